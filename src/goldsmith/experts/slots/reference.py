"""experts.slots: reference, the forward of experts.moe before its sum."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ...core.tracing import stage
from .._activations import activate
from .._conventions import SLOT_NAMES, MoeOptions
from .._projections import ReferenceCall


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor, Tensor]:
    call = ReferenceCall("experts.slots", dict(zip(SLOT_NAMES, tensors, strict=True)), options)
    g, u = call.gate_and_up()
    h = stage("h", activate(options["activation"], g.to(call.to), u.to(call.to), options["alpha"], options["limit"]))
    o = stage("o", call.outputs("down", h).view(*call.shape, call.x.shape[-1]))
    return o, (~torch.isfinite(o)).any(-1).to(torch.uint8)
