"""The engines that can be compared: what each needs, which formats it has, what it rounds, and how it is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from goldsmith.core import native
from goldsmith.offload.settings import parse_budget

from ..model.shapes import Shape
from .arithmetic import Arithmetic
from .llama import BATCH, Llama, NoLlama
from .processes import EngineProcess

OURS, AUTO = "goldsmith", "auto"
# the engine's keywords for --plan; all but auto are fixed
PLANS: dict[str, dict[str, str]] = {
    AUTO: {},
    "cpu": {"lanes": "cpu", "prefill": "cpu"},
    "copied": {"lanes": "copied", "prefill": "stream"},
    "uncached": {"cache": "none"},
}
ROOT = Path(__file__).resolve().parents[3]
FLOATS = ("bf16", "fp32")
ROWS = {"int4": "q8", "int8": "q8", "bf16": "bf16", "fp32": "fp32"}  # what llama.cpp's products round inputs to


@dataclass(frozen=True)
class Precision:
    """The formats of the experts and of all other matrices."""

    format: str
    dense: str

    def __str__(self) -> str:
        return self.format if self.format == self.dense else f"{self.format}, dense part {self.dense}"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.dense == "bf16" else "float32"


@dataclass(frozen=True)
class Setting:
    """What all engines of a run share."""

    threads: int
    device: str
    context: int
    compute: str | None = None
    level: str = ""  # the highest instruction level of the engines in Python
    known: frozenset[str] = frozenset()  # keywords that goldsmith's loading functions take
    llama: Llama | None = None
    runner: Path | None = None


@dataclass(frozen=True)
class Peer:
    """One engine, or one budget or plan of it.

    lacks      why it cannot run a precision, or None
    weights    bytes of its weights in memory
    gpu        bytes of its weights on the GPU; None: all memory there
    """

    name: str
    label: str
    lacks: Callable[[Precision], str | None]
    arithmetic: Callable[[Precision], Arithmetic]
    weights: Callable[[Shape, Precision], int]
    start: Callable[[Path, Shape, Precision, Path], EngineProcess]
    dense: Callable[[Precision], str] = field(default=lambda precision: precision.dense)
    in_python: bool = True
    has_parts: bool = True  # whether the time of a token can be divided
    gpu: Callable[[Shape, Precision], int | None] = field(default=lambda shape, precision: None)
    budget: int | None = None
    plan: str = ""


def goldsmith(setting: Setting, budget: str = "0", plan: str = AUTO) -> Peer:
    packs = "dense_format" in setting.known and setting.device == "cpu"

    def dense(precision: Precision) -> str:
        return precision.dense if packs or precision.dense in FLOATS else "fp32"

    def arithmetic(precision: Precision) -> Arithmetic:
        rows = "q8" if setting.compute == "int8" and precision.format not in FLOATS else "fp32"
        packed = dense(precision)
        return Arithmetic(precision.dtype, rows, "fp32", packs="" if packed in FLOATS else packed)

    def start(path: Path, shape: Shape, precision: Precision, folder: Path) -> EngineProcess:
        more: dict[str, Any] = {"budget": budget, "format": precision.format, **PLANS[plan]}
        if packs and precision.dense not in FLOATS:
            more["dense_format"] = precision.dense
        return _worker(OURS, setting, path, shape, precision, folder, compute=setting.compute, **more)

    label, size = OURS, parse_budget(budget)
    if setting.device != "cpu":
        label += f", budget {budget}" + ("" if plan == AUTO else f", {plan}")
    return Peer(
        OURS, label, lambda precision: None, arithmetic,
        lambda shape, p: shape.file_bytes(p.format, dense(p)), start, dense,
        gpu=lambda shape, p: None if size is None else size + shape.outside_bytes(dense(p)),
        budget=None if setting.device == "cpu" else size, plan="" if setting.device == "cpu" else plan,
        has_parts=setting.device == "cpu",  # a recorded step has no clocks
    )  # fmt: skip


def torch_compile(setting: Setting) -> Peer:
    """goldsmith's experts and packed layers as operators in transformers' model, under torch.compile."""
    ours = goldsmith(setting)

    def start(path: Path, shape: Shape, precision: Precision, folder: Path) -> EngineProcess:
        more: dict[str, Any] = {"budget": "0", "format": precision.format}
        if precision.dense not in FLOATS:
            more["dense_format"] = precision.dense
        return _worker("torch.compile", setting, path, shape, precision, folder, compute=setting.compute, **more)

    return replace(ours, name="torch.compile", label="torch.compile", start=start, plan="", has_parts=False)


def transformers(setting: Setting) -> Peer:
    label = "transformers" if setting.device == "cpu" else "transformers, all on the GPU"
    return _of_transformers("transformers", label, setting, whole=True)


def accelerate(setting: Setting, budget: str, budget_bytes: int) -> Peer:
    peer = _of_transformers("accelerate", f"accelerate, budget {budget}", setting, budget_bytes=budget_bytes)
    return replace(peer, budget=budget_bytes, gpu=lambda shape, p: budget_bytes + shape.outside_bytes(p.dense))


def _of_transformers(name: str, label: str, setting: Setting, **more: Any) -> Peer:
    def lacks(precision: Precision) -> str | None:
        if precision.format in FLOATS and precision.format == precision.dense:
            return None
        return f"it has no {KINDS_TEXT[precision.format]} experts beside a dense part in {precision.dense}"

    def start(path: Path, shape: Shape, precision: Precision, folder: Path) -> EngineProcess:
        return _worker(name, setting, path, shape, precision, folder, **more)

    return Peer(
        name, label, lacks, lambda p: Arithmetic(p.dtype), lambda shape, p: shape.file_bytes(p.format, p.dense), start
    )


def kt_kernel(setting: Setting) -> Peer:
    """Experts in 4 or 16 bits; its 8-bit classes round the weights to a format of their own."""

    def lacks(precision: Precision) -> str | None:
        if precision.format not in ("int4", "bf16"):
            return f"it cannot compute with the weights of {KINDS_TEXT[precision.format]}"
        dense = precision.dense in FLOATS
        return None if dense else f"transformers has no {KINDS_TEXT[precision.dense]} for the dense part"

    def start(path: Path, shape: Shape, precision: Precision, folder: Path) -> EngineProcess:
        return _worker("kt-kernel", setting, path, shape, precision, folder, format=precision.format)

    return Peer(
        "kt-kernel", "kt-kernel in transformers", lacks, lambda p: Arithmetic(p.dtype, "bf16"),
        lambda shape, p: shape.file_bytes(p.format, p.dense), start,
    )  # fmt: skip


KINDS_TEXT = {"int4": "Q4_0", "int8": "Q8_0", "bf16": "bfloat16", "fp32": "float32"}


def llama_cpp(setting: Setting) -> Peer:
    def arithmetic(precision: Precision) -> Arithmetic:
        return Arithmetic("float32", ROWS[precision.format], ROWS[precision.dense], "fp16")

    def start(path: Path, shape: Shape, precision: Precision, folder: Path) -> EngineProcess:
        layers, on_cpu = ("0", "0") if setting.device == "cpu" else ("999", "1")
        command = [
            str(setting.runner),
            str(path),
            str(setting.threads),
            str(setting.context),
            str(BATCH),
            layers,
            on_cpu,
        ]
        return EngineProcess("llama.cpp", command, {}, folder / "llama.cpp.log")

    label = "llama.cpp" if setting.device == "cpu" else "llama.cpp, experts on the CPU"
    return Peer(
        "llama.cpp", label, lambda precision: None, arithmetic,
        _llama_bytes, start, in_python=False, has_parts=False, gpu=lambda shape, p: shape.outside_bytes(p.dense),
    )  # fmt: skip


def _llama_bytes(shape: Shape, precision: Precision) -> int:
    """The file, which it maps, and a copy of Q4_0 matrices with their rows interleaved."""
    repacked = shape.layers * shape.experts_bytes("int4") if precision.format == "int4" else 0
    if precision.dense == "int4":
        repacked = shape.file_bytes("int4", "int4")
    return shape.file_bytes(precision.format, precision.dense) + repacked


def golden(setting: Setting, path: Path, shape: Shape, folder: Path) -> EngineProcess:
    """The process of the plain models that judge the others; always on the CPU."""
    return _worker("golden", setting, path, shape, Precision("fp32", "fp32"), folder, on_cpu=True)


def missing(name: str, setting: Setting, llama: Path | None) -> str | None:
    """What to install or which option to give before this peer can run; None if it can."""
    if name == "llama.cpp":
        try:
            Llama.find(llama)
        except NoLlama as error:
            return str(error)
        return None
    if name == "accelerate" and setting.device == "cpu":
        return "it splits a model between a GPU and the CPU, and this run has no GPU (--device cuda)"
    if name == "kt-kernel":
        from benchmarks.peers import kt_kernel

        return kt_kernel.missing() or (None if setting.device == "cpu" else "it is timed on a CPU only")
    if name == "torch.compile":
        return None if setting.device == "cpu" else "its step is compiled for a CPU only"
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed (pip install {name})"
    return None


PEERS = ("llama.cpp", "transformers", "kt-kernel", "accelerate")
ON_REQUEST = ("torch.compile",)  # not timed by default: compiling takes minutes


def versions(names: Sequence[str], setting: Setting) -> dict[str, str]:
    of_peers = {}
    for name in names:
        if name == "llama.cpp":
            of_peers[name] = setting.llama.version if setting.llama else ""
        elif name not in ON_REQUEST:
            of_peers[name] = importlib.metadata.version(name)
    return of_peers


def _worker(
    name: str, setting: Setting, path: Path, shape: Shape, precision: Precision, folder: Path, on_cpu: bool = False,
    **more: Any,
) -> EngineProcess:  # fmt: skip
    config = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.H, "intermediate_size": shape.I * shape.k,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "num_experts": shape.E, "num_experts_per_tok": shape.k,
        "moe_intermediate_size": shape.I, "norm_topk_prob": True, "rope_theta": shape.theta,
        "rms_norm_eps": shape.epsilon, "tie_word_embeddings": shape.tied, "max_position_embeddings": 40960,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    options = {
        "path": str(path), "config": config, "dtype": precision.dtype, "threads": setting.threads,
        "device": "cpu" if on_cpu else setting.device, "context": setting.context, **more,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.generate.workers.worker", name, json.dumps(options)]
    # stores and calibrations of this run only; they go away with the folder
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": paths, "GOLDSMITH_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    if not on_cpu:
        environment |= levels(setting.level)
    return EngineProcess(name, command, environment, folder / f"{name}.log")


def beyond(level: str, system: str) -> str:
    """A note where llama.cpp's description of its build names AVX-512 and the engines in Python may not use it."""
    if "AVX512 = 1" in system and native.LEVELS.index(level) < native.LEVELS.index("avx512"):
        return f"built with AVX-512, the others are held to {level}"
    return ""


def levels(level: str) -> dict[str, str]:
    """Environment variables that hold goldsmith, torch and oneDNN to a level below the machine's."""
    highest = native.LEVELS.index(level) if level else len(native.LEVELS)
    if highest >= native.library().gs_machine_level():
        return {}
    limits = {"GOLDSMITH_ISA": level}
    if highest <= native.LEVELS.index("avx2"):
        limits |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return limits
