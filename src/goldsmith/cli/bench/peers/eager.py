"""The reference in plain eager torch, differentiated by autograd."""

from __future__ import annotations

from ..experts import Experts
from ..subject import Subject, Variant

NAME = "eager"


def missing() -> str | None:
    return None


def prepare(subject: Subject) -> Variant | None:
    if isinstance(subject, Experts):
        return None  # the reference decodes expert by expert; transformers has what is used
    tensors = subject.fresh_leaves()
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    reference = subject.reference()
    return Variant(NAME, lambda: reference(tensors), leaves, note="matrix products in float32")
