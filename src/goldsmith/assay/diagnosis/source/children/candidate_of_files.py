"""A process that holds the candidate of the user's files, or of edited copies of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....gate.isolation.candidate_process import CandidateProcess
from ....gate.isolation.limits import Limits
from ....gate.isolation.sandbox import Surroundings
from ....gate.isolation.zygote_process import zygote
from ..reading.candidate_source import CandidateSource

CALL, _MEMORY = 20.0, 4 << 30  # seconds and bytes of one call


def candidate_of_files(
    source: CandidateSource, device: str | torch.device, edited: Mapping[str, str] | None = None, seconds: float = CALL,
    *, boxed: bool = False,
) -> CandidateProcess:  # fmt: skip
    """The runner of a target; it starts again after its end. boxed: it runs in a sandbox. Raises NoZygote."""
    on_cuda = torch.device(device).type == "cuda"
    return CandidateProcess(
        zygote(), Limits(seconds, seconds, _MEMORY, files=4096, processes=4096),
        f"{__package__}.edited_modules:load", {**source.to_arguments(), "edited": dict(edited or {})},
        Surroundings(boxed=boxed, gpu="cuda" if on_cuda else "", threads=torch.get_num_threads(), paths=source.paths),
        again=True,
    )  # fmt: skip
