"""offers_backward: whether a candidate comes with a whole backward, for problems that ask for none."""

from __future__ import annotations

import torch

from ..declare.binding import inputs_and_scalars
from ..declare.target import Target
from ..execute.records import Material
from ..execute.run import execute


def offers_backward(target: Target, device: str | torch.device, seed: int) -> bool:
    """Whether, on the smallest case, every input that can have a gradient gets one through autograd.

    A kernel without a backward returns tensors that are not part of a graph. One that is only partly made of torch's
    operators has gradients for some inputs, and promises none.
    """
    case = target.smallest()
    supply = case.build(target.dtypes[0], device, seed)
    inputs, scalars = inputs_and_scalars(supply)
    wanted = target.wanted_grads(inputs)
    if not wanted or any(t.numel() == 0 for t in inputs.values()):
        return False
    run = execute(Material(target, case.name, case.sizes, inputs, scalars, seed, order=tuple(supply)))
    return run.error is None and all(run.grads.get(f"{name}.grad") is not None for name in wanted)
