"""mhc.boundary: post of one connection and pre of the next, fused."""
