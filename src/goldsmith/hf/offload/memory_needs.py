"""MemoryNeeds: what a model will take, from its shapes, before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from ...experts.packed.formats import FORMATS
from ...experts.packed.layout import Layout
from ...experts.packed.quantisation import check_group
from ...offload.memory.host_memory import memory_free, process_memory
from ...offload.store.blocks import ExpertBlocks
from .budget import GIB, cache_bytes, dense_bytes
from .layers import ExpertsLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes.

    dense      everything outside the experts: memory of the process, or of the GPU
    store      the file of experts, which is mapped: processes share its pages, and the system may drop them
    token      keys and values of one token
    program    what the process takes already, with torch and transformers
    available  memory that the machine can still provide
    """

    dense: int
    store: int
    token: int
    program: int
    available: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def memory_needs(model: PreTrainedModel, layers: Sequence[ExpertsLayer], cpu_format: str) -> MemoryNeeds:
    """The needs of a model on the meta device. A checkpoint of codes may need another size of store."""
    store = _store(model, layers, cpu_format)
    return MemoryNeeds(dense_bytes(model), store, cache_bytes(model, 1), process_memory().own, memory_free())


def check_memory(needs: MemoryNeeds) -> None:
    """Raises ValueError if the model's parts outside the experts do not fit in memory."""
    if needs.dense > needs.available:
        raise ValueError(
            f"offload: everything but the experts (attention, embeddings, dense layers) takes "
            f"{needs.dense / GIB:.1f} GiB, but this machine has {max(0, needs.available) / GIB:.1f} GiB of memory "
            "available: close other programs, or use a machine with more memory"
        )


def _store(model: PreTrainedModel, layers: Sequence[ExpertsLayer], cpu_format: str) -> int:
    """Bytes of the blocks of all experts."""
    format = ("bf16" if model.dtype == torch.bfloat16 else "fp32") if cpu_format == "auto" else cpu_format
    kind = FORMATS[format]
    scales = kind.scales[0] if kind.scales else None
    total = 0
    for layer in layers:
        spec = layer.spec
        group = check_group("offload", kind, None, spec.hidden_size, spec.intermediate_size)
        layout = Layout(format, 1, spec.hidden_size, spec.intermediate_size, group, scales, (0, spec.intermediate_size))
        biased = ("gate_up_bias", "down_bias") if spec.biased else ()
        total += ExpertBlocks.of(layout, biased).stride * spec.num_experts
    return total
