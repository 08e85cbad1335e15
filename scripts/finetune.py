"""Results of `goldsmith finetune`: keeps them in docs/finetune, and makes their table and pictures.

    goldsmith finetune ... --output DIR
    python scripts/finetune.py DIR --keep docs/finetune/NAME.json     also docs/images/finetune-NAME.svg
    python scripts/tables.py                                          writes the table

Each file of docs/finetune is one run, on one machine.
"""

import argparse
import json
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER, IMAGES = ROOT / "docs" / "finetune", ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "examples"))

from loss_curves import COLOURS, HEIGHT, MARGIN, STYLE, WIDTH, panel  # noqa: E402  from the examples, found above

OPTIONS = ("rank", "alpha", "targets", "lr", "schedule", "batch_size", "grad_accum", "seq_len", "dtype", "seed")
Table = Callable[[list[str], list[list[str]]], str]


def reduced(folder: Path) -> dict:
    """The results of a run that the page shows."""
    run = json.loads((folder / "run.json").read_text())
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    kept = {
        name: run[name] for name in ("machine", "versions", "trained_parameters", "format", "bytes", "data", "steps")
    }
    kept["options"] = {name: run["options"][name] for name in OPTIONS}
    kept["loss"] = [[row["step"], round(row["loss"], 4)] for row in rows if "loss" in row]
    kept["eval_loss"] = [[row["step"], round(row["eval_loss"], 4)] for row in rows if "eval_loss" in row]
    return kept


def svg(run: dict) -> str:
    """The picture of one run: training loss of each step, and loss on held-out text."""
    title = f"{run['machine']['name']}, {_on(run)}, torch {run['versions']['torch']}"
    curves = {"each step": [run["loss"]], "held-out text": [run["eval_loss"]]}
    height = HEIGHT + 22 * len(curves) + 24
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">']
    parts += [f"<title>Loss while fine-tuning</title><desc>{escape(title)}</desc><style>{STYLE}</style>"]
    parts += [f'<rect class="ground" width="{WIDTH}" height="{height}"/>']
    parts += panel("loss, nats per token", curves, MARGIN, WIDTH - 2 * MARGIN, 0.0)
    y = HEIGHT + 8
    for colour, name in zip(COLOURS, curves, strict=False):
        parts.append(f'<rect x="{MARGIN}" y="{y - 8}" width="16" height="6" fill="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 24}" y="{y}">{escape(name)}</text>')
        y += 22
    parts.append(f'<text class="note" x="{MARGIN}" y="{y + 4}">{escape(title)}</text></svg>\n')
    return "\n".join(parts)


def runs(table: Table) -> str:
    """A table with a row per run, and each run's picture with its conditions."""
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    titles = ["run", "held-out loss before", "after", "training loss", "trained", "of the experts"]
    rows = [
        [
            name,
            f"{run['eval_loss'][0][1]:.3f}",
            f"{run['eval_loss'][-1][1]:.3f}",
            f"{run['loss'][0][1]:.3f} -> {run['loss'][-1][1]:.3f}",
            f"{run['trained_parameters']['total']:,}",
            f"{run['bytes']['experts'] / 2**20:.1f} MiB, {run['format']}",
        ]
        for name, run in kept.items()
    ]
    text = table(titles, rows) + "\n" if rows else "No run yet.\n"
    for name, run in kept.items():
        options, data = run["options"], run["data"]
        text += (
            f"{name}: {run['machine']['name']}, {_on(run)}; "
            f"{', '.join(f'{part} {number}' for part, number in run['versions'].items())}. "
            f"{data['tokens']:,} tokens of {data['file']}, {run['steps']} steps of {options['batch_size']} x "
            f"{options['seq_len']} tokens, LoRA of rank {options['rank']} on {', '.join(options['targets'])}, "
            f"{options['dtype']}, learning rate {options['lr']:g}, {options['schedule']}.\n\n"
            f"![loss while fine-tuning](images/finetune-{name}.svg)\n\n"
        )
    return text


def _on(run: dict) -> str:
    machine = run["machine"]
    if machine["device"] != "cpu":
        return "on the GPU"
    return f"{machine['threads']} thread{'s' * (machine['threads'] > 1)} of {machine['cores']} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --output of a run")
    parser.add_argument("--keep", required=True, type=Path, metavar="FILE.json", help="in docs/finetune")
    args = parser.parse_args()
    run = reduced(args.folder)
    args.keep.parent.mkdir(parents=True, exist_ok=True)
    args.keep.write_text(json.dumps(run) + "\n")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"finetune-{args.keep.stem}.svg").write_text(svg(run))


if __name__ == "__main__":
    main()
