"""Legal orders of a sum, a scan and a matrix product: sequential, permuted, tiled, pairwise.

`reduce` and `matmul` return the result of some correct implementation in the tensor's own precision: no partial sum has
more precision. On the CPU numpy runs the sequential loops: its reductions over a leading axis add row after row. A GPU
needs a launch for each term of a loop, so that loops of few numbers a step are computed on the CPU as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MOST_AT_ONCE = 2**24  # up to this many products: compute all terms, then add them; 1 ns a term, almost nothing a step
_MOST_IN_PLACE = 2**34  # up to this many: add in place, 0.75 ns a term on a CPU; with more, add four terms at a time
_MOST_LAUNCHES = 2**14  # on a GPU, a launch adds one term; real kernels add no more terms than this one after another
_ACCUMULATORS = 2**16  # as many as fit in a core's cache
# a launch with its slices costs some 10 us, in which a core adds 8,000 numbers; a copy to the CPU and back costs 100 us
_LEAST_LAUNCHES, _FEW_NUMBERS = 2**5, 2**13
MOST_PARTIALS = 2**24  # elements of the tiles' partial sums in memory at once


@dataclass(frozen=True)
class Order:
    """One order of summation.

    style: as_stored | permuted | tiles | pairwise; seed draws the permutation; tile is a power of two in 16..256.
    apart: the seed of a second order, for results drawn at random: a kernel may add equal rows in different orders, for
    example the last rows of a matrix. Without it, equal rows would cancel to the last bit in every run.
    """

    style: str
    seed: int
    tile: int
    apart: int | None = None

    def permutation(self, n: int, device: torch.device) -> Tensor | None:
        return None if self.style == "as_stored" or n < 2 else permutation(n, self.seed, device)


def permutation(n: int, seed: int, device: torch.device) -> Tensor:
    """The indices 0..n-1 in a random order, drawn on the device: a copy would wait for all that a GPU has to do."""
    return torch.randperm(n, generator=torch.Generator(device).manual_seed(seed), device=device)


def _halves(n: int, order: Order, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices 0..n-1 in two random halves."""
    shuffled = permutation(n, order.seed ^ n, device)
    return shuffled[: n // 2], shuffled[n // 2 :]


def _is_apart(order: Order, x: Tensor) -> bool:
    """Not term by term on a GPU, where each term is a launch: its other orders are apart."""
    return order.apart is not None and (x.device.type == "cpu" or order.style in ("tiles", "pairwise"))


def _two(order: Order) -> tuple[Order, Order]:
    return replace(order, apart=None), replace(order, apart=None, seed=order.apart or 0)


def reduce(x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, order: Order, product: bool = False) -> Tensor:
    """sum or prod over `dim` (an int, a list, or None for all) in the given order."""
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    dims = [d % x.dim() for d in dims]
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*dims, *kept).reshape(math.prod(x.shape[d] for d in dims), math.prod(x.shape[d] for d in kept))
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim()) if keepdim or d in kept]
    return fold(rows, order, product).reshape(shape)


def fold(rows: Tensor, order: Order, product: bool = False) -> Tensor:
    """The sum or product of n rows in the given order: (n, m) -> (m,)."""
    n, m = rows.shape
    if n == 0 or m == 0:
        return torch.full((m,), 1.0 if product else 0.0, dtype=rows.dtype, device=rows.device)
    if m > 1 and _is_apart(order, rows):
        total = rows.new_empty(m)
        for columns, one in zip(_halves(m, order, rows.device), _two(order), strict=True):
            total[columns] = fold(rows[:, columns], one, product)
        return total
    p = order.permutation(n, rows.device)
    rows = rows if p is None else rows[p]
    if order.style == "pairwise":
        return pairwise(rows, product)
    if order.style == "tiles" and n > order.tile:
        whole = n // order.tile * order.tile
        partial = sequential(rows[:whole].reshape(-1, order.tile, m), 1, product)
        if whole < n:
            partial = torch.cat([partial, sequential(rows[whole:], 0, product).unsqueeze(0)])
        rows = partial
    return sequential(rows, 0, product)


def pairwise(rows: Tensor, product: bool = False) -> Tensor:
    """(n, ...) -> (...): adds one half to the other, then halves of the result; an odd row waits for the next round."""
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        merged = rows[:half] * rows[half : 2 * half] if product else rows[:half] + rows[half : 2 * half]
        rows = merged if rows.shape[0] % 2 == 0 else torch.cat([merged, rows[2 * half :]])
    return rows[0]


def sequential(x: Tensor, dim: int, product: bool = False) -> Tensor:
    """((x_0 + x_1) + x_2) + ... along dim"""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        import numpy

        a = x.contiguous().numpy()
        f = numpy.multiply if product else numpy.add
        with numpy.errstate(invalid="ignore", over="ignore"):
            if a.shape[-1] < 2 or dim == a.ndim - 1:  # numpy would sum a single column pairwise
                return torch.from_numpy(numpy.ascontiguousarray(f.accumulate(a, axis=dim).take(-1, axis=dim)))
            return torch.from_numpy(numpy.asarray(f.reduce(a, axis=dim)))
    n = x.shape[dim]
    if _quicker_on_cpu(x, n, x.numel() // max(n, 1)):
        return sequential(x.cpu(), dim, product).to(x.device)
    steps = x.unbind(dim)
    acc = steps[0].clone()
    for step in steps[1:]:
        acc = acc * step if product else acc + step
    return acc


def _quicker_on_cpu(t: Tensor, steps: int, numbers: int) -> bool:
    """Whether a loop over a GPU's tensor is quicker on the CPU: `steps` launches, each for that many numbers."""
    exact = t.dtype in (torch.float32, torch.float64)  # in 16 bits the CPU, too, needs an operator for each step
    return t.device.type != "cpu" and exact and steps >= _LEAST_LAUNCHES and numbers <= _FEW_NUMBERS


def scan(x: Tensor, dim: int, order: Order) -> Tensor:
    """Running sums: sequential, or in tiles with a carry from tile to tile."""
    n = x.shape[dim]
    rows = x.movedim(dim, 0)
    if order.style in ("as_stored", "permuted") or n <= order.tile:
        return _running(rows).movedim(0, dim)
    out, carry = [], None
    for tile in rows.split(order.tile):
        local = _running(tile)
        local = local if carry is None else local + carry
        carry = local[-1]
        out.append(local)
    return torch.cat(out).movedim(0, dim)


def _running(rows: Tensor) -> Tensor:
    """Sequential running sums over axis 0; numpy on the CPU, where torch.cumsum keeps partial sums in float64."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        import numpy

        with numpy.errstate(invalid="ignore", over="ignore"):
            return torch.from_numpy(numpy.add.accumulate(rows.contiguous().numpy(), axis=0))
    if _quicker_on_cpu(rows, rows.shape[0], rows.numel() // max(rows.shape[0], 1)):
        return _running(rows.cpu()).to(rows.device)
    acc = [rows[0]] if rows.shape[0] else []
    for row in rows[1:]:
        acc.append(acc[-1] + row)
    return torch.stack(acc) if acc else rows.clone()


def matmul(a: Tensor, b: Tensor, order: Order) -> Tensor:
    """(..., M, K) @ (..., K, N) with the K products added in the given order."""
    n = a.shape[-1]
    if n == 0 or a.numel() == 0 or b.numel() == 0:
        return a @ b
    if _is_apart(order, a):
        return _in_two_orders(a, b, order)
    p = order.permutation(n, a.device)
    if p is not None:
        a, b = a.index_select(-1, p), b.index_select(-2, p)
    if order.style in ("as_stored", "permuted"):
        return _term_by_term(a, b)
    tiles = -(-n // order.tile)
    outputs = a.numel() // n * b.shape[-1]
    if order.style == "pairwise" and tiles > 1 and outputs * tiles <= MOST_PARTIALS:
        return pairwise(torch.stack([s @ t for s, t in _tiles(a, b, order.tile)]))
    return _tile_by_tile(a, b, order.tile)


def _term_by_term(a: Tensor, b: Tensor) -> Tensor:
    """The product whose terms are added one after another; where they are very many, some at a time."""
    n, device, terms = a.shape[-1], a.device, a.numel() * b.shape[-1]
    if _quicker_on_cpu(a, n, terms // n):
        a, b = a.cpu(), b.cpu()
    if terms > _MOST_IN_PLACE or (device.type != "cpu" and n > _MOST_LAUNCHES):
        product = _tile_by_tile(a, b, 4 if n <= _MOST_LAUNCHES else n // (_MOST_LAUNCHES // 4))
    else:
        product = _one_by_one(a, b) if a.device.type == "cpu" and terms <= _MOST_AT_ONCE else _in_place(a, b)
    return product.to(device)


def _in_two_orders(a: Tensor, b: Tensor, order: Order) -> Tensor:
    """A product whose elements are added in one of two orders, so that neither equal rows nor columns have one."""
    rows, columns = (_halves(n, order, a.device) for n in (a.shape[-2], b.shape[-1]))
    c = a.new_empty(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if row.numel() and column.numel():
                part = matmul(a.index_select(-2, row), b.index_select(-1, column), _two(order)[(i + j) % 2])
                c[..., row[:, None], column] = part
    return c


def _tiles(a: Tensor, b: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(a.split(size, -1), b.split(size, -2), strict=True)


def _tile_by_tile(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Adds the matrix products of tiles of the K axis, one after another."""
    products = (s @ t for s, t in _tiles(a, b, size))
    acc = next(products)
    for product in products:
        acc = acc + product
    return acc


def _in_place(a: Tensor, b: Tensor) -> Tensor:
    """acc += a_k b_k, one term after another, as a plain loop does; four terms at a time would have half its noise"""
    width, batch = b.shape[-1], math.prod(a.shape[:-2])
    rows = a.shape[-2] if a.device.type != "cpu" else max(1, _ACCUMULATORS // (batch * width))
    parts, factors = [], b.movedim(-2, 0).unsqueeze(-2).unbind()
    for part in a.split(rows, -2):
        columns = part.movedim(-1, 0).unsqueeze(-1).contiguous().unbind()
        acc = columns[0] * factors[0]
        for column, factor in zip(columns[1:], factors[1:], strict=True):
            acc.addcmul_(column, factor)
        parts.append(acc)
    return torch.cat(parts, -2)


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """Rounds the products, then adds them one after another, in chunks of rows that fit in the cache."""
    n = a.shape[-1]
    outputs = max(a.numel() // n * b.shape[-1], 1)
    chunk = max(1, min(n, 2**18 // outputs))
    acc: Tensor | None = None
    for lo in range(0, n, chunk):
        s, t = a[..., lo : lo + chunk], b[..., lo : lo + chunk, :]
        terms = s.movedim(-1, 0).unsqueeze(-1) * t.movedim(-2, 0).unsqueeze(-2)
        terms = terms.reshape(terms.shape[0], -1)
        if acc is not None:
            terms[0] += acc
        acc = sequential(terms, 0)
    return (a @ b if acc is None else acc).reshape(*a.shape[:-1], b.shape[-1])
