"""Right: Strassen's seven products of halves in float64, with odd sizes filled up by zeros."""

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"


def _halves(t):
    t = torch.nn.functional.pad(t.double(), (0, t.shape[1] % 2, 0, t.shape[0] % 2))
    top, bottom = t.chunk(2)
    return *top.chunk(2, 1), *bottom.chunk(2, 1)


def candidate(a, b):
    a11, a12, a21, a22 = _halves(a)
    b11, b12, b21, b22 = _halves(b)
    m1, m2, m3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
    m4, m5 = a22 @ (b21 - b11), (a11 + a12) @ b22
    m6, m7 = (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
    top = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1)
    bottom = torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)
    return torch.cat([top, bottom])[: len(a), : b.shape[1]].to(a.dtype)
