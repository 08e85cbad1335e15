"""Tables and the picture of docs/speed-generation.md, from rows of `goldsmith bench generate`.

    python scripts/generation.py            draws docs/images/generation-*.svg anew
    python scripts/generation.py --check    changes nothing; exit status 1 and the names of outdated pictures

`python scripts/tables.py` writes the tables.
"""

import json
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "generate"
IMAGES = ROOT / "docs" / "images"
NOTHING = "No measurement is in benchmarks/results/generate yet: `goldsmith bench generate --json FILE` makes one.\n"
NO_PARTS = (
    "The rows in benchmarks/results/generate do not have these parts: a run of `goldsmith bench generate` adds them.\n"
)
NO_RULES = (
    "The rows in benchmarks/results/generate compare no two rates of goldsmith: a run of `goldsmith bench generate` "
    "over several formats, budgets or plans does, and adds the result.\n"
)
BETWEEN = "between two steps"  # a part of the native step only
PICTURES = {  # shape and level
    "generation-small.svg": ("small", "avx512_bf16"),
    "generation-small-avx2.svg": ("small", "avx2"),
}
OURS, LLAMA, PLAIN = "goldsmith", "llama.cpp", "transformers"
KINDS = {"int4": "4 bits (Q4_0)", "int8": "8 bits (Q8_0)", "bf16": "bf16", "fp32": "fp32"}
COLOURS = {OURS: "#4c78a8", LLAMA: "#b5651d", PLAIN: "#8c959f"}
OTHER = "#54813b"
STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1b1f24 } .title { font-weight: 600 }
  .number { font-size: 12px; fill: #57606a }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .number { fill: #9da7b3 } }
"""
Table = Callable[[list[str], list[list[str]]], str]
Case = dict[str, dict]  # label of an engine -> its row


def cases() -> dict[tuple, Case]:
    """(machine, device, shape, layers, sizes of the text, level, format, dense) -> the rows of its newest run."""
    by_name: dict[tuple, Case] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["op"] != "generate":
                continue
            text = row["prompt_tokens"], row["decode_tokens"]
            place = (
                row["machine"],
                row["device"],
                row["shape"],
                row["sizes"]["layers"],
                text,
                row.get("level", ""),
                row["format"],
                row["dense"],
            )
            case = by_name.setdefault(place, {})
            if any(run_of(other) != run_of(row) for other in case.values()):
                case.clear()
            case[row["label"]] = row
    return by_name


def run_of(row: dict) -> tuple:
    return row["date"], row["commit"], json.dumps(row["versions"]), row.get("compute")


def groups() -> dict[tuple, dict[str, Case]]:
    """The cases of one model on one machine, by precision, in the order of the rows."""
    models: dict[tuple, dict[str, Case]] = {}
    for (*model, format, dense), case in cases().items():
        models.setdefault(tuple(model), {})[precision(format, dense)] = case
    return models


def precision(format: str, dense: str) -> str:
    return KINDS[format] if format == dense else f"experts {KINDS[format]}, the rest {KINDS[dense]}"


def rates(table: Table) -> str:
    """Decode and prompt rates of every engine, a table for each model and machine."""
    text = ""
    for (machine, device, shape, layers, (prompt, decode), level), precisions in groups().items():
        labels = list(
            dict.fromkeys(label for case in precisions.values() for label, r in case.items() if "decode" in r)
        )
        lines = []
        for name, case in precisions.items():
            ours = case.get(next((label for label in labels if label.startswith(OURS)), ""))
            for phase, tokens in (("decode", decode), ("prompt", prompt)):
                cells = [rate(case.get(label), phase, ours) for label in labels]
                shares = [share(case.get(label)) if phase == "decode" else "" for label in labels]
                read = [", ".join(filter(None, shares))] if device == "cpu" else []
                lines.append([name if phase == "decode" else "", f"{phase}, {tokens}", *cells, *read])
        whole = max(row["all_layers"] for case in precisions.values() for row in case.values())
        of = f" of {whole}" if layers < whole else ""
        text += f"**{shape}**, {layers}{of} layers, on {machine}{f', level {level}' if level else ''}:\n\n"
        read = [f"of the read rate: {', '.join(labels)}"] if device == "cpu" else []
        text += table(["weights", "tokens", *labels, *read], lines) + "\n"
        text += "".join(f"{line}\n" for line in conditions(precisions)) + "\n"
    return text.removesuffix("\n") or NOTHING


def rate(row: dict | None, phase: str, ours: dict | None) -> str:
    """Tokens per second with its spread, and as a multiple of ours."""
    if row is None or phase not in row:
        return "-"
    value = row[phase]
    spread = f"±{50 * (value['most'] - value['least']) / value['median']:.0f} %" if value["rounds"] > 1 else "(1 round)"
    text = f"{figure(value['median'])} {spread}"
    if ours is not None and row is not ours and phase in ours:
        text += f" ({value['median'] / ours[phase]['median']:.2g}x)"
    return text if row.get("verified") is not False else f"{text}, **logits are wrong**"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def share(row: dict | None) -> str:
    """Nothing where weights are on a GPU, whose memory has another rate."""
    known = row is not None and "share_of_read" in row and row["device"] == "cpu"
    return f"{100 * row['share_of_read']:.0f} %" if known else ""


def memory(table: Table) -> str:
    """Memory of each engine's process, and the error of its logits."""
    lines = []
    for (_, _, shape, layers, _, level), precisions in groups().items():
        for name, case in precisions.items():
            for label, row in case.items():
                if "resident" in row.get("memory", {}):
                    sizes = [f"{row['memory'][key] / 2**20:,.0f}" for key in ("stated", "resident", "peak")]
                    errors = [f"{row[key]:.0e}" if key in row else "-" for key in ("error", "honest")]
                    lines.append([f"{named(shape, layers, level)}, {name}", label, *sizes, *errors])
    titles = ["", "engine", "stated, MiB", "resident", "peak", "error of the logits", "of honest roundings"]
    return table(titles, lines) if lines else NOTHING


def parts(table: Table) -> str:
    """Where the time of a native step goes, in milliseconds."""
    return _parts(table, lambda row: BETWEEN in row["parts"], "all parts") or NO_PARTS


def module_parts(table: Table) -> str:
    """The same of engines that compute with the model's modules, from a run with clocks around these."""
    return _parts(table, lambda row: row["engine"] != OURS, "with clocks") or NO_PARTS


def _parts(table: Table, chosen: Callable[[dict], bool], total: str) -> str:
    lines, names = [], []
    for (_, _, shape, layers, _, level), precisions in groups().items():
        for name, case in precisions.items():
            for label, row in case.items():
                if "parts" in row and "decode" in row and chosen(row):
                    names += [part for part in row["parts"] if part not in names]
                    lines.append((f"{named(shape, layers, level)}, {name}", label, row))
    cells = []
    for case, label, row in lines:
        times = 1 / row["decode"]["median"], sum(row["parts"].values()), *(row["parts"].get(name) for name in names)
        cells.append([case, label, *map(milliseconds, times)])
    return table(["", "engine", "a token, timed", total, *names], cells) if lines else ""


def named(shape: str, layers: int, level: str) -> str:
    return f"{shape}, {layers} layers" + (f", {level}" if level else "")


def rules(table: Table) -> str:
    """The rules that goldsmith's rates must keep, with the comparisons that broke them."""
    newest: dict[tuple, dict] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["op"] == "generate.rule":
                newest[row["machine"], row["rule"], row["case"], row["faster"], row["slower"]] = row
    lines = []
    for machine, rule in dict.fromkeys(key[:2] for key in newest):
        mine = [row for key, row in newest.items() if key[:2] == (machine, rule)]
        broken = [
            f"{row['case']}: {row['faster']} {figure(row['rates'][0])}, {row['slower']} {figure(row['rates'][1])}"
            for row in mine
            if not row["kept"]
        ]
        lines.append([rule, machine, f"{len(mine) - len(broken)} of {len(mine)}", "; ".join(broken) or "-"])
    return table(["rule", "machine", "comparisons that keep it", "broken, tokens/s"], lines) if lines else NO_RULES


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{3 if seconds >= 1e-2 else 2}g}"


def conditions(precisions: dict[str, Case]) -> Iterator[str]:
    rows = [row for case in precisions.values() for row in case.values()]
    for run in dict.fromkeys(map(run_of, rows)):
        date, commit, versions, _ = run
        mine = [row for row in rows if run_of(row) == run]
        named = ", ".join(f"{name} {version}" for name, version in json.loads(versions).items())
        reads = [row["read_gb_s"] for row in mine if "read_gb_s" in row]
        busy = max(row.get("load") or 0.0 for row in mine)
        rate_text = " to ".join(f"{value:.0f}" for value in sorted({round(min(reads)), round(max(reads))}))
        yield (
            f"{named}; commit {commit}; {date}; {mine[0]['threads']} threads; load {busy:.1f}; read rate {rate_text} "
            "GB/s; tokens per second, median ± half of slowest to fastest round, engines in turns. In brackets: as a "
            "multiple of goldsmith's."
        )


def drawing(shape: str, wanted: str) -> str:
    """Bars of the decode rates, a group for each precision."""
    bars: list[tuple[str, list[tuple[str, float]]]] = []
    for (_, device, name, _, _, level), precisions in groups().items():
        if (name, device) == (shape, "cpu") and level in (wanted, ""):
            bars = [
                (title, [(label, row["decode"]["median"]) for label, row in case.items() if "decode" in row])
                for title, case in precisions.items()
            ]
    most = max((value for _, group in bars for _, value in group), default=1.0)
    height, body, labels = 40, "", list(dict.fromkeys(label for _, group in bars for label, _ in group))
    for k, label in enumerate(labels):
        body += f'<rect x="{16 + 130 * k}" y="14" width="12" height="12" fill="{colour(label)}"/>'
        body += f'<text x="{34 + 130 * k}" y="25">{escape(label)}</text>\n'
    for title, group in bars:
        height += 14
        body += f'<text class="title" x="16" y="{height + 12}">{escape(title)}</text>\n'
        height += 20
        for label, value in group:
            width = 560 * value / most
            body += f'<rect x="16" y="{height}" width="{width:.1f}" height="14" fill="{colour(label)}"/>'
            body += f'<text class="number" x="{24 + width:.1f}" y="{height + 12}">{figure(value)}</text>\n'
            height += 18
    described = "; ".join(f"{t}: " + ", ".join(f"{label} {figure(v)}" for label, v in g) for t, g in bars)
    return (
        f'<svg viewBox="0 0 660 {height + 12}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
        f"<!-- made by scripts/generation.py -->\n<desc>Tokens per second while decoding. {escape(described)}</desc>\n"
        f"<style>{STYLE}</style>\n{body}</svg>\n"
    )


def colour(label: str) -> str:
    return next((value for name, value in COLOURS.items() if label.startswith(name)), OTHER)


def main(arguments: list[str]) -> int:
    stale = []
    for name, (shape, level) in PICTURES.items():
        path, new = IMAGES / name, drawing(shape, level)
        if not path.is_file() or path.read_text(encoding="utf-8") != new:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not up to date' if '--check' in arguments else 'brought up to date'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
