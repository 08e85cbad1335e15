"""The tables of the documents say what the operators and the measurements say."""

import json
import re
import subprocess
import sys

import pytest

from repo.tree import ROOT

ROW = {
    "op": "mhc.connection", "case": "train[T=8,D=4]", "dtype": "bfloat16", "direction": "forward", "mode": "cold",
    "peer": "goldsmith", "median_us": 200.0, "p10": 196.0, "p90": 204.0, "share_of_ceiling": 0.9, "copy_gb_s": 3000.0,
    "verified": True, "machine": "card", "device": "cuda", "versions": {"torch": "2"},
    "commit": "abc", "date": "2026-01-02",
}  # fmt: skip


def test_generated_tables_are_up_to_date():
    done = subprocess.run([sys.executable, "scripts/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python scripts/tables.py`"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_no_page_promises_a_model_that_the_table_refuses(page):
    table = (ROOT / "docs" / "models.md").read_text()
    assert re.search(r"^\| `.*\| refused \|", table, re.M)  # while there is one, "every model" is false
    text = " ".join(page.read_text().split())
    assert not re.search(r"\b(every|any|all) mixture-of-experts models?\b", text, re.I), page.name


def test_reasons_in_the_table_of_models_have_no_advice_for_another_call():
    assert "set_experts_implementation" not in (ROOT / "docs" / "models.md").read_text()


def test_every_option_is_in_the_table_of_its_command():
    typer = pytest.importorskip("typer", reason="comes with the extra cli")
    from goldsmith.cli import app

    text = (ROOT / "docs" / "commands.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        section = text.partition(f"## goldsmith {name}\n")[2].partition("\n## ")[0]
        for option in (p for p in command.params if not getattr(p, "hidden", False)):
            for flag in (*option.opts, *option.secondary_opts):
                if flag.startswith("-") and flag != "--help":
                    assert re.search(rf"^\| `[^`]*{flag}(?![\w-])[^`]*` \|", section, re.M), f"{name} {flag}"


@pytest.fixture
def speed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def speed(*changes):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROW | change) + "\n" for change in changes))
        return tables.speed()

    return speed


def test_a_speed_table_keeps_a_faster_peer_and_has_its_conditions_on_the_next_line(speed):
    lines = speed({}, {"peer": "liger", "median_us": 50.0, "p10": 49.0, "p90": 51.0}).splitlines()
    assert lines[2] == "| `mhc.connection` | train[T=8,D=4], bfloat16 | forward | 200 ±2 % | 90 % | 50.0 ±2 % | yes |"
    assert lines[3] == ""
    assert lines[4].startswith("card; torch 2; commit abc; 2026-01-02; device time of single calls")


def test_a_speed_table_shows_the_newest_run_only(speed):
    text = speed({"commit": "old", "date": "2026-01-01", "case": "train[T=1,D=1]"}, {})
    assert "T=1,D=1" not in text and "commit old" not in text and "commit abc" in text


def test_peers_are_compared_within_one_run_only(speed):
    peer = {"peer": "liger", "median_us": 50.0}
    text = speed(peer, {}, {"commit": "later", "median_us": 100.0})
    assert "| 100 ±" in text and "50.0" not in text and "commit later" in text and "commit abc" not in text


def test_a_row_that_failed_verification_says_so(speed):
    assert "**no**" in speed({"verified": False})


def test_only_a_check_of_all_cases_counts_as_verified(speed):
    for by, message in (
        ("goldsmith verify, 1 cases, bfloat16 (v.json)", "1 case"),  # one that stands for others, out of a file
        ("goldsmith verify, 1 cases, bfloat16", "yes"),  # all there are, in the run
        ("goldsmith verify, 20 cases, bfloat16 (v.json)", "yes"),
        ("goldsmith verify, 21 cases, bfloat16 (v.json)", "yes"),
        ("goldsmith verify, 1 of 1 cases, bfloat16 (v.json)", "yes"),
    ):
        assert speed({"verified_by": by}).splitlines()[2].endswith(f"| {message} |")


def test_rows_of_a_cpu_and_of_peers_that_did_not_run_are_left_out(speed):
    assert speed({"device": "cpu"}, {"median_us": None}).startswith("No measurement")
