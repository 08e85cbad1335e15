"""Reach of the patch search: for how many faults its list of edits holds the one that restores the right kernel.

    python -m benchmarks.kernelfault.reach [--out rows.jsonl] [NAME ...]

No edit is run, so that a fault takes a few seconds. A fault of several edits counts as reached in parts if each of
them is undone by a single edit. Edits in other words count as not reached, even if they are right. The second table
shows, for each kind of edit, how often it restores a place, and how many edits of that kind such places have.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernelfault import catalogue, targets
from benchmarks.kernelfault.catalogue import ROOT, Fault
from benchmarks.kernelfault.likelihood import first_sight
from benchmarks.kernelfault.patches import chosen
from goldsmith.assay.declare.target import Target
from goldsmith.assay.diagnosis.source.edits.edits import Edit
from goldsmith.assay.diagnosis.source.edits.every_edit import EveryEdit
from goldsmith.assay.diagnosis.source.reading.candidate_source import candidate_source
from goldsmith.assay.diagnosis.source.reading.value_kinds import Kinds, observing
from goldsmith.assay.execute import interpreter
from goldsmith.assay.execute.records import PlainBackward, PlainCalls, RunSettings
from goldsmith.assay.execute.run import execute
from goldsmith.assay.judge.examination import Examination

_NEAR, _MARGIN = 3, 300  # lines and bytes around what differs
_PLAIN = RunSettings(plain=PlainCalls((), (0,), (PlainBackward(0),), watch=0.0))
_FORM = re.compile(r"[\s(),]+|#[^\n]*|\bpass\b")  # what may differ between texts of one tree
Row = dict[str, Any]


def row_of(fault: Fault) -> Row:
    """The row of one fault: for it and for each of its parts the kind and the cost of the edit that undoes it, or None.

    beside: for each such edit, the number of edits of each kind at its place
    """
    right = (ROOT / fault.file).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        path = catalogue.copy(fault.host, fault.backend, fault, Path(folder))
        target = targets.factory(fault.host, fault.backend, path)()
        wrong = fault.stages if all(s.endswith(".grad") for s in fault.stages) else ()
        source = candidate_source(target)
        listed = EveryEdit(source.parts, wrong, _kinds(target, str(path)), source.golden)
        data = path.read_bytes()
        edits = _edits(listed, data, right)
    row: Row = {"fault": fault.key, "edits": len(edits), "whole": None, "parts": [], "beside": []}

    def place(wanted: str) -> list[Any] | None:
        edit = _restoring(edits, data, wanted)
        if edit is None:
            return None
        row["beside"].append(Counter(e.kind for e in edits if e.place == edit.place))
        return [edit.kind, round(edit.cost, 2)]

    row["whole"] = place(right)
    if len(fault.edits) > 1:
        row["parts"] = [place(data.decode().replace(new, old, 1)) if new else None for old, new in fault.edits]
    return row


def _kinds(target: Target, path: str) -> Kinds:
    """The kinds of the values in the smallest case whose run does not raise."""
    kinds: Kinds = {}
    values, device = frozenset(("values",)), torch.device("cpu")
    materials = [Examination(target, c, None, device, 0, values, c.name).material for c in target.cases]
    for material in sorted(materials, key=lambda m: sum(t.numel() for t in m.inputs.values())):
        with observing((path,), kinds), interpreter.watching(), contextlib.suppress(Exception):
            if execute(material, _PLAIN).error is None:
                break
    return kinds


def _edits(listed: EveryEdit, data: bytes, right: str) -> list[Edit]:
    """The edits of all lines, and those that bring in other expressions near the lines that differ."""
    differing = {
        line
        for _, first, last, _, _ in _changes(data.decode(), right)
        for line in range(first - _NEAR, last + 2 + _NEAR)
    }
    places = {p for f in listed.functions for p in f.places if p[1] in differing}
    return sorted([*listed.near, *listed.far(places)], key=lambda e: e.cost)


def _changes(before: str, after: str) -> list[tuple[str, int, int, int, int]]:
    matcher = difflib.SequenceMatcher(
        None, before.splitlines(keepends=True), after.splitlines(keepends=True), autojunk=False
    )
    return [c for c in matcher.get_opcodes() if c[0] != "equal"]


def _restoring(edits: Sequence[Edit], data: bytes, right: str) -> Edit | None:
    """The cheapest edit that gives the text, up to its form."""
    changes, after = _changes(data.decode(), right), right.encode()
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    begin = max(0, min((starts[c[1]] for c in changes), default=0) - _MARGIN)
    end = min(len(data), max((starts[c[2]] for c in changes), default=0) + _MARGIN)
    tree, form = ast.dump(ast.parse(right)), _form(after[begin : len(after) - (len(data) - end)])
    for edit in edits:
        if min(s[0] for s in edit.spans) >= begin and max(s[1] for s in edit.spans) <= end:
            text = edit.applied(data)
            if _form(text[begin : len(text) - (len(data) - end)]) == form and _tree(text.decode()) == tree:
                return edit
    return None


def _form(text: bytes) -> str:
    return _FORM.sub("", text.decode(errors="replace"))


def _tree(text: str) -> str:
    try:
        return ast.dump(_WithoutPass().visit(ast.parse(text)))
    except SyntaxError:
        return ""


class _WithoutPass(ast.NodeTransformer):
    """Removes `pass`, which a removed statement leaves behind."""

    def visit_Pass(self, node: ast.Pass) -> None:
        return None


def table(rows: Sequence[Row], faults: Sequence[Fault]) -> str:
    """Counts by batch, in Markdown."""
    number = first_sight()[1]
    known = {f.key: number.get(f.host.name, "ours") for f in faults}
    lines = ["| batch | faults | reached | of one edit | of several | of several, in parts |", "|" + " --- |" * 6]
    for batch in [*sorted({*known.values()}, key=lambda n: (not n.isdigit(), n.zfill(2))), "all"]:
        own = [r for r in rows if batch in (known[r["fault"]], "all")]
        one, several = ([r for r in own if bool(r["parts"]) is more] for more in (False, True))
        whole = [sum(r["whole"] is not None for r in some) for some in (one, several)]
        parts = sum(r["whole"] is not None or all(r["parts"]) for r in several)
        lines.append(
            f"| {batch} | {len(own)} | {sum(whole)} ({100 * sum(whole) / max(1, len(own)):.0f} %) | "
            f"{whole[0]} of {len(one)} | {whole[1]} of {len(several)} | {parts} of {len(several)} |"
        )
    return "\n".join(lines)


def kinds_table(rows: Sequence[Row]) -> str:
    """How often an edit of a kind is the right one, and how many of the kind stand at such places, in Markdown."""
    right = Counter(place[0] for r in rows for place in [r["whole"], *r["parts"]] if place)
    listed = sum((Counter(c) for r in rows for c in r["beside"]), Counter[str]())
    places = max(1, sum(len(r["beside"]) for r in rows))
    lines = ["| kind | right | edits a place |", "| --- | --- | --- |"]
    rows_by_rate = sorted(listed, key=lambda kind: -right[kind] / listed[kind])
    return "\n".join([*lines, *(f"| {k} | {right[k]} | {listed[k] / places:.1f} |" for k in rows_by_rate)])


def _rows(faults: Sequence[Fault]) -> Iterator[Row]:
    for fault in faults:
        try:
            yield row_of(fault)
        except Exception as error:  # noqa: BLE001 - a faulty kernel may raise anything on import as well
            yield {
                "fault": fault.key,
                "edits": 0,
                "whole": None,
                "parts": [],
                "error": f"{type(error).__name__}: {error}",
            }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hosts, batches by number, or faults; all without")
    parser.add_argument("--out", type=Path, help="the file of rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    number = first_sight()[1]
    names = [*options.names, *(h for h, n in number.items() if n in options.names)]
    faults = chosen(names, None, None)
    rows = []
    for row in _rows(faults):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(table(rows, faults))
    print(f"\n{kinds_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
