"""kt-kernel: its training kernels for LoRA on frozen experts, and its inference kernels for one token.

We call its C++ classes directly, as its wrapper does, but without the wrapper's copies between devices. LoRA is in
bfloat16. kt-kernel packs the base twice, once for each direction.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldsmith.cli.bench.experts import MoeSubject
from goldsmith.cli.bench.subject import Prepared, Subject, Variant
from goldsmith.core import native
from goldsmith.experts._conventions import FACTORS, TARGETS
from goldsmith.experts.benchmarks import DRAWN
from goldsmith.experts.packed.formats import Codes
from goldsmith.experts.packed.layout import Layout, read_matrix

NAME = "kt-kernel"
VARIANTS = ("avx512_bf16", "amx")  # variants with training kernels
CLASSES = {"bf16": "AMXBF16", "int8": "AMXInt8", "int4": "AMXInt4_KGroup", "mxfp4": "MXFP4"}
NO_LIMIT = 1e30  # its mxfp4 class requires a limit of the activation
NOTES = {"int8": "; activations in int8, too"}


def missing() -> str | None:
    if importlib.util.find_spec("kt_kernel") is None:
        return "kt-kernel is not installed (pip install --no-deps kt-kernel==0.7.2)"
    if native.reason() is not None:
        return f"we cannot tell which of its variants would run: {native.reason()}"
    level = native.machine_isa()[0]
    return None if level in VARIANTS else f"its training kernels need AVX512_BF16 or AMX; this machine has {level}"


def prepare(subject: Subject) -> Variant | None:
    if not isinstance(subject, MoeSubject) or subject.device != "cpu":
        return None
    kind = subject.options["layout"].partition(":")[0]
    if kind not in CLASSES or (not subject.entry.sizes["r"] and (subject.timed_backward or kind == "mxfp4")):
        return None  # its training kernels need LoRA, and the mxfp4 kernel is a training kernel
    return _Layer(subject, kind).variant()


class _Layer:
    """A kt-kernel object with loaded weights, and the tensors that it reads and writes."""

    def __init__(self, subject: MoeSubject, kind: str) -> None:
        self.subject, self.kind, self.library = subject, kind, library()
        sizes = subject.entry.sizes
        self.tokens, self.slots, self.rank = sizes["T"], sizes["k"], sizes["r"]
        self.workers = most_workers(torch.get_num_threads())
        with silent():
            self.pool = pool(self.workers)
            config = self._config(sizes)
            self.loaded = [*self._weights(config), *self._factors(config)]
            self.moe = getattr(self.library.moe, CLASSES[kind] + ("_SFT_MOE" if self.rank else "_MOE"))(config)
            self._run(self.moe.load_weights_task())
        self.count = torch.tensor([self.tokens], dtype=torch.int32)
        self.y = torch.zeros(self.tokens, sizes["H"], dtype=torch.bfloat16)
        self.dy, self.kept = torch.randn_like(self.y), False
        factors = [torch.zeros_like(subject.required(name)) for name in FACTORS] if self.rank else []
        self.gradients = [torch.zeros_like(self.y), *factors, torch.zeros(self.tokens, self.slots)]

    def variant(self) -> Variant:
        """The variant. A forward keeps data for its backward, and a second forward before it would end the process."""
        note = f"{self.workers} workers{NOTES.get(self.kind, '')}"
        call = self.subject.in_turn(self.subject.tensors, self._forward)
        if not self.rank:
            return Variant(NAME, call, [], note=note)
        forward = Prepared(self._forget, call)
        return Variant(NAME, forward, [], note=note, gradients=lambda: Prepared(forward, self._backward))

    def _forward(self, tensors: dict[str, Any]) -> Tensor:
        places = [tensors[name].data_ptr() for name in ("topk_ids", "topk_weights", "x")]
        task = self.moe.forward_sft_task if self.rank else self.moe.forward_task
        self._run(task(self.count.data_ptr(), self.slots, *places, self.y.data_ptr(), *(True,) * bool(self.rank)))
        self.kept = bool(self.rank)
        return self.y

    def _forget(self) -> None:
        if self.kept:
            self._backward()

    def _backward(self) -> list[Tensor]:
        """dx, and the gradients of all six factors and of the routing weights."""
        self._run(self.moe.backward_task(*(t.data_ptr() for t in (self.dy, *self.gradients)), 0, 0, 0))
        self.kept = False
        return self.gradients

    def _run(self, task: Any) -> None:
        self.pool.submit(task)
        self.pool.sync()

    def _config(self, sizes: Any) -> Any:
        experts, hidden, inner = sizes["E"], sizes["H"], sizes["I"]
        if self.rank:
            config = self.library.moe.MOESFTConfig()
            config.expert_num, config.num_experts_per_tok = experts, self.slots
            config.hidden_size, config.intermediate_size = hidden, inner
            config.lora_rank, config.lora_alpha, config.lora_dropout = (
                self.rank, self.subject.scaling * self.rank, 0.0,
            )  # fmt: skip
            config.max_cache_depth = 1
            config.share_backward_bb = config.share_cache_pool = config.full_weight_grad = False
        else:
            config = self.library.moe.MOEConfig(experts, self.slots, hidden, inner)
        config.max_len, config.layer_idx = -(-self.tokens // 32) * 32, 0
        self.map = torch.arange(experts)
        config.physical_to_logical_map = self.map.data_ptr()
        config.pool = self.pool.backend_
        return config

    def _weights(self, config: Any) -> list[Tensor]:
        if self.kind in ("int4", "mxfp4"):
            nibbles = _nibbles(self.subject)
            config.quant_config.bits, config.quant_config.group_size = 4, 32
            config.quant_config.zero_point = False
            if self.kind == "mxfp4":
                config.swiglu_limit = NO_LIMIT
            for name, (codes, scales) in nibbles.items():
                if self.kind == "mxfp4":  # by node and expert
                    setattr(config, f"{name}_projs", [[t.data_ptr() for t in codes]])
                    setattr(config, f"{name}_scales", [[t.data_ptr() for t in scales]])
                else:
                    setattr(config, f"{name}_proj", codes.data_ptr())
                    setattr(config, f"{name}_scale", scales.data_ptr())
            return [t for pair in nibbles.values() for t in pair]
        gate_up, down = self.subject.weights()
        weights = [*(half.contiguous() for half in gate_up.chunk(2, 1)), down.contiguous()]
        for name, weight in zip(TARGETS, weights, strict=True):
            setattr(config, f"{name}_proj", weight.data_ptr())
        return weights

    def _factors(self, config: Any) -> list[Tensor]:
        if not self.rank:
            return []
        factors = [self.subject.required(name).contiguous() for name in FACTORS]
        for name, factor in zip(FACTORS, factors, strict=True):
            target, which = name.split("_")
            setattr(config, f"{target}_lora_{which}", factor.data_ptr())
        return factors


def _nibbles(subject: MoeSubject) -> dict[str, tuple[Tensor, Tensor]]:
    """{projection: (codes [E, out, in / 2], scales [E, out, in / 32])}, the first input in the low nibble.

    int4: codes q + 8, scales unchanged; mxfp4: codes E2M1, scales powers of two in bfloat16.
    """
    layout, nibbles = Layout.parse(subject.options["layout"]), {}
    for name in TARGETS:
        blob = subject.required("down" if name == "down" else "gate_up")
        (place,) = layout.matrices("down" if name == "down" else "gate_up")
        two: list[tuple[Tensor, Tensor]] = []
        for e in range(DRAWN):
            at = place.offset + e * place.expert_stride + place.parts[name == "up"]
            panels = blob[at : at + place.panels * place.panel_bytes].view(place.panels, -1)
            two.append(_in_its_encoding(read_matrix(layout, place, panels), layout.format))
        drawn = [two[e % DRAWN] for e in range(layout.num_experts)]
        nibbles[name] = torch.stack([codes for codes, _ in drawn]), torch.stack([scales for _, scales in drawn])
    return nibbles


def _in_its_encoding(matrix: Codes, format: str) -> tuple[Tensor, Tensor]:
    if matrix.scales is None:
        raise ValueError(f"{format} has no scales")
    if format == "mxfp4":
        return matrix.codes, torch.exp2(matrix.scales.float() - 127).bfloat16()
    return matrix.codes ^ 0x88, matrix.scales


def most_workers(threads: int) -> int:
    """At most one worker less than cores: with a worker on each core, every call takes a multiple of 4 or 8 ms."""
    return max(1, min(threads, (os.cpu_count() or 1) - 1))


@functools.cache
def library() -> Any:
    """The extension for this machine, without its Python package, which needs another torch, and gguf."""
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or spec.origin is None:
        raise ImportError("kt_kernel is not installed")
    name = f"_kt_kernel_ext_{native.machine_isa()[0]}"
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    path = Path(spec.origin).parent / f"{name}{suffix}"
    extension = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    if extension is None or extension.loader is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(extension)
    extension.loader.exec_module(module)
    return module


@functools.cache
def pool(workers: int) -> Any:
    config = library().WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [workers]
    return library().CPUInfer(config)


@contextmanager
def silent() -> Iterator[None]:
    """Discard what the library prints, because rows may go to stdout."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
