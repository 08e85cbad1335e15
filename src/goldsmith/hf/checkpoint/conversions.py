"""Which tensors of a checkpoint make which tensors of a model: transformers' renamings and converters, run lazily.

The conversions are those that transformers makes in `convert_and_load_state_dict_in_model`: every key of the files is
renamed, a key that is right already is left alone, and keys that a converter merges or splits form a group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming


@dataclass
class ConversionGroup:
    """Keys of the files from which one converter makes one or more tensors of the model; `first` names the first."""

    converter: WeightConverter
    first: str
    keys: dict[str, list[str]] = field(default_factory=dict)  # by the converter's pattern, in transformers' order

    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]

    @property
    def targets(self) -> list[str]:
        """The names of the tensors that the converter makes."""
        patterns = self.converter.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns] if len(patterns) > 1 else [self.first]

    def convert(self, model: nn.Module, read: Callable[[str], Tensor], e: int | None = None) -> dict[str, Tensor]:
        """The tensors by the model's names, by transformers' own operations; of expert e alone if it is not None."""
        converter: Any = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys if e is None else keys[e : e + 1]:
                converter.add_tensor(self.first, key, pattern, read(key))
        tensors = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}

    def by_expert(self, experts: int) -> bool:
        """Whether the converter can run on one expert alone: it stacks one tensor of each and mixes no experts."""
        stack, *rest = self.converter.operations
        return (
            type(stack).__name__ == "MergeModulelist"
            and getattr(stack, "dim", None) == 0
            and all(0 not in (getattr(op, name, 1) for name in ("dim", "dim0", "dim1")) for op in rest)
            and all(type(op).__name__ in ("Concatenate", "Transpose", "Interleave") for op in rest)
            and len(self.converter.source_patterns) == len(self.keys)
            and all(len(keys) == experts for keys in self.keys.values())
        )


class KeyConversions:
    """Where the tensors of a model come from.

    sources   {name in the model: its key in the files, or the group that makes it}
    rivals    {name in the model: a second key that gives it}, so that one of the two would be dropped
    unknown   {renamed key: key} of tensors that the model has no place for
    coded     whether a key is part of a quantised weight, to which converters do not apply
    """

    def __init__(self, model: PreTrainedModel, keys: Collection[str], coded: Callable[[str], bool]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._model, self._state = model, model.state_dict()
        self._prefix = f"{model.base_model_prefix}."
        self._top = {f"{name.partition('.')[0]}." for name, _ in model.named_children()}
        self.sources: dict[str, str | ConversionGroup] = {}
        self.rivals: dict[str, str] = {}
        groups: dict[str, ConversionGroup] = {}
        self.unknown: dict[str, str] = {}
        for key in sorted(keys, key=dot_natural_key):
            if coded(key):
                self._add(self._coded_name(key), key, key)
                continue
            name, pattern = self._renamed(key, converters)
            if name not in self._state:
                self.unknown[self._with_prefix(self._rename_only(key) if pattern is None else name)] = key
            elif pattern is None:
                self._add(name, key, key)
            else:
                group = groups.setdefault(name, ConversionGroup(by_pattern[pattern], name))
                for target in group.targets:
                    self._add(target, group, key)
                group.keys.setdefault(pattern, []).append(key)

    def _add(self, name: str, source: str | ConversionGroup, key: str) -> None:
        if self.sources.setdefault(name, source) is not source:
            self.rivals.setdefault(name, key)

    def _renamed(self, key: str, converters: list[WeightConverter]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, converters, prefix, self._state)
        if name not in self._state and key in self._state:  # saved by transformers under its own name
            name, pattern = rename_source_key(key, [], [], prefix, self._state)
        return name, pattern

    def _rename_only(self, key: str) -> str:
        renamings: list[WeightRenaming] = self._renamings
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    def _coded_name(self, key: str) -> str:
        """The name of a part of a quantised weight, whose module is renamed as its plain weight would be."""
        stem, _, part = key.rpartition(".")
        for name in (f"{stem}.weight", stem):
            if name in self._state:
                return key
        return self._with_prefix(self._rename_only(key))

    def _with_prefix(self, name: str) -> str:
        if f"{name.partition('.')[0]}." not in self._top:
            if self._prefix in self._top:  # the files hold the base model
                return self._prefix + name
            if name.startswith(self._prefix):  # the model is the base model
                return name.removeprefix(self._prefix)
        return name
