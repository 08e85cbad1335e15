"""FittedAdapter: an adapter's files, checked against a model whose weights need not be in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..experts_spec import ExpertsSpec
from .coverage import check_peft_layers, check_targets, refuse_missing, saved_modules, shell
from .files import CONFIG, ROOT, AdapterConfig, plain_path
from .fusing import fused
from .layout import PeftFactors
from .peft_layers import remove_peft_layers
from .peft_names import by_names_in_model
from .reading import factors_in_file, read_adapter


@dataclass(frozen=True)
class FittedAdapter:
    """An adapter that fits the model

    experts   {path of an experts module: {parameter: peft's factors}}
    ranks     {path: (rank of gate, rank of up)} where goldsmith joined two pairs
    peft      tensors of peft's own layers outside the experts, by their names in the file
    whole     {name in the model: tensor} of the modules that are replaced whole
    layers    the model's shell with peft's layers, on the meta device; None if there are none
    """

    folder: Path
    config: AdapterConfig
    experts: dict[str, dict[str, PeftFactors]]
    ranks: dict[str, tuple[int, int]]
    peft: dict[str, Tensor]
    whole: dict[str, Tensor]
    layers: nn.Module | None


def fitted(model: nn.Module, experts: Mapping[str, ExpertsSpec], folder: Path, op: str) -> FittedAdapter:
    """The adapter in this folder. Raises ValueError, with nothing changed, unless all of it fits the model.

    experts: the specs of the model's experts modules, by path.
    """
    config, tensors, ranks = read_adapter(folder, op)
    config, tensors = fused(model, folder, config, tensors)
    tensors = by_names_in_model(model, tensors, ROOT)
    check_targets(folder / CONFIG, config, model)
    used, missing = set[str](), list[str]()
    factors: dict[str, dict[str, PeftFactors]] = {}
    for path, spec in experts.items():
        by_parameter = factors_in_file(folder, config, tensors, plain_path(path), spec, used, missing)
        if by_parameter:
            factors[path] = by_parameter
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    unknown = [name for name in rest if ".experts." in name]
    if unknown:
        raise ValueError(
            f"{folder}: {unknown[0]} has no place in this model; its target_parameters are "
            f"{config.get('target_parameters')}"
        )
    bare = shell(model)
    remove_peft_layers(bare)
    whole = saved_modules(bare, folder / CONFIG, config, rest, missing)
    peft = {name: tensor for name, tensor in rest.items() if name not in whole}
    layers = check_peft_layers(bare, folder, config, peft, missing)
    refuse_missing(folder, missing)
    if not factors and not peft and not whole:
        raise ValueError(f"{folder}: it holds nothing for this model")
    replaced = {name.removeprefix(ROOT): rest[name] for name in whole}
    ranks = {path: ranks[plain_path(path)] for path in factors if plain_path(path) in ranks}
    return FittedAdapter(folder, config, factors, ranks, peft, replaced, layers)
