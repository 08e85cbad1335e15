"""`watch`: where the first NaN or Inf of a training run came from."""
