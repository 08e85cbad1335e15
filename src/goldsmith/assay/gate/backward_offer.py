"""offers_backward: whether a candidate has a complete backward, although its problem does not ask for one."""

from __future__ import annotations

import torch

from ..declare.binding import inputs_and_scalars
from ..declare.target import Target
from ..execute.records import Material
from ..execute.run import execute


def offers_backward(target: Target, device: str | torch.device, seed: int) -> bool:
    """Whether, on the smallest case, every input that can have a gradient gets one through autograd.

    A kernel without a backward returns tensors that are not part of a graph. A kernel that uses torch's operators for
    a part of its work has gradients for some inputs only. Neither offers a backward.
    """
    case = target.smallest()
    supply = case.build(target.dtypes[0], device, seed)
    inputs, scalars = inputs_and_scalars(supply)
    wanted = target.wanted_grads(inputs)
    if not wanted or any(t.numel() == 0 for t in inputs.values()):
        return False
    run = execute(Material(target, case.name, case.sizes, inputs, scalars, seed, order=tuple(supply)))
    return run.error is None and all(run.grads.get(f"{name}.grad") is not None for name in wanted)
