"""Runs as plain data: the arguments and settings that go to a candidate's process, and the results that come back.

What comes back is checked field by field, because a candidate may have forged it. Output gradients do not come back:
the judge makes them again, and learns only which outputs got one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, cast

from torch import Tensor

from ...declare.target import Target
from ...execute import raised
from ...execute.interpreter import Interpreted
from ...execute.memory import Overrun
from ...execute.plain_calls import LEAST
from ...execute.records import (
    CandidateRun,
    Material,
    OpenGraph,
    OpenGraphs,
    PlainBackward,
    PlainCalls,
    PlainResults,
    RunSettings,
)
from .candidate_side import CandidateSide, Parts
from .protocol import Malformed

_FACTS = ("outputs", "saved", "grads", "mutates")
_HERE = ("live_outputs", "live_grads", "error", "overruns", "interpreted", "between")  # not as they are, or not at all
_TEXTS_OF_EVENTS = {
    "frames": 1, "file": 2, "folder": 1, "import": 1, "process": 1, "thread": 0, "traced": 1, "patched": 1, "left": 1,
    "remark": 1,
}  # fmt: skip
_LONGEST = 300  # characters of a text of an event
_PHASES = ("forward", "backward")


def request_of(material: Material, settings: RunSettings) -> dict[str, object]:
    return {"target": _target(material.target), "material": _material(material), "settings": _settings(settings)}


def run_of(request: Mapping[str, Any], parts: Parts) -> tuple[Material, RunSettings]:
    """The arguments and settings of a request, for the candidate that this process holds."""
    side = cast("Target", CandidateSide(parts, **request["target"]))
    settings = dict(request["settings"])
    if settings["between"] is not None:
        settings["between"] = Material(side, **settings["between"])
    if settings["plain"] is not None:
        others = tuple(Material(side, **m) for m in settings["plain"]["others"])
        backward = tuple(PlainBackward(**b) for b in settings["plain"]["backward"])
        graphs = settings["plain"]["open"]
        further = {"others": others, "backward": backward, "open": None if graphs is None else OpenGraphs(**graphs)}
        settings["plain"] = PlainCalls(**{**settings["plain"], **further})
    return Material(side, **request["material"]), RunSettings(**settings)


def calls_request_of(materials: Sequence[Material]) -> dict[str, Any]:
    """Plain calls with these inputs."""
    return {"target": _target(materials[0].target), "materials": [_material(m) for m in materials]}


def materials_of(request: Mapping[str, Any], parts: Parts) -> list[Material]:
    """The inputs that `calls_request_of` has put into a request."""
    side = cast("Target", CandidateSide(parts, **request["target"]))
    return [Material(side, **m) for m in request["materials"]]


def times_from_data(data: object, count: int) -> list[tuple[float, float]]:
    """(microseconds, microseconds of work left) of each call; Malformed for anything else."""
    if not isinstance(data, list) or len(data) != count:
        raise Malformed("times of another number of calls")
    for row in data:
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(v, float) and 0 <= v < 1e12 for v in row):
            raise Malformed("times that are no numbers")
    return [(row[0], row[1]) for row in data]


def outputs_from_data(data: object, count: int) -> list[dict[str, Tensor]]:
    """The results of calls; Malformed for anything else."""
    if not isinstance(data, list) or len(data) != count:
        raise Malformed("results of another number of calls")
    return [_tensors(outputs) for outputs in data]


def events_from_data(seen: Any) -> list[list[str]]:
    """What a process has noted; Malformed for anything that `EventLog` does not note."""
    if not isinstance(seen, list) or not all(map(_is_event, seen)):
        raise Malformed("notes that nothing there makes")
    return [[" ".join(text.split())[:_LONGEST] for text in note] for note in seen]


def _is_event(note: Any) -> bool:
    texts = isinstance(note, list) and note and all(isinstance(text, str) for text in note)
    return bool(texts) and _TEXTS_OF_EVENTS.get(note[0], -1) == len(note) - 1


def _target(target: Target) -> dict[str, object]:
    backward = target.backward if target.backward in (None, "auto") else "own"
    return {**{n: getattr(target, n) for n in _FACTS}, "backward": backward}


def _material(material: Material) -> dict[str, object]:
    return {f.name: getattr(material, f.name) for f in fields(material) if f.name != "target"}


def _settings(settings: RunSettings) -> dict[str, object]:
    data = {f.name: getattr(settings, f.name) for f in fields(settings)}
    data["between"] = None if settings.between is None else _material(settings.between)
    if settings.plain is not None:
        data["plain"] = {f.name: getattr(settings.plain, f.name) for f in fields(settings.plain)}
        data["plain"]["others"] = [_material(m) for m in settings.plain.others]
        data["plain"]["backward"] = [asdict(b) for b in settings.plain.backward]
        data["plain"]["open"] = None if settings.plain.open is None else asdict(settings.plain.open)
    return data


def results_to_data(run: CandidateRun) -> dict[str, object]:
    data = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in _HERE}
    data["error"] = None if run.error is None else raised.to_data(run.error)
    data["cotangents"] = list(run.cotangents)
    data["overruns"] = [asdict(o) for o in run.overruns]
    data["interpreted"] = asdict(run.interpreted)
    data["between"] = None if run.between is None else results_to_data(run.between)
    if run.plain is not None:
        data["plain"] = {f.name: getattr(run.plain, f.name) for f in fields(run.plain) if f.name != "watched"}
        different = {id(outputs): outputs for outputs in run.plain.outputs}
        numbers = {key: number for number, key in enumerate(different)}
        data["plain"]["outputs"] = list(different.values())
        data["plain"]["calls"] = [numbers[id(outputs)] for outputs in run.plain.outputs]
        data["plain"]["open"] = [vars(graph) for graph in run.plain.open]
        data["plain"]["rewritten"] = None if run.plain.rewritten is None else vars(run.plain.rewritten)
    return data


def results_from_data(data: Any, material: Material, settings: RunSettings) -> CandidateRun:
    """The run that was asked for, from plain data; Malformed if a field is not of its kind."""
    try:
        run = _run(data, material, settings)
        missing = "" if run.error else _missing(run, material, settings)
        if missing:
            raise Malformed(f"results without {missing}")
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"results that are no run ({type(error).__name__}: {error})"[:200]) from error
    return run


def _missing(run: CandidateRun, material: Material, settings: RunSettings) -> str:
    """What a run that has not raised lacks of what was asked for; what does not come cannot be judged."""
    if settings.plain is not None:
        plain, graphs = run.plain or PlainResults(), settings.plain.open
        if len(plain.outputs) < min(LEAST, len(settings.plain.schedule)):
            return "those of all plain calls"
        return "" if graphs is None or len(plain.open) == len(graphs.graphs) else "those of open graphs"
    if settings.between is not None and run.between is None:
        return "those of the call in between"
    if settings.earlier and not {n for n in run.outputs if n not in run.overwritten} <= run.earlier.keys():
        return "those of an earlier call"
    twice = settings.backward_twice and not material.target.mutates
    return "those of the second backward" if twice and run.grads.keys() != (run.second_grads or {}).keys() else ""


def _run(data: dict[str, Any], material: Material, settings: RunSettings) -> CandidateRun:
    outputs = _tensors(data["outputs"])
    sent = {n: settings.cotangents.get(n) for n in _names(data["cotangents"])}
    between = settings.between or material
    run = CandidateRun(
        names=tuple(_names(data["names"])),
        outputs=outputs,
        grads=_tensors(data["grads"], optional=True),
        second_grads=None if data["second_grads"] is None else _tensors(data["second_grads"], optional=True),
        stages=_tensors(data["stages"]),
        cotangents={n: material.cotangent(n, outputs[n]) if c is None else c for n, c in sent.items()},
        saved=tuple(_names(data["saved"])),
        error=None if data["error"] is None else raised.from_data(data["error"]),
        phase=_one_of(data["phase"], _PHASES),
        overruns=[_overrun(o) for o in data["overruns"]],
        changed=_tensors(data["changed"]),
        by_forward=set(_names(data["by_forward"])),
        overwritten=_tensors(data["overwritten"]),
        unwritten=_tensors(data["unwritten"]),
        from_bands=_tensors(data["from_bands"]),
        aliases={(str(a), str(b)) for a, b in data["aliases"]},
        called_tracing=bool(data["called_tracing"]),
        own_function=bool(data["own_function"]),
        late_bytes=int(data["late_bytes"]),
        reused={str(a): str(b) for a, b in data["reused"].items()},
        covered=_tensors(data["covered"]),
        flaws={str(a): str(b)[:300] for a, b in data["flaws"].items()},
        changed_settings=[str(s)[:300] for s in data["changed_settings"]],
        interpreted=Interpreted(int(data["interpreted"]["launches"]), bool(data["interpreted"]["bfloat16"])),
        between=None if data["between"] is None else _run(data["between"], between, RunSettings()),
        earlier=_tensors(data["earlier"]),
        plain=None if data["plain"] is None else _plain(data["plain"]),
    )
    results = {**run.outputs, **{n: g for n, g in run.grads.items() if g is not None}}
    for name, mask in (*run.unwritten.items(), *run.from_bands.items()):
        if name not in results or results[name].shape != mask.shape:
            raise Malformed("results with a mask that fits no result")
    for mask in (*run.changed.values(), *run.overwritten.values()):
        if mask.numel() == 0:
            raise Malformed("results with an empty mask")
    return run


def _plain(data: dict[str, Any]) -> PlainResults:
    different = [_tensors(outputs) for outputs in data["outputs"]]
    if not all(type(number) is int and 0 <= number < len(different) for number in data["calls"]):
        raise Malformed("results of a plain call that were not sent")
    return PlainResults(
        outputs=[different[number] for number in data["calls"]],
        grads={int(n): _tensors(grads, optional=True) for n, grads in data["grads"].items()},
        sent={int(n): tuple(_names(sent)) for n, sent in data["sent"].items()},
        inputs=_tensors(data["inputs"]),
        late=[(int(number), str(name)) for number, name in data["late"]],
        threads=int(data["threads"]),
        open=list(map(_graph, data["open"])),
        rewritten=None if data["rewritten"] is None else _graph(data["rewritten"]),
        shared=[_tensors(outputs) for outputs in data["shared"]],
        kept=int(data["kept"]),
        overwritten=_names(data["overwritten"]),
    )


def _graph(data: dict[str, Any]) -> OpenGraph:
    outputs, sent = _tensors(data["outputs"]), tuple(_names(data["sent"]))
    if not outputs.keys() >= set(sent):
        raise Malformed("gradients for results that were not sent")
    return OpenGraph(outputs, _tensors(data["grads"], optional=True), sent)


def _overrun(data: dict[str, Any]) -> Overrun:
    numbers = {n: int(data[n]) for n in ("bytes", "distance", "body")}
    return Overrun(str(data["label"])[:200], _one_of(data["side"], ("past", "before", "gap")), **numbers)


def _tensors(data: dict, *, optional: bool = False) -> dict[str, Any]:
    for name, tensor in data.items():
        if not isinstance(name, str) or not (isinstance(tensor, Tensor) or optional and tensor is None):
            raise Malformed("results with something that is no tensor")
    return dict(data)


def _names(data: Any) -> list[str]:
    names = list(data)
    if not all(isinstance(n, str) for n in names):
        raise Malformed("results with a name that is no text")
    return names


def _one_of(value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise Malformed(f"results with an unknown word {value!r}"[:100])
    return str(value)
