"""Which strategy atomic_experts takes: a rule of shapes alone, so that it needs no look at the routing."""

from __future__ import annotations

import torch

STRATEGIES = ("auto", "gather", "sorted", "dense")
DENSE_FROM = {"cpu": 16, "cuda": 32}  # dense from k = num_experts / this on; docs/router.md says where from


def choose_strategy(
    tokens: int, k: int, num_experts: int, hidden: int, dtype: torch.dtype, device: torch.device | str
) -> str:
    """ "gather", "sorted" or "dense" for `tokens` tokens with k of num_experts experts each, rows of `hidden` numbers

    A pure function of the shapes. Its rule, and the measurements behind it, are a table in docs/router.md. It does not
    depend on `tokens`, so that on a CPU a token's result is the same bits in a batch of any size.
    """
    return "dense" if k * DENSE_FROM.get(torch.device(device).type, DENSE_FROM["cuda"]) >= num_experts else "gather"
