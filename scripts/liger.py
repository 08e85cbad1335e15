"""Results of examples/assay_liger.py: keeps them in docs/liger, and makes their tables.

    python examples/assay_liger.py --json all.json
    python scripts/liger.py all.json docs/liger/cpu.json     keeps what the tables need: 20 kB of 900
    python scripts/tables.py                                 writes the tables

Each file of docs/liger is from one machine. Where time is short, run the example several times, each `--only` for some
targets, and give all files: scripts/liger.py one.json two.json docs/liger/h100.json.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "liger"
FUNCTIONS = {
    "pre": "`LigerMHCPreFunction`",
    "post_res": "`LigerMHCPostResFunction`",
    "coefficients": "`LigerMHCCoeffsFunction`",
    "swiglu": "`LigerSiLUMulFunction`",
}
FAULTS = {
    "addend_dropped": "an addend of the gradient of x left out",
    "narrowed_block": "the last, partly filled block left out of the grid",
    "mask_removed": "the mask of a load removed",
    "gradient_not_rounded": "coefficients: a gradient no longer rounded to bfloat16",
}
Table = Callable[[list[str], list[list[str]]], str]


def reduced(result: dict) -> dict:
    """The parts of the example's JSON that the tables show."""
    reports = {}
    for label, report in result["reports"].items():
        worst: dict[str, dict] = {}
        for row in report["rows"]:
            if row["run"] == "values" and row["kind"] != "stage":
                known = worst.setdefault(row["tensor"], dict.fromkeys(MEASURES, 0.0))
                for measure in MEASURES:
                    known[measure] = max(known[measure], row[measure] or 0.0)
        findings = {}
        for entry in report["findings"]:
            kept = {key: entry[key] for key in ("rung", "probe", "tensor", "case", "text")}
            findings.setdefault((entry["probe"], entry["tensor"]), kept)
        reports[label] = {
            "verdict": report["verdict"],
            "expected": result["expected"][label],
            "cases": report["cases"],
            "dtypes": report["dtypes"],
            "seconds": round(report["seconds"], 1),
            "worst": worst,
            "findings": list(findings.values()),
            "notes": sorted({(note["id"], note["tensor"]) for note in report["notes"]}),
        }
    return {"machine": result["machine"], "versions": result["versions"], "reports": reports}


MEASURES = ("max_error", "max_over_bound", "rms_over_noise")


def runs() -> Iterator[dict]:
    for path in sorted(FOLDER.glob("*.json")):
        yield json.loads(path.read_text())


def verdicts(table: Table) -> str:
    text = ""
    for run in runs():
        rows = [
            [name, report["verdict"], _sizes(report), _reason(report), f"{report['seconds']:.0f} s"]
            for label, name in FUNCTIONS.items()
            if (report := run["reports"].get(label))
        ]
        text += table(["function", "verdict", "tried on", "what it rests on", "took"], rows) + _conditions(run)
    return text


def errors(table: Table) -> str:
    text = ""
    for run in runs():
        rows = [
            [name, f"`{tensor}`", *(f"{worst[measure]:.2g}" for measure in MEASURES)]
            for label, name in FUNCTIONS.items()
            for tensor, worst in run["reports"].get(label, {"worst": {}})["worst"].items()
        ]
        titles = ["function", "tensor", "largest error", "in bounds", "rms, in the noisiest honest run's"]
        text += table(titles, rows) + _conditions(run)
    return text


def faults(table: Table) -> str:
    text = ""
    for run in runs():
        rows = []
        for label, what in FAULTS.items():
            if report := run["reports"].get(label):
                first = report["findings"][0] if report["findings"] else None
                wrong = ", ".join(f"`{t}`" for t in dict.fromkeys(f["tensor"] for f in report["findings"]))
                by = f"{first['rung']}, {first['probe']}" if first else "-"
                rows.append([what, report["verdict"], by, _short(first["text"]) if first else "-", wrong])
        text += table(["edit", "verdict", "found by", "first finding", "tensors named"], rows) + _conditions(run)
    return text


def _sizes(report: dict) -> str:
    return f"{len(report['cases'])} cases, {', '.join(report['dtypes'])}"


def _reason(report: dict) -> str:
    if report["verdict"] != "pass":
        first = report["findings"][0]
        more = len(report["findings"]) - 1
        return f"{first['rung']}: {_short(first['text'])}" + (f"; {more} more" if more else "")
    largest = max(worst["max_over_bound"] for worst in report["worst"].values())
    noise = max(worst["rms_over_noise"] for worst in report["worst"].values())
    return f"at most {largest:.2g} of the bound, {noise:.2g} of the noisiest honest run"


def _short(text: str) -> str:
    """The first two clauses of a finding: the mistake and its place."""
    return "; ".join(text.split("; ")[:2]).replace("|", "\\|")


def _conditions(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"\n{run['machine']}; {versions}.\n\n"


def joined(parts: list[dict]) -> dict:
    """Several runs as one; the later run counts for a target in both."""
    for part in parts[1:]:
        for what in ("machine", "versions"):
            if part[what] != parts[0][what]:
                raise SystemExit(
                    f"{what}: {part[what]} in one file, {parts[0][what]} in another; join runs of one machine"
                )
    reports = {label: report for part in parts for label, report in part["reports"].items()}
    return {**parts[0], "reports": {label: reports[label] for label in (*FUNCTIONS, *FAULTS) if label in reports}}


def main(sources: list[str], to: str) -> int:
    kept = joined([reduced(json.loads(Path(source).read_text())) for source in sources])
    Path(to).parent.mkdir(parents=True, exist_ok=True)
    Path(to).write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1:-1], sys.argv[-1]))
