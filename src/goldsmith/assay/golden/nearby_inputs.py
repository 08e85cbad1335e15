"""How far a few roundings of the inputs move each result of a golden: what any stable formula may err by.

    max over draws of |golden(x + s u x) - golden(x)|, s = +1 or -1 for each element, u = 4 sqrt(n) roundings

x + x s in place of x (1 + s) errs by a rounding of x, even where 1 + s is near 0, and so does the golden where s is
rounded. Another formula is as good as the golden's if it errs no more than the golden does for rounded inputs: backward
stability (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 1.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..noise import formula_rounding

DRAWS = 4
Results = dict[str, Tensor]


def moves(
    evaluate: Callable[[Results], Mapping[str, Tensor]], leaves: Results, values: Results, compute: torch.dtype
) -> Results:
    """name of a result -> its largest change; leaves: the inputs and output gradients in float64."""
    far = {name: torch.zeros_like(value) for name, value in values.items() if value.is_floating_point()}
    for draw in range(DRAWS):
        for name, value in evaluate({n: _changed(t, compute, draw) for n, t in leaves.items()}).items():
            if name in far and value.shape == far[name].shape:
                far[name] = torch.maximum(far[name], (value - values[name]).abs().nan_to_num(0.0, 0.0, 0.0))
    return far


def _changed(t: Tensor, compute: torch.dtype, draw: int) -> Tensor:
    if not t.is_floating_point():
        return t
    generator = torch.Generator(t.device).manual_seed(draw)
    signs = torch.randint(0, 2, t.shape, generator=generator, device=t.device).to(t.dtype) * 2 - 1
    return t + t * signs * formula_rounding.unit(t, compute)
