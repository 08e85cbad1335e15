"""The table of training stacks in docs/finetune.md, from the rows of `python -m benchmarks.training_stacks --write`."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "training_stacks.json"
NAMES = {"goldsmith": "`goldsmith finetune`", "trl": "TRL's `SFTTrainer`"}
CASES = {
    "between": "killed between two checkpoints, same command",
    "saving": "killed while writing a checkpoint, same command",
    "changed": "killed, then another learning rate",
}


def rendered(path: Path = RESULTS) -> str:
    """A row for each stack: its speed, and how it continues after it was killed."""
    content = json.loads(path.read_text())
    lines = [
        f"| | steps per CPU second | {' | '.join(CASES.values())} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in content["stacks"].items():
        cells = [NAMES[name], f"{row['steps_per_cpu_s']:.2f}", *(_short(case, row[case]) for case in CASES)]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    stamp = (
        f"`python -m benchmarks.training_stacks`: {content['steps']} steps of 4 rows of the example model, LoRA of "
        "rank 8; `SFTTrainer` with the experts of transformers. Bits are those of the adapter, compared with a run "
        "that was not killed. "
        f"{content['machine']}; {versions}."
    )
    return "\n".join([*lines, "", stamp, ""])


def _short(case: str, outcome: str) -> str:
    kind, _, reason = outcome.partition(": ")
    if kind == "fails":
        return "refused" if "different settings" in reason else f"fails: {reason.partition(':')[0].strip()}"
    return f"the old rate, {outcome}" if case == "changed" and outcome == "same bits" else outcome
