"""Scheme: how a checkpoint stores the weight of a linear layer, and which format of ours holds its codes.

A scheme reads one matrix from its tensors: as codes of a format of `experts.pack` if one holds them exactly, otherwise
as the weights that they represent, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....experts.packed.formats import FORMATS, Codes, divisors
from ....experts.packed.formats import decode as decoded

Parts = Mapping[str, Tensor]  # the tensors of one linear layer: "weight_packed", "weight_scale", ...
# scales of activations and of the cache, which other runtimes use; here only weights are quantised
ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
)


@dataclass(frozen=True)
class CodeFormat:
    """A format of `experts.pack` that holds codes exactly, and the inputs that share a scale (None: as in `pack`)."""

    format: str
    group: int | None


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is stored.

    label      for messages, such as "GPTQ (4 bits)"
    parts      its tensors in the files, by the last part of their names
    read       tensors -> codes of `format`, or weights [out, in] in float32 if `format` is None
    group      inputs that share a scale; None: all inputs of a row, or the format's own
    reason     why no format holds the codes exactly, for messages
    optional   tensors that may be there as well
    aliases    other names of parts
    """

    label: str
    parts: tuple[str, ...]
    read: Callable[[Parts], Codes | Tensor]
    format: str | None = None
    group: int | None = None
    reason: str = ""
    optional: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> set[str]:
        """Every name of a part that a layer may have."""
        return {*self.parts, *self.optional, *self.aliases, *ACTIVATIONS}

    @property
    def marks(self) -> set[str]:
        """Names of parts that show that a layer is stored in codes."""
        return {*self.parts, *self.aliases} - {"weight"}

    def target(self, hidden: int, intermediate: int) -> CodeFormat | str:
        """The format that holds the codes of experts of these sizes, or the reason why none does."""
        if self.format is None:
            return self.reason
        fmt, group = FORMATS[self.format], self.group
        if fmt.fixed:
            if fmt.name == "mxfp4" and (hidden % 32 or intermediate % 32):
                return f"groups of 32 do not divide {hidden} and {intermediate}"
            return CodeFormat(self.format, fmt.group)
        if group is None and fmt.bits == 8:
            return CodeFormat(self.format, None)
        both = [size for size in divisors(hidden) if intermediate % size == 0]
        if group is None and both:  # one scale per row, repeated
            return CodeFormat(self.format, both[-1])
        if group is not None and group % 8 == 0 and hidden % group == 0 and intermediate % group == 0:
            return CodeFormat(self.format, group)
        return f"groups of {group or 'a whole row'} do not fit {hidden} and {intermediate}"

    def codes(self, parts: Parts, target: CodeFormat) -> Codes:
        """The codes of a matrix with the groups of `target`; only for a scheme with a format."""
        codes = self.read(parts)
        if not isinstance(codes, Codes) or codes.scales is None:
            raise ValueError(f"{self.label} has no codes with scales; read its weights")
        if FORMATS[target.format].fixed or target.group is None:
            return codes
        inputs = codes.codes.shape[1] * FORMATS[target.format].per_code
        times = inputs // target.group // codes.scales.shape[1]
        if times == 1:
            return codes
        zeros = None if codes.zeros is None else codes.zeros.repeat_interleave(times, 1)
        return Codes(codes.codes, codes.scales.repeat_interleave(times, 1), zeros)

    def weights(self, parts: Parts) -> Tensor:
        """w [out, in] in float32: exact, except that a product with a float32 scale is rounded once."""
        values = self.read(parts)
        if isinstance(values, Tensor):
            return values
        if self.format is None:
            raise ValueError(f"{self.label} gives codes, but no format decodes them")
        return decoded(FORMATS[self.format], values)


def check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...], other: str) -> None:
    """Raises ValueError unless the tensor has the shape that another tensor implies."""
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{name} is {list(tensor.shape)}, but {other} needs {list(wanted)}")


def check_dtype(name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
    if tensor.dtype not in wanted:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, wanted))}")


def groups_of(inputs: int, group: int | None, what: str) -> int:
    """The number of groups along the inputs; raises ValueError if the group does not divide them."""
    if group is None:
        return 1
    if group < 1 or inputs % group:
        raise ValueError(f"its {inputs} inputs are not a multiple of the group size {group} ({what})")
    return inputs // group


def grown(values: Tensor, inputs: int) -> Tensor:
    """[rows, groups] -> [rows, inputs]: each value repeated for the inputs of its group."""
    return values.repeat_interleave(math.ceil(inputs / values.shape[1]), 1)[:, :inputs]
