"""The child process: reads jobs from stdin, a JSON line each, and writes a JSON line per row.

A wrong kernel may kill the process; the parent then writes the missing row.
"""

from __future__ import annotations

import contextlib
import ctypes
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

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 240.0  # seconds for a diagnosis: four times the default, because others use the machine too
TOGETHER = "all cases"
SIGNAL_AT_PARENTS_END = 1  # prctl's PR_SET_PDEATHSIG


def main() -> int:
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel prints must not be read as a row
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the temporary folder goes, too
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_END, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    sys.path[:1] = [str(ROOT)]  # instead of this folder, whose file names are not for import
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
            for row in rows(json.loads(line), Path(folder)):
                results.write(json.dumps(row) + "\n")
                results.flush()
    return 0


def rows(job: dict, folder: Path) -> Iterator[dict]:
    """The job's rows: a "begin" before each row, and an "end" after the last one."""
    from benchmarks.kernelfault import catalogue

    done = {(case, seed) for case, seed in job["done"]}
    if job["kind"] == "clean":
        import_from(ROOT / "src")
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
    import_from(path if host.package else ROOT / "src")
    _quiet()
    from benchmarks.kernelfault import targets

    make = targets.factory(host, job["backend"], path)
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
        fields = examine(make, case, seed, fault.dtype, device) if fault is not None else twin(make, case, seed, device)
        row |= fields
        if job["baselines"] and case != TOGETHER:
            from benchmarks.kernelfault import baselines

            op = targets.operator(host) if host.package else None
            dtype, interpreted = fault.dtype if fault is not None else "", job["backend"] == "triton"
            row["baselines"] = baselines.rejected(make, case, seed, dtype, op, interpreted=interpreted)
        yield {**row, "load": round(os.getloadavg()[0], 1)}
    yield {"end": 0 if first else seeds}


class _From(PathFinder):
    """Finds goldsmith in one folder, before an editable install of the checkout would."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        if name.partition(".")[0] != "goldsmith":
            return None
        return PathFinder.find_spec(name, [self._folder] if path is None else path, target)


def import_from(folder: Path) -> None:
    """Import goldsmith from this folder; raises RuntimeError where it was imported from elsewhere."""
    imported = sys.modules.get("goldsmith")
    if imported is not None and Path(imported.__file__).parent.parent != folder:
        raise RuntimeError(f"goldsmith was imported from {imported.__file__}, but must come from {folder}")
    if imported is None:
        sys.meta_path.insert(0, _From(folder))


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def cases_of(make: Callable[[], Any]) -> list[str]:
    return [case.name for case in make().cases]


def examine(make: Callable[[], Any], case: str, seed: int, dtype: str = "", device: str = "cpu") -> dict:
    """The diagnosis of a faulty host in one case, as fields of a row."""
    import torch

    from goldsmith import assay
    from goldsmith.assay.diagnosis.causes import features, rules

    started = time.perf_counter()
    one = None if case == TOGETHER else case
    drawn = getattr(torch, dtype) if dtype else None
    diagnosis = assay.diagnose(make(), one, dtype=drawn, device=device, seed=seed, budget_s=BUDGET)
    raw, seen = {}, []
    if diagnosis.evidence is not None and diagnosis.verdict == "fail":
        raw = {id: round(match.score, 4) for id, match in rules.matches(diagnosis.evidence).items()}
        seen = sorted(features.features(diagnosis.evidence))
    sizes = sizes_of(make, one) if one is not None else {}
    return diagnosis_fields(diagnosis, sizes) | {
        "raw": raw,
        "features": seen,
        "seconds": round(time.perf_counter() - started, 3),
    }


def diagnosis_fields(diagnosis: Any, sizes: dict) -> dict:
    """The fields of a row that come from the diagnosis."""
    return {
        "verdict": diagnosis.verdict,
        "stage": diagnosis.first_wrong_stage,
        "causes": [{"id": c.id, "score": c.score, "params": _plain(c.params)} for c in diagnosis.causes],
        "sentences": diagnosis.causes[0].evidence[:3] if diagnosis.causes else [],
        "findings": _findings(diagnosis.report),
        "notes": sorted({n.id for n in diagnosis.report.notes}),
        "sizes": sizes,
        "small": _plain(dict(diagnosis.case.get("sizes", {}))),
        "partial": diagnosis.partial,
    }


def twin(make: Callable[[], Any], case: str, seed: int, device: str = "cpu") -> dict:
    """The host without a fault: its verdict, and the cost of each part of a check."""
    import torch

    from goldsmith import assay
    from goldsmith.assay.diagnosis.experiments.isolate import isolate
    from goldsmith.assay.execute.records import RunSettings
    from goldsmith.assay.execute.run import execute
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
    """Check a right kernel, drawn at random with its order of sums, layout, dtype and threads, under all probes."""
    import torch

    from benchmarks.assay.right_kernels import draws
    from goldsmith import assay

    threads = 1 + seed % 3
    torch.set_num_threads(threads)
    target, words = draws.draw(seed)
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
