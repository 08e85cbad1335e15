"""Counts what is trained, and measures the memory that it takes, before the first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....offload.memory.host_memory import memory_free
from ...model_types import text_config
from ..data.documents import Document
from ..data.packing import batch
from ..errors import TrainingError
from ..options import Options
from ..run.loss import summed_loss
from ..run.training_steps import TrainingSteps
from .device import memory, on_gpu
from .loading import LoadedModel, checkpoint_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 64  # tokens of the shorter of two rows on which activations are measured
SHARE = 0.8  # of free memory that a proposed batch size may use


@dataclass(frozen=True)
class Accounting:
    """Numbers of parameters, and bytes. `activations`: of one batch; `free`: memory that is still available."""

    format: str
    trained: dict[str, int]
    expert_lora: dict[str, int]
    experts: int
    frozen: int
    lora: int
    optimizer: int
    activations: int
    free: int
    proposal: tuple[int, int] | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def needed(self) -> int:
        """Bytes that training needs in addition to the loaded model."""
        return self.optimizer + self.activations

    def would_fit_alone(self, batch_size: int) -> bool:
        """Whether one row of the batch would fit without gradients and optimizer moments."""
        return self.activations / batch_size <= SHARE * self.free


def account(loaded: LoadedModel, options: Options, training: TrainingSteps, local_ranks: int = 1) -> Accounting:
    """The accounting; raises TrainingError if the optimizer's parameters are not the model's trainable ones.

    On a CPU, the ranks of this machine share its free memory.
    """
    from ....experts.packed.experts import PackedExperts
    from ... import trainable_report
    from ...converted_experts import converted_modules

    report = trainable_report(loaded.model)
    in_optimizer = sum(p.numel() for p in loaded.parameters.values())
    if in_optimizer != report["trained_parameters"]["total"]:
        raise TrainingError(
            f"The optimizer has {in_optimizer:,} parameters, but the model counts {report['trained_parameters']}."
        )
    row = row_bytes(loaded, options)
    size = sum(p.numel() * p.element_size() for p in loaded.parameters.values())
    device = loaded.model.device
    free = (memory(device) if on_gpu(device) else memory_free() // local_ranks) - 3 * size
    base = next(iter(converted_modules(loaded.model).values())).base
    return Accounting(
        format=base.format if isinstance(base, PackedExperts) else "bf16",
        trained=report["trained_parameters"],
        expert_lora=report["expert_lora"],
        experts=report["bytes"]["experts"],
        frozen=report["bytes"]["frozen"],
        lora=size,
        optimizer=3 * size,  # two moments and the gradient
        activations=round(row * training.batch_size),
        free=free + 3 * size,
        proposal=propose(row, training.window // training.ranks, free),
    )


def propose(row: float, window: int, free: float) -> tuple[int, int] | None:
    """(batch size, accumulation) with the same rows per step and the largest batch that fits; None if none fits."""
    fitting = [size for size in range(1, window + 1) if window % size == 0 and size * row <= SHARE * free]
    return (fitting[-1], window // fitting[-1]) if fitting else None


def row_bytes(loaded: LoadedModel, options: Options) -> float:
    """Bytes that autograd keeps for a row of `seq_len` tokens: an estimate a L + b L^2 from measurements on short rows.

    b is attention's: each layer keeps its own copy of a packed row's mask. With gradient checkpointing, autograd keeps
    every layer's input and all activations of one layer.
    """
    model, text, length = loaded.model, text_config(loaded.model), options.seq_len
    short_length = max(1, min(PROBE, length // 2))
    if options.checkpointing:
        checkpoint_layers(model, False)
    short, long = (_kept(model, n, options.pack) for n in (short_length, 2 * short_length))
    quadratic = max(0.0, (long - 2 * short) / (2 * short_length * short_length))
    all_layers = (short / short_length - quadratic * short_length) * length + quadratic * length * length
    if not options.checkpointing:
        return all_layers
    checkpoint_layers(model)
    layers, vocabulary = max(1, text.num_hidden_layers), 4.0 * text.vocab_size * length
    return vocabulary + (all_layers - vocabulary) / layers + layers * text.hidden_size * model.dtype.itemsize * length


def _kept(model: PreTrainedModel, length: int, packed: bool) -> int:
    """Bytes of the tensors that autograd keeps for a row, without parameters and packed weights."""
    from ...converted_experts import converted_modules

    bases = (module.base_tensors for module in converted_modules(model).values())
    parameter_storages = {t.untyped_storage().data_ptr() for some in (model.parameters(), *bases) for t in some}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            kept[storage.data_ptr()] = tensor
        return tensor

    sizes = [length // 2, length - length // 2] if packed and length > 1 else [length]
    vocabulary = text_config(model).vocab_size
    probe = batch([[Document([k % vocabulary for k in range(n)], [True] * n) for n in sizes]], pad=0)
    probe, devices = probe.to(model.device), [model.device] if on_gpu(model.device) else []
    model.train()
    with torch.random.fork_rng(devices=devices), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = summed_loss(model, probe)
    bytes_kept = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return bytes_kept
