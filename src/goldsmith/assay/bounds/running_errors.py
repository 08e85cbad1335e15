"""|computed - exact| <= e: running error analysis of a golden, forward and backward.

The golden runs once in float64 under a dispatch mode that computes an error bound for every result
(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 2.2, 3.3 and 4.2):

    elementwise f:         e = sum_i |df/da_i| e_i + c_f u |y|
    sum or dot, n terms:   e = sum_i (e of the terms) + gamma_n sum_i |a_i b_i|,  gamma_n = n u / (1 - n u): any order
    store in unit u_o:     e += u_o (|y| + e) + half the smallest subnormal

Errors belong to *storages*, not to tensors: each inexact storage has a float64 twin with as many elements, and the
error of a tensor is the twin viewed with the tensor's sizes, strides and offset. Views, transposes, expands and
slices therefore need no rule, and every alias sees a write into a view. A storage without a twin is exact.

An open bound is inf (intermediate NaN becomes inf at the end). The rules are in elementwise.py, sums.py (reductions),
softmax.py, products.py (matrix products, convolutions) and data_movement.py (copies, indexing and scatters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch as modes

from ...core.tracing import is_deciding
from ..support.dispatch_mode import DispatchMode
from ..support.torch_settings import default_dtype, in_one_order, threads_for
from .bounded import Bounded, smallest_subnormal, unit_roundoff
from .finite_values import finite_throughout
from .rule_context import Error
from .rule_lookup import OperatorTreatment, decided, treatment_of
from .storage_errors import Twin, slots, tensors, view_key

Function = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_SWEEP = 256  # operators between removals of dead storages


def running_bounds(
    fn: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    leaves: Mapping[str, Tensor],
    *,
    compute: torch.dtype,
    stores: Mapping[str, torch.dtype],
    dot: str = "ieee",
    read_back: torch.dtype | None = None,
) -> dict[str, Bounded]:
    """Every result of `fn(leaves)` with a proven rounding bound; `fn` may call torch.autograd.grad inside.

    leaves: float64 tensors holding the candidate's already rounded inputs (exact: error 0), and output gradients.
    stores: result name -> dtype in which the candidate stores it (default: `compute`).
    dot: "tf32" adds the rounding of both operands of every matrix product.
    read_back: dtype of rounded outputs that a backward may read again: attention's computes sum(g p) as sum(dy y).
    """
    bounded, clean = _run(fn, leaves, compute, stores, dot, read_back, careful=False)
    if clean or (_all_finite(bounded) and finite_throughout(fn, leaves)):
        return bounded  # where only bounds are open, 0 times an infinite error is NaN
    # NaN or Inf appeared: run again with rules that mask them, at about twice the cost
    return _run(fn, leaves, compute, stores, dot, read_back, careful=True)[0]


def _all_finite(bounded: Mapping[str, Bounded]) -> bool:
    return all(bool(torch.isfinite(b.value).all()) for b in bounded.values())


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value that a candidate reads back after storing `value` in `dtype`.

    Call it inside `fn` for every 16-bit stage, saved result and output, as soon as the golden has computed it. Under
    `running_bounds` the rounding enters the error of everything that follows, backward included; under `legal_runs`
    the value itself is rounded (gradient: identity); elsewhere the argument is returned unchanged.
    """
    for mode in reversed(modes._get_current_dispatch_mode_stack()):
        if hasattr(mode, "on_store"):
            return mode.on_store(value, dtype)
    return value


def _run(
    fn: Function,
    leaves: Mapping[str, Tensor],
    compute: torch.dtype,
    stores: Mapping[str, torch.dtype],
    dot: str,
    read_back: torch.dtype | None,
    careful: bool,
) -> tuple[dict[str, Bounded], bool]:
    if dot not in ("ieee", "tf32"):
        raise ValueError(f"unknown dot {dot!r}; known: ieee, tf32")
    mode = RunningErrors(compute, dot, careful, read_back)
    # so that a golden that writes to its inputs does no harm
    leaves = {name: t.detach().clone() for name, t in leaves.items()}
    for leaf in leaves.values():
        mode.error_of(leaf)  # create its twin before a number can leave the tensors
    with default_dtype(torch.float64), threads_for(leaves), in_one_order(leaves):
        with mode:
            results = fn(leaves)
        return _collect(mode, results, compute, stores)


def _collect(
    mode: RunningErrors, results: Mapping[str, Tensor], compute: torch.dtype, stores: Mapping[str, torch.dtype]
) -> tuple[dict[str, Bounded], bool]:
    out, doubts = {}, []
    for name, tensor in results.items():
        value = tensor.detach()
        error = mode.error_of(value)
        dtype = stores.get(name, compute)
        bound = torch.zeros_like(value, dtype=torch.float64) + error
        if not mode.is_stored(value, dtype):
            bound = bound + _store_error(value, bound, dtype)
        if compute == torch.float64:
            bound = 2 * bound  # the golden itself rounds in this precision
        bad = torch.isnan(bound)
        doubts.append((bad | ~torch.isfinite(value)).any())
        bound = torch.where(bad, torch.inf, bound)
        value = value.to(torch.float64, copy=True)
        out[name] = Bounded(value, bound, (value == 0) & (bound == 0), sorted(mode.notes_of(tensor)))
    return out, not doubts or not bool(torch.stack(doubts).any())


def _store_error(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """u_o (|y| + e) + half the smallest subnormal; 0 where y is exact and representable in the store's dtype"""
    if not (dtype.is_floating_point and value.is_floating_point()):
        return torch.zeros_like(error)
    rounding = unit_roundoff(dtype) * (value.abs() + error) + smallest_subnormal(dtype) / 2
    exact = (error == 0) & ((value.to(dtype).to(torch.float64) == value) | ~torch.isfinite(value))
    return torch.where(exact, 0.0, rounding)


class RunningErrors(DispatchMode):
    """The mode behind `running_bounds`; the rules call it as `v, e = context(argument)`."""

    def __init__(
        self, compute: torch.dtype, dot: str = "ieee", careful: bool = False, read_back: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.compute, self.careful = compute, careful
        self.u = unit_roundoff(compute)
        self.read_back = unit_roundoff(read_back) if read_back is not None else 0.0
        self.least_back = torch.finfo(read_back).smallest_normal if read_back is not None else 0.0
        # tensor cores drop 13 bits of a float32 operand without rounding: 2^-10 instead of tf32's 2^-11
        self.operand_unit = 2.0**-10 if dot == "tf32" else 0.0
        self.tiny = torch.finfo(compute).smallest_normal
        self.poisoned: frozenset[str] = frozenset()
        self._twins: dict[int, Twin] = {}
        self._scalars: dict[float, float] = {}

    # RuleContext

    def __call__(self, x: object) -> tuple[Any, Error]:
        """(value, error) of an operand: a float64 tensor or a Python number, with NaN and Inf replaced when careful."""
        if isinstance(x, Tensor):
            error = self.error_of(x)
            v = x if x.dtype == torch.float64 else x.to(torch.float64)
            return (torch.nan_to_num(v, 0.0, 0.0, 0.0) if self.careful else v), error
        return x, self._scalar_error(x)

    def rounding(self, y: Tensor, c: float | Tensor = 1.0) -> Error:
        """c u |y|; |y| below the smallest normal number, which a kernel may flush to zero; 0 for integers"""
        if not y.is_floating_point():
            return 0.0
        a = y.abs()
        return torch.where(a < self.tiny, a, a * (c * self.u))

    def gamma(self, n: int) -> float:
        """n u / (1 - n u), or inf when n u >= 1"""
        return n * self.u / (1 - n * self.u) if n * self.u < 1 else float("inf")

    def error_of(self, t: Tensor) -> Error:
        twin = self._twin(t)
        if twin.error is None:
            return 0.0
        if t.is_complex():
            return float("inf")
        return twin.error.as_strided(t.shape, t.stride(), t.storage_offset())

    def terms_of(self, x: object) -> int:
        """Number of terms of the sum that made a tensor; 0 for anything else."""
        return self._twin(x).terms if isinstance(x, Tensor) and x.is_floating_point() else 0

    def size_of(self, t: Tensor) -> Tensor:
        """sum |a_i b_i| of a product if outputs are read back, otherwise |t|"""
        size = self._twin(t).size
        return t.abs() if size is None else size.as_strided(t.shape, t.stride(), t.storage_offset())

    def notes_of(self, t: Tensor) -> frozenset[str]:
        return self._twin(t).notes | self.poisoned

    def on_store(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the rounding of a store to the twin of `value`, once; the operators used for that add no error."""
        with modes._disable_current_modes():
            if not self.is_stored(value, dtype):
                kept = value.detach()
                error = self.error_of(kept)
                full = torch.zeros_like(kept, dtype=torch.float64) + error
                self._write(kept, full + _store_error(kept, full, dtype), frozenset())
                self._twin(kept).stores.add(view_key(kept, dtype))
        return value

    def is_stored(self, value: Tensor, dtype: torch.dtype) -> bool:
        return view_key(value, dtype) in self._twin(value).stores

    # dispatch

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        treatment = treatment_of(func)
        if is_deciding():
            treatment = decided(treatment)
        if treatment.composed is not None:
            with self:
                y = treatment.composed(*args, **kwargs)
                if y is not NotImplemented:  # torch's decomposition may decline a call
                    return args[0].copy_(y) if treatment.inplace else y
        if treatment.view:
            y = func(*args, **kwargs)
            if isinstance(y, Tensor) and y.dtype != args[0].dtype and not (y.is_complex() or args[0].is_complex()):
                self._escape(func, args)  # the same bytes viewed as another dtype
            return y
        notes = self._notes(args, kwargs)
        if treatment.inplace:
            return self._inplace(func, treatment, args, kwargs, notes)
        y = func(*args, **kwargs)
        if treatment.unseen:
            return y
        outs = y if isinstance(y, tuple | list) else (y,)
        if not any(isinstance(o, Tensor) for o in outs):
            self._escape(func, args)
            return y
        # a complex element is two numbers, and a twin holds one error for it
        pairs = any(t.is_complex() for t in (*tensors(outs, {}), *tensors(args, kwargs)))
        if treatment.exact or self._whole_numbers(outs, args, kwargs):
            errors: tuple[Error, ...] = (0.0,) * len(outs)
        elif treatment.rule is None or pairs:
            notes = notes | {treatment.label}
            errors = (float("inf"),) * len(outs)
        else:
            result = treatment.rule(self, self._sane(y), *args, **kwargs)
            errors = result if isinstance(result, tuple) else (result,) * len(outs)
            if any(isinstance(e, float) and e == float("inf") for e in errors):
                notes = notes | {treatment.label}
        for out, error in zip(outs, errors, strict=True):
            if isinstance(out, Tensor) and not self._shares(out, args):
                self._record(out, error, notes)
                if treatment.terms is not None:
                    self._twin(out).terms = treatment.terms(self, *args)
                if self.read_back and treatment.size is not None and out.is_contiguous() and slots(out) == out.numel():
                    self._twin(out).size = treatment.size(self, *args).expand_as(out).reshape(-1)
        return y

    def _inplace(
        self,
        func: OpOverload,
        treatment: OperatorTreatment,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        notes: frozenset[str],
    ) -> Any:
        """An in-place operator: applies the rule of its functional form to a copy of the old value."""
        target = args[0]
        before = self._copy(target) if treatment.reads_target else target
        y = func(*args, **kwargs)
        if treatment.exact:
            error: Error = 0.0
        elif treatment.rule is None:
            notes, error = notes | {treatment.label}, float("inf")
        else:
            result = treatment.rule(self, self._sane(target), before, *args[1:], **kwargs)
            error = result[0] if isinstance(result, tuple) else result
        self._write(target, self._settle(target, error), notes)
        return y

    # twins

    def _twin(self, t: Tensor) -> Twin:
        storage = t.untyped_storage()
        twin = self._twins.get(storage._cdata)
        if twin is None:  # a leaf or a constant: its error is what `compute` cannot represent
            error = None
            if self.poisoned:  # it may come from a number that left the tensors
                error = torch.full((slots(t),), torch.inf, dtype=torch.float64, device=t.device)
            elif t.is_floating_point() and self.compute != torch.float64:
                flat = t.detach().as_strided((storage.nbytes() // t.element_size(),), (1,), 0).to(torch.float64)
                gap = (flat - flat.to(self.compute).to(torch.float64)).abs()
                gap = torch.where(torch.isfinite(gap), gap, 0.0)  # it overflows `compute`: no error is known
                error = gap if bool(gap.any()) else None
            twin = self._twins[storage._cdata] = Twin(StorageWeakRef(storage), error, frozenset())
        return twin

    def _record(self, t: Tensor, error: Error, notes: frozenset[str]) -> None:
        """Sets the error of a new result; the error may broadcast."""
        if len(self._twins) % _SWEEP == _SWEEP - 1:
            self._twins = {key: twin for key, twin in self._twins.items() if not twin.storage.expired()}
        storage = t.untyped_storage()
        error = self._settle(t, error)
        base = None
        if not (isinstance(error, float) and error == 0.0):
            count = slots(t)
            if t.is_complex():
                base = torch.full((count,), torch.inf, dtype=torch.float64, device=t.device)
            elif count == t.numel() and t.is_contiguous():
                whole = error if isinstance(error, Tensor) else torch.full((), error, device=t.device)
                base = whole.to(torch.float64).expand(t.shape).contiguous().view(-1)
            else:
                base = torch.zeros(count, dtype=torch.float64, device=t.device)
                view = base.as_strided(t.shape, t.stride(), t.storage_offset())
                view.copy_(error) if isinstance(error, Tensor) else view.fill_(error)
        self._twins[storage._cdata] = Twin(StorageWeakRef(storage), base, notes | self.poisoned)

    def _write(self, t: Tensor, error: Error, notes: frozenset[str]) -> None:
        """Sets the error of an overwritten region of a storage that may hold more than `t`."""
        twin = self._twin(t)
        twin.notes = twin.notes | notes
        twin.terms, twin.size = 0, None
        twin.stores.clear()
        if twin.error is None:
            if isinstance(error, float) and error == 0.0:
                return
            twin.error = torch.zeros(slots(t), dtype=torch.float64, device=t.device)
        if t.is_complex():
            twin.error.fill_(torch.inf)
            return
        view = twin.error.as_strided(t.shape, t.stride(), t.storage_offset())
        view.copy_(error) if isinstance(error, Tensor) else view.fill_(error)

    def _settle(self, y: Tensor, error: Error) -> Error:
        """The error of y; a NaN or Inf in y has nothing to round and is exact, unless its bound is open anyway."""
        if self.poisoned:
            return float("inf")
        if not (self.careful and y.is_floating_point() and isinstance(error, Tensor)):
            return error
        lost = torch.isnan(error) | torch.isinf(error)
        return torch.where(torch.isfinite(y), error, torch.where(lost, torch.inf, 0.0))

    def _sane(self, y: object) -> Any:
        if not self.careful:
            return y
        clean = [
            torch.nan_to_num(o, 0.0, 0.0, 0.0) if isinstance(o, Tensor) and o.is_floating_point() else o
            for o in (y if isinstance(y, tuple | list) else (y,))
        ]
        return tuple(clean) if isinstance(y, tuple | list) else clean[0]

    def _copy(self, t: Tensor) -> Tensor:
        before = t.clone()
        error = self.error_of(t)
        self._record(before, error.clone() if isinstance(error, Tensor) else error, frozenset())
        return before

    # helpers

    def _notes(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        notes = self.poisoned
        for t in tensors(args, kwargs):
            twin = self._twins.get(t.untyped_storage()._cdata)
            if twin is not None and twin.notes:
                notes = notes | twin.notes
        return notes

    def _whole_numbers(self, outs: Sequence[object], args: tuple[object, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the results are integers of exact arguments: these are exact whatever the operator."""
        if any(isinstance(o, Tensor) and (o.is_floating_point() or o.is_complex()) for o in outs):
            return False
        return all(self._twin(t).error is None for t in tensors(args, kwargs))

    def _escape(self, func: OpOverload, args: tuple[object, ...]) -> None:
        """Records that a number left the tensors (x.item()): its error is lost, so that no later bound is proven."""
        if any(isinstance(self.error_of(t), Tensor) for t in tensors(args, {}) if t.is_floating_point()):
            self.poisoned = self.poisoned | {f"{func.namespace}.{func._schema.name.split('::')[-1]}"}

    @staticmethod
    def _shares(out: Tensor, args: tuple[object, ...]) -> bool:
        key = out.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == key for t in tensors(args, {}))

    def _scalar_error(self, x: object) -> float:
        if not isinstance(x, float) or x != x or x in (float("inf"), float("-inf")):
            return 0.0
        if x not in self._scalars:
            self._scalars[x] = abs(x - float(torch.tensor(x, dtype=self.compute)))
        gap = self._scalars[x]
        return gap if gap < float("inf") else 0.0
