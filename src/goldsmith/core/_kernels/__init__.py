"""Code that the families' kernels share; only backends import it."""
