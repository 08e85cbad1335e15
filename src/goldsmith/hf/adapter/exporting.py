"""export_adapter: `per_expert.export` for a model's folder, whose weights are not read."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.files import default_dtype, weight_files
from ..experts_spec import experts_modules, spec_of
from ..model_class import config_of, empty_model
from .per_expert import export


def export_adapter(model: str | Path, adapter: str | Path, output: str | Path) -> int:
    """Writes a peft adapter with one pair of factors per expert and projection, as vLLM and SGLang read it

    model     the folder of the base model, or the name of a cached hub model
    Returns the number of tensors. All pairs get one rank and the scaling 1. Raises ValueError, with nothing written,
    for an adapter that does not fit or that replaces whole modules.
    """
    from ..offload.adapters import adapter_folder
    from ..offload.loading import folder

    source = folder(model)
    config = config_of(source)
    empty = empty_model(config, default_dtype(weight_files(source, config), config))
    specs = {path: spec_of(module) for path, module in experts_modules(empty)}
    return export(empty, specs, adapter_folder(adapter), Path(output))
