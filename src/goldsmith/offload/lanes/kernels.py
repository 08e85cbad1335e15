"""The experts' kernels over blocks: `experts.slots` without its checks, which the Engine does once for all lanes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int32
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core import native
from ...experts import PackedExperts, slots
from ...experts._conventions import TARGETS
from ..store.header import ActivationOptions
from .call_checks import FEW

if TYPE_CHECKING:
    from ...experts._native_abi import NativeCall
    from ...experts.packed.layout import Layout

_KEPT = 128  # most calls whose arguments are kept


@dataclass(frozen=True, eq=False)
class HostFactors:
    """The LoRA of a layer as the CPU's kernels take it: six factors (None: no LoRA there) and three scales, by name.

    kept   the object lives as long as its adapter is active, so a call's arguments may be kept for it
    """

    tensors: Mapping[str, Tensor | None]
    scales: Mapping[str, float]
    kept: bool = True

    @classmethod
    def of(
        cls, factors: Mapping[str, tuple[Tensor, Tensor]], scaling: Mapping[str, float], *, kept: bool = True
    ) -> HostFactors:
        tensors = {
            f"{target}_{which}": factors[target][i] if target in factors else None
            for target in TARGETS
            for i, which in enumerate("ab")
        }
        return cls(tensors, {f"{target}_scale": float(scaling.get(target, 1.0)) for target in TARGETS}, kept)

    def arguments(self) -> dict[str, Any]:
        """`lora` and `lora_scaling` of `experts.slots`."""
        pairs = {t: (self.tensors[f"{t}_a"], self.tensors[f"{t}_b"]) for t in TARGETS}
        present = {target: pair for target, pair in pairs.items() if pair[0] is not None}
        return {"lora": present, "lora_scaling": {target: self.scales[f"{target}_scale"] for target in present}}


NO_LORA = HostFactors.of({}, {})


class Kernels:
    """The CPU's kernels with a store's options, on at most `threads` threads (0: torch's number).

    int8   inputs of a row that share a scale in integer products; 0: float products
    Keeps the arguments of calls with few routes, because the same shapes recur with other addresses.
    """

    def __init__(self, options: ActivationOptions, threads: int = 0, int8: int = 0) -> None:
        self._options, self._threads, self._int8 = options, threads, int8
        self._calls: dict[tuple[object, ...], tuple[NativeCall, tuple[Any, ...]]] = {}
        self._merged: dict[tuple[object, ...], tuple[NativeCall, tuple[Any, ...]]] = {}

    def rows(
        self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor, lora: HostFactors | None = None
    ) -> None:
        """rows[t k + j] = output of expert ids[t, j] of `base` for x[t]; flags[t k + j] = 1 if it has NaN or Inf

        x [T, H] contiguous, float32 or bfloat16; ids [T, k], -1 to skip (row and flag become 0). rows [T k, H] float32
        and flags [T k] uint8 are fully written. Uses the native kernels if the CPU has them, otherwise `experts.slots`.
        lora: added to the experts; it has a row for each expert of `base`.
        """
        if x.is_cpu and native.reason() is None:
            self.call(x, ids, base, rows, flags, lora).run("forward", "offload.Engine", ids)
            return
        T, k = ids.shape
        more = {} if lora is None else lora.arguments()
        slots(x, ids, base, out=rows.view(T, k, -1), flags=flags.view(T, k), **self._options, **more)

    def forget(self) -> None:
        """Forgets the arguments of earlier calls; after it their LoRA may change."""
        self._calls.clear()
        self._merged.clear()

    def call(
        self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor, lora: HostFactors | None = None
    ) -> NativeCall:
        """The arguments of the native library's call for `rows`, valid until the next request

        The caller keeps them and the tensors alive until the call is done.
        """
        if ids.numel() > FEW or not x.is_contiguous() or not (lora is None or lora.kept):
            return self._build_call((x, ids, rows, flags), base, lora)
        key = (base.gate_up.data_ptr(), x.shape, x.dtype, ids.shape, ids.stride(), ids.dtype)
        entry = self._calls.get(key)
        if entry is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            call = self._build_call([_like(t) for t in (x, ids, rows, flags)], base, lora)
            args = call.args
            entry = self._calls[key] = call, (args.x, args.ids, args.rows, args.flags)
        call, (x_at, ids_at, rows_at, flags_at) = entry
        x_at.data, ids_at.data, rows_at.data, flags_at.data = (
            x.data_ptr(), ids.data_ptr(), rows.data_ptr(), flags.data_ptr(),
        )  # fmt: skip
        return call

    def merged(self, tensors: Sequence[Tensor], base: PackedExperts, lora: HostFactors | None, finite: c_int32) -> None:
        """`rows` and `flags` as in `rows`, and y = their weighted sums, for the tensors x, ids, weights, rows, flags, y

        finite: 1 if no row and no sum has NaN or Inf. Only with the native library.
        """
        x, ids, weights = tensors[:3]
        key = (base.gate_up.data_ptr(), x.shape, x.dtype, ids.shape, ids.stride(), ids.dtype)
        entry = self._merged.get(key)
        if entry is None:
            if len(self._merged) >= _KEPT:
                self._merged.clear()
            call = self.merged_call([_like(tensor) for tensor in tensors], base, lora)
            args = call.args
            entry = call, (args.x, args.ids, args.weights, args.rows, args.flags, args.y)
            if lora is None or lora.kept:
                self._merged[key] = entry
        call, views = entry
        for view, tensor in zip(views, tensors):
            view.data = tensor.data_ptr()
        native.check(native.library().gs_moe_merged(byref(call.args), byref(finite)))

    def merged_call(self, tensors: Sequence[Tensor], base: PackedExperts, lora: HostFactors | None) -> NativeCall:
        """The arguments of gs_moe_merged for these tensors."""
        x, ids, weights, rows, flags, y = tensors
        call = self._build_call((x, ids, rows, flags), base, lora)
        call.keep("weights", weights)
        call.keep("y", y)
        return call

    def _build_call(self, tensors: Sequence[Tensor], base: PackedExperts, lora: HostFactors | None) -> NativeCall:
        from ...experts._native_abi import NativeCall

        x, ids, rows, flags = tensors
        named = {
            "x": x, "topk_ids": ids, "gate_up": base.gate_up, "down": base.down, "gate_up_bias": base.gate_up_bias,
            "down_bias": base.down_bias, **(lora or NO_LORA).tensors,
        }  # fmt: skip
        scales = NO_LORA.scales if lora is None else lora.scales
        call = NativeCall(named, {**self._options, **scales, "layout": base.layout.text, "int8": self._int8})
        call.keep("rows", rows)
        call.keep("flags", flags)
        if self._threads:
            call.args.threads = self.team(base.layout, ids.numel())
        return call

    def team(self, layout: Layout, routes: int) -> int:
        """Threads for so many routes: waking more would take longer than they save."""
        from ...experts._native_abi import busy

        read = layout.expert_nbytes * min(routes, layout.num_experts)
        work = 6 * layout.hidden_size * layout.intermediate_size * routes
        return min(self._threads, busy(read, work))


def _like(tensor: Tensor) -> Tensor:
    """A copy of the same shape and strides in its own memory, so that keeping it does not keep the caller's buffer."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@functools.cache
def kernel_module(module: str) -> ModuleType:
    """A module of GPU kernels by name, imported on first use."""
    return importlib.import_module(f"goldsmith.{module}")


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of x in kernels: float32 for float16, which it holds exactly; otherwise unchanged."""
    return torch.float32 if dtype == torch.float16 else dtype
