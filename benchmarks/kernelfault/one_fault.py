"""Diagnoses one fault in one case, in a child process, as the kernel's author would see it.

python benchmarks/kernelfault/one_fault.py KEY [DEVICE [PAGE]]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT)]


def main(key: str, device: str = "cpu", page: str = "") -> int:
    from benchmarks.kernelfault import catalogue, figures, worker

    fault = next(f for f in catalogue.faults() if f.key == key)
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        path = catalogue.copy(fault.host, fault.backend, fault, Path(folder))
        worker.import_from(path if fault.host.package else ROOT / "src")
        import torch

        from benchmarks.kernelfault import targets
        from goldsmith import assay

        torch.set_num_threads(1)
        make = targets.factory(fault.host, fault.backend, path)
        case = None if fault.together else next(iter(fault.cases or worker.cases_of(make)))
        dtype = getattr(torch, fault.dtype) if fault.dtype else None
        sizes = worker.sizes_of(make, case) if case is not None else {}
        diagnosis = assay.diagnose(make(), case, dtype=dtype, device=device, budget_s=worker.BUDGET)
        where = f"as it is tried in {case}" if case is not None else "with every case before it"
        print(f"{fault.host.name}: {fault.what} ({fault.id}, {fault.backend}, {where})\n")
        print(str(diagnosis).replace(folder, "copy"), end="")
        if page:
            diagnosis.to_html(page)
            print(f"\nPage  {page}")
        if not fault.counted:
            notes = {n.id for n in diagnosis.report.notes}
            for note in (n for n in diagnosis.report.notes if n.id == fault.note):
                print(f"\n{note.id}  {note.text}")
                break
            return int(diagnosis.verdict != fault.verdict or bool(fault.note) and fault.note not in notes)
        judgement = figures.judged(worker.diagnosis_fields(diagnosis, sizes), fault)
        return int(not (judgement["stage"] and judgement["top1"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
