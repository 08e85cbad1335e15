"""The child process: reads jobs from stdin, a JSON line each, loads the host's copy, writes a JSON line for each row.

A wrong kernel may end the process; the rows that are then missing are the parent's to tell.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUDGET = 240.0  # seconds for a diagnosis: four times what it has by itself, since others use the machine, too
TOGETHER = "all cases"


def main() -> int:
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a kernel prints is not a row
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: what it cuts short is no row
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
            for row in rows(json.loads(line), Path(folder)):
                results.write(json.dumps(row) + "\n")
                results.flush()
    return 0


def rows(job: dict, folder: Path) -> Iterator[dict]:
    """The job's rows; before each one, what is about to be run, and after the last one an end."""
    import catalogue

    done = {(case, seed) for case, seed in job["done"]}
    if job["kind"] == "clean":
        import_from(HERE.parents[1] / "src")
        _quiet()
        finished = {seed for _, seed in done}
        for seed in (s for s in job["draws"] if s not in finished):
            yield {"begin": {"kind": "clean", "host": "", "backend": "torch", "case": "", "seed": seed}}
            yield clean(seed)
        yield {"end": len(job["draws"])}
        return
    host = catalogue.hosts()[job["host"]]
    fault = next((f for f in catalogue.faults() if f.key == job["fault"]), None)
    path = catalogue.copy(host, job["backend"], fault, folder)
    import_from(path if host.package else HERE.parents[1] / "src")
    _quiet()
    import loading

    make = loading.factory(host, job["backend"], path)
    cases = list(fault.cases if fault is not None and fault.cases else cases_of(make))
    if fault is not None and fault.together:
        cases = [TOGETHER]
    first = job.get("first", False)
    seeds, cases = 1 if first else job["seeds"], cases[:1] if first or job["quick"] else cases
    for seed, case in itertools.product(range(seeds), cases):
        if (case, seed) in done:
            continue
        row = {"kind": job["kind"], "host": host.name, "backend": job["backend"], "case": case, "seed": seed}
        if fault is not None:
            row["fault"] = fault.key
        yield {"begin": row}
        device = job["device"]
        found = examine(make, case, seed, fault.dtype, device) if fault is not None else twin(make, case, seed, device)
        row |= found
        if job["baselines"] and case != TOGETHER:
            import baselines

            op = loading.operator(host) if host.package else None
            dtype, interpreted = fault.dtype if fault is not None else "", job["backend"] == "triton"
            row["baselines"] = baselines.rejected(make, case, seed, dtype, op, interpreted=interpreted)
        yield {**row, "load": round(os.getloadavg()[0], 1)}
    yield {"end": 0 if first else seeds}


class _From(PathFinder):
    """Finds our own package in one folder, before an editable install of the checkout, which finds it itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        if name.partition(".")[0] != "goldsmith":
            return None
        return PathFinder.find_spec(name, [self._folder] if path is None else path, target)


def import_from(folder: Path) -> None:
    """Our own package comes from there; a child that has it from elsewhere must not go on."""
    imported = sys.modules.get("goldsmith")
    if imported is not None and Path(imported.__file__).parent.parent != folder:
        raise RuntimeError(f"goldsmith was imported from {imported.__file__}, and is wanted from {folder}")
    if imported is None:
        sys.meta_path.insert(0, _From(folder))


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def cases_of(make: Callable[[], Any]) -> list[str]:
    return [case.name for case in make().cases]


def examine(make: Callable[[], Any], case: str, seed: int, dtype: str = "", device: str = "cpu") -> dict:
    """What `diagnose` says of a faulty host in one case."""
    import torch

    from goldsmith import assay
    from goldsmith.assay.diagnosis import features, rules

    started = time.perf_counter()
    one = None if case == TOGETHER else case
    drawn = getattr(torch, dtype) if dtype else None
    found = assay.diagnose(make(), one, dtype=drawn, device=device, seed=seed, budget_s=BUDGET)
    raw, seen = {}, []
    if found.evidence is not None and found.verdict == "fail":
        raw = {id: round(match.score, 4) for id, match in rules.matches(found.evidence).items()}
        seen = sorted(features.features(found.evidence))
    sizes = sizes_of(make, one) if one is not None else {}
    return told(found, sizes) | {"raw": raw, "features": seen, "seconds": round(time.perf_counter() - started, 3)}


def told(found: Any, sizes: dict) -> dict:
    """What a row keeps of a diagnosis."""
    return {
        "verdict": found.verdict,
        "stage": found.first_wrong_stage,
        "causes": [{"id": c.id, "score": c.score, "params": _plain(c.params)} for c in found.causes],
        "sentences": found.causes[0].evidence[:3] if found.causes else [],
        "findings": _findings(found.report),
        "notes": sorted({n.id for n in found.report.notes}),
        "sizes": sizes,
        "small": _plain(dict(found.case.get("sizes", {}))),
        "partial": found.partial,
    }


def twin(make: Callable[[], Any], case: str, seed: int, device: str = "cpu") -> dict:
    """The same host without a fault: its verdict, and what each part of an examination costs."""
    import torch

    from goldsmith import assay
    from goldsmith.assay.diagnosis.isolate import isolate
    from goldsmith.assay.execute.run import RunSettings, execute
    from goldsmith.assay.judge.examination import Examination
    from goldsmith.assay.probes import select, values

    target = make()
    report = assay.check(target, case, device=device, seed=seed, raises=False)
    chosen = target.case(case)
    examination = Examination(target, chosen, target.dtypes[0], device, seed, select(("values",)), chosen.name)
    state = torch.random.get_rng_state()
    plain = _timed(lambda: execute(examination.material, RunSettings(fill="zero")))
    compare = _timed(lambda: values.run(examination))
    stages = _timed(lambda: isolate(examination))
    torch.random.set_rng_state(state)
    cost = {"plain": plain, "compare": compare, "stages": compare + stages, "all": report.seconds}
    return {
        "verdict": report.verdict,
        "findings": _findings(report),
        "notes": sorted({n.id for n in report.notes}),
        "seconds": report.seconds,
        "cost": {name: round(seconds, 5) for name, seconds in cost.items()},
    }


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    with contextlib.suppress(RuntimeError):
        call()
    return time.perf_counter() - started


def clean(seed: int) -> dict:
    """A right kernel, drawn at random with its order of sums, layout, dtype and threads, under all probes."""
    import torch

    import assay_clean
    from goldsmith import assay

    threads = 1 + seed % 3
    torch.set_num_threads(threads)
    target, words = assay_clean.draw(seed)
    report = assay.check(target, seed=seed, raises=False)
    return {
        "kind": "clean", "host": words.split()[0], "backend": "torch", "case": words, "seed": seed, "threads": threads,
        "verdict": report.verdict, "findings": _findings(report), "seconds": report.seconds,
    }  # fmt: skip


def sizes_of(make: Callable[[], Any], case: str) -> dict:
    return _plain({k: v for k, v in make().case(case).sizes.items() if isinstance(v, int)})


def _findings(report: Any) -> list[str]:
    return [f"{f.rung} {f.probe} {f.tensor}: {f.text}"[:300] for f in report.findings[:6]]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


if __name__ == "__main__":
    sys.exit(main())
