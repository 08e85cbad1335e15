"""GgufCheckpoint: a GGUF file, read tensor by tensor under the model's own names.

Names, and what llama.cpp's converter does to values (norms with an offset, heads in another order), are undone by
transformers' own tables for each architecture.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from torch import Tensor, nn

from ...experts_spec import ExpertsSpec
from ..formats.layer import CodedLayer
from ..formats.scheme import Scheme
from ..per_expert import PerExpertTensor
from . import blocks
from .files import parts_of
from .header import check_header
from .layer import GgufLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down)_exps\.(weight|bias)")


class GgufCheckpoint:
    """The tensors of a GGUF file, or of all parts of a split one, by the model's names.

    Raises ValueError for a damaged or incomplete file.
    """

    method, mapped = "gguf", False

    def __init__(self, file: Path, model: nn.Module) -> None:
        self.folder, self.file, self._model = file.parent, file, cast("PreTrainedModel", model)
        self.architecture = check_header(file).architecture
        self._tensors: dict[str, ReaderTensor] = {}
        self.sources = parts_of(file)
        for part in self.sources:
            check_header(part)
            try:
                self._tensors |= {tensor.name: tensor for tensor in GGUFReader(part).tensors}
            except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
                raise ValueError(f"{part}: not a whole GGUF file: {error}") from error
        matches = ((EXPERTS.fullmatch(name), tensor) for name, tensor in self._tensors.items())
        kinds = [Type(tensor.tensor_type) for match, tensor in matches if match and match[2] == "weight"]
        self._shared = blocks.shared_format(kinds) if kinds else "it has no experts"
        self._layers: dict[str, CodedLayer] = {}

    @property
    def label(self) -> str:
        """What messages call this checkpoint."""
        return str(self.file)

    @cached_property
    def names(self) -> dict[str, str]:
        """The model's name of each tensor outside the experts -> its name in the file."""
        return {self._model_names.get(name, name): name for name in self._tensors if not EXPERTS.fullmatch(name)}

    def stored_name(self, name: str) -> str:
        """The name itself."""
        return name

    def below(self, path: str) -> set[str]:
        """Names of the tensors below a module's path, relative to it."""
        return {name[len(path) + 1 :] for name in self.names if name.startswith(path + ".")}

    def get(self, name: str) -> Tensor:
        """The tensor with this name in the model, decoded, as transformers gives it to the model."""
        tensor = self._tensors[self.names[name]]
        try:
            values = blocks.weights(Type(tensor.tensor_type), tensor.data)
        except ValueError as error:
            raise ValueError(f"{self.file}: {tensor.name}: {error}") from error
        return self._processed(tensor.name, values.view([int(size) for size in tensor.shape[::-1]]), name)

    def per_expert(self, name: str, experts: int) -> PerExpertTensor | None:
        """None: experts are read by `experts`."""
        return None

    def scheme(self, layer: str) -> Scheme | None:
        """None: `get` decodes every tensor."""
        return None

    def siblings(self, name: str) -> dict[str, str]:
        return {}

    def experts(self, path: str, spec: ExpertsSpec) -> CodedLayer:
        """The experts of the decoder layer whose number is in the path."""
        if path not in self._layers:
            number = next(int(part) for part in path.split(".") if part.isdecimal())
            self._layers[path] = GgufLayer(str(self.file), self._tensors, number, spec, self._shared)
        return self._layers[path]

    @cached_property
    def _conversions(self) -> tuple[list, list] | None:
        """(renamings, converters) of transformers' newer tables; None for an architecture of the older ones."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming
        from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported

        if not is_gguf_arch_supported(self.architecture):
            return None
        mapping = deepcopy(get_gguf_conversion_mapping(self.architecture, self._model.config))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        return renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]

    @cached_property
    def _model_names(self) -> dict[str, str]:
        if self._conversions is not None:
            from transformers.core_model_loading import rename_source_key

            return {name: rename_source_key(name, *self._conversions)[0] for name in self._tensors}
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        # First without children: each module below adds the names that only it knows, but builds a table for all
        # layers, so that time grows with the square of their number
        whole = self._model
        top = SimpleNamespace(config=whole.config, state_dict=whole.state_dict, named_children=list)
        names: dict[str, str] = {}
        for model in (top, whole):
            names = get_gguf_hf_weights_map(model, self._processor)
            # llama.cpp adds .weight to parameters without it (gpt-oss's sinks), which is not in transformers' table
            names |= {f"{stored}.weight": name for stored, name in names.items() if stored not in self._tensors}
            if all(name in names or EXPERTS.fullmatch(name) for name in self._tensors):
                break
        return names

    @cached_property
    def _processor(self) -> TensorProcessor:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        return TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=self._model.config.to_dict())

    def _processed(self, stored: str, values: Tensor, name: str) -> Tensor:
        """The values without what llama.cpp's converter did to them."""
        if self._conversions is None:
            numbers = values.float().numpy()
            return torch.from_numpy(np.ascontiguousarray(self._processor.process(weights=numbers, name=stored).weights))
        from transformers.core_model_loading import rename_source_key

        renamings, converters = self._conversions
        _, pattern = rename_source_key(stored, renamings, converters)
        converter = next((c for c in converters if pattern in c.source_patterns), None)
        for operation in converter.operations if converter else ():
            changed = operation.convert({name: values}, source_patterns=[pattern], target_patterns=[name])
            (values,) = changed.values()
        return values
