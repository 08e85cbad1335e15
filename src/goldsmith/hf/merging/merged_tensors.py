"""MergeWork: the tensors of base + adapter, piece by piece; keys and shapes stay those of the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from ..adapter.files import DOWN
from ..adapter.fitting import FittedAdapter
from ..checkpoint.conversions import ConversionGroup
from ..checkpoint.formats.linear import weights_of
from ..checkpoint.reader import ModelCheckpoint
from ..experts_spec import ExpertsSpec
from .codes import CODES, FLOATS, Survival, Writer, copied_format
from .deltas import OtherLayers, by_projection, experts_delta
from .names import expert_of, layer_of, natural_key

OP = "goldsmith.hf.merge"
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes in which torch adds
Progress = Callable[[int, int, str], None]
Source = str | ConversionGroup | list[str]  # a key, a group, or the keys of one coded weight


class MergeWork:
    """One merge: the tensors of the output, in the order of the layers."""

    def __init__(
        self, checkpoint: ModelCheckpoint, model: nn.Module, specs: dict[str, ExpertsSpec], adapter: FittedAdapter,
        format: str | None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.model, self.specs, self.adapter, self.format = checkpoint, model, specs, adapter, format
        self.coded = format in CODES
        self._copied = copied_format(checkpoint)  # the format of codes that may be copied
        self.survival, self.written, self.merged = Survival(), 0, 0
        self._other = OtherLayers(adapter)
        self._plain_linear: list[str] = []
        self._deltas: tuple[str, dict[str, Tensor]] = ("", {})  # of the experts module that is being written
        sizes = [(spec.hidden_size, spec.intermediate_size) for spec in specs.values()] or [(128, 128)]
        self._writer = Writer(format, *sizes[0]) if format is not None else None
        self._check()

    def pieces(self, progress: Progress | None) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """(tensors that belong together, whether a layer ends with them)."""
        items = self._items()
        for done, (name, source) in enumerate(items, 1):
            tensors = self._piece(name, source)
            self.written += len(tensors)
            following = layer_of(items[done][0]) if done < len(items) else None
            if progress is not None:
                progress(done, len(items), name)
            yield tensors, following != layer_of(name)

    def config(self, content: dict[str, object]) -> dict[str, object]:
        """config.json of the output."""
        content = dict(content)
        text = content.get("text_config")
        if self._writer is not None:
            content.pop("quantization_config", None)
            if isinstance(text, dict) and "quantization_config" in text:
                content["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
            own = self._writer.config(sorted(set(self._plain_linear)))
            if own is not None:
                content["quantization_config"] = own
            elif self.format in FLOATS:
                content.pop("torch_dtype", None)
                content["dtype"] = str(FLOATS[self.format]).removeprefix("torch.")
        return content

    # -- what is written ----------------------------------------------------------------------------------------------

    def _items(self) -> list[tuple[str, Source]]:
        """(name in the model, source), in natural order."""
        items: dict[str, Source] = {}
        seen: set[int] = set()
        for name, source in self.checkpoint.names.items():
            if isinstance(source, ConversionGroup):
                if id(source) not in seen:
                    seen.add(id(source))
                    items[name] = source
                continue
            stem, _, part = name.rpartition(".")
            scheme = self.checkpoint.scheme(stem)
            if scheme is not None and part not in (scheme.known | {"bias"}):
                raise ValueError(f"{self.checkpoint.label}: {name} is not known beside codes ({scheme.label})")
            if scheme is not None and part != "bias":
                keys = items.setdefault(f"{stem}.weight", [])
                cast("list[str]", keys).append(source)
            else:
                items[name] = source
        return sorted(items.items(), key=lambda item: natural_key(item[0]))

    def _is_coded(self, stem: str) -> bool:
        return self.checkpoint.scheme(stem) is not None

    def _piece(self, name: str, source: Source) -> dict[str, Tensor]:
        experts = self._experts_of(name)
        if isinstance(source, list):
            return self._coded_weight(name, source, experts)
        if experts is not None:
            return self._expert_weight(name, source, experts)
        if isinstance(source, str):
            value = self._outside(name, self.checkpoint.read(source))
            return {source: value}
        touched = [target for target in source.targets if self._covers(target)]
        if not touched:
            return {key: self._as_written(self.checkpoint.read(key)) for key in source.all_keys()}
        return {target: self._outside(target, self.checkpoint.get(target)) for target in source.targets}

    def _outside(self, name: str, value: Tensor) -> Tensor:
        """A weight outside the experts, merged or replaced if the adapter covers it."""
        if name.endswith(".weight") and value.dim() == 2:
            self._plain_linear.append(name.removesuffix(".weight"))
        if name in self.adapter.whole:
            self.merged += 1
            return self._as_written(self.adapter.whole[name].to(value.dtype))
        if name not in self._other.names:
            return self._as_written(value)
        self.merged += 1
        wide = self._working(name, value)
        delta = self._other.merged(name, torch.zeros_like(value, dtype=torch.float32))
        merged = self._as_written(self._other.merged(name, wide))
        self.survival.add(layer_of(name), delta, self._as_written(wide), merged)
        return merged

    def _as_written(self, value: Tensor) -> Tensor:
        if self.format in FLOATS and value.is_floating_point():
            return value.to(FLOATS[self.format])
        return value

    def _working(self, name: str, value: Tensor) -> Tensor:
        """The value in the dtype in which W + s B A is added: the base's own, or wider if the output is."""
        if self.format is None:
            if value.dtype not in WIDE:
                raise ValueError(
                    f"{self.checkpoint.folder}: {name} has the dtype {str(value.dtype)[6:]}, in which no sum can be "
                    "written: give format='bf16'"
                )
            return value  # as peft adds
        output = FLOATS.get(self.format, torch.float32)
        return value.to(torch.promote_types(value.dtype, output) if value.dtype in WIDE else output)

    def _covers(self, name: str) -> bool:
        return name in self._other.names or name in self.adapter.whole

    # -- experts ------------------------------------------------------------------------------------------------------

    def _experts_of(self, name: str) -> str | None:
        """The path of the experts module that a weight belongs to; None for biases and other weights."""
        path = next((path for path in self.specs if name.startswith(f"{path}.")), None)
        return None if path is None or name.endswith("bias") else path

    def _delta(self, path: str, projection: str) -> Tensor | None:
        """[E, out, in] in float32, None if the adapter does not cover this projection of these experts."""
        if self._deltas[0] != path:
            parts: dict[str, Tensor] = {}
            for parameter, factors in self.adapter.experts.get(path, {}).items():
                delta = experts_delta(factors, self.specs[path])
                parts |= by_projection(parameter, delta, self.specs[path])
                self.merged += 1
            self._deltas = path, parts
        return self._deltas[1].get(projection)

    def _expert_weight(self, name: str, source: str | ConversionGroup, path: str) -> dict[str, Tensor]:
        """The tensors of one key or group that belongs to experts, merged."""
        spec = self.specs[path]
        if isinstance(source, ConversionGroup):
            if len(source.targets) == 1 and source.by_expert(spec.num_experts):
                keys = [(key, e) for listed in source.keys.values() for e, key in enumerate(listed)]
                if all(expert_of(key) is not None for key, _ in keys):
                    return self._each_expert(path, keys)
            parts = [self._whole_stack(target, target, self.checkpoint.get(target)) for target in source.targets]
            return {key: tensor for part in parts for key, tensor in part.items()}
        place = expert_of(name)
        if place is not None and source.endswith(".weight"):
            value = self.checkpoint.read(source)
            return self._projection(path, place[1], place[0], value, source.removesuffix(".weight"))
        return self._whole_stack(name, source, self.checkpoint.read(source))

    def _each_expert(self, path: str, keys: list[tuple[str, int]]) -> dict[str, Tensor]:
        """The tensors of projections that the files store separately. keys: (key, number of the expert)."""
        tensors: dict[str, Tensor] = {}
        for key, expert in keys:
            _, projection = cast("tuple[int, str]", expert_of(key))
            value = self.checkpoint.read(key)
            tensors |= self._projection(path, projection, expert, value, key.removesuffix(".weight"))
        return tensors

    def _whole_stack(self, name: str, key: str, value: Tensor) -> dict[str, Tensor]:
        """A parameter of all experts in one tensor, under `key`; as codes, the projections of each expert."""
        path, parameter = self._experts_of(name), name.rpartition(".")[2]
        if path is None or parameter not in (self.specs[path].first, DOWN):
            return {key: self._outside(name, value)}
        if not self.coded:
            return {key: self._stacked(path, parameter, value)}
        tensors, spec = dict[str, Tensor](), self.specs[path]
        for projection, stack in by_projection(parameter, self._turned(value, spec, parameter), spec).items():
            for e in range(spec.num_experts):
                tensors |= self._projection(path, projection, e, stack[e], f"{path}.{e}.{projection}_proj")
        return tensors

    def _turned(self, value: Tensor, spec: ExpertsSpec, parameter: str) -> Tensor:
        """A stacked weight in the model's layout: files may store the transpose (qwen3_vl_moe)."""
        out, inputs = (1 + spec.gated) * spec.intermediate_size, spec.hidden_size
        if parameter == DOWN:
            out, inputs = spec.hidden_size, spec.intermediate_size
        own = (spec.num_experts, inputs, out) if spec.transposed else (spec.num_experts, out, inputs)
        if tuple(value.shape) == own:
            return value
        if tuple(value.mT.shape) == own:
            return value.mT
        raise ValueError(
            f"{self.checkpoint.folder}: {parameter} is {list(value.shape)}, but the config says {list(own)}"
        )

    def _stacked(self, path: str, parameter: str, value: Tensor) -> Tensor:
        """W + s B A of all experts in one tensor."""
        factors = self.adapter.experts.get(path, {}).get(parameter)
        turned = self._turned(value, self.specs[path], parameter)
        if factors is None:
            return self._as_written(value)
        delta, wide = experts_delta(factors, self.specs[path]), self._working(f"{path}.{parameter}", turned)
        self.merged += 1
        merged = self._as_written(wide + delta.to(wide.dtype))
        self.survival.add(path, delta, self._as_written(wide), merged)
        return merged if turned is value else merged.mT.contiguous()

    def _projection(self, path: str, projection: str, expert: int, value: Tensor, stem: str) -> dict[str, Tensor]:
        """One projection of one expert, merged, in the output's format."""
        delta = self._delta(path, projection)
        if delta is not None or self.format is not None:
            value = self._working(stem, value)
        merged = value if delta is None else value + delta[expert].to(value.dtype)
        if self._writer is None:
            parts = {"weight": merged}
            before = value
        else:
            parts = self._writer.parts(merged, stem)
            before = value
            if delta is not None:
                before = self._writer.value(self._writer.parts(value, stem), stem)
        if delta is not None:
            after = parts["weight"] if self._writer is None else self._writer.value(parts, stem)
            self.survival.add(path, delta[expert], before, after)
        return {f"{stem}.{part}": tensor for part, tensor in parts.items()}

    def _coded_weight(self, name: str, keys: list[str], path: str | None) -> dict[str, Tensor]:
        """A weight that the base holds as codes: decoded where the output needs its numbers, otherwise copied."""
        parts = {key.rpartition(".")[2]: self.checkpoint.read(key) for key in keys}
        place = expert_of(name)
        if path is not None and place is not None:
            untouched = self._delta(path, place[1]) is None
            if not (untouched and self.format == self._copied):
                value = self._decoded(name, parts)
                return self._projection(path, place[1], place[0], value, keys[0].rpartition(".")[0])
        elif self._covers(name) or not (self.coded and self.format == self._copied):
            value = self._decoded(name, parts)
            return {f"{keys[0].rpartition('.')[0]}.weight": self._outside(name, value)}
        return dict(zip(keys, parts.values()))

    def _decoded(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        stem = name.removesuffix(".weight")
        scheme = self.checkpoint.scheme(stem)
        if scheme is None:
            raise ValueError(f"{self.checkpoint.label}: {stem} has codes, but no group of the config includes it")
        return weights_of(scheme, parts, f"{self.checkpoint.label}: {stem}")

    def _check(self) -> None:
        """Raises ValueError for a merge that is not possible, before anything is written."""
        self._check_names()
        method = self.checkpoint.method
        if method == "mxfp4":
            raise ValueError(
                f"{OP}: {self.checkpoint.folder} holds mxfp4 codes, which this command does not merge into: keep the "
                "adapter apart, or dequantise the model with transformers first"
            )
        if method is not None and self.coded:
            names = self._other.names | set(self.adapter.whole)
            coded = sorted(name for name in names if self._is_coded(name.removesuffix(".weight")))
            if coded:
                raise ValueError(
                    f"{OP}: the adapter changes {coded[0]}, which {self.checkpoint.folder} holds as codes, and only "
                    "experts are written as codes: give format='bf16', or keep the adapter apart"
                )

    def _check_names(self) -> None:
        """Raises ValueError if the adapter covers a weight that the files do not hold under a name of its own."""
        there: set[str] = set()
        for name, source in self._items():
            there |= set(source.targets) if isinstance(source, ConversionGroup) else {name}
        covered = self._other.names | set(self.adapter.whole)
        for path, by_parameter in self.adapter.experts.items():
            if not any(re.match(rf"{re.escape(path)}\.\d+\.", name) for name in there):
                covered |= {f"{path}.{parameter}" for parameter in by_parameter}
        missing = sorted(covered - there)
        if missing:
            raise ValueError(
                f"{OP}: the adapter covers {missing[0]}, which {self.checkpoint.folder} does not hold as a tensor of "
                "its own: it is tied to another weight, which the merge would change too. Keep the adapter apart"
            )
