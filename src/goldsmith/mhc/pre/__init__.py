"""mhc.pre: computes the coefficients and the layer's input together."""
