"""mhc.pre in plain torch."""

from __future__ import annotations

from typing import NotRequired, Unpack

from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas
from .._common import CoefficientOptions
from ..coefficients import reference as coefficients


class _Options(CoefficientOptions):
    suffix: NotRequired[str]


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, **options: Unpack[_Options]
) -> tuple[Tensor, ...]:
    h_pre, h_post, h_res, inv_rms, h_mix = coefficients.forward(x, phi, alpha, bias, gamma, **options)
    return stage("h_in", formulas.collapse(h_pre, x)), h_post, h_res, inv_rms, h_mix


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return formulas.as_stages(coefficients.gradients(grads, tensors, options), tensors)
