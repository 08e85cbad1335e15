"""Tables and progress bars of the commands on narrow terminals: no number and no unit is cut."""

import io
import re

import pytest
from rich.console import Console
from rich.padding import Padding

from goldsmith.cli.bench import tables
from goldsmith.cli.bench.rows import TimingRow
from goldsmith.cli.terminal import WholeTable, console
from goldsmith.cli.verify import display
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.display import VerifyProgress
from goldsmith.cli.verify.selection import Job

NARROW = [40, 60, 80, 100]


def printed(what, width):
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


def small():
    table = WholeTable(labels=2)
    for header in ("target", "backend", "verdict", "cases"):
        table.add_column(header, no_wrap=True)
    table.add_row("norm", "[dim](interpreter)[/]", "[red]FAIL[/]", "0/4")
    table.add_row("", "native", "pass", "")
    return table


def test_a_table_that_fits_is_a_table():
    assert printed(small(), 60).splitlines() == [
        "target  backend        verdict  cases",
        "norm    (interpreter)  FAIL     0/4  ",
        "        native         pass          ",
    ]


def test_a_row_that_does_not_fit_is_labels_and_pairs():
    assert printed(small(), 30).splitlines() == [
        "norm  (interpreter)",
        "  verdict FAIL, cases 0/4",
        "norm  native",
        "  verdict pass",
    ]


@pytest.mark.parametrize("width", NARROW)
def test_a_timing_shows_its_numbers_whole_at_every_width(width):
    fields = {name: None for name in TimingRow.__dataclass_fields__}
    row = TimingRow(**fields | {
        "op": "mhc.sinkhorn", "case": "train[T=4096]", "dtype": "float32", "backend": "reference", "peer": "goldsmith",
        "device": "cpu", "direction": "backward", "mode": "wall", "median_us": 2435123.0, "p10": 2248095.0,
        "p90": 2513345.0, "floor_us": 85.1, "share_of_ceiling": 0.01, "ceiling": "copy", "error": 9.4e-8,
    })  # fmt: skip
    text = printed(tables.table([row]), width)
    assert all(word in text for word in ("2,435,123", "2,248,095-2,513,345", "85.1", "1 %", "9.4e-08"))
    assert "…" not in text and max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", NARROW[1:])
def test_a_progress_bar_stays_on_one_line_with_its_unit(width):
    check = Check("an operator with a name", "", "cpu", [Job("case", "float32", "case", cost=1.0) for _ in range(20)])
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with VerifyProgress(console, [check]) as progress:
        task = progress.progress.tasks[0]
        task._get_time = lambda: task.start_time + 22.0
        progress.finished(check, 1.0, "an operator with a name: case[T=4096,D=4096]")
        text = printed(progress.progress.make_tasks_table(progress.progress.tasks), width)
    (line,) = [line for line in text.splitlines() if line.strip()]
    assert re.search(r"1/20 cases", line) and line.rstrip().endswith("about 6 min 58 s left")


def test_a_log_has_a_line_where_no_check_finishes_for_long(monkeypatch):
    check = Check("an operator", "", "cpu", [Job(str(k), "float32", str(k)) for k in range(3)])
    out = io.StringIO()
    now = iter([0.0, 10.0, 31.0, 31.0, 31.0, 50.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(now))
    with VerifyProgress(Console(file=out, width=80), [check]) as progress:
        for _ in range(3):
            progress.finished(check, 1.0, "an operator: case[T=1]")
    assert out.getvalue() == "2 of 3 cases after 31 s: an operator: case[T=1]\n"


def test_a_cell_of_several_words_is_not_cut():
    table = WholeTable(labels=1)
    for header in ("target", "error / bound", "time"):
        table.add_column(header, no_wrap=True)
    table.add_row("norm", "2.37e+04", "1.3 s")
    for width in range(8, 30):
        assert "…" not in printed(table, width) and "1.3 s" in " ".join(printed(table, width).split())


def test_lines_in_a_pipe_have_no_blanks_at_their_ends(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    console().print(Padding("word " * 40, (0, 0, 0, 2)))
    assert out.getvalue().count("word") == 40
    assert all(line == line.rstrip() for line in out.getvalue().splitlines())
