"""mhc.pre: the coefficients and the layer's input, fused."""
