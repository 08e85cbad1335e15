"""mhc.lagged_boundary: mhc.boundary in the lagged scheme, where the connection before chooses h_pre."""
