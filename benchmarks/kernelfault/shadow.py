"""Shadow mode: whether each edit of the golden that another state of the assay tries has an equal in this one.

    python -m benchmarks.kernelfault.shadow --against REVISION [--hosts adamw,gemm] [--most 12] [--seed 0]

Every edit is applied to the golden of right kernels, and its tensor is compared bit by bit in float64. An edit is lost
where no edit of this state makes the same numbers, and renamed where only edits with another cause do. Exit status: 0
nothing lost, 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TENSORS = 2  # of the forward, and as many gradients
_NUMBER = 1.3125  # stands for the number that a search would fit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernelfault.shadow", description=__doc__)
    parser.add_argument("--against", required=True, help="a revision of this repository")
    parser.add_argument("--hosts", default="", help="only these, with commas between them")
    parser.add_argument("--most", type=int, default=12, help="hosts, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from . import catalogue

    names = sorted(h.name for h in catalogue.hosts().values() if not h.package)
    drawn = random.Random(options.seed).sample(names, min(options.most, len(names)))
    lost, count = Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        archive = subprocess.run(["git", "archive", options.against, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for name in options.hosts.split(",") if options.hosts else drawn:
            old, new = (_offers(root, name) for root in (Path(folder), ROOT))
            for tensor, edits in old.items():
                mine: dict[str, set[str]] = {}
                for cause, _, digest in new.get(tensor, []):
                    mine.setdefault(digest, set()).add(cause)
                count += len(edits)
                missing = [(cause, text) for cause, text, digest in edits if digest not in mine]
                other = [1 for cause, _, digest in edits if digest in mine and cause not in mine[digest]]
                print(f"{name} {tensor}: {len(edits)} edits, {len(new.get(tensor, []))} here, {len(missing)} lost, "
                      f"{len(other)} renamed", flush=True)  # fmt: skip
                lost.update(missing)
    for (cause, text), times in lost.most_common(60):
        print(f"  {times}  {cause}: {text}")
    print(f"{count} edits, {sum(lost.values())} lost")
    return 1 if lost else 0


def _offers(root: Path, host: str) -> dict[str, list[list[str]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, __file__, str(root), host], env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{host} with {root}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _child(root: Path, name: str) -> None:
    """Writes (cause, text, digest of the edited tensor) of all edits, by tensor."""
    sys.path[:1] = [str(ROOT)]
    from benchmarks.kernelfault import catalogue, targets, worker

    worker.import_from(root / "src")
    import torch

    torch.set_num_threads(1)
    host = catalogue.hosts()[name]
    backend = next(iter(host.backends))
    make = targets.factory(host, backend, ROOT / host.backends[backend])
    print(json.dumps(dict(_of_tensors(make()))))


def _of_tensors(target: Any) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    from goldsmith.assay.judge.examination import Examination
    from goldsmith.assay.probes import select, values

    case = target.cases[0]
    examination = Examination(target, case, target.dtypes[0], "cpu", 0, select(("values",)), case.name)
    values.run(examination)
    results = [n for n, b in examination.ref.bounded.items() if b.value.is_floating_point() and b.value.numel()]
    forward = [n for n in results if not n.endswith(".grad")][-_TENSORS:]
    for tensor in (*forward, *[n for n in results if n.endswith(".grad")][:_TENSORS]):
        yield tensor, list(_edits(examination, tensor))


def _edits(examination: Any, tensor: str) -> Iterator[tuple[str, str, str]]:
    import torch

    from goldsmith.assay.diagnosis.search import offers
    from goldsmith.assay.diagnosis.search.engine import Search
    from goldsmith.assay.diagnosis.search.judge import Judge

    bounded = examination.ref.bounded[tensor]
    judge = Judge(bounded.value + 1, bounded.value, bounded.bound)
    search = Search(examination, tensor, judge, examination.first, None)
    changes = sorted(offers.of(search), key=lambda c: -c.prior)
    same = _digest(torch, search.values_after({}, tensor), tensor)
    for kind, error in search.left_out.items():
        print(f"{tensor}: {kind} was left out: {error}", file=sys.stderr)
        yield "left out", kind, f"left out {kind}"
    for change in changes:
        if change.redone is not None or change.composed is not None:
            continue
        if change.free is not None:
            change = replace(change, edit=change.edit.with_number(_NUMBER), free=None)
        digest = _digest(torch, search.run_changed(change, tensor), tensor)
        if digest not in ("", same):
            yield change.cause, change.text, digest


def _digest(torch: Any, values: Any, tensor: str) -> str:
    value = (values or {}).get(tensor)
    if value is None:
        return ""
    value = torch.where(torch.isnan(value), torch.nan, value.double() + 0.0).contiguous()
    return hashlib.sha1(value.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        _child(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
