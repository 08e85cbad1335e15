"""KernelFault: known faults in copies of kernels, and what the assay says of them."""
