"""The models of transformers that have hyper-connections, and the classes here that replace theirs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from torch import nn

from .class_names import PREFIX

PARTS = ("layer", "connection", "head")


@dataclass(frozen=True)
class Family:
    """One model file of transformers. classes: {name: (one of PARTS, what computes it here)}

    attention: how many values the layers' attention returns, the kind of attention deciding in some; flat: whether
    streams are [B, S, n*D] there.
    """

    model_type: str
    classes: dict[str, tuple[str, str]]
    attention: int
    flat: bool = False

    @property
    def file(self) -> str:
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"


_PRE = ("connection", "mhc.pre")
_HEAD = ("head", "mhc.head")
_LAYER = ("layer", "mhc.pre and mhc.post with one backward; mhc.boundary without gradients")
FAMILIES = (
    Family(
        "deepseek_v4",
        {"DeepseekV4DecoderLayer": _LAYER, "DeepseekV4HyperConnection": _PRE, "DeepseekV4HyperHead": _HEAD},
        attention=2,
    ),
    Family("glm5_next", {"Glm5NextTextDecoderLayer": _LAYER, "Glm5NextTextHyperConnection": _PRE}, attention=3),
    Family(
        "hy_v4",
        {
            "HYV4DecoderLayer": ("layer", "mhc.independent_pre and mhc.inject with one backward"),
            "HYV4HyperConnection": ("connection", "mhc.independent_pre"),
            "HYV4HyperHead": _HEAD,
        },
        attention=3,
    ),
    Family(
        "qwen4_exp",
        {
            "Qwen4ExpTextDecoderLayer": ("layer", "mhc.inject"),
            "Qwen4ExpTextGatedResidual": ("connection", "mhc.gated_pre"),
        },
        attention=2,
        flat=True,
    ),
)


@dataclass(frozen=True)
class Known:
    """transformers' own class of a module, and its family."""

    family: Family
    kind: type[nn.Module]

    @property
    def part(self) -> str:
        return self.family.classes[self.kind.__name__][0]

    @property
    def computes(self) -> str:
        return self.family.classes[self.kind.__name__][1]

    @property
    def ours(self) -> type[nn.Module]:
        """Our class for it."""
        module = importlib.import_module(f".{self.family.model_type}", __package__)
        return getattr(module, PREFIX + self.kind.__name__)


def known(module: nn.Module) -> Known | None:
    """The class of transformers that is replaced, if the module has it or a subclass of it."""
    for kind in type(module).__mro__:
        for family in FAMILIES:
            if kind.__module__ == family.file and kind.__name__ in family.classes:
                return Known(family, kind)
    return None
