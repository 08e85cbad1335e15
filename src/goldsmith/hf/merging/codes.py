"""Formats of a merged checkpoint: floats, or experts as codes in a layout that transformers and others read.

`Survival` measures how much of the adapter is left after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...experts.packed.formats import FORMATS
from ...experts.packed.quantisation import check_group, check_scale_dtype, quantise
from ..checkpoint.formats.registry import Schemes
from ..checkpoint.reader import ModelCheckpoint

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {"int4": "compressed-tensors", "fp8_block": "fp8"}  # format -> quant_method
LEAST = 0.9  # a smaller share of the adapter is reported as lost


@dataclass
class Survival:
    """How much of an adapter is left after rounding, from sums over all merged weights.

    share   norm of the merged change / norm of the adapter's change
    along   the merged change's component along the adapter's change / the adapter's change: 1 if all of it is left,
            0 if nothing is
    noise   norm of the rest of the merged change, which rounding adds / norm of the adapter's change
    """

    adapter: float = 0.0
    merged: float = 0.0
    product: float = 0.0
    by_layer: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, layer: str, delta: Tensor, before: Tensor, after: Tensor) -> None:
        d, m = delta.detach().double(), after.double() - before.double()
        sums = float(d.square().sum()), float(m.square().sum()), float((d * m).sum())
        self.adapter, self.merged, self.product = (
            self.adapter + sums[0], self.merged + sums[1], self.product + sums[2]
        )  # fmt: skip
        old = self.by_layer.get(layer, (0.0, 0.0, 0.0))
        self.by_layer[layer] = (old[0] + sums[0], old[1] + sums[1], old[2] + sums[2])

    @property
    def share(self) -> float:
        return _share(self.adapter, self.merged)

    @property
    def along(self) -> float:
        return self.product / self.adapter if self.adapter else 1.0

    @property
    def noise(self) -> float:
        return math.sqrt(max(0.0, self.share**2 - self.along**2))

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer with the smallest `along`, and that value; None without layers."""
        along = {layer: p / a if a else 1.0 for layer, (a, _, p) in self.by_layer.items()}
        return min(along.items(), key=lambda item: item[1]) if along else None

    @property
    def lost(self) -> bool:
        """Whether less than LEAST of the adapter survives."""
        return self.along < LEAST


def _share(adapter: float, merged: float) -> float:
    return math.sqrt(merged / adapter) if adapter else 1.0


def copied_format(checkpoint: ModelCheckpoint) -> str | None:
    """The format of CODES in which a base already stores all its quantised layers; None if it uses another."""
    for form, method in CODES.items():
        schemes = checkpoint.schemes if checkpoint.method == method else []
        if schemes and all(s.format == form and s.group == FORMATS[form].group for s in schemes):
            return form
    return None


class Writer:
    """Stores a merged expert's projection [out, in] as the tensors of a format, keyed by the last part of their names.

    format: a key of FLOATS or CODES. hidden, intermediate: the sizes that the groups must divide.
    """

    def __init__(self, format: str, hidden: int, intermediate: int) -> None:
        self.format, self.coded = format, format in CODES
        self.group: int | None = None
        if self.coded:
            self._format = FORMATS[format]
            self.group = check_group("goldsmith.hf.merge", self._format, None, hidden, intermediate)
            self._scale = check_scale_dtype("goldsmith.hf.merge", self._format, None)
        own = self.config([])
        self._scheme = None if own is None else Schemes(Path("merged"), own).all[0]

    def parts(self, weight: Tensor, where: str) -> dict[str, Tensor]:
        if not self.coded:
            return {"weight": weight.to(FLOATS[self.format]).contiguous()}
        codes = quantise(self._format, weight.float(), self.group, self._scale, where)
        if codes.scales is None:
            raise ValueError(f"goldsmith.hf.merge: {where} has no scales")
        if self.format == "fp8_block":
            return {"weight": codes.codes.contiguous(), "weight_scale_inv": codes.scales.contiguous()}
        packed = (codes.codes ^ 0x88).contiguous().view(torch.int32)  # two's complement -> q + 8
        shape = torch.tensor(weight.shape, dtype=torch.int64, device="cpu")
        return {"weight_packed": packed, "weight_scale": codes.scales.contiguous(), "weight_shape": shape}

    def value(self, parts: Mapping[str, Tensor], name: str) -> Tensor:
        """The numbers that these tensors stand for, in float32."""
        return self._scheme.weights(parts) if self._scheme is not None else parts["weight"].float()

    def config(self, plain: list[str]) -> dict[str, object] | None:
        """quantization_config for config.json; `plain`: the linear modules that stay floats. None for floats."""
        if not self.coded:
            return None
        if self.format == "fp8_block":
            return {
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
                "modules_to_not_convert": plain,
            }  # fmt: skip
        weights = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group,
            "actorder": None, "dynamic": False, "observer": "minmax",
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": plain,
        }  # fmt: skip
