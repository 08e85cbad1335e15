"""The reference in plain eager torch, differentiated by autograd."""

from __future__ import annotations

from goldsmith.cli.bench.experts import ExpertSubject
from goldsmith.cli.bench.subject import Subject, Variant

NAME = "eager"


def missing() -> str | None:
    return None


def prepare(subject: Subject) -> Variant | None:
    if isinstance(subject, ExpertSubject):
        return None  # the reference decodes expert by expert; the fair peer is transformers
    tensors = subject.fresh_leaves()
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    reference = subject.reference()
    return Variant(NAME, lambda: reference(tensors), leaves, note="matrix products in float32")
