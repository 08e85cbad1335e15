"""What is trained and what it takes, before the first step: counted or measured, and said where it is an estimate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import TrainingError
from .loop import Plan
from .loss import summed_loss
from .model import Loaded, checkpoint_layers
from .options import Options
from .packing import Batch

PROBE = 64  # tokens on which activations are measured
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def needed(self) -> int:
        """What training takes on top of what is loaded."""
        return self.optimizer + self.activations


def account(loaded: Loaded, options: Options, plan: Plan) -> Accounting:
    """Raises TrainingError when what the model calls trainable is not what the optimizer gets."""
    from ...experts.packed import PackedExperts
    from .. import trainable_report
    from ..convert import converted_modules

    report = trainable_report(loaded.model)
    held = sum(p.numel() for p in loaded.parameters.values())
    if held != report["trained_parameters"]["total"]:
        raise TrainingError(
            f"{held:,} parameters are in the optimizer, and {report['trained_parameters']} are counted."
        )
    per_token = activation_bytes(loaded, options)
    size = sum(p.numel() * p.element_size() for p in loaded.parameters.values())
    free = memory_free() - 3 * size
    return Accounting(
        format=next(
            m.base.format for m in converted_modules(loaded.model).values() if isinstance(m.base, PackedExperts)
        ),
        trained=report["trained_parameters"],
        expert_lora=report["expert_lora"],
        experts=report["bytes"]["experts"],
        frozen=report["bytes"]["frozen"],
        lora=size,
        optimizer=3 * size,  # two moments and the gradient
        activations=round(per_token * options.seq_len * plan.batch_size),
        free=free + 3 * size,
        proposal=propose(per_token * options.seq_len, plan.window, free),
    )


def propose(row: float, window: int, free: float) -> tuple[int, int] | None:
    """(batch size, accumulation) with the same rows a step and the largest batch that fits; None when none does."""
    fitting = [size for size in range(1, window + 1) if window % size == 0 and size * row <= SHARE * free]
    return (fitting[-1], window // fitting[-1]) if fitting else None


def activation_bytes(loaded: Loaded, options: Options) -> float:
    """Bytes that autograd keeps for a token: measured on a few, packed bases and parameters left out.

    With gradient checkpointing a layer's input each, and one layer whole.
    """
    model, config = loaded.model, loaded.model.config
    length = min(PROBE, options.seq_len)
    if options.checkpointing:
        checkpoint_layers(model, False)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dtype != torch.uint8 and storage.data_ptr() not in known:  # packed bases are bytes
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(length)[None] % config.get_text_config().vocab_size
    probe = Batch(ids, torch.arange(length)[None], ids.clone(), length)
    model.train()
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = summed_loss(model, probe)
    whole = sum(kept.values()) / length
    del loss
    if not options.checkpointing:
        return whole
    checkpoint_layers(model)
    text = config.get_text_config()
    layers = max(1, text.num_hidden_layers)
    vocabulary = 4 * text.vocab_size
    return vocabulary + (whole - vocabulary) / layers + layers * text.hidden_size * model.dtype.itemsize


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
