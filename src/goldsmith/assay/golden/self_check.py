"""Checks of the golden before a candidate is judged: float64 inside, repeatable, inputs unwritten, gradients right."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...core.tracing import TargetError, modelled_storage
from ..support import inplace_errors, memory_errors
from ..support.dispatch_mode import DispatchMode
from ..support.printable import from_here
from ..support.torch_settings import default_dtype, in_one_order, threads_for
from . import gradient_check
from .self_check_results import Forward, Gradient, SelfCheck

_SMALL = 2**17  # total elements of all inputs below which one thread is faster than two


def exact(t: Tensor) -> Tensor:
    """The golden's copy of an input: contiguous, and in float64 if it is floating-point."""
    t = t.detach()
    return (t.double() if t.is_floating_point() else t).clone(memory_format=torch.contiguous_format)


def self_check(
    forward: Forward,
    gradient: Gradient | None,
    leaves: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    sent: Collection[str] | None = None,
    surrogate: Collection[str] = (),
    wide: bool = False,
    seed: int = 0,
) -> SelfCheck:
    """Checks float64 everywhere, two bit-equal runs, inputs unwritten, and gradients against central differences.

    forward(leaves) -> {output: tensor}, decisions fixed; gradient(leaves, {"grad_<output>": cotangent}) ->
    {input: gradient} for the differentiable inputs (None: forward only). leaves: float64 inputs, integers unchanged.
    shapes: output -> shape of the candidate's output, compared with the golden's.
    sent: outputs for which `gradient` takes a cotangent (None: every floating-point one); L has no other terms.
    surrogate: inputs whose gradient is not a derivative and is not compared with differences.
    wide: the candidate computes in float64 too, and draws the same random numbers as the golden.
    """
    check = SelfCheck()
    leaves = {name: t.detach() for name, t in leaves.items()}
    with default_dtype(torch.float64), threads_for(leaves), in_one_order(leaves):
        _checks(check, forward, gradient, leaves, shapes or {}, sent, surrogate, wide, seed)
    return check


def _checks(
    check: SelfCheck,
    forward: Forward,
    gradient: Gradient | None,
    leaves: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    sent: Collection[str] | None,
    surrogate: Collection[str],
    wide: bool,
    seed: int,
) -> None:
    watch = _NarrowerThanFloat64(wide)
    seen = _attempt(check, "the golden", watch, forward, leaves)
    if seen is None:
        return
    for name, shape in shapes.items():
        if name in seen and tuple(seen[name].shape) != tuple(shape):
            text = f"{name}: the golden's shape is {list(seen[name].shape)}, the candidate's {list(shape)}"
            text += " (one number)" if not shape else ""
            check.mismatches[name] = f"{text}; one of the two is wrong"
    generator = torch.Generator().manual_seed(seed)
    cotangents = {
        f"grad_{name}": torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
        for name, y in seen.items()
        if y.is_floating_point() and (sent is None or name in sent)
    }

    def backward(own: dict[str, Tensor]) -> dict[str, Tensor]:
        return cast(Gradient, gradient)(own, cotangents)

    if gradient is not None:
        _attempt(check, "the golden's backward", watch, backward, leaves)
    check.problems += watch.problems
    # under a dispatch mode autograd uses other formulas (for prod, say), so the two compared runs go without one
    _twice(check, "the golden", forward, leaves)
    grads = None if gradient is None else _twice(check, "the golden's backward", backward, leaves)
    if grads is not None and not check.problems and not check.mismatches:
        gradient_check.confirm(check, forward, backward, grads, cotangents, leaves, generator, surrogate)


def _twice(check: SelfCheck, what: str, call: Forward, leaves: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    first = _attempt(check, what, None, call, leaves)
    second = _attempt(check, what, None, call, leaves) if first is not None else None
    for name, y in (first or {}).items():
        if second is not None and name in second and not _equal(y, second[name]):
            text = f"{what} does not repeat: {name} differs between two runs on the same inputs"
            if y.is_cuda and _rounded_apart(y, second[name]):
                check.notes.append(f"{text}, by no more than float64 rounding: the GPU adds with atomics")
            else:
                check.problems.append(text)
    return first


def _rounded_apart(a: Tensor, b: Tensor) -> bool:
    """|a - b| <= 2^8 roundings of the largest number, as after adding in another order"""
    if a.dtype != torch.float64 or b.dtype != torch.float64 or a.shape != b.shape:
        return False
    same, largest = (a == b) | (a.isnan() & b.isnan()), a.abs().nan_to_num(posinf=0.0).max()
    return bool((same | ((a - b).abs() <= 2**8 * torch.finfo(torch.float64).eps * largest)).all())


def _attempt(
    check: SelfCheck, what: str, watch: _NarrowerThanFloat64 | None, call: Forward, leaves: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Calls `call` on copies of the leaves; exceptions and written inputs become problems."""
    own = {name: t.clone() for name, t in leaves.items()}
    try:
        if watch is None:
            results = call(own)
        else:
            with watch:
                results = call(own)
    except (TargetError, ImportError):  # a mistake in the declaration or a missing module, not in arithmetic
        raise
    except Exception as error:
        if memory_errors.out_of_memory(error):
            raise
        edits = inplace_errors.edited(error)
        reason = f"{type(error).__name__}: {error}" if edits is None else f"on an {edits}"
        check.problems.append(f"{what} raised {reason}{_where(error)}")
        return None
    for name, t in leaves.items():
        if name in own and not _equal(own[name].detach(), t):
            problem = f"{what} wrote to its input {name}"
            check.problems += [problem] if problem not in check.problems else []
    return {name: y.detach() for name, y in results.items() if isinstance(y, Tensor)}


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _internal(f.filename)]
    return f" ({from_here(own[-1].filename)}:{own[-1].lineno})" if own else ""


def _internal(filename: str) -> bool:
    ours = "/goldsmith/assay/" in filename or filename.endswith("/goldsmith/core/tracing.py")
    return ours or "/torch/" in filename or filename.startswith("<frozen")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: NaN equals itself and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class _NarrowerThanFloat64(DispatchMode):
    """Dispatch mode that reports operators whose result is narrower than float64, outside `storage(...)`.

    Random draws are an exception: in float32 they equal the candidate's, in float64 torch draws other numbers.
    """

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.wide = wide

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        y = func(*args, **(kwargs or {}))
        if not modelled_storage():
            for out in y if isinstance(y, tuple | list) else (y,):
                if not isinstance(out, Tensor):
                    continue
                if func._schema.name in _DRAWS:
                    if out.dtype == torch.float64 and not self.wide:
                        self._report(
                            func,
                            out,
                            "draws random numbers",
                            "torch draws other numbers there than in the "
                            "candidate's dtype: pass dtype=torch.float32 in both, or make them an input",
                        )
                elif out.dtype in _NARROW:
                    self._report(func, out, "computes", "the golden must stay in float64")
        return y

    def _report(self, func: OpOverload, out: Tensor, does: str, why: str) -> None:
        dtype = str(out.dtype).removeprefix("torch.")
        frame = next((f for f in reversed(traceback.extract_stack()) if not _internal(f.filename)), None)
        place = f" at {from_here(frame.filename)}:{frame.lineno}" if frame else ""
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        text = f"the golden {does} in {dtype}: {name}{place}; {why}"
        if not any(
            f" {dtype}:" in known for known in self.problems
        ):  # report the first of each dtype; the others follow from it
            self.problems.append(text)


_DRAWS = {f"aten::{name}" for name in ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli")}
_NARROW = {torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2}
