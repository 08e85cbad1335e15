"""Wrong kernels, which the assay must reject, and right twins of some, which it must pass."""
