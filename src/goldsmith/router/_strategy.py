"""Which strategy atomic_experts takes: a rule of shapes alone, so that it needs no look at the routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._common import FLOATS, check_count, check_device, named

STRATEGIES = ("auto", "gather", "sorted", "dense")


@dataclass(frozen=True)
class Dense:
    """Where matrix products with all experts are the quicker: so many tokens, each with one expert in so many."""

    tokens: int
    one_in: int
    dtypes: tuple[torch.dtype, ...] = FLOATS


# from rows of `goldsmith bench`; docs/router.md shows them, and tests/router/test_strategies.py holds the rule to them
DENSE = {
    "cpu": Dense(tokens=64, one_in=16),  # timed in float32, which both strategies make of 16-bit rows
    # rows have "dense" ahead in bfloat16 alone: products of float32 are IEEE float32, and float16's weighed sum has
    # such; at 512 tokens and k = N / 16 of float32 it took four times as long forward as "gather"
    "cuda": Dense(tokens=1024, one_in=32, dtypes=(torch.bfloat16,)),
}


def choose_strategy(
    tokens: int, k: int, num_experts: int, hidden: int, dtype: torch.dtype, device: torch.device | str
) -> str:
    """ "dense" where tokens and k / num_experts are at least those of the device's rule, in its dtypes, else "gather"

    For `tokens` tokens with k of num_experts experts each, rows of `hidden` numbers of `dtype`, on a device such as
    "cuda". A pure function of its arguments; the rule, and the measurements behind it, are a table in docs/router.md.
    "sorted" is never chosen. Raises TypeError and ValueError that name the argument.
    """
    op = "router.choose_strategy"
    for name, value in (("tokens", tokens), ("k", k)):
        check_count(op, name, value, least=0)
    for name, value in (("num_experts", num_experts), ("hidden", hidden)):
        check_count(op, name, value)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(f"{op}: dtype={dtype!r}, wanted one of: {', '.join(f'torch.{named(d)}' for d in FLOATS)}")
    return rule_based_strategy(tokens, k, num_experts, dtype, check_device(op, device).type)


def rule_based_strategy(tokens: int, k: int, num_experts: int, dtype: torch.dtype, kind: str) -> str:
    rule = DENSE.get(kind, DENSE["cuda"])
    many = tokens >= rule.tokens and k * rule.one_in >= num_experts
    return "dense" if many and dtype in rule.dtypes else "gather"
