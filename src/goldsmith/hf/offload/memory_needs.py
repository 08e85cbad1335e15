"""MemoryNeeds: what a model will take, from its shapes, before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from ...experts.packed.formats import FORMATS
from ...experts.packed.layout import Layout
from ...experts.packed.quantisation import check_group, fitting_group
from ...offload.memory.host_memory import memory_free, process_memory
from ...offload.store.blocks import ExpertBlocks
from .budget import GIB, cache_bytes, dense_bytes
from .dense_format import EXACT, layout_of, linear_layers
from .layers import ExpertsLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_CHOSEN = 8  # experts of a token in a model whose config has another word for them
ROWS = 6  # of a token in a layer: its input, norm, queries, keys, values and result


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes.

    dense      everything outside the experts: memory of the process, or of the GPU
    store      the file of experts, which is mapped: processes share its pages, and the system may drop them
    token      keys and values of one token
    prompt     what computing a prompt takes for each token of a call
    program    what the process takes already, with torch and transformers
    available  memory that the machine can still provide
    """

    dense: int
    store: int
    token: int
    prompt: int
    program: int
    available: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def memory_needs(
    model: PreTrainedModel, layers: Sequence[ExpertsLayer], cpu_format: str, dense_format: str = EXACT
) -> MemoryNeeds:
    """The needs of a model on the meta device. A checkpoint of codes may need another size of store."""
    return MemoryNeeds(
        dense=_dense(model, layers, dense_format), store=_store(model, layers, cpu_format),
        token=cache_bytes(model, 1), prompt=_prompt(model, layers), program=process_memory().own,
        available=memory_free(),
    )  # fmt: skip


def check_memory(needs: MemoryNeeds) -> None:
    """Raises ValueError if the model's parts outside the experts do not fit in memory."""
    if needs.dense > needs.available:
        raise ValueError(
            f"offload: everything but the experts (attention, embeddings, dense layers) takes "
            f"{needs.dense / GIB:.1f} GiB, but this machine has {max(0, needs.available) / GIB:.1f} GiB of memory "
            "available: close other programs, or use a machine with more memory"
        )


def _dense(model: PreTrainedModel, layers: Sequence[ExpertsLayer], dense_format: str) -> int:
    if dense_format == EXACT:
        return dense_bytes(model)
    packed = [layer for _, _, layer in linear_layers(model, layers)]
    sizes = [layout_of(layer, dense_format).nbytes for layer in packed]
    return dense_bytes(model, packed) + sum(sizes)


def _prompt(model: PreTrainedModel, layers: Sequence[ExpertsLayer]) -> int:
    """float32 rows of a token's experts (input or result, gate, up and their product), and the layers' own rows.

    Measured beside it: 39 MiB for 512 tokens of which this says 46 (8 layers, H 1024, I 512, top-8, bfloat16, 2026-11).
    """
    text, hidden = model.config.get_text_config(), layers[0].spec.hidden_size
    k = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or MOST_CHOSEN
    inner = max(layer.spec.intermediate_size for layer in layers)
    return 4 * k * (hidden + 3 * inner) + ROWS * hidden * model.dtype.itemsize


def _store(model: PreTrainedModel, layers: Sequence[ExpertsLayer], cpu_format: str) -> int:
    """Bytes of the blocks of all experts."""
    format = ("bf16" if model.dtype == torch.bfloat16 else "fp32") if cpu_format == "auto" else cpu_format
    kind = FORMATS[format]
    scales = kind.scales[0] if kind.scales else None
    total = 0
    for layer in layers:
        spec = layer.spec
        sizes = spec.hidden_size, spec.intermediate_size
        group = check_group("offload", kind, fitting_group(kind, *sizes), *sizes)
        layout = Layout(format, 1, spec.hidden_size, spec.intermediate_size, group, scales, (0, spec.intermediate_size))
        biased = ("gate_up_bias", "down_bias") if spec.biased else ()
        total += ExpertBlocks.of(layout, biased).stride * spec.num_experts
    return total
