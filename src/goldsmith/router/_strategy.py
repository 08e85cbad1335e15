"""Which strategy atomic_experts takes: a rule of shapes alone, so that it needs no look at the routing."""

from __future__ import annotations

import torch

STRATEGIES = ("auto", "gather", "sorted", "dense")


def choose_strategy(
    tokens: int, k: int, num_experts: int, hidden: int, dtype: torch.dtype, device: torch.device | str
) -> str:
    """ "gather", "sorted" or "dense" for `tokens` tokens with k of num_experts experts each, rows of `hidden` numbers

    A pure function of the shapes; the table of its rule, with the measurements behind it, is in the family's README.
    """
    kind = torch.device(device).type
    return "dense" if k >= num_experts / DENSE_FROM.get(kind, DENSE_FROM["cuda"]) else "gather"


DENSE_FROM = {"cpu": 32, "cuda": 267}
