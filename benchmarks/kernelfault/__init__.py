"""KernelFault: known faults in copies of kernels, and how well the assay detects and diagnoses them."""
