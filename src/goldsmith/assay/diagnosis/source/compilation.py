"""compiles: whether Triton's compiler takes an edited copy of the candidate, which its interpreter does not show."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .children.child import NoAnswer, single_request
from .children.compile_process import COMPILED, REFUSED, UNKNOWN
from .children.mutants import Mutants
from .reading.candidate_source import CandidateSource

_SECONDS = 20.0
_MAIN = f"{__package__}.children.compile_process:serve"


def compiles(source: CandidateSource, mutants: Mutants, texts: Mapping[str, str]) -> bool | None:
    """False if the compiler refuses an edited copy and takes the files as they are; None if one of these is not known.

    source: the files as they are. True without any kernels, and on a GPU, where every run compiles them.
    """
    answer = COMPILED if mutants.on_cuda else _answer(source, mutants, texts)
    if answer == REFUSED:
        return False if _answer(source, mutants, {}) == COMPILED else None
    return True if answer == COMPILED else None


def _answer(source: CandidateSource, mutants: Mutants, texts: Mapping[str, str]) -> str:
    launches = mutants.launches(texts)
    if not launches:
        return COMPILED
    message = {"edited": dict(texts), "launches": launches}
    try:
        return str(single_request(_MAIN, source, message, time.monotonic() + _SECONDS))
    except NoAnswer:
        return UNKNOWN
