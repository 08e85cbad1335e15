"""Triton kernels that several operators of the family share; each operator's own stand in its `_triton.py`.

Legend of the suffixes: T tokens, N streams, D dim, M = 2N + N*N mixes (N for the head), K = N*D, P fixed chunks of
tokens.
"""
