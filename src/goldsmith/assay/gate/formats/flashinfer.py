"""FlashInfer-Bench's JSON: a Definition is a problem, its Workloads are the cases, and Solutions are candidates.

A Definition is found with its workloads as in their data sets: `definitions/**/NAME.json`, `workloads/**/NAME.jsonl`.
Where every input is random, small workloads with odd sizes are added, because kernels are called with such sizes too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...declare.case import Case, Make
from ..bad_problem import BadProblem
from ..candidate import Candidate
from ..candidate_call import DTYPES, CandidateCall, Output
from ..isolation.loading import Refusal
from ..problem import Problem
from .wide_reference import WideReference

ODD = (1, 3, 5, 7, 11, 13, 17, 19)  # sizes of variable axes in the added workloads
INTEGERS = {torch.int8: (-128, 128)}
OTHER_INTEGERS = (-1024, 1024)
LANGUAGES = {"python": "python", "triton": "python", "cuda": "cuda", "cpp": "cpp", "c++": "cpp"}


@dataclass(frozen=True)
class DefinedTensor:
    """A tensor of a definition: axes by name, None for a Python scalar."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str


@dataclass(frozen=True, eq=False)
class Definition:
    name: str
    axes: Mapping[str, int | None]  # None: variable
    inputs: tuple[DefinedTensor, ...]
    outputs: tuple[DefinedTensor, ...]
    reference: str
    constraints: tuple[str, ...] = ()

    @property
    def variable(self) -> list[str]:
        return [name for name, value in self.axes.items() if value is None]

    @property
    def drawn(self) -> bool:
        """Whether every input may be drawn at random; whole numbers may be indices, which must fit."""
        return all(t.shape is not None and DTYPES[t.dtype].is_floating_point for t in self.inputs)

    @property
    def free(self) -> bool:
        """Whether all sizes are as good as those of a workload."""
        return self.drawn and not self.constraints

    def draw(self, make: Make, **sizes: Any) -> dict[str, Any]:
        """Inputs of these sizes, all at random."""
        return {t.name: _value(t, {}, self, sizes, make, Path()) for t in self.inputs}

    def allows(self, sizes: Mapping[str, int]) -> bool:
        known = {**{n: v for n, v in self.axes.items() if v is not None}, **sizes}
        try:
            return all(eval(text, {"__builtins__": {}}, dict(known)) for text in self.constraints)
        except (NameError, ArithmeticError):
            return False


def is_definition(data: object) -> bool:
    return isinstance(data, Mapping) and "reference" in data and "axes" in data


def is_solution(data: object) -> bool:
    return isinstance(data, Mapping) and "sources" in data and "spec" in data


def read(path: Path, text: str, *, workloads: Path | None = None, backward: Any = None) -> Problem:
    """The problem of a definition's JSON, with the workloads of its data set or of `workloads`, a JSONL file."""
    definition = parsed(text, str(path))
    reference = WideReference(definition.reference, definition.name)
    workload_file = workloads if workloads is not None else beside(path, definition.name)
    root = root_of(workload_file if workload_file is not None else path)
    lines = workload_file.read_text(encoding="utf-8") if workload_file is not None else ""
    cases = [_case(definition, w, root) for w in _workloads(lines, definition, str(workload_file))]
    cases += _odd_cases(definition, cases)
    if not cases:
        raise BadProblem(
            f"{path.name}: the problem has no cases: no workloads/**/{definition.name}.jsonl is beside "
            f"definitions/. Give the file with --workloads"
        )
    reference.look_for_roundings(_smallest(cases))
    narrow = {t.dtype: t.name for t in reversed(definition.inputs) if t.dtype in ("float16", "bfloat16")}
    stored = {stage: narrow[dtype] for stage, dtype in reference.roundings.values() if dtype in narrow}
    stored |= {stage: name for stage in reference.products.values() for name in [*narrow.values()][:1]}
    return Problem(
        reference.golden(tuple(t.name for t in definition.inputs)),
        cases,
        name=definition.name,
        backward=backward,
        outputs=tuple(t.name for t in definition.outputs),
        stored=stored,
        construct=entry(definition).to_data(),
    )


def entry(definition: Definition) -> CandidateCall:
    """How solutions are called. Each says itself whether it fills its last arguments or returns its results."""
    axes = {
        axis: (axis, t.name, dim)
        for t in reversed(definition.inputs)
        for dim, axis in enumerate(t.shape or ())
        if definition.axes[axis] is None
    }
    outputs = tuple(
        Output(t.name, tuple(a if (size := definition.axes[a]) is None else size for a in t.shape or ()), t.dtype)
        for t in definition.outputs
    )
    return CandidateCall(
        "positional",
        ("run",),
        order=tuple(t.name for t in definition.inputs),
        outputs=outputs,
        axes=tuple(axes.values()),
    )


def parsed(text: str, name: str) -> Definition:
    """Raises `BadProblem` that names the field."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadProblem(f"{name}: not JSON: {error}") from None
    if not is_definition(data):
        raise BadProblem(f"{name}: not a definition; it needs name, axes, inputs, outputs and reference")
    axes: dict[str, int | None] = {}
    for axis, spec in _fields(data, "axes", name).items():
        kind = spec.get("type") if isinstance(spec, Mapping) else None
        if kind not in ("const", "var") or (kind == "const" and not isinstance(spec.get("value"), int)):
            raise BadProblem(f'{name}: axis {axis!r} must be {{"type": "var"}} or {{"type": "const", "value": N}}')
        axes[axis] = spec["value"] if kind == "const" else None
    tensors = {}
    for side in ("inputs", "outputs"):
        tensors[side] = tuple(_tensor(n, s, axes, f"{name}: {side}.{n}") for n, s in _fields(data, side, name).items())
    if not isinstance(data["reference"], str):
        raise BadProblem(f"{name}: reference must be Python source with a function run")
    return Definition(
        str(data.get("name") or Path(name).stem), axes, tensors["inputs"], tensors["outputs"], data["reference"],
        tuple(data.get("constraints") or ()),
    )  # fmt: skip


def solution(data: Mapping[str, object], name: str) -> tuple[str, Candidate]:
    """(definition, candidate) of a Solution's JSON; raises `Refusal`."""
    spec, sources = data.get("spec"), data.get("sources")
    if not isinstance(spec, Mapping) or not isinstance(sources, list) or not sources:
        raise Refusal("bad_solution", f"{name}: a solution needs spec and sources")
    texts = {str(s.get("path")): str(s.get("content")) for s in sources if isinstance(s, Mapping)}
    file, _, function = str(spec.get("entry_point", "")).partition("::")
    if file not in texts or not function:
        raise Refusal(
            "bad_solution",
            f"{name}: entry_point {spec.get('entry_point')!r} must be FILE::FUNCTION with a file among the sources: "
            f"{', '.join(texts)}",
        )
    language = LANGUAGES.get(str(spec.get("language", "python")).lower())
    if language is None:
        raise Refusal("unknown_language", f"{name}: language {spec.get('language')!r}; known: {', '.join(LANGUAGES)}")
    if language != "python" and str(spec.get("binding") or "tvm-ffi").lower() != "torch":
        raise Refusal("unknown_binding", f"{name}: C++ and CUDA solutions are judged with binding 'torch' only")
    candidate = Candidate(
        name=str(data.get("name") or name),
        source=texts[file],
        language=language,
        entry=function,
        files={p: t for p, t in texts.items() if p != file},
        call="destination" if spec.get("destination_passing_style", True) else "positional",
    )
    return str(data.get("definition", "")), candidate


def beside(path: Path, name: str) -> Path | None:
    """The workloads of a definition in the data set that its file lies in."""
    for folder in path.resolve().parents:
        if (folder / "workloads").is_dir():
            return next(iter(sorted((folder / "workloads").rglob(f"{name}.jsonl"))), None)
    return None


def root_of(path: Path) -> Path:
    """The root of a data set, to which paths of safetensors files are relative."""
    for folder in path.resolve().parents:
        if (folder / "definitions").is_dir() or (folder / "workloads").is_dir():
            return folder
    return path.resolve().parent


def _fields(data: Mapping[str, object], key: str, name: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, Mapping) or not value:
        raise BadProblem(f"{name}: {key} must be an object that is not empty")
    return value


def _tensor(name: str, spec: object, axes: Mapping[str, int | None], where: str) -> DefinedTensor:
    shape, dtype = (spec.get("shape"), spec.get("dtype")) if isinstance(spec, Mapping) else (None, None)
    if dtype not in DTYPES:
        raise BadProblem(f"{where}: dtype {dtype!r} cannot be judged; known: {', '.join(DTYPES)}")
    unknown = [axis for axis in shape or () if axis not in axes]
    if unknown:
        raise BadProblem(f"{where}: axis {unknown[0]!r} is not among the axes: {', '.join(axes)}")
    return DefinedTensor(name, None if shape is None else tuple(shape), dtype)


def _workloads(lines: str, definition: Definition, name: str) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            data = data.get("workload", data)
            missing = [axis for axis in definition.variable if not isinstance(data["axes"].get(axis), int)]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise BadProblem(f"{name}, line {number}: not a workload; it needs axes and inputs") from None
        if missing:
            raise BadProblem(f"{name}, line {number}: the workload gives no size for axis {missing[0]!r}")
        yield data


def _case(definition: Definition, workload: Mapping[str, Any], root: Path) -> Case:
    sizes = {axis: workload["axes"][axis] for axis in definition.variable}
    given = workload.get("inputs") or {}
    unknown = [t.name for t in definition.inputs if t.shape is None and t.name not in given]
    if unknown:
        raise BadProblem(f"{definition.name}: a workload gives no value for the scalar {unknown[0]!r}")

    def draw(make: Make, **_: object) -> dict[str, object]:
        return {t.name: _value(t, given.get(t.name) or {}, definition, sizes, make, root) for t in definition.inputs}

    label = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    free = definition.free and all(
        (given.get(t.name) or {}).get("type", "random") == "random" for t in definition.inputs
    )
    name = f"{str(workload.get('uuid', 'workload'))[:8]}[{label}]"
    return Case(name, definition.draw if free else draw, sizes, "a workload")


def _value(
    t: DefinedTensor,
    source: Mapping[str, Any],
    definition: Definition,
    sizes: Mapping[str, int],
    make: Make,
    root: Path,
) -> object:
    kind, dtype = source.get("type", "random"), DTYPES[t.dtype]
    if kind == "scalar":
        return source["value"]
    if kind == "safetensors":
        from safetensors.torch import load_file

        return load_file(str(root / source["path"]))[source["tensor_key"]].to(make.device)
    shape = [size if (size := definition.axes[axis]) is not None else sizes[axis] for axis in t.shape or ()]
    return _random(shape, dtype, make.generator).to(make.device)


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Distributions as FlashInfer-Bench's: normal, within [-2, 2] in 8 bits; whole numbers in +-1024 or all of int8."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        low, high = INTEGERS.get(dtype, OTHER_INTEGERS)
        return torch.randint(max(low, 0) if dtype is torch.uint8 else low, high, shape, generator=generator).to(dtype)
    drawn = torch.randn(shape, generator=generator)
    return (drawn.clamp(-2, 2) if dtype.itemsize == 1 else drawn).to(dtype)


def _odd_cases(definition: Definition, cases: Sequence[Case]) -> list[Case]:
    """Two workloads with odd sizes, where every tensor may be drawn and the constraints allow them."""
    if not definition.variable or not definition.drawn:
        return []
    known = [dict(case.sizes) for case in cases]
    added = []
    for first in (ODD, ODD[4:] + ODD[:4]):
        sizes = {axis: first[i % len(first)] for i, axis in enumerate(definition.variable)}
        if sizes not in known and definition.allows(sizes):
            added.append(_case(definition, {"axes": sizes, "uuid": "odd"}, Path()))
    return added


def _smallest(cases: Sequence[Case]) -> Mapping[str, object]:
    def size(case: Case) -> int:
        product = 1
        for value in case.sizes.values():
            product *= max(int(str(value)), 1)
        return product

    return min(cases, key=size).build()
