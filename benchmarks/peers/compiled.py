"""The reference under torch.compile, forward and backward."""

from __future__ import annotations

import importlib.util

import torch

from goldsmith.cli.bench.experts import ExpertSubject
from goldsmith.cli.bench.subject import Subject, Variant

NAME = "compile"


def missing() -> str | None:
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on a GPU"
    return None


def prepare(subject: Subject) -> Variant | None:
    if isinstance(subject, ExpertSubject):
        return None  # the reference decodes expert by expert; the fair peer is transformers
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a donated buffer can be used once only, but the backward is repeated here
    tensors = subject.fresh_leaves()
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    torch.compiler.reset()
    compiled = torch.compile(subject.reference(), fullgraph=True, dynamic=False)
    return Variant(NAME, lambda: compiled(tensors), leaves, note="matrix products in float32")
