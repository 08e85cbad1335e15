"""A small problem, and candidates for it as sources."""

import torch

from benchmarks.gate.triton_cost import KERNEL
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


TRITON = KERNEL.format(number=0)


def candidate(body, name="kernel", head=""):
    """A candidate whose function has this body, below these lines."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return gate.Candidate(name, f"import torch\n{head}\n\ndef candidate(x, w):\n{lines}\n")
