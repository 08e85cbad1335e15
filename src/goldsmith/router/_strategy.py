"""The rule by which atomic_experts chooses its strategy from shapes and dtype, without reading the routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._common import FLOATS, check_count, check_device, dtype_name

STRATEGIES = ("auto", "gather", "sorted", "dense")


@dataclass(frozen=True)
class Dense:
    """When "dense" is faster: at least `tokens` tokens, k >= num_experts / `one_in`, and one of `dtypes`."""

    tokens: int
    one_in: int
    dtypes: tuple[torch.dtype, ...] = FLOATS


# From measurements with `python -m benchmarks.bench`, which docs/router.md shows; tests/router/test_strategies.py
# checks the rule.
DENSE = {
    "cpu": Dense(tokens=64, one_in=16),  # timed in float32, to which both strategies convert 16-bit rows
    # "dense" is faster in bfloat16 only. Products of float32 are IEEE float32, and so is the weighted sum of float16;
    # in float32, at 512 tokens and k = N / 16, the forward of "dense" took four times as long as that of "gather".
    "cuda": Dense(tokens=1024, one_in=32, dtypes=(torch.bfloat16,)),
}


def choose_strategy(
    tokens: int, k: int, num_experts: int, hidden: int, dtype: torch.dtype, device: torch.device | str
) -> str:
    """ "dense" if tokens, k / num_experts and dtype satisfy the device's rule, otherwise "gather"

    For `tokens` tokens with k of num_experts experts each, whose rows have `hidden` numbers of `dtype`, on a device
    such as "cuda". A pure function of its arguments; docs/router.md has the rule and the measurements behind it. It
    never chooses "sorted". Raises TypeError and ValueError that name the argument.
    """
    op = "router.choose_strategy"
    for name, value in (("tokens", tokens), ("k", k)):
        check_count(op, name, value, least=0)
    for name, value in (("num_experts", num_experts), ("hidden", hidden)):
        check_count(op, name, value)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(
            f"{op}: dtype={dtype!r}, expected one of: {', '.join(f'torch.{dtype_name(d)}' for d in FLOATS)}"
        )
    return rule_based_strategy(tokens, k, num_experts, dtype, check_device(op, device).type)


def rule_based_strategy(tokens: int, k: int, num_experts: int, dtype: torch.dtype, kind: str) -> str:
    rule = DENSE.get(kind, DENSE["cuda"])
    many = tokens >= rule.tokens and k * rule.one_in >= num_experts
    return "dense" if many and dtype in rule.dtypes else "gather"
