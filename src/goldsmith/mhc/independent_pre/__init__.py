"""mhc.independent_pre: mhc.pre of a connection that does not mix its streams."""
