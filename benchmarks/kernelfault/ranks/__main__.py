"""How well the assay over ranks names faults of sharded computations.

    python -m benchmarks.kernelfault.ranks [--ranks 2] [--specimen NAME] [--json FILE]

Every specimen runs twice on processes of this machine: right, and with the fault of a public bug in it. Exit status: 0
every fault named rightly and no right version accused, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import catalogue, score


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernelfault.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--specimen", help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")
    options = parser.parse_args()
    faults = tuple(f for f in catalogue.faults() if options.specimen in (None, f.specimen))
    if not faults:
        names = ", ".join(f.specimen for f in catalogue.faults())
        print(f"no specimen {options.specimen!r}; there are: {names}", file=sys.stderr)
        return 2
    rows = []
    for row in score.outcomes(options.ranks, faults):
        rows.append(row)
        print(_line(row), flush=True)
    right, passed = sum(r.right for r in rows), sum(r.right_passes for r in rows)
    proven = sum(r.right and r.proven for r in rows)
    print(
        f"\nOn {options.ranks} ranks, {right} of {len(rows)} faults are named rightly, {proven} of them proven; "
        f"{sum(r.detected for r in rows)} are detected. {passed} of {len(rows)} right versions pass."
    )
    if options.json:
        options.json.write_text(json.dumps([r.to_json() for r in rows], indent=1) + "\n", encoding="utf-8")
    return 0 if right == passed == len(rows) else 1


def _line(row: score.Outcome) -> str:
    named = row.named or ("not explained" if row.detected else "not detected")
    kind = "" if not row.named else "proven" if row.proven else "likely"
    verdict = "ok" if row.right else f"wrong, it is {row.cause}"
    accused = "right version passes" if row.right_passes else f"RIGHT VERSION ACCUSED: {row.right_text[:200]}"
    return f"{row.specimen:22} {named:22} {kind:7} {verdict:32} {accused}"


if __name__ == "__main__":
    sys.exit(main())
