"""Wrong kernels that the assay must reject, and right ones that look like them."""
