"""Changes of the backward alone: saved tensors, recomputation, sums of a gradient."""
