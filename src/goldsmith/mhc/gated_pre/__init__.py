"""mhc.gated_pre: gates the normalised streams and averages them to the layer's input."""
