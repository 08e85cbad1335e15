"""The engines in Python, each behind the same methods: goldsmith, transformers, accelerate, and the golden model."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from goldsmith.experts.packed.formats import FORMATS, decode
from goldsmith.experts.packed.quantisation import quantise

from .arithmetic import Arithmetic, InFloat64, RandomRounding
from .gguf_files import read
from .parts import timed_parts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
Timed = tuple[list[float], list[int]]  # seconds of each token after the first, and all tokens


class TransformersEngine:
    """Plain transformers, with weights that a GGUF file holds; experts as one grouped product."""

    implementation = "grouped_mm"
    inference = True

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM  # noqa: F401 - before the memory is read

        self.options = options
        self.model: Any = None

    def load(self) -> str:
        self.model = plain_model(self.options, DTYPES[self.options["dtype"]], self.implementation)
        return ""

    def logits(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids], device=self.model.device)).logits[0].float().cpu()

    def prompt(self, ids: list[int]) -> float:
        times, _ = self._generate(ids, 1)
        return times[0]

    def decode(self, ids: list[int], count: int) -> Timed:
        times, tokens = self._generate(ids, count + 1)
        return times[1:], tokens

    def parts(self, ids: list[int], count: int) -> dict[str, float]:
        """Seconds of a token in each part of the model, the first token not counted."""
        with timed_parts(self.model) as clock:
            self._generate(ids, count + 1, after_first=clock.start)
        return {name: seconds / count for name, seconds in clock.seconds.items()}

    def close(self) -> None:
        self.model = None

    def _generate(self, ids: list[int], count: int, after_first: Callable[[], None] = lambda: None) -> Timed:
        """Seconds of each token, and the tokens, through the call that `goldsmith generate` makes."""
        from goldsmith.hf.offload import generation

        times: list[float] = []

        def arrived(row: int, text: str) -> None:
            times.append(time.perf_counter())
            if len(times) == 1:
                after_first()

        out = generation.Generation([])
        prompt = torch.tensor([ids])
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        began = time.perf_counter()
        generation.generate(
            self.model, Numbers(), [""], generation=out, inputs=inputs, max_new_tokens=count, on_piece=arrived
        )  # type: ignore[arg-type]
        return [after - before for before, after in zip([began, *times], times)], out.outputs[0].tokens


class GoldsmithEngine(TransformersEngine):
    """goldsmith.offload over the file of this run, in the precision that the options ask for."""

    inference = False  # generate enters it itself

    def __init__(self, options: dict[str, Any]) -> None:
        from goldsmith.hf import offload  # noqa: F401
        from goldsmith.offload import from_pretrained  # noqa: F401

        super().__init__(options)

    def load(self) -> str:
        from goldsmith.offload import from_pretrained

        wanted = {name: self.options.get(name) for name in ("dense_format", "compute")}
        known = keywords()
        notes = []
        if wanted["dense_format"] and "dense_format" not in known:
            notes.append(f"dense part in {self.options['dtype']}: no --dense-format in this version")
        given = {name: value for name, value in wanted.items() if value and name in known}
        self.offloaded = from_pretrained(
            self.options["path"], dtype=DTYPES[self.options["dtype"]], device=self.options["device"],
            gpu_budget=self.options["budget"], threads=self.options["threads"],
            max_length=self.options["context"], **given,
        )  # fmt: skip
        self.model = self.offloaded.model
        format = self.offloaded.engine.store.format
        if format != self.options["format"]:
            notes.append(f"experts in {format}")
        return "; ".join(notes)

    def parts(self, ids: list[int], count: int) -> dict[str, float]:
        """The experts' part divided into kernels and what the engine does around them."""
        self.offloaded.reset_stats()
        seconds = super().parts(ids, count)
        stats = self.offloaded.stats()
        if "experts" in seconds and stats.t_wall and self.options["device"] == "cpu":
            # the share of its kernel in the time of a call, by all calls, the prompt's among them
            kernels = seconds["experts"] * min(1.0, stats.t_cpu / stats.t_wall)
            seconds["experts: kernels"] = kernels
            seconds["experts: engine around them"] = seconds.pop("experts") - kernels
        return seconds

    def close(self) -> None:
        if self.model is not None:
            self.offloaded.close()


class AccelerateEngine(TransformersEngine):
    """transformers' model split between GPU and CPU by accelerate, with a budget for the experts."""

    def load(self) -> str:
        from accelerate import dispatch_model, infer_auto_device_map

        super().load()
        device = torch.device(self.options["device"])
        dense = sum(p.nbytes for name, p in self.model.named_parameters() if ".experts." not in name)
        room = self.options["budget_bytes"] + dense
        places = infer_auto_device_map(
            self.model, {device.index or 0: room, "cpu": 1 << 50}, no_split_module_classes=["Qwen3MoeDecoderLayer"]
        )
        self.model = dispatch_model(self.model, places, main_device=device.index or 0)
        on_gpu = sum(place != "cpu" for name, place in places.items() if ".layers." in name)
        return f"{on_gpu} layers on the GPU"


class PlainEngine(TransformersEngine):
    """The golden: plain transformers in float64, and in an engine's arithmetic with random roundings."""

    implementation = "eager"

    def load(self) -> str:
        self.held = ("", "")
        return ""

    def golden_logits(self, ids: list[int], packs: str) -> Tensor:
        """In float64, returned as float64; packs: the dense part has the weights of this format."""
        self._hold("float64", packs)
        with InFloat64():
            return self.model(torch.tensor([ids])).logits[0].double()

    def rounded_logits(self, ids: list[int], seed: int, text: str) -> Tensor:
        arithmetic = Arithmetic.parse(text)
        self._hold(arithmetic.dtype, arithmetic.packs)
        torch.manual_seed(seed)
        modules = self.model.modules()
        experts, routers = set[tuple[int, int]](), set[int]()
        for module in modules:
            name = type(module).__name__
            if name.endswith("Experts"):
                experts |= {tuple(p.shape[1:]) for p in module.parameters()}
            elif name.endswith("Router") or name.endswith("Gate"):
                routers |= {id(p) for p in module.parameters()}
        with RandomRounding(arithmetic, experts, routers, seed):
            return self.model(torch.tensor([ids])).logits[0].float()

    def _hold(self, dtype: str, packs: str) -> None:
        if self.held != (dtype, packs):
            self.model = None
            self.model, self.held = plain_model(self.options, DTYPES[dtype], self.implementation), (dtype, packs)
            if packs:
                _round_dense(self.model, packs)


def plain_model(options: dict[str, Any], dtype: torch.dtype, implementation: str, *, experts: bool = True) -> Any:
    """transformers' model with the numbers of a GGUF file, on the device of the options.

    experts=False leaves the experts without numbers.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from goldsmith.hf.checkpoint.loading import fill_transient_buffers

    config = Qwen3MoeConfig(**options["config"])
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read(Path(options["path"]), dtype, experts=experts), strict=False, assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    left = [n for n, p in model.named_parameters() if p.is_meta and (experts or ".experts." not in n)]
    if left:
        raise ValueError(f"{options['path']} lacks {left[0]}")
    fill_transient_buffers(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with contextlib.suppress(AttributeError):
        model.set_experts_implementation(implementation)
    return model.eval().to(options["device"]) if options.get("whole") else model.eval()


def _round_dense(model: Any, format: str) -> None:
    """Give the linear layers the numbers that they have after goldsmith has packed them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fmt, weight = FORMATS[format], module.weight
            codes = quantise(fmt, weight.float(), fmt.group, fmt.scales[0], "bench generate")
            module.weight = nn.Parameter(decode(fmt, codes, weight.dtype), requires_grad=False)


def keywords() -> set[str]:
    """The keywords that this version's loading functions take."""
    from goldsmith.hf.offload.loading import load
    from goldsmith.offload.engine import Engine

    return {*inspect.signature(load).parameters, *inspect.signature(Engine).parameters}


class Numbers:
    """A tokenizer of numbers: the model has no text."""

    eos_token_id = pad_token_id = None

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(f" {i}" for i in ids)


class KtKernelEngine(TransformersEngine):
    """transformers' model with the experts computed by kt-kernel's C++ classes."""

    def load(self) -> str:
        from .kt_experts import put_into

        self.model = plain_model(self.options, DTYPES[self.options["dtype"]], "eager", experts=False)
        return put_into(self.model, Path(self.options["path"]), self.options)


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "goldsmith": GoldsmithEngine,
    "transformers": TransformersEngine,
    "accelerate": AccelerateEngine,
    "kt-kernel": KtKernelEngine,
    "golden": PlainEngine,
}
