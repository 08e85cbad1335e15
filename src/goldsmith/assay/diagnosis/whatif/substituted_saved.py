"""Explains a change of the forward as a confused tensor: the backward reads another tensor than the golden's.

If the outputs are right and a gradient is not, a mask that is never applied cannot be missing from the forward. If the
change turns one tensor of the forward into another one, the backward was given that other tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..facts.evidence import WhatIf
from ..graph.tensors import floating

_NEAR = 1e-9  # relative to the size: both are float64
_RARER = 0.03


def read_instead(what: WhatIf, golden: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> WhatIf | None:
    """The same numbers explained by a confused tensor; None if the change turns no forward tensor into another one."""
    forward = {n: t.double() for n, t in golden.items() if not n.endswith(".grad") and floating(t) and t.numel() > 1}
    for name, before in forward.items():
        after = changed.get(name)
        if after is None or after.shape != before.shape or not floating(after) or _same(after.double(), before):
            continue
        for other, t in forward.items():
            if other != name and t.shape == before.shape and _same(after.double(), t):
                text = f"the backward reads {other} in place of {name}"
                params = {"saved": name, "by": other}
                also = (what.cause, *(a for a in what.also if a != what.cause))
                return replace(what, cause="wrong_saved_tensor", text=text, params=params, also=also,
                               prior=what.prior + _RARER)  # fmt: skip
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    size = float(b.abs().max())
    return bool(torch.isfinite(a).all()) and size > 0 and bool(((a - b).abs() <= _NEAR * size).all())
