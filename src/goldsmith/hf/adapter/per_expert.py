"""An adapter with one pair of factors per expert and projection, as vLLM and SGLang read it for most models.

peft trains one parameter of all experts, under `experts.lora_A` and `experts.base_layer.lora_A`. Loaders whose models
keep each expert's projections separate look for `experts.3.gate_proj.lora_A` instead, and use one rank and one scaling.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from ...experts.packed.files import refuse_what_is_no_file, replacing
from ..checkpoint.foreign_errors import writing
from ..experts_spec import ExpertsSpec
from .files import CONFIG, ROOT, WEIGHTS, config_text, plain_path, serialised
from .fitting import FittedAdapter, fitted
from .reading import split_factors

OP = "goldsmith.hf.export_adapter"
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def export(model: nn.Module, experts: dict[str, ExpertsSpec], adapter: Path, output: Path) -> int:
    """Writes the adapter in `adapter` with tensors per expert, and returns how many tensors it has

    model     the model that it fits; its weights may be on the meta device
    All pairs get one rank (smaller ones are padded with zeros) and the scaling 1, which is folded into B. Raises
    ValueError, with nothing written, for an adapter that does not fit, or that replaces whole modules.
    """
    fit = fitted(model, experts, adapter, OP)
    if fit.whole:
        raise ValueError(
            f"{adapter}: it replaces {next(iter(fit.whole))} whole (modules_to_save), which these loaders do not read: "
            "merge it instead"
        )
    if adapter.resolve() == output.resolve():
        raise ValueError(f"output {output} is the adapter's own folder: give another")
    tensors = _experts(fit, experts) | _others(fit)
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    padded = {name: _padded(tensor, rank, 0 if ".lora_A." in name else 1) for name, tensor in tensors.items()}
    modules = {name.removeprefix(ROOT).partition(".lora_")[0].rpartition(".")[2] for name in padded}
    config = {**fit.config, "r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    config |= {"target_modules": sorted(modules), "target_parameters": None, "inference_mode": True}
    for name in (WEIGHTS, CONFIG):
        refuse_what_is_no_file(OP, output / name)
    new = not output.exists()
    try:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            for name, content in (
                (WEIGHTS, serialised(padded, {"format": "pt"})),
                (CONFIG, config_text(config).encode()),
            ):
                with replacing(output / name) as file:
                    file.write(content)
    except OSError:
        if new:
            shutil.rmtree(output, ignore_errors=True)
        raise
    return len(padded)


def _experts(fit: FittedAdapter, experts: dict[str, ExpertsSpec]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, by_parameter in fit.experts.items():
        spec = experts[path]
        factors, scaling, _ = split_factors(spec, by_parameter, fit.ranks.get(path))
        for target, (a, b) in factors.items():
            name = NAMES[target] if spec.gated or target == "down" else "up_proj"
            for e in range(a.shape[0]):
                stem = f"{ROOT}{plain_path(path)}.{e}.{name}"
                tensors[f"{stem}.lora_A.weight"] = a[e].clone()
                tensors[f"{stem}.lora_B.weight"] = (b[e].float() * scaling[target]).to(b.dtype)
    return tensors


def _others(fit: FittedAdapter) -> dict[str, Tensor]:
    """peft's tensors outside the experts, with their scaling folded into B."""
    if not fit.peft or fit.layers is None:
        return {}
    tensors: dict[str, Tensor] = {}
    modules = dict(fit.layers.named_modules())
    for name, tensor in fit.peft.items():
        path, _, kind = name.removeprefix(ROOT).partition(".lora_")
        if kind not in ("A.weight", "B.weight"):
            raise ValueError(f"{fit.folder}: {name} is not read by these loaders: merge the adapter instead")
        scale = float(modules[path].scaling["default"]) if kind.startswith("B") else 1.0
        tensors[name] = tensor if scale == 1 else (tensor.float() * scale).to(tensor.dtype)
    return tensors


def _padded(tensor: Tensor, rank: int, dim: int) -> Tensor:
    missing = rank - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
