"""The dropout masks of LoRA: Philox4x32-10 (Salmon et al. 2011), with a counter per (feature, token, slot, projection).

    key      (seed mod 2^32, seed div 2^32)                      from the call's 64-bit seed, as unsigned integers
    counter  (feature div 4, token, slot, projection)            four 32-bit words, the first is Philox's word 0
    word     output word number feature mod 4
    kept     word >= threshold,  threshold = floor(p 2^32 + 1/2) in float64, compared as 64-bit numbers
    mask     1 / (1 - p) where kept, else 0

token: row of x [T, H] (leading dimensions flattened), or the low 32 bits of the row's number, if `seed` has numbers
behind it: a rank with some of the tokens passes their rows in the whole tensor. slot: j of topk_ids [T, k]. projection:
0 gate, 1 up, 2 down. feature: 0..H-1 of x for gate and up, 0..I-1 of h for down, counted over the whole I even with
partitions. So a mask does not depend on threads, instruction set, grouping by expert, partitions, ranks or
recomputation, and every implementation has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four int64 tensors with 32-bit words, which broadcast; returns four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # the product wraps in int64, which keeps all of its 64 bits
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """floor(p 2^32 + 1/2): elements whose word is below this are dropped."""
    return int(p * 2.0**32 + 0.5)


def kept(seed: int, projection: int, tokens: Tensor, slots: Tensor, features: int, p: float) -> Tensor:
    """bool [routes, features]: True where a feature is kept; tokens [routes] and slots [routes] identify the routes."""
    columns = torch.arange((features + 3) // 4, device=tokens.device)
    words = philox(
        (columns, tokens.unsqueeze(-1), slots.unsqueeze(-1), torch.full_like(columns, projection)),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    words = torch.broadcast_tensors(*words)
    drawn = torch.stack(words, -1).reshape(len(tokens), 4 * len(columns))[:, :features]
    return drawn >= threshold(p)


def seed_and_numbers(seed: Tensor) -> tuple[int, Tensor | None]:
    """The key in `seed`, and the numbers of the tokens behind it, if it has any."""
    flat = seed.detach().reshape(-1).cpu()
    return int(flat[0]), flat[1:].contiguous() if len(flat) > 1 else None


def numbered(seed: Tensor, tokens: Tensor) -> tuple[int, Tensor]:
    """The key in `seed`, and the numbers of these rows."""
    key, numbers = seed_and_numbers(seed)
    return key, tokens if numbers is None else (numbers & _WORD).to(tokens.device)[tokens]


def new_seed() -> Tensor:
    """An int64 scalar from torch's default CPU generator, which activation checkpointing saves and replays."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
