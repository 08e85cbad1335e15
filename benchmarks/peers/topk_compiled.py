"""The code of `topk` under torch.compile."""

from __future__ import annotations

from dataclasses import replace

import torch

from goldsmith.cli.bench.subject import Subject, Variant

from . import topk
from .compiled import missing as missing

NAME = "topk-compile"


def prepare(subject: Subject) -> Variant | None:
    variant = topk.prepare(subject)
    if variant is None:
        return None
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a donated buffer can be used once only, but the backward is repeated here
    torch.compiler.reset()
    return replace(variant, peer=NAME, forward=torch.compile(variant.forward, fullgraph=True, dynamic=False))
