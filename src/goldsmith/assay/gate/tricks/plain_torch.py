"""Whether torch's own operators computed a result, where the problem asks for a kernel."""

from __future__ import annotations

import torch

from ...declare.binding import inputs_and_scalars
from ...declare.target import Target
from ...execute.records import Material
from ..isolation.candidate_process import CandidateProcess
from ..isolation.protocol import Malformed
from ..isolation.wire import calls_request_of


def evidence(process: CandidateProcess, target: Target, device: str | torch.device, seed: int) -> str:
    """A sentence that names the operator, or ""; from one call of the first case."""
    case = target.cases[0]
    supply = case.build(target.dtypes[0], device, seed)
    inputs, scalars = inputs_and_scalars(supply)
    material = Material(target, case.name, case.sizes, inputs, scalars, seed, order=tuple(supply))

    def read(reply: dict[str, object]) -> dict[str, str]:
        origins = reply.get("origins")
        if not isinstance(origins, dict) or not all(isinstance(t, str) for pair in origins.items() for t in pair):
            raise Malformed("origins that are no names")
        return origins

    origins = process.answer({"do": "origins", **calls_request_of([material])}, "a call", read)
    return ", ".join(f"{name} is the result of torch's {operator}" for name, operator in sorted(origins.items()))
