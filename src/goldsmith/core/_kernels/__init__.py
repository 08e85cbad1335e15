"""What the families' kernels share; imported by backends alone."""
