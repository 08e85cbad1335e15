"""The table of models in docs/models.md, from the rows that `python benchmarks/coverage.py --write` has recorded."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "coverage.json"
COLUMNS = ("dispatch", "convert", "finetune", "generate")


def rendered(path: Path = RESULTS) -> str:
    """Models that are equal in all four columns as a list, all others as a table with their reasons."""
    content = json.loads(path.read_text())
    models, versions = content["models"], content["versions"]
    equal = [name for name, row in models.items() if all(row[column] == "equal" for column in COLUMNS)]
    lines = [
        f"{len(equal)} of {len(models)} model types are equal in all four uses: {', '.join(f'`{n}`' for n in equal)}.",
        "",
        "| model type | class | " + " | ".join(COLUMNS) + " | reason |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in models.items():
        if name not in equal:
            cells = [f"`{name}`", f"`{row['class']}`", *(row[column] for column in COLUMNS), _reason(row)]
            lines.append("| " + " | ".join(cells) + " |")
    stamp = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", f"Tiny random models of every class, in float32 on a CPU; {stamp}.", ""])


def _reason(row: dict[str, str]) -> str:
    text = " ".join(row.get("why", "").split()).removeprefix("goldsmith.hf: ").removeprefix("goldsmith.hf.register: ")
    for advice in (". Use experts_implementation", ", so set_experts_implementation"):  # to callers of hf.register
        text = text.partition(advice)[0]
    return text.replace("|", "\\|")
