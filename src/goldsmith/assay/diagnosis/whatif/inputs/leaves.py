"""Inputs and output gradients confused with others: exchanged, transposed, in another order, in another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice, product

import torch
from torch import Tensor

from ....judge.examination import Examination
from ...graph.tensors import floating, whole
from ..change import Change
from ..indexing.indices import wraps
from ..sums.reductions import strides_exchanged

_ROWS = 1 << 16
_MEANT = 8  # combinations of axes of one length
_BLOCK = 16  # the largest block that lengths are padded to, since tested cases are small
_BEYOND = ("stray_read", "overrun")
Leaves = Mapping[str, Tensor]
_OTHER = ("wrong_saved_tensor", ("swapped_results", "invalid_index"))  # for integers, another index


def changes(examination: Examination, leaves: Leaves) -> Iterator[Change]:
    for name, t in leaves.items():
        if floating(t) and t.numel():
            yield from _rearranged(name, t)
            yield from _valued(name)
            yield from _formats(examination, name)
        elif whole(t) and t.numel():
            yield from _numbered(name, t)
    yield from _together(leaves)
    yield from _sorted_by(leaves)
    yield from _one_for_all(leaves)
    for (a, s), (b, t) in combinations(leaves.items(), 2):
        if s.shape == t.shape and s.dtype == t.dtype and s.numel() and not torch.equal(s, t):

            def exchanged(now: Leaves, a: str = a, b: str = b) -> Leaves:
                return {a: now[b], b: now[a]}

            def twice(now: Leaves, a: str = a, b: str = b) -> Leaves:
                return {b: now[a]}

            yield _change("swapped_results", f"{a} and {b} are exchanged", exchanged, {"exchanged": [a, b]}, 0.75)
            for there, here, change in ((a, b, twice), (b, a, lambda now, a=a, b=b: {a: now[b]})):
                text = f"{there} is read in place of {here}"
                cause, also = ("invalid_index", ("permuted", "wrong_saved_tensor")) if whole(s) else _OTHER
                params = {"read": there, "operand": here}
                yield Change(cause, text, -1, None, params, 0.5, leaves=change, also=also)


def _together(leaves: Leaves) -> Iterator[Change]:
    """Inputs of one shape, such as cosines and sines, read at the same wrong place."""
    alike: dict[torch.Size, list[str]] = {}
    for name, t in leaves.items():
        if floating(t) and t.dim() and not name.startswith("grad_"):
            alike.setdefault(t.shape, []).append(name)
    for shape, names in alike.items():
        for axis in range(len(shape)) if len(names) > 1 else ():
            for step in (1, -1) if shape[axis] > 1 else ():

                def moved(now: Leaves, names: list[str] = names, s: int = step, d: int = axis) -> Leaves:
                    return {n: now[n].roll(s, d) for n in names}

                text = f"{' and '.join(names)} are shifted by {step:+d} along axis {axis}"
                yield _change("shifted", text, moved, {"operand": names[0], "axis": axis, "step": step}, 0.5)


def _one_for_all(leaves: Leaves) -> Iterator[Change]:
    """One place of an axis used for all: a block's number, such as its scale, that is read after the loop."""
    groups: dict[tuple[tuple[str, int], ...], int] = {}
    inputs = {n: t for n, t in leaves.items() if floating(t) and t.dim() and not n.startswith("grad_")}
    for n in sorted({n for t in inputs.values() for n in t.shape if n > 1}):
        axes = [[(m, d) for d, k in enumerate(t.shape) if k == n] for m, t in inputs.items() if n in t.shape]
        together = islice(product(*axes), _MEANT)
        for some in (*together, *((one,) for own in axes for one in own)):
            groups.setdefault(some, n)
    for some in groups:
        for at, which, cause in ((-1, "last", "wrong_factor"), (0, "first", "wrong_stride")):

            def stands(now: Leaves, some: tuple = some, at: int = at) -> Leaves:
                return {m: now[m].select(d, at).unsqueeze(d).expand(now[m].shape).contiguous() for m, d in some}

            of = " and ".join(f"axis {d} of {m}" for m, d in some)
            also = ("missing_rescale", "overwritten_accumulator") if at else ("wrong_factor",)
            params = {"operand": some[0][0], "factor": some[0][0], "axis": some[0][1]}
            text = f"the {which} along {of} is used for all"
            yield Change(cause, text, -1, None, params, 0.45, leaves=stands, also=also)


def _sorted_by(leaves: Leaves) -> Iterator[Change]:
    """Rows in the order that sorts one of their indices, or in the inverse order."""
    for index, by in leaves.items():
        if not whole(by) or not 2 < by.numel() <= _ROWS:
            continue
        order = by.flatten().argsort(stable=True)
        if bool((order.diff() > 0).all()):
            continue
        for how, at in ((f"sorts {index}", order), (f"undoes the sorting of {index}", order.argsort())):
            for name, t in leaves.items():
                leading = [d for d in range(1, t.dim() + 1) if t.shape[:d].numel() == len(at)]
                if floating(t) and leading:
                    change = _one(name, lambda t, d=leading[0], i=at: t.flatten(0, d - 1)[i].reshape(t.shape))
                    text = f"the rows of {name} are read in the order that {how}"
                    yield _change("permuted", text, change, {"operand": name, "axis": 0}, 0.55)


def _numbered(name: str, t: Tensor) -> Iterator[Change]:
    """Indices, offsets and counts that are off by one, or read at another place."""
    low, high = int(t.min()), int(t.max())
    for step in (1, -1):
        cause = "off_by_one" if bool((t.diff() >= 0).all()) else "shifted"  # offsets ascend
        text = f"{name} is {step:+d}"
        clamped = _one(name, lambda t, s=step: (t.long() + s).clamp(low, high).to(t.dtype))
        yield _change(cause, f"{text}, within its range", clamped, {"input": name}, 0.5)
        around = _one(name, lambda t, s=step: (low + (t.long() + s - low) % (high - low + 1)).to(t.dtype))
        yield _change(cause, f"{text}, wrapping around", around, {"input": name}, 0.5)
        plain = _one(name, lambda t, s=step: t + s)
        yield _change("off_by_one", f"every number in {name} is {step:+d}", plain, {"input": name}, 0.55)
        for axis in range(t.dim()):
            if t.shape[axis] > 1:
                moved = _one(name, lambda t, s=step, d=axis: t.roll(s, d))
                text = f"{name} is shifted by {step:+d} along axis {axis}"
                yield _change("shifted", text, moved, {"input": name, "axis": axis, "step": step}, 0.4)
    yield from _lengths(name, t, low, high)
    for bits, wrap in wraps(t):
        yield _change("index_overflow", f"{name} wraps at {bits} bits", _one(name, wrap), {"input": name}, 0.6)
    yield from _orders(name, t)
    yield _change("wrong_stride", f"{name} is halved", _one(name, lambda t: t // 2), {"input": name}, 0.5)


def _lengths(name: str, t: Tensor, low: int, high: int) -> Iterator[Change]:
    """Lengths extended to the end of their block or to the longest; zero lengths taken for one or for all."""
    if low == 0 < high:
        for what, none in (("one", lambda t: t.clamp(min=1)), ("all", lambda t: torch.where(t == 0, t.amax(), t))):
            text = f"an empty entry of {name} is taken to have {what}"
            yield Change("empty_group", text, -1, None, {"input": name}, 0.5, leaves=_one(name, none),
                         also=("wrong_mask", "off_by_one"))  # fmt: skip
    if low < 0 or high < 2:
        return
    for block in range(2, min(high, _BLOCK) + 1):
        up = _one(name, lambda t, b=block: -(-t // b) * b)
        text = f"{name} is taken to the end of its block of {block}"
        yield Change("wrong_mask", text, -1, None, {"input": name, "block": block}, 0.5, leaves=up, also=_BEYOND)
    if low < high:
        most = _one(name, lambda t: t.amax().expand(t.shape).clone())
        text = f"the largest of {name} is used for all"
        yield Change("wrong_mask", text, -1, None, {"input": name}, 0.45, leaves=most, also=_BEYOND)


def _orders(name: str, t: Tensor) -> Iterator[Change]:
    """Another order of the same indices; offsets whose inner values are off by one."""
    if t.dim() != 1 or len(t) < 3:
        return
    own = torch.arange(len(t), device=t.device)
    if torch.equal(t.sort().values.long(), own) and not torch.equal(t.long(), own):
        inverse = _one(name, lambda t: t.argsort().to(t.dtype))
        yield _change("permuted", f"{name} is read as its inverse permutation", inverse, {"input": name}, 0.55)
        ignored = _one(name, lambda t: torch.arange(len(t), device=t.device).to(t.dtype))
        yield _change("permuted", f"{name} is not applied", ignored, {"input": name}, 0.55)
    if bool((t.diff() >= 0).all()) and int(t[0]) < int(t[-1]):
        for step in (1, -1):
            inner = _one(name, lambda t, s=step: torch.cat([t[:1], (t[1:-1] + s).clamp(t[0], t[-1]), t[-1:]]))
            text = f"{name} is {step:+d} but for its ends"
            yield _change("off_by_one", text, inner, {"input": name}, 0.5)
    elif int(t.min()) < int(t.max()):
        first = _one(name, lambda t: t[:1].expand(len(t)).clone())
        yield _change("wrong_stride", f"the first of {name} is used for all", first, {"input": name}, 0.5)


def _change(cause: str, text: str, leaves: Callable[..., Leaves], params: dict, prior: float) -> Change:
    return Change(cause, text, -1, None, params, prior, leaves=leaves)


def _one(name: str, change: Callable[..., Tensor]) -> Callable[[Leaves], Leaves]:
    return lambda now: {name: change(now[name])}


def _rearranged(name: str, t: Tensor) -> Iterator[Change]:
    for i, j in combinations(range(t.dim()), 2):
        if t.shape[i] == t.shape[j] > 1:
            text = f"axes {i} and {j} of {name} are transposed"
            change = _one(name, lambda t, i=i, j=j: t.transpose(i, j).contiguous())
            yield _change("transposed", text, change, {"operand": name, "axes": [i, j]}, 0.75)
    if t.dim() >= 2 and t.shape[-1] == t.shape[-2] > 2:
        yield from _diagonal_mistakes(name, t)
    if t.dim() >= 2 and t.shape[-1] != t.shape[-2] and min(t.shape[-2:]) > 1:
        for text, read in strides_exchanged(name):
            yield _change("wrong_stride", text, _one(name, read), {"operand": name}, 0.65)
    for axis in range(t.dim()):
        if t.shape[axis] < 2:
            continue
        for step in (1, -1):
            text = f"{name} is shifted by {step:+d} along axis {axis}"
            yield _change("shifted", text, _one(name, lambda t, s=step, d=axis: t.roll(s, d)),
                          {"operand": name, "axis": axis, "step": step}, 0.6)  # fmt: skip
            yield _change("shifted", f"{text}, filled with zeros",
                           _one(name, lambda t, s=step, d=axis: _come_in(t, s, d)),
                          {"operand": name, "axis": axis, "step": step}, 0.5)  # fmt: skip
            if t.shape[axis] > 2:  # with two places one stands for both, which is a change of its own
                slid = _one(name, lambda t, s=step, d=axis: _slid(t, s, d))
                params = {"operand": name, "axis": axis, "step": step}
                yield _change("shifted", f"{text}, repeating its end", slid, params, 0.5)
        text = f"{name} is reversed along axis {axis}"
        yield _change("permuted", text, _one(name, lambda t, d=axis: t.flip(d)), {"operand": name, "axis": axis}, 0.5)
        half = t.shape[axis] // 2
        if half > 0:
            yield _change("wrong_stride", f"every second index of axis {axis} of {name} is read twice",
                          _one(name, lambda t, d=axis: t.index_select(d, _places(t, d) // 2)),
                          {"operand": name, "axis": axis}, 0.45)  # fmt: skip
            yield _change("wrong_stride", f"{name} is read with twice its stride along axis {axis}",
                          _one(name, lambda t, d=axis: t.index_select(d, _places(t, d) * 2 % t.shape[d])),
                          {"operand": name, "axis": axis}, 0.45)  # fmt: skip
            text = f"the second half of axis {axis} of {name} is read as the first"
            change = _one(name, lambda t, d=axis, h=half: _halved(t, d, h))
            yield _change("missing_partition", text, change, {"operand": name, "axis": axis}, 0.45)


def _diagonal_mistakes(name: str, t: Tensor) -> Iterator[Change]:
    """Sums over a triangular input that end one element early, or that read its diagonal as ones."""
    one = torch.eye(t.shape[-1], dtype=torch.bool, device=t.device)
    i, j = torch.nonzero(torch.ones_like(one), as_tuple=True)
    for step, where in ((-1, "below"), (1, "above")):
        off_diagonal = ((j - i) == step).reshape(one.shape)
        if bool((t * off_diagonal).any()):
            change = _one(name, lambda t, m=off_diagonal: t.masked_fill(m, 0.0))
            text = f"the elements of {name} just {where} its diagonal are left out"
            yield Change("off_by_one", text, -1, None, {"input": name}, 0.45, leaves=change,
                         also=("truncated_reduction", "mask_shift"))  # fmt: skip
    change = _one(name, lambda t: t.masked_fill(one, 1.0))
    params = {"factor": name}
    yield _change("wrong_factor", f"the diagonal of {name} counts as ones", change, params, 0.45)


def _places(t: Tensor, axis: int) -> Tensor:
    return torch.arange(t.shape[axis], device=t.device)


def _halved(t: Tensor, axis: int, half: int) -> Tensor:
    first, rest = t.narrow(axis, 0, half), t.narrow(axis, 2 * half, t.shape[axis] - 2 * half)
    return torch.cat([first, first, rest], axis)


def _come_in(t: Tensor, step: int, axis: int) -> Tensor:
    moved = t.roll(step, axis)
    moved.select(axis, 0 if step > 0 else -1).zero_()
    return moved


def _slid(t: Tensor, step: int, axis: int) -> Tensor:
    n = t.shape[axis]
    return t.index_select(axis, (torch.arange(n, device=t.device) - step).clamp(0, n - 1))


def _valued(name: str) -> Iterator[Change]:
    for text, change, prior in (
        ("has the other sign", torch.neg, 0.5),
        ("counts as one", torch.ones_like, 0.55),
        ("counts as zero", torch.zeros_like, 0.5),
        ("is squared", torch.square, 0.4),
        ("is taken with one added", lambda t: t + 1, 0.45),
        ("counts as one less itself", lambda t: 1 - t, 0.45),
        ("is taken without its sign", torch.abs, 0.3),
    ):
        cause = "sign_flip" if "other sign" in text else "missing_term" if "zero" in text else "wrong_factor"
        params = {
            "factor": name,
            "term": name,
            "named": {"counts as one": f"1/{name}", "is squared": name}.get(text, ""),
        }
        yield _change(cause, f"{name} {text}", _one(name, change), params, prior)


def _formats(examination: Examination, name: str) -> Iterator[Change]:
    """Inputs rounded to a narrower format."""
    value = examination.material.inputs.get(name)
    if value is None or value.dtype != torch.float32:
        return
    for dtype in (torch.bfloat16, torch.float16):
        dtype_name = str(dtype).removeprefix("torch.")
        text = f"{name} is rounded to {dtype_name} before it is used"
        change = _one(name, lambda t, dtype=dtype: t.to(dtype).to(t.dtype))
        yield _change("low_precision_accumulation", text, change, {"input": name, "dtype": dtype_name}, 0.5)
