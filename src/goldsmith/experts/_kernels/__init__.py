"""Triton kernels over packed panels."""
