"""What a thread or a process of the candidate has written after the calls that returned it."""

from __future__ import annotations

import math
from typing import Any

from ..isolation.candidate_process import CandidateProcess
from ..isolation.late_writes import LATE
from ..isolation.protocol import Malformed


def evidence(process: CandidateProcess) -> list[str]:
    """Sentences about results and inputs that have changed; the last request to this process."""

    def read(reply: dict[str, Any]) -> list[str]:
        sentences = reply.get("late")
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise Malformed("a last look without sentences")
        return [sentence[:300] for sentence in sentences]

    calls = 1 + math.ceil(LATE / process.limits.seconds)
    sentences = process.answer({"do": "late"}, "a last look at its results", read, calls=calls)
    process.look_at_memory()
    return sentences
