"""The experts of a layer with ggml: gate, up, SwiGLU and down by `ggml_mul_mat_id`, weights repacked where it can.

Give the folder of its shared libraries (libggml-base.so, libggml-cpu.so), for example `bin` of a build of llama.cpp.
Distinct layers take turns in one graph, so that weights come from memory. ggml's threads poll between the layers.
"""

from __future__ import annotations

import ctypes
import random
import time
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

TYPES = {"fp32": ("F32", 0), "bf16": ("BF16", 30), "int8": ("Q8_0", 8), "int4": ("Q4_0", 2), "mxfp4": ("MXFP4", 39)}
REPACKED = ("int4", "mxfp4")  # formats whose weights ggml rearranges on processors with AVX2; it crashes with others
_INT32 = 26


class _Init(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Ggml:
    """The functions of ggml's two libraries; every pointer is opaque."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        self._log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *line: None)  # kept alive
        self.base.ggml_log_set(self._log, None)

    def call(self, name: str, *arguments: object, result: object = c_void_p) -> object:
        function = getattr(self.cpu if "backend_cpu" in name else self.base, name)
        function.restype = result
        return function(*arguments)

    def pointer(self, name: str, *arguments: object) -> c_void_p:
        return c_void_p(self.call(name, *arguments))  # type: ignore[arg-type]

    def context(self, size: int) -> c_void_p:
        self.base.ggml_init.argtypes = [_Init]
        return self.pointer("ggml_init", _Init(size, None, True))

    def buffer_type(self, backend: c_void_p) -> tuple[c_void_p, str]:
        """The type of buffer whose weights are repacked for this processor, and its name."""
        device = self.pointer("ggml_backend_get_device", backend)
        registry = self.pointer("ggml_backend_dev_backend_reg", device)
        found = self.call("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        if found:
            listed = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(found)(device)  # type: ignore[arg-type]
            at = 0
            while listed and listed[at]:
                name = self.call("ggml_backend_buft_name", c_void_p(listed[at]), result=c_char_p)
                if isinstance(name, bytes) and b"REPACK" in name:
                    return c_void_p(listed[at]), name.decode()
                at += 1
        return self.pointer("ggml_backend_cpu_buffer_type"), "CPU"


class Layers:
    """`count` layers of E experts with k of them for the only token; `us()` is the time of one layer."""

    def __init__(self, ggml: Ggml, format: str, sizes: dict[str, int], count: int) -> None:
        self.ggml, self.count, self.E, self.k = ggml, count, sizes["E"], sizes["k"]
        H, I = sizes["H"], sizes["I"]
        _, kind = TYPES[format]
        self.backend = ggml.pointer("ggml_backend_cpu_init")
        overhead = int(ggml.call("ggml_tensor_overhead", result=c_size_t))  # type: ignore[call-overload]
        graphs = int(ggml.call("ggml_graph_overhead", result=c_size_t))  # type: ignore[call-overload]
        plain = ggml.pointer("ggml_backend_cpu_buffer_type")
        memory, self.buffer = ggml.buffer_type(self.backend) if format in REPACKED else (plain, "CPU")
        weights = ggml.context(overhead * (3 * count + 8))
        shapes = ((H, I), (H, I), (I, H))
        tensors = [[self._tensor(weights, kind, a, b, self.E) for a, b in shapes] for _ in range(count)]
        self._held = ggml.call("ggml_backend_alloc_ctx_tensors_from_buft", weights, memory)
        if not self._held:
            raise MemoryError(f"ggml has no memory for {count} layers in {format}")
        stored = [self._quantised(kind, a, b) for a, b in shapes]
        for layer in tensors:
            for tensor, data in zip(layer, stored, strict=True):
                self._set(tensor, data)
        values = ggml.context(overhead * (16 * count + 16) + 2 * graphs)
        x = self._tensor(values, 0, H, 1, 1)
        self.ids, self.graph = [], ggml.pointer("ggml_new_graph", values)
        for gate, up, down in tensors:
            ids = ggml.pointer("ggml_new_tensor_2d", values, c_int(_INT32), c_int64(self.k), c_int64(1))
            self.ids.append(ids)
            g, u = (ggml.pointer("ggml_mul_mat_id", values, w, x, ids) for w in (gate, up))
            h = ggml.pointer("ggml_swiglu_split", values, g, u)
            y = ggml.pointer("ggml_mul_mat_id", values, down, h, ids)
            ggml.call("ggml_build_forward_expand", self.graph, y, result=None)
        if not ggml.call("ggml_backend_alloc_ctx_tensors_from_buft", values, plain):
            raise MemoryError("ggml has no memory for a layer's values")
        self._set(x, torch.randn(H).numpy().tobytes())

    def threads(self, count: int) -> None:
        self.ggml.call("ggml_backend_cpu_set_n_threads", self.backend, c_int(count), result=None)

    def free(self) -> None:
        """Give back the weights, which are most of the memory."""
        self.ggml.call("ggml_backend_buffer_free", c_void_p(self._held), result=None)  # type: ignore[arg-type]

    def us(self) -> float:
        for ids in self.ids:
            self._set(ids, (c_int32 * self.k)(*random.sample(range(self.E), self.k)))
        began = time.perf_counter()
        self.ggml.call("ggml_backend_graph_compute", self.backend, self.graph, result=c_int)
        return (time.perf_counter() - began) / self.count * 1e6

    def _tensor(self, context: c_void_p, kind: int, *sizes: int) -> c_void_p:
        return self.ggml.pointer("ggml_new_tensor_3d", context, c_int(kind), *map(c_int64, sizes))

    def _set(self, tensor: c_void_p, data: object) -> None:
        size = ctypes.sizeof(data) if isinstance(data, ctypes.Array) else len(data)  # type: ignore[arg-type]
        self.ggml.call("ggml_backend_tensor_set", tensor, data, c_size_t(0), c_size_t(size), result=None)

    def _quantised(self, kind: int, inputs: int, outputs: int) -> bytes:
        """The weights of all experts of a layer; every layer has the same, in its own memory."""
        values = torch.randn(self.E * outputs * inputs) * inputs**-0.5
        if kind == 0:
            return values.numpy().tobytes()
        row = int(self.ggml.call("ggml_row_size", c_int(kind), c_int64(inputs), result=c_size_t))  # type: ignore[call-overload]
        data = ctypes.create_string_buffer(row * outputs * self.E)
        rows = c_int64(outputs * self.E)
        self.ggml.call(
            "ggml_quantize_chunk", c_int(kind), c_void_p(values.data_ptr()), data, c_int64(0), rows, c_int64(inputs),
            None, result=c_size_t,
        )  # fmt: skip
        return data.raw
