"""Triton kernels that several operators of the family share; an operator's own kernels are in its `_triton.py`.

Legend: T tokens, N streams, D dim, M = 2N + N*N mixes (N for the head), K = N*D, P chunks of tokens of fixed size. A
trailing P (NP, MP, WP) means padded to a power of two.
"""
