"""The device of a run: the CPU with packed experts, or one GPU with experts in plain bfloat16."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....experts import PackedExperts
from ...converted_experts import ConvertedExperts
from ..errors import TrainingError
from ..options import Options

ON_GPU = "cuda_grouped"  # the backend of experts.moe, named so that no other is used instead


def chosen(options: Options) -> torch.device:
    """The device of --device; raises TrainingError if it does not exist or does not support the other options."""
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise TrainingError(f"--device is {options.device}; expected cpu, cuda, or one of several as cuda:1.")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise TrainingError(
            f"--device {options.device}: torch sees {torch.cuda.device_count()} CUDA devices here; on a CPU leave "
            "--device out."
        )
    for refused, reason in (
        (options.train_router, "--train-router trains in float32: leave --train-router or --device out"),
        (options.dtype != "bf16", f"--dtype is {options.dtype}: give --dtype bf16 with it"),
        (options.format not in ("auto", "bf16"), f"--format is {options.format}: leave it out"),
        (options.partitions > 1, f"--partitions is {options.partitions}, which is only for the CPU: leave it out"),
    ):
        if refused:
            raise TrainingError(f"--device {options.device} computes everything in bfloat16, and {reason}.")
    return device


def of_rank(options: Options, local_rank: int, local_world: int) -> Options:
    """The options with this rank's own GPU, if they name one; raises TrainingError if it has none."""
    kind, _, index = options.device.partition(":")
    if kind != "cuda":
        return options
    if index:
        raise TrainingError(f"--device {options.device} is one GPU for {local_world} ranks; give --device cuda.")
    if torch.cuda.device_count() < local_world:
        raise TrainingError(
            f"--device cuda needs a GPU for each of {local_world} ranks; torch sees {torch.cuda.device_count()} CUDA "
            f"devices here. Start as many ranks as there are GPUs."
        )
    return replace(options, device=f"cuda:{local_rank}")


def hint(options: Options) -> str | None:
    """How to use all GPUs of this machine, if a run of one process would use one of several."""
    if options.device != "cuda" or torch.cuda.device_count() < 2:
        return None
    count = torch.cuda.device_count()
    return (
        f"This run uses one of {count} GPUs. `torchrun --nproc-per-node {count} -m goldsmith finetune ...` with the "
        f"same options uses all, with {count} times the rows in a step."
    )


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def move_experts(module: ConvertedExperts, device: torch.device, model: str) -> None:
    """Moves a converted module's experts from packed on the CPU to plain bfloat16 on a GPU, in place."""
    base = module.base
    if not isinstance(base, PackedExperts):
        return
    if base.format != "bf16":
        raise TrainingError(
            f"MODEL {model} is a checkpoint in {base.format}; on a GPU, experts can only be trained in bfloat16. "
            "The CPU uses its codes as they are: leave --device out."
        )
    plain = (*base.unpack(torch.bfloat16), base.gate_up_bias, base.down_bias)
    moved = tuple(None if t is None else t.to(device) for t in plain)
    module.set_base(moved if base.has_bias else moved[:2], ON_GPU)


def memory(device: torch.device) -> int:
    """Free bytes of a GPU, including those that torch has reserved but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
