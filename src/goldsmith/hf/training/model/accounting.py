"""What is trained and what it takes, before the first step: counted or measured, and said where it is an estimate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...model_types import text_config
from ..data.documents import Document
from ..data.packing import batch
from ..errors import TrainingError
from ..options import Options
from ..run.loss import summed_loss
from ..run.plan import TrainingPlan
from .device import memory, on_gpu
from .loading import LoadedModel, checkpoint_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 64  # tokens of the shorter row on which activations are measured
SHARE = 0.8  # of the free memory that a proposal may take


@dataclass(frozen=True)
class Accounting:
    """Numbers of parameters, and bytes: `activations` of one batch at the chosen length, `free` what memory is left."""

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
        """What training takes on top of what is loaded."""
        return self.optimizer + self.activations

    def would_fit_alone(self, batch_size: int) -> bool:
        """Whether one row of the batch fits, if it were not for gradients and moments of what is trained."""
        return self.activations / batch_size <= SHARE * self.free


def account(loaded: LoadedModel, options: Options, plan: TrainingPlan) -> Accounting:
    """Raises TrainingError when what the model calls trainable is not what the optimizer gets."""
    from ....experts.packed import PackedExperts
    from ... import trainable_report
    from ...converted_experts import converted_modules

    report = trainable_report(loaded.model)
    held = sum(p.numel() for p in loaded.parameters.values())
    if held != report["trained_parameters"]["total"]:
        raise TrainingError(
            f"{held:,} parameters are in the optimizer, and {report['trained_parameters']} are counted."
        )
    row = row_bytes(loaded, options)
    size = sum(p.numel() * p.element_size() for p in loaded.parameters.values())
    device = loaded.model.device
    free = (memory(device) if on_gpu(device) else memory_free()) - 3 * size
    base = next(iter(converted_modules(loaded.model).values())).base
    return Accounting(
        format=base.format if isinstance(base, PackedExperts) else "bf16",
        trained=report["trained_parameters"],
        expert_lora=report["expert_lora"],
        experts=report["bytes"]["experts"],
        frozen=report["bytes"]["frozen"],
        lora=size,
        optimizer=3 * size,  # two moments and the gradient
        activations=round(row * plan.batch_size),
        free=free + 3 * size,
        proposal=propose(row, plan.window, free),
    )


def propose(row: float, window: int, free: float) -> tuple[int, int] | None:
    """(batch size, accumulation) with the same rows a step and the largest batch that fits; None when none does."""
    fitting = [size for size in range(1, window + 1) if window % size == 0 and size * row <= SHARE * free]
    return (fitting[-1], window // fitting[-1]) if fitting else None


def row_bytes(loaded: LoadedModel, options: Options) -> float:
    """Bytes that autograd keeps for one row of `seq_len` tokens: measured on short rows, and a L + b L^2 put through.

    The square is attention's: each layer keeps its own copy of a packed row's mask. With gradient checkpointing a
    layer's input each, and one layer whole.
    """
    model, text, length = loaded.model, text_config(loaded.model), options.seq_len
    some = max(1, min(PROBE, length // 2))
    if options.checkpointing:
        checkpoint_layers(model, False)
    short, long = (_kept(model, n, options.pack) for n in (some, 2 * some))
    square = max(0.0, (long - 2 * short) / (2 * some * some))
    whole = (short / some - square * some) * length + square * length * length
    if not options.checkpointing:
        return whole
    checkpoint_layers(model)
    layers, vocabulary = max(1, text.num_hidden_layers), 4.0 * text.vocab_size * length
    return vocabulary + (whole - vocabulary) / layers + layers * text.hidden_size * model.dtype.itemsize * length


def _kept(model: PreTrainedModel, length: int, packed: bool) -> int:
    """Bytes of the tensors that autograd keeps for a row, bases and parameters left out."""
    from ...converted_experts import converted_modules

    bases = (module.held for module in converted_modules(model).values())
    known = {t.untyped_storage().data_ptr() for some in (model.parameters(), *bases) for t in some}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
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


def memory_free() -> int:
    """Bytes that this machine can still give, by /proc/meminfo and the limit of the control group."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)
