"""Statistics of how evenly a routing uses its experts, and a load-balance loss. Plain torch; never waits for a GPU.

With a process group, both count the tokens of all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.groups import Group, TokenRanks
from ..core.shapes import ShapeError, check_choice, check_dtype, check_same_device, check_tensor
from ._common import FLOATS, can_inspect, check_count, same_dtype, sum_dtype
from ._common import flat as rows_of

KINDS = ("marginal", "joint")


@dataclass(frozen=True, eq=False)
class Usage:
    """Counts of how often each of N experts was selected, and statistics of them; `a + b` combines two batches

    The counts of `a + b` are exact, and so are statistics of counts. Masses of weights are float64 sums, which differ
    from those of a single call by rounding (for n weights >= 0 of one expert, by less than n / 2^52 of their sum). Add
    two usages only if both were counted with weights or both without; a sum of counts and weights is meaningless.

    counts      int64 [N]: entries of each expert
    mass        float64 [N]: the counts, or the sums of the weights
    share_used  number of experts with an entry, divided by N
    kl          sum_e z_e ln(z_e N), z = mass / sum(mass): 0 when uniform, ln N when one expert has everything
    max_load    N max_e z_e: 1 when uniform
    kl and max_load are NaN when nothing was selected. All but counts are float64 tensors on the indices' device.
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
                f"router.Usage: cannot add usages of {len(self.counts)} and of {len(other.counts)} experts; "
                "both need the same num_experts"
            )
        return Usage(self.counts + other.counts, self.mass + other.mass)


@torch.no_grad()
def usage(indices: Tensor, num_experts: int, *, weights: Tensor | None = None, group: Group | None = None) -> Usage:
    """counts_e = number of entries that are e;   mass = counts, or mass_e = sum of the weights of those entries

    indices: any shape, int32 or int64; -1 is ignored. weights: the same shape, any float dtype. group: a process group
    or a DeviceMesh; the entries of all its ranks are counted, and all ranks must call this. All entries of DTensors are
    counted. The result repeats bit for bit, also on a GPU, and never waits for the device. OmniMoE measures with
    counts, PEER with weights. Raises ShapeError, TypeError, ValueError. An index outside [0, num_experts) raises
    IndexError on a CPU; on a GPU and under vmap it is ignored.
    """
    op = "router.usage"
    check_count(op, "num_experts", num_experts)
    check_tensor(op, "indices", indices)
    if weights is not None:
        check_tensor(op, "weights", weights)
        check_dtype(op, "weights", weights, FLOATS)
        check_same_device(op, {"indices": indices, "weights": weights})
        if weights.shape != indices.shape:
            shapes = f"weights is {list(weights.shape)}, expected the shape of indices, {list(indices.shape)}"
            raise ShapeError(f"{op}: {shapes}")
    ranks = TokenRanks(op, (indices,) if weights is None else (indices, weights), group)
    flat, valid = _entries(op, ranks.tensors[0], num_experts)
    counts = ranks.count(_counted(flat, valid, num_experts))
    if weights is None:
        return Usage(counts, counts.double())
    at = flat.masked_fill(~valid, num_experts)
    mass = torch.zeros(num_experts + 1, dtype=torch.float64, device=flat.device)
    values = ranks.tensors[1].reshape(-1).double()
    if mass.is_cuda:
        mass = mass.index_put((at,), values, accumulate=True)  # deterministic, because it sorts; index_add is not
    else:
        mass = mass.index_add(0, at, values)
    return Usage(counts, ranks.count(mass[:num_experts].clone()))


def load_balance_loss(
    x: Tensor, y: Tensor, indices: Tensor, *, kind: str = "marginal", group: Group | None = None
) -> Tensor:
    """1/2 [sx sum_i fx_i Px_i + sy sum_j fy_j Py_j]     kind "marginal"
    sx sy sum_ij f_ij P_ij                            kind "joint"

    f_ij is the share of the entries that select pair (i, j), fx and fy its marginals; f has no gradient. P_ij is the
    mean over the rows of softmax(x)_i softmax(y)_j, Px and Py its marginals. A uniform routing has loss 1. "joint" also
    sees imbalance that the marginals hide: if only pairs with i = j are used, marginal is 1 and joint is s. The loss
    builds no tensor of size rows times experts.

    group: a process group or a DeviceMesh of ranks with tokens of their own. The loss is then that of all their tokens,
    equal on all ranks; averaged over the group, as DDP and FSDP do, its gradients are those of one process. Without a
    group, the mean of the ranks' losses is another loss, because f and P are multiplied before they are averaged.
    DTensors need no group: their loss is that of all tokens, a DTensor too, and its gradients are those of one process.

    x [..., sx], y [..., sy]: the logits given to product_topk; indices [..., k]: its result. Returns a float32 scalar
    (float64 for float64 logits), computed in that dtype. Rows without a valid index are ignored; without any row the
    loss is 0. Differentiable in x and y. Raises ShapeError, TypeError, ValueError, and IndexError on a CPU outside
    vmap. Source: Fedus et al. 2021, arXiv 2101.03961, applied to each axis.
    """
    op = "router.load_balance_loss"
    sx, sy = _check_loss(op, x, y, indices, kind)
    ranks = TokenRanks(op, (x, y, indices), group)
    x, y, indices = ranks.tensors
    k, to = indices.shape[-1], sum_dtype(x.dtype)
    flat, valid = _entries(op, indices, sx * sy)
    kept = valid.view(-1, k).any(-1, keepdim=True)
    rows = ranks.count(kept.sum()).clamp(min=1).to(to)
    entries = ranks.count(valid.sum()).clamp(min=1).to(to)
    with torch.autocast(x.device.type, enabled=False):
        # masked before the softmax, which has no derivative for a row of only -inf
        p, q = (rows_of(t).to(to).masked_fill(~kept, 0.0).softmax(-1) * kept for t in (x, y))
        if kind == "joint":
            counts = ranks.count(_counted(flat, valid, sx * sy))
            f = (counts.to(to) / entries).view(sx, sy)
            return ranks.result(sx * sy * ranks.sum(((p @ f) * q).sum()) / rows)
        fx, fy = (ranks.count(_counted(at, valid, s)).to(to) / entries for at, s in ((flat // sy, sx), (flat % sy, sy)))
        masses = ranks.sum(torch.cat((p.sum(0), q.sum(0))))
        return ranks.result((sx * (fx * masses[:sx]).sum() + sy * (fy * masses[sx:]).sum()) / (2 * rows))


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
        shape_texts = ", ".join(f"{n} {list(s)}" for n, s in zip(("x", "y", "indices"), shapes, strict=True))
        raise ShapeError(
            f"{op}: {shape_texts}; expected [*batch, sx], [*batch, sy], [*batch, k] with sx, sy and k at least 1"
        )
    return x.shape[-1], y.shape[-1]


def _entries(op: str, indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(flat, valid): the indices in int64 with 0 where invalid. On a CPU an index out of range raises IndexError."""
    check_tensor(op, "indices", indices)
    check_dtype(op, "indices", indices, (torch.int32, torch.int64))
    flat = indices.reshape(-1).long()
    if can_inspect(flat) and bool(((flat < -1) | (flat >= n)).any()):
        raise IndexError(
            f"{op}: indices range from {int(flat.min())} to {int(flat.max())}, "
            f"expected -1 (ignored) or 0 <= index < {n}"
        )
    valid = (flat >= 0) & (flat < n)
    return flat.masked_fill(~valid, 0), valid


def _counted(flat: Tensor, valid: Tensor, n: int) -> Tensor:
    """Counts of the valid entries, int64 [n]; integer sums do not depend on the order."""
    return torch.zeros(n, dtype=torch.int64, device=flat.device).scatter_add(0, flat, valid.long())
