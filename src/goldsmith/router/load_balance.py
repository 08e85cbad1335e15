"""How evenly a routing uses its experts, and a loss that evens it out: plain torch, no device is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.shapes import ShapeError, check_choice, check_dtype, check_same_device, check_tensor
from ._common import FLOATS, can_inspect, check_count, same_dtype, wide
from ._common import flat as rows_of

KINDS = ("marginal", "joint")


@dataclass(frozen=True, eq=False)
class Usage:
    """How often each of N experts was selected, with what follows from it; `a + b` is both batches counted together

    The counts of `a + b` are exact, and so is what follows from them; masses of weights are float64 sums, which differ
    from those of one call by their roundings (n weights >= 0 of one expert, by less than n / 2^52 of their sum). Either
    both are counted with weights or neither is: a sum of entries and weights says nothing.

    counts      int64 [N]: entries of each expert
    mass        float64 [N]: counts, or sums of the weights
    share_used  experts with an entry, over N
    kl          sum_e z_e ln(z_e N), z = mass / sum(mass): 0 when uniform, ln N when one expert has everything
    max_load    N max_e z_e: 1 when uniform
    kl and max_load are NaN when nothing was selected. All are float64 tensors on the indices' device, but for counts.
    """

    counts: Tensor
    mass: Tensor
    share_used: Tensor = field(init=False)
    kl: Tensor = field(init=False)
    max_load: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.counts)
        z = self.mass / self.mass.sum()
        for name, value in (
            ("share_used", (self.counts > 0).double().mean()),
            ("kl", torch.xlogy(z, z * n).sum()),
            ("max_load", n * z.max()),
        ):
            object.__setattr__(self, name, value)

    def __radd__(self, other: object) -> Usage:
        """sum() starts with 0."""
        return self if type(other) is int and other == 0 else NotImplemented

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        if len(self.counts) != len(other.counts):
            raise ValueError(
                f"router.Usage: one counts {len(self.counts)} experts, the other {len(other.counts)}; "
                "only what was counted with the same num_experts adds up"
            )
        return Usage(self.counts + other.counts, self.mass + other.mass)


@torch.no_grad()
def usage(indices: Tensor, num_experts: int, *, weights: Tensor | None = None) -> Usage:
    """counts_e = number of entries that are e;   mass = counts, or mass_e = sum of the weights of those entries

    indices: any shape, int32 or int64, -1 is left out; weights: the same shape, any float. The result repeats bit for
    bit, also on a GPU, and nothing waits for the device. OmniMoE measures with counts, PEER with weights. Raises
    ShapeError, TypeError, ValueError, and IndexError on a CPU (a GPU leaves out what is not in [0, num_experts), and so
    does vmap).
    """
    op = "router.usage"
    check_count(op, "num_experts", num_experts)
    flat, valid = _entries(op, indices, num_experts)
    counts = _counted(flat, valid, num_experts)
    if weights is None:
        return Usage(counts, counts.double())
    check_tensor(op, "weights", weights)
    check_dtype(op, "weights", weights, FLOATS)
    check_same_device(op, {"indices": indices, "weights": weights})
    if weights.shape != indices.shape:
        raise ShapeError(f"{op}: weights is {list(weights.shape)}, wanted the shape of indices, {list(indices.shape)}")
    at = flat.masked_fill(~valid, num_experts)
    mass = torch.zeros(num_experts + 1, dtype=torch.float64, device=indices.device)
    values = weights.reshape(-1).double()
    if mass.is_cuda:
        mass = mass.index_put((at,), values, accumulate=True)  # sorts, and so repeats; index_add would not
    else:
        mass = mass.index_add(0, at, values)
    return Usage(counts, mass[:num_experts].clone())


def load_balance_loss(x: Tensor, y: Tensor, indices: Tensor, *, kind: str = "marginal") -> Tensor:
    """1/2 [sx sum_i fx_i Px_i + sy sum_j fy_j Py_j]     kind "marginal"
    sx sy sum_ij f_ij P_ij                            kind "joint"

    f: share of the entries that are pair (i, j), fx and fy of i and of j, without gradient. P: mean over the rows of
    softmax(x)_i softmax(y)_j, Px and Py of softmax(x) and softmax(y). 1 when all is uniform. "joint" also sees what
    the marginals cannot: experts with i = j alone have marginal 1 and joint s. No tensor of rows times experts is made.

    x [..., sx], y [..., sy] as product_topk took them, indices [..., k] as it gave them -> a float32 number (float64
    for float64), computed so; rows without a valid index are left out, and without any row it is 0. Differentiable in
    x and y. Raises ShapeError, TypeError, ValueError, IndexError (on a CPU, not under vmap). Source: Fedus et al. 2021,
    arXiv 2101.03961, on each axis.
    """
    op = "router.load_balance_loss"
    sx, sy = _check_loss(op, x, y, indices, kind)
    k, to = indices.shape[-1], wide(x.dtype)
    flat, valid = _entries(op, indices, sx * sy)
    kept = valid.view(-1, k).any(-1, keepdim=True)
    rows = kept.sum().clamp(min=1).to(to)
    entries = valid.sum().clamp(min=1).to(to)
    with torch.autocast(x.device.type, enabled=False):
        # before the softmax: of a row that is wholly -inf it has no derivative
        p, q = (rows_of(t).to(to).masked_fill(~kept, 0.0).softmax(-1) * kept for t in (x, y))
        if kind == "joint":
            f = (_counted(flat, valid, sx * sy).to(to) / entries).view(sx, sy)
            return sx * sy * ((p @ f) * q).sum() / rows
        fx, fy = (_counted(at, valid, s).to(to) / entries for at, s in ((flat // sy, sx), (flat % sy, sy)))
        return (sx * (fx * p.sum(0)).sum() + sy * (fy * q.sum(0)).sum()) / (2 * rows)


def _check_loss(op: str, x: Tensor, y: Tensor, indices: Tensor, kind: str) -> tuple[int, int]:
    for name, tensor in (("x", x), ("y", y)):
        check_tensor(op, name, tensor)
        check_dtype(op, name, tensor, FLOATS)
    check_tensor(op, "indices", indices)
    same_dtype(op, [("x", x), ("y", y)])
    check_same_device(op, {"x": x, "y": y, "indices": indices})
    check_choice(op, "kind", kind, KINDS)
    shapes = [tuple(t.shape) for t in (x, y, indices)]
    if any(len(s) == 0 or s[-1] == 0 for s in shapes) or len({s[:-1] for s in shapes}) > 1:
        came = ", ".join(f"{n} {list(s)}" for n, s in zip(("x", "y", "indices"), shapes, strict=True))
        raise ShapeError(f"{op}: {came}; wanted [*batch, sx], [*batch, sy], [*batch, k] of at least 1 each")
    return x.shape[-1], y.shape[-1]


def _entries(op: str, indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(flat, valid): the indices in int64, 0 where not valid; whether all are in range is asked where that is quick."""
    check_tensor(op, "indices", indices)
    check_dtype(op, "indices", indices, (torch.int32, torch.int64))
    flat = indices.reshape(-1).long()
    if can_inspect(flat) and bool(((flat < -1) | (flat >= n)).any()):
        raise IndexError(
            f"{op}: indices has {int(flat.min())}..{int(flat.max())}, wanted -1 (left out) or 0 <= index < {n}"
        )
    valid = (flat >= 0) & (flat < n)
    return flat.masked_fill(~valid, 0), valid


def _counted(flat: Tensor, valid: Tensor, n: int) -> Tensor:
    """int64 [n]; sums of integers are the same in every order."""
    return torch.zeros(n, dtype=torch.int64, device=flat.device).scatter_add(0, flat, valid.long())
