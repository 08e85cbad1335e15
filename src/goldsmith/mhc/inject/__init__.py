"""mhc.inject: adds the layer's output to every stream."""
