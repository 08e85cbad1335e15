"""NVIDIA ModelOpt: NVFP4, and fp8 with one scale for each matrix or for each row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.json_values import parse_json
from . import fp4, fp8
from .scheme import Scheme

SETTINGS = "hf_quant_config.json"  # beside config.json; the only place for the settings in older checkpoints


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """The scheme of a "modelopt" quantization_config; raises ValueError for one that is not supported."""
    algorithm = (settings.get("quantization") or settings).get("quant_algo")
    label = f"ModelOpt {algorithm}"
    if algorithm == "NVFP4":
        return fp4.nvfp4(label, "weight", "weight_scale_2", divided=False)
    if algorithm == "FP8":
        return fp8.tensorwise(label, "weight_scale")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return fp8.rowwise(label, "weight_scale")
    raise ValueError(f"{label}; supported are NVFP4, FP8 and FP8_PER_CHANNEL_PER_TOKEN")


def settings_beside(folder: Path) -> dict[str, object]:
    """The settings of a folder whose config.json has none; empty if ModelOpt did not write it."""
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text())
        settings = content["quantization"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the settings of ModelOpt: {error}") from error
    return {"quant_method": "modelopt", **settings} if settings.get("quant_algo") else {}
