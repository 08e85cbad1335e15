"""Event: one non-finite value, with where it is, where it came from, and its likely cause."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAN, INF = "nan", "inf"
UNKNOWN = "unknown"  # id of the likely cause if nothing points to one
LARGEST = 1 << 24  # an operator on more elements is not repeated in float64
DEPTH = 4  # user frames that are kept


@dataclass(frozen=True)
class Likely:
    """A cause by its id in the assay's catalogue ("unknown" if nothing points to one), with the evidence."""

    id: str
    evidence: str

    @property
    def title(self) -> str:
        """What the evidence speaks for: "likely overflow"; without a cause it stands for itself."""
        return "evidence" if self.id == UNKNOWN else f"likely {self.id}"


@dataclass(frozen=True)
class Operand:
    """One tensor that the operator read. `absmax` is over all its elements, before the operator ran."""

    shape: tuple[int, ...]
    dtype: str
    absmax: float
    source: str

    @property
    def finite(self) -> bool:
        return math.isfinite(self.absmax)


@dataclass(frozen=True)
class Event:
    """An operator in which NaN or Inf was born (all its inputs were finite), or entered unseen (carried).

    kind     "nan" or "inf" ("nan" if both occur)
    phase    "backward" under autograd's backward, "forward" everywhere else, also in an optimizer
    module   dotted path of the innermost watched module ("" outside of them)
    op       the operator, such as "aten::div"; where only results were seen, the call ("Linear.forward",
             "AdamW.step") or the node of autograd ("SqrtBackward0")
    tensor   which of its results, or which tensor it read
    count    how many of `total` elements are not finite, the first at `index`; None if only flags were kept
    inputs   what the operator read: shape, dtype, absmax, finite
    born     every input was finite, or infinite on purpose (a mask)
    source   its origin: a parameter's or buffer's name, "input", or the operators between which it was written
    step     the step, from 0
    stack    user frames, innermost first; in the backward, those of the forward operator
    likely   the likely cause, with the evidence
    """

    kind: str
    phase: str
    module: str
    op: str
    tensor: str
    count: int | None
    total: int
    index: tuple[int, ...] | None
    inputs: tuple[Operand, ...]
    born: bool
    source: str
    step: int
    stack: tuple[str, ...] = ()
    likely: Likely = field(default_factory=lambda: Likely("unknown", ""))

    def __str__(self) -> str:
        share = f"{self.count} of {self.total} elements" if self.count is not None else f"among {self.total} elements"
        at = f", first at {list(self.index)}" if self.index else ""
        where = f" in {self.module}" if self.module else ""
        how = "born here" if self.born else f"carried, from {self.source}"
        name = {NAN: "NaN", INF: "Inf"}[self.kind]
        lines = [f"{name} in the {self.phase} of step {self.step}: {self.op}{where}, {self.tensor}: {share}{at}; {how}"]
        lines += [f"  read {i.dtype} {list(i.shape)}, absmax {i.absmax:.4g} ({i.source})" for i in self.inputs]
        lines.append(f"  {self.likely.title}: {self.likely.evidence}")
        return "\n".join([*lines, *(f"  at {frame}" for frame in self.stack)])


class NonFinite(ArithmeticError):
    """A watch with stop=True met NaN or Inf. The text is the event; `.event` is the object."""

    def __init__(self, event: Event):
        super().__init__(str(event))
        self.event = event


_WIDE = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
}


def plain(tensor: Any) -> bool:
    """Whether a tensor can be judged: real memory, floating, not empty, and wide enough to be reduced."""
    kind = type(tensor)  # compared first, because this runs for every argument and result of every operator
    return (
        (kind is Tensor or kind is torch.nn.Parameter)
        and tensor.dtype in _WIDE
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


_norm = torch.ops.aten.linalg_vector_norm.default


def absmax(tensor: Tensor) -> Tensor:
    """max |x| as a 0-dimensional tensor, in one reduction; NaN if any element is NaN, Inf if any is Inf."""
    if tensor.device.type != "cpu" or tensor.is_complex():
        return _norm(tensor.detach(), math.inf)
    low, high = ends(tensor)  # 23 times as fast as the norm (torch 2.13, one thread)
    return torch.maximum(-low, high)


def peak(tensor: Tensor) -> float:
    """max |x| as a number; waits for the device."""
    if not tensor.is_cpu or tensor.is_complex():
        return float(absmax(tensor))
    least, greatest = ends(tensor)
    return larger_end(least.item(), greatest.item())


def quiet_peak(tensor: Tensor) -> float:
    """`peak`, unseen by dispatch modes: the watch must not watch itself."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return peak(tensor)


def larger_end(low: float, high: float) -> float:
    """max |x|, from the least and the greatest element; NaN if one is NaN."""
    return low if math.isnan(low) else max(abs(low), abs(high))


def ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(min, max), for complex numbers (-max |x|, max |x|), read in memory order: across rows takes 6 times as long."""
    value = tensor.detach()
    if value.is_complex():
        most = _norm(value, math.inf)
        return -most, most
    if not value.is_contiguous():
        strides = value.stride()
        value = value.permute(sorted(range(value.dim()), key=lambda axis: -strides[axis]))
    return torch.aminmax(value)


def kind_of(peak: float) -> str:
    return NAN if math.isnan(peak) else INF


def settle() -> None:
    """Wait until every device has finished its work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def additive_mask(tensor: Tensor) -> Tensor:
    """Whether a tensor holds only 0 and -inf, like a mask that is added to scores; a 0-dimensional bool."""
    value = tensor.detach()
    if value.is_complex():
        return torch.zeros((), dtype=torch.bool, device=value.device)
    return ((value == 0) | (value == -math.inf)).all()


def infinite_there(out: Tensor, read: list[Tensor]) -> Tensor | None:
    """Where an elementwise operator's result is infinite and all elements that it read there are finite."""
    try:
        finite = [torch.isfinite(t.detach()).expand(out.shape) for t in read]
    except RuntimeError:
        return None  # shapes that broadcast, so not elementwise after all
    created = torch.isinf(out.detach())
    for inputs in finite:
        created = created & inputs
    return created if bool(created.any()) else None


def where(tensor: Tensor, bad: Tensor | None = None) -> tuple[int, tuple[int, ...] | None]:
    """(number of elements that are not finite, index of the first), or of those that are `bad`"""
    bad = ~torch.isfinite(tensor.detach()) if bad is None else bad
    count = int(bad.sum())
    if not count:
        return 0, None
    first = int(bad.flatten().to(torch.uint8).argmax())
    index = []
    for size in reversed(tensor.shape):
        first, rest = divmod(first, size)
        index.append(rest)
    return count, tuple(reversed(index))


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
Frames = tuple[tuple[str, int, str], ...]


def frames() -> Frames:
    """The innermost user frames: neither torch's nor the assay's."""
    frames_seen: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames_seen) < DEPTH:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) and not code.co_filename.startswith("<"):
            frames_seen.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames_seen)


def frame_texts(stack: Frames) -> tuple[str, ...]:
    return tuple(f"{file}:{line} in {name}" for file, line, name in stack)


# causes

POLES = {"atanh", "digamma", "erfinv", "lgamma", "log1p", "logit", "mvlgamma", "polygamma", "tan", "special_ndtri"}


def cause(
    op: str, func: Callable, args: Any, kwargs: Mapping[str, Any], out: Tensor, mutated: bool, meant: bool,
    bad: Tensor | None,
) -> Likely:  # fmt: skip
    """The likely cause of a value that was born: runs the operator once more, as it was and in float64.

    meant: the inputs hold infinities that the program had written, or that came from those; bad: where the result is
    not finite although its own inputs are.
    """
    origin = f"{op} produced it from " + ("infinities that the program had written" if meant else "finite values")
    tensors = [t for t in leaves((args, kwargs)) if plain(t)]
    written = [v for v in leaves((args, kwargs)) if isinstance(v, float) and not math.isfinite(v)]
    if written:
        return Likely("unknown", f"{op} was given the number {written[0]}")
    if mutated or not op.startswith("aten::") or any(t.numel() > LARGEST for t in tensors) or out.numel() > LARGEST:
        return Likely("unknown", origin)
    settle()
    try:
        again = [t for t in leaves(func(*args, **kwargs)) if plain(t) and t.shape == out.shape]
        if again and math.isfinite(peak(again[0])):
            evidence = f"after a synchronisation {op} gives finite values for the same inputs: they were not ready"
            return Likely("missing_sync", evidence)
        wide = func(*_widened(args), **_widened(kwargs))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return Likely("unknown", f"{origin}; it has no float64 form: {str(error).split(chr(10))[0]}")
    wide_results = [t for t in leaves(wide) if isinstance(t, Tensor) and t.shape == out.shape and plain(t)]
    if not wide_results or (meant and bad is None):
        return Likely("unknown", origin)
    wide_result = wide_results[0] if bad is None else wide_results[0][bad]
    wide_peak, most, dtype = peak(wide_result), torch.finfo(out.dtype).max, name_of(out.dtype)
    hint = "; subtract the maximum first" if op == "aten::exp" else ""
    if math.isfinite(wide_peak) and wide_peak > most:
        return Likely("overflow", f"in float64 it reaches {wide_peak:.4g}, and {dtype} ends at {most:.4g}{hint}")
    if math.isfinite(wide_peak):
        return Likely(
            "unknown", f"in float64 the same inputs give finite values up to {wide_peak:.4g}: look inside {op}"
        )
    undefined = _undefined(op, tensors, [v for v in leaves((args, kwargs)) if isinstance(v, int | float)])
    if not undefined and math.isinf(wide_peak) and op.split("::")[1].rstrip("_") not in POLES:
        largest = max((float(t[t.isfinite()].abs().amax()) for t in tensors if bool(t.isfinite().any())), default=0.0)
        return Likely("overflow", f"with inputs up to {largest:.4g} it overflows in float64, too{hint}")
    undefined = undefined or f"{op.split('::')[1]} is not defined there"
    return Likely("unknown", f"float64 gives {kind_of(wide_peak)} for the same inputs: {undefined}")


def _undefined(op: str, tensors: list[Tensor], numbers: list[float]) -> str:
    """Which inputs lie where the operator is not defined, in words; "" if none does, or if its domain is not known."""
    stem = op.split("::")[1]
    last = tensors[-1]
    if stem == "div" and 0 in numbers:
        return "the divisor is the number 0"
    if stem in ("div", "reciprocal", "rsqrt") and bool((last == 0).any()):
        zeros, below = int((last == 0).sum()), int((last < 0).sum()) if stem == "rsqrt" else 0
        text = f"the divisor holds {zeros} zero{'' if zeros == 1 else 's'}"
        return text + (f" and {below} negative value{'' if below == 1 else 's'}" if below else "")
    if stem in ("log", "log2", "log10", "sqrt", "rsqrt", "pow"):
        none = int((tensors[0] <= 0).sum())
        return f"zero or negative inputs: {none}" if none else ""
    return ""


def _widened(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return [_widened(v) for v in value]
    return {k: _widened(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def leaves(value: object) -> list[Any]:
    """Tensors and numbers in arguments or results, which operators nest one list deep."""
    if isinstance(value, list | tuple):
        items: Iterable[object] = value
    elif isinstance(value, Mapping):
        items = value.values()
    else:
        return [value]
    flat: list[object] = []
    for item in items:
        if isinstance(item, Tensor):
            flat.append(item)
        else:
            flat += leaves(item)
    return flat


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
