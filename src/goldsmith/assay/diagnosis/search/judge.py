"""Judge: whether a changed golden's tensor equals the candidate's."""

from __future__ import annotations

import torch
from torch import Tensor

from ...bounds.bounded import SLACK

EXPLAINED = 0.999  # share of the squared error from which a change explains a tensor
_EXACT = 4.0  # in units of the bound: both are rounded, and the changed golden's bound is unknown
_ALL = 1 - 1e-8  # share of the elements; rounding alone may move the rest farther
_NEAR = 0.8  # share of the elements that must equal the candidate's, within rounding
_OPEN = 1e-5  # relative to the size: counts as wrong if no bound is known
_APART = 1e6  # squared distance, in bounds, between a number and an infinity
_PART = 6  # wrong elements, and right ones, at least, for a change in part of a tensor


class Judge:
    """Compares tensors with the candidate's, within rounding."""

    def __init__(self, got: Tensor, golden: Tensor, bound: Tensor):
        self.got, self.finite = got.double(), torch.isfinite(got)
        scale = float(golden[torch.isfinite(golden)].abs().mean()) if golden.numel() else 0.0
        # an infinity allows no finite number in its place
        size = torch.where(torch.isfinite(golden), golden.abs(), scale)
        limit = torch.where(torch.isfinite(bound), SLACK * bound, _OPEN * (size + scale))
        self.wrong_at = ~((self.got - golden).abs() <= limit) & ~((got == golden) | (got != got))
        rounded = torch.finfo(got.dtype).eps / 2 * self.got.abs().nan_to_num(0, 0, 0)  # half an ulp of a rounded number
        self.bound = torch.maximum(torch.where(torch.isfinite(bound + golden), bound, 1e-6 * size), rounded).clamp_min(
            1e-13 * (size + scale) + 1e-300
        )
        self.error = self._units(golden)
        self.golden = golden

    def _units(self, value: Tensor) -> float:
        finite = torch.isfinite(value)
        away = torch.where(self.finite & finite, (self.got - value) / self.bound, 0.0)
        return float(away.square().sum()) + _APART * int((self.finite != finite).sum())

    def residual(self, value: Tensor) -> Tensor:
        return torch.where(self.finite, (self.got - value) / self.bound, 0.0).flatten()

    def explained(self, value: Tensor | None) -> tuple[float, bool]:
        """(share of the squared error that is explained, whether every element is the candidate's within rounding)."""
        if value is None or value.shape != self.got.shape or not value.is_floating_point():
            return 0.0, False
        if bool((torch.isfinite(value) != self.finite).any()):
            return 0.0, False
        size, wanted = (t.abs().nan_to_num(0, 0, 0) for t in (value, self.golden))
        larger = float(size.sum() / wanted.sum().clamp_min(1e-300))
        grown = (size / wanted.clamp_min(1e-300)).clamp(1.0, 16 * max(1.0, larger))
        near = ((self.got - value).abs() <= _EXACT * self.bound * grown) | (self.got == value) | ~self.finite
        if not self.error:  # the candidate equals the golden: a change must keep it so
            return 0.0, bool(near.all())
        share = 1 - self._units(value) / self.error
        few = float(near.double().mean()) < _NEAR  # one element of a tiny bound may hold all of the squared error
        if bool(near.all()) or share > _ALL and not few:
            return share, True
        return (share - 1) / 2 if few else share, False  # a partial share still guides the search

    def explained_where_wrong(self, value: Tensor | None) -> tuple[float, bool]:
        """The same where the candidate is wrong, with the golden's values elsewhere, for a change of one part."""
        count = int(self.wrong_at.sum())
        if value is None or value.shape != self.got.shape or not _PART <= count <= self.wrong_at.numel() - _PART:
            return 0.0, False
        return self.explained(torch.where(self.wrong_at, value, self.golden))
