"""kt-kernel's experts in a model of transformers, with the weights of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.kt_kernel import CLASSES, library, most_workers, pool, silent

from .plain import DTYPES, TransformersEngine, plain_model

NAMES = ("gate", "up", "down")
SLOTS = 32  # its calls take a multiple of this many tokens


class KtKernelEngine(TransformersEngine):
    """transformers' model with the experts computed by kt-kernel's C++ classes."""

    def load(self) -> str:
        self.model = plain_model(self.options, DTYPES[self.options["dtype"]], "eager", experts=False)
        return put_into(self.model, Path(self.options["path"]), self.options)


class KtExperts(nn.Module):
    """Stands in for the experts of a layer; computes in bfloat16."""

    def __init__(self, layer: int, moe: Any, workers: int, sizes: dict[str, int]) -> None:
        super().__init__()
        self.layer, self.moe, self.workers, self.k = layer, moe, workers, sizes["num_experts_per_tok"]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).bfloat16().contiguous()
        ids, weights = top_k_index.long().contiguous(), top_k_weights.float().contiguous()
        count, y = torch.tensor([len(x)], dtype=torch.int32), torch.zeros_like(x)
        places = [t.data_ptr() for t in (ids, weights, x)]
        runner = pool(self.workers)
        runner.submit(self.moe.forward_task(count.data_ptr(), self.k, *places, y.data_ptr()))
        runner.sync()
        return y.to(hidden_states.dtype).view(hidden_states.shape)


def put_into(model: Any, path: Path, options: dict[str, Any]) -> str:
    """Replace the experts of every layer; returns what differs from the request."""
    import gguf

    sizes, workers = options["config"], most_workers(options["threads"])
    tensors = {entry.name: entry for entry in gguf.GGUFReader(path).tensors}
    with silent():
        for layer, block in enumerate(model.model.layers):
            parts = [tensors[f"blk.{layer}.ffn_{name}_exps.weight"] for name in NAMES]
            moe = _loaded(layer, parts, sizes, workers, options)
            block.mlp.experts = KtExperts(layer, moe, workers, sizes)
    return f"{workers} of {options['threads']} threads for the experts, which leaves one core to the caller"


def _loaded(layer: int, parts: list[Any], sizes: dict[str, int], workers: int, options: dict[str, Any]) -> Any:
    experts, hidden, inner = (sizes[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size"))
    config = library().moe.MOEConfig(experts, sizes["num_experts_per_tok"], hidden, inner)
    config.max_len, config.layer_idx = -(-options["context"] // SLOTS) * SLOTS, layer
    order = torch.arange(experts)
    config.physical_to_logical_map, config.pool = order.data_ptr(), pool(workers).backend_
    kept: list[Tensor] = [order]  # until the weights are packed
    for name, entry in zip(NAMES, parts, strict=True):
        if options["format"] == "int4":
            codes, scales = _nibbles(np.asarray(entry.data))
            config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, 32, False
            setattr(config, f"{name}_scale", scales.data_ptr())
            kept.append(scales)
        else:
            codes = torch.from_numpy(np.array(entry.data)).view(torch.bfloat16)
        setattr(config, f"{name}_proj", codes.data_ptr())
        kept.append(codes)
    moe = getattr(library().moe, f"{CLASSES[options['format']]}_MOE")(config)
    runner = pool(workers)
    runner.submit(moe.load_weights_task())
    runner.sync()
    return moe


def _nibbles(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Q4_0 blocks [E, rows, bytes]: codes q + 8, two in a byte with the even input first, and scales in bfloat16."""
    parts = blocks.reshape(*blocks.shape[:-1], -1, 18)
    scales = np.ascontiguousarray(parts[..., :2]).view(np.float16)[..., 0]
    packed = parts[..., 2:]  # inputs 0 to 15 in the low halves, 16 to 31 in the high ones
    codes = np.concatenate([packed & 15, packed >> 4], -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(pairs)), torch.from_numpy(scales.astype(np.float32)).bfloat16()
