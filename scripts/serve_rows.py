"""The table of servers in docs/serve.md, from the rows of `python -m benchmarks.serve --write`."""

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "serve.json"


def throughput(table: Callable[[list[str], list[list[str]]], str], path: Path = RESULTS) -> str:
    """A row for each server: tokens per second, and seconds to the first text, by the number of clients."""
    content = json.loads(path.read_text())
    numbers = sorted({row["clients"] for row in content["rows"]})
    cells = {(row["server"], row["clients"]): row for row in content["rows"]}
    lines = []
    for server in dict.fromkeys(row["server"] for row in content["rows"]):
        rows = [cells.get((server, number)) for number in numbers]
        speeds = [f"{row['tokens_per_s']:,.0f}" if row else "" for row in rows]
        first = [f"{row['first_text_s']:.3f}" if row else "" for row in (rows[0], rows[-1])]
        alike = next(f"{row['same_characters']} of {row['characters']}" for row in rows if row)
        lines.append([f"`{server}`", *speeds, *first, alike])
    head = [f"tokens/s, {number} clients".replace("1 clients", "1 client") for number in numbers]
    titles = ["server", *head, "first text, s", f"with {numbers[-1]} clients", "same text"]
    about = content["conditions"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    stamp = (
        f"`python -m benchmarks.serve`: {about['model']}, greedy answers of {about['tokens']} tokens, median of "
        f"{max(row['turns'] for row in content['rows'])} turns. {about['machine']}; {versions}."
    )
    return f"{table(titles, lines)}\n{stamp}\n"
