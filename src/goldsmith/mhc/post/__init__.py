"""mhc.post: mixes the streams and adds the layer's output to each."""
