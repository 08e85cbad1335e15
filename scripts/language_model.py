"""Results of examples/mhc_lm.py: keeps them in docs/language-model, and makes their tables and pictures.

    sh examples/mhc_lm_large.sh
    python scripts/language_model.py build/mhc_lm/*.json --keep docs/language-model/h100.json   50 kB of 500
    python scripts/tables.py                                                                    writes the tables

Each file of docs/language-model is one comparison, on one machine; its picture is docs/images/language-model-NAME.svg.
`--alone` adds trainings that had the machine to themselves; only their speeds are comparable.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER, IMAGES = ROOT / "docs" / "language-model", ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "examples"))

from loss_curves import by_model, merged, smooth, svg  # noqa: E402  from the examples, found above

KEPT = ("residual", "init", "seed", "finished", "val_loss", "params", "peak_bytes")
CONDITIONS = ("dim", "layers", "heads", "n", "seq", "batch", "steps", "lr", "device", "torch", "bytes")
Table = Callable[[list[str], list[list[str]]], str]


def reduced(results: list[dict], alone: list[dict]) -> dict:
    """The results that the page shows, with fewer points per curve."""
    whole = merged(results)
    runs = []
    for run in whole["runs"]:
        kept = {key: run[key] for key in KEPT}
        kept["train_loss"] = statistics.mean(run["loss"][-len(run["loss"]) // 20 :])
        kept["train_curve"] = [[step, round(loss, 4)] for step, loss in smooth(run["loss"])]
        kept["val_curve"] = [[step, round(loss, 4)] for step, loss in run["val_curve"]]
        runs.append(kept)
    speeds = {name: own[0]["tokens_per_s"] for name, own in by_model([r for a in alone for r in a["runs"]]).items()}
    conditions = {key: whole["conditions"][key] for key in CONDITIONS}
    return {"unigram_nats": whole["unigram_nats"], "conditions": conditions, "alone": speeds, "runs": runs}


def kept() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def losses(table: Table) -> str:
    """A section per comparison: conditions, picture, table, and differences per seed."""
    return "\n".join(_section(name, result, table) for name, result in kept().items()) or "No comparison yet.\n"


def _section(name: str, result: dict, table: Table) -> str:
    groups, setup = by_model(result["runs"]), result["conditions"]
    seeds = max(len(runs) for runs in groups.values())
    read = setup["steps"] * setup["batch"] * setup["seq"]
    message = (
        f"{setup['device']}, torch {setup['torch']}. dim {setup['dim']}, {setup['layers']} blocks, n = {setup['n']}, "
        f"{setup['steps']} steps of {setup['batch']} x {setup['seq']} bytes ({read / 1e6:.3g} million, from a text of "
        f"{setup['bytes'] / 1e6:.3g} million), learning rate {setup['lr']:g}, {seeds} seed{'s' * (seeds > 1)}. "
        f"Byte frequencies alone: {result['unigram_nats']:.3f} nats."
    )
    rows = []
    for model, runs in groups.items():
        values = [run["val_loss"] for run in runs]
        alone = result["alone"].get(model)
        rows.append(
            [
                model,
                f"{statistics.mean(values):.4f}",
                f"{min(values):.4f} to {max(values):.4f}",
                f"{statistics.mean(run['train_loss'] for run in runs):.4f}",
                f"{runs[0]['params']:,}",
                f"{alone:,.0f}" if alone else "-",
                f"{max(run['peak_bytes'] for run in runs) / 2**20:,.0f}",
            ]
        )
    titles = ["model", "validation", "of its seeds", "training", "parameters", "bytes/s, alone", "peak MiB"]
    picture = f"![loss curves](images/language-model-{name}.svg)"
    lines = [f"### {name}", "", message, "", picture, "", table(titles, rows)]
    return "\n".join([*lines, *_differences(groups)])


def _differences(groups: dict[str, list[dict]]) -> list[str]:
    """The differences of validation loss from the plain model with the same seed."""
    plain = {run["seed"]: run["val_loss"] for run in groups.get("plain", [])}
    lines = []
    for model, runs in groups.items():
        apart = [run["val_loss"] - plain[run["seed"]] for run in runs if model != "plain" and run["seed"] in plain]
        if apart:
            shown = ", ".join(f"{value:+.4f}" for value in apart)
            lines.append(f"- {model} minus plain, seed by seed: {shown}. {_verdict(apart)}")
    return [*lines, ""] if lines else []


def _verdict(apart: list[float]) -> str:
    if len(apart) < 2:
        return "One seed decides nothing."
    if all(value < 0 for value in apart):
        return f"Lower with every one of {len(apart)} seeds."
    if all(value > 0 for value in apart):
        return f"Higher with every one of {len(apart)} seeds."
    return "The seeds do not agree in sign: this shows no difference."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--alone", nargs="*", default=[], metavar="RESULT.json")
    parser.add_argument("--keep", required=True, metavar="FILE.json", help="in docs/language-model")
    args = parser.parse_args()
    read = lambda names: [json.loads(Path(name).read_text()) for name in names]  # noqa: E731
    result, file = reduced(read(args.results), read(args.alone)), Path(args.keep)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result) + "\n")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"language-model-{file.stem}.svg").write_text(svg(result))


if __name__ == "__main__":
    main()
