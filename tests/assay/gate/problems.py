"""A small problem, and candidates for it as sources."""

import torch

from goldsmith import assay
from goldsmith.assay import gate


def golden(x, w):
    return torch.softmax(x, -1) * w


@assay.case(T=[1, 5], D=[12])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def problem(**more):
    return gate.Problem(golden, rows, name="scaled_softmax", **more)


RIGHT = """
import torch

def candidate(x, w):
    e = (x - x.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True) * w
"""


TRITON = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, D, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * D + d, mask=d < D, other=-float("inf"))
    e = tl.exp(x - tl.max(x))
    y = e / tl.sum(e) * tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * D + d, y, mask=d < D)


def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""


def candidate(body, name="kernel", head=""):
    """A candidate whose function has this body, below these lines."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return gate.Candidate(name, f"import torch\n{head}\n\ndef candidate(x, w):\n{lines}\n")
