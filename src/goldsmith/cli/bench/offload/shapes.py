"""Layers of real models, with random weights: the experts, a store of them, and models that share all tensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ....offload.memory.transport import Transport
from ....offload.store.expert_store import ExpertStore

Sizes = dict[str, int | None]
VOCABULARY = 1024  # what is timed takes embeddings: tokens are only read where one is chosen


@dataclass(frozen=True)
class Shape:
    """E experts of H x I, k for each token; `dense` layers stand before those with experts."""

    name: str
    H: int
    I: int
    E: int
    k: int
    dense: int
    model: str  # transformers' word for it
    attention: Sizes

    def config(self, layers: int) -> Any:
        from transformers import AutoConfig

        sizes = {"num_experts": self.E} if self.model == "qwen3_moe" else {"n_routed_experts": self.E}
        config = AutoConfig.for_model(
            self.model, hidden_size=self.H, moe_intermediate_size=self.I, num_experts_per_tok=self.k,
            num_hidden_layers=self.dense + layers, vocab_size=VOCABULARY, **sizes, **self.attention,
        )  # fmt: skip
        config.dtype = torch.bfloat16
        return config


_QWEN: Sizes = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
}
_LITE: Sizes = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "norm_topk_prob": False,
}  # fmt: skip
_TINY: Sizes = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "norm_topk_prob": True,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3", 2048, 768, 128, 8, 0, "qwen3_moe", _QWEN),  # Qwen3-30B-A3B
        Shape("v2-lite", 2048, 1408, 64, 6, 1, "deepseek_v2", _LITE),  # DeepSeek-V2-Lite
        Shape("tiny", 64, 64, 8, 2, 0, "qwen3_moe", _TINY),
    )
}


class Layers:
    """So many layers of a shape: weights in memory, drawn where `device` is, and a store of them in `folder`."""

    def __init__(self, shape: Shape, count: int, device: torch.device, format: str, folder: Path | None) -> None:
        self.shape, self.count, self.device, self.format = shape, count, device, format
        self.say: Callable[[str], None] = lambda text: None  # what is done now, for a log
        self.numbers = tuple(range(shape.dense, shape.dense + count))
        make = torch.Generator(device=device).manual_seed(0)
        self._make = make
        self.weights = {layer: self._experts() for layer in self.numbers}
        self._folder = Path(tempfile.mkdtemp(prefix="goldsmith-bench-", dir=folder))
        try:
            source = ((n, {"gate_up": gate_up, "down": down}) for n, (gate_up, down) in self.weights.items())
            self.store = ExpertStore.build(source, self._folder / f"{shape.name}.store", format=format)
            self._locked = Transport(self.store, device)  # the same pages for every engine, locked once
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def _experts(self) -> tuple[Tensor, Tensor]:
        E, H, I = self.shape.E, self.shape.H, self.shape.I
        return self._drawn(E, 2 * I, H, std=H**-0.5).cpu(), self._drawn(E, H, I, std=I**-0.5).cpu()

    def _drawn(self, *sizes: int, std: float) -> Tensor:
        drawn = torch.empty(*sizes, dtype=torch.bfloat16, device=self.device)
        return drawn.normal_(0.0, std, generator=self._make)

    def exact_weights(self, layer: int, experts: list[int]) -> tuple[Tensor, Tensor]:
        """gate_up and down of some experts in float64, on the device: what the store stands for."""
        if self.store.exact:
            gate_up, down = (t[experts].to(self.device).double() for t in self.weights[layer])
            return gate_up, down
        numbers = [self.store.dequantize(layer, e) for e in experts]
        gate_up, down = (torch.stack([n[name] for n in numbers]).to(self.device) for name in ("gate_up", "down"))
        return gate_up.double(), down.double()

    @cached_property
    def on_device(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {n: (gate_up.to(self.device), down.to(self.device)) for n, (gate_up, down) in self.weights.items()}

    @cached_property
    def _dense(self) -> dict[str, Tensor]:
        """What is no expert, by name."""
        found = {}
        for name, tensor in _empty(self.shape.config(self.count)).named_parameters():
            if ".experts." not in name:
                norm = tensor.dim() == 1
                drawn = torch.ones(tensor.shape, dtype=torch.bfloat16, device=self.device)
                found[name] = drawn if norm else self._drawn(*tensor.shape, std=tensor.shape[-1] ** -0.5)
        return found

    def model(self, weights: dict[int, tuple[Tensor, Tensor]], implementation: str = "eager") -> Any:
        """A model of its own whose tensors are everybody's."""
        from ....hf.checkpoint.loading import fill_transient_buffers

        model = _empty(self.shape.config(self.count))
        model.set_experts_implementation(implementation)
        for name, tensor in self._dense.items():
            place, _, last = name.rpartition(".")
            model.get_submodule(place)._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        for layer, pair in weights.items():
            experts = model.layers[layer].mlp.experts
            for name, tensor in zip(("gate_up_proj", "down_proj"), pair, strict=True):
                experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        fill_transient_buffers(model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        return model.eval()

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._locked.close()
        self.store.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _empty(config: Any) -> Any:
    from transformers import AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(config, dtype=torch.bfloat16)


Turn = dict[int, tuple[Tensor, Tensor, Tensor]]


def turns(layers: Layers, tokens: int, count: int) -> list[Turn]:
    """Inputs of `count` passes through the layers: x [T, H], ids [T, k] of a uniform routing, weights [T, k]."""
    make = torch.Generator().manual_seed(1)
    shape, found = layers.shape, list[Turn]()
    for _ in range(count):
        turn: Turn = {}
        for layer in layers.numbers:
            x = torch.randn(tokens, shape.H, generator=make).bfloat16()
            best = torch.rand(tokens, shape.E, generator=make).topk(shape.k)
            weights = best.values / best.values.sum(1, keepdim=True)
            x, ids, weights = (t.to(layers.device) for t in (x, best.indices, weights))
            turn[layer] = (x, ids, weights)
        found.append(turn)
    return found


def waits(device: torch.device) -> Callable[[], None]:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
