"""Declarations of discrete results (top-k, argmax, sign, dropout mask), judged before the numbers that depend on them.

A decision names a result (an output or a stage) and the scores it was made from. `probes/decisions.py` judges it: a
choice is legal if its score lies within the rounding bound of the best one left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from ...core.tracing import TargetError, TargetTypeError


@dataclass(frozen=True)
class TopK:
    """index = the k largest of `scores` along `dim`, best first if `ordered`"""

    scores: str
    k: str | int
    dim: int = -1
    ordered: bool = True


@dataclass(frozen=True)
class Sign:
    """mask = of > 0; either answer is legal where `of` is zero within its bound"""

    of: str


@dataclass(frozen=True)
class Given:
    """A mask accepted as the candidate draws it (dropout); with `rate`, its share of zeros must agree."""

    rate: str | float | None = None


Decision = TopK | Sign | Given


def topk(scores: str, k: str | int, dim: int = -1, ordered: bool = True) -> TopK:
    """Decision: the k largest of `scores` along `dim`. `k` is a number or the name of a scalar."""
    if not isinstance(k, str):
        k = _whole("topk", "k", k)
        if k < 0:
            raise TargetError(f"topk: k must be a number >= 0 or the name of a scalar, got {k}")
    return TopK(_text("topk", "scores", scores), k, _whole("topk", "dim", dim), bool(ordered))


def argmax(scores: str, dim: int = -1) -> TopK:
    """Decision: the index of the largest of `scores` along `dim` (that axis may be kept or dropped in the result)."""
    return TopK(_text("argmax", "scores", scores), 1, _whole("argmax", "dim", dim), True)


def sign(of: str) -> Sign:
    """Decision: where `of` is positive; at a kink (|of| within its rounding bound) both answers are legal."""
    return Sign(_text("sign", "of", of))


def given(rate: str | float | None = None) -> Given:
    """Decision: a mask accepted as drawn. With `rate` (a number or the name of a scalar) its zeros are counted."""
    if isinstance(rate, float | int) and not 0 <= rate <= 1:
        raise TargetError(f"given: rate must lie between 0 and 1, got {rate}")
    return Given(rate)


def _text(function: str, argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise TargetTypeError(
            f"{function}: {argument} must be the name of an input, output or stage, got {type(value).__name__}"
        )
    return value


def _whole(function: str, argument: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TargetTypeError(f"{function}: {argument} must be a whole number, got {value!r}")
    return int(value)
