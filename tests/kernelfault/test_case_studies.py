"""The page of the source logs: what it shows of a fault is what the fault's own truth accepts."""

import importlib.util
import re

import pytest

from benchmarks.kernelfault import catalogue
from repo.tree import ROOT

PAGE = (ROOT / "docs" / "case-studies.md").read_text(encoding="utf-8")
BY_KEY = {f.key: f for f in catalogue.faults()}


def script():
    spec = importlib.util.spec_from_file_location("case_studies", ROOT / "scripts" / "case_studies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STORIES = [m[3] for m in script().BLOCK.finditer(PAGE)]
PROVEN = re.compile(r"FAIL\s+(\S+) is wrong: .*? \((\w+), score", re.S)
GUESSED = re.compile(r"FAIL\s+(\S+) is wrong; not explained.*?\s\d+ % +(\w+)", re.S)


def shown():
    """(fault, what is shown of it), for every diagnosis of the page."""
    for story in STORIES:
        for part in re.split(r"\n(?=\w+: .* \([MG]\d\d\w?, \w+, as it is tried in )", story):
            host, id, backend = re.match(r"(\w+): .* \(([MG]\d\d\w?), (\w+), as it is tried in ", part).groups()
            yield BY_KEY[f"{id} {host} {backend}"], part
    for number, seen, key in script().SEEN:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {number} | {seen} | `{key}` |"))
        yield BY_KEY[key], f"FAIL {row.split(' | ')[3]}"


@pytest.mark.parametrize("fault, text", [pytest.param(f, t, id=f"{f.key} {i}") for i, (f, t) in enumerate(shown())])
def test_the_page_shows_the_planted_fault(fault, text):
    if not fault.counted:
        assert re.search(r"^PASS ", text, re.M) and re.search(rf"^{fault.note}  ", text, re.M) and "FAIL" not in text
        return
    stage, cause = (GUESSED if "is wrong; not explained" in text else PROVEN).search(text).groups()
    assert stage in fault.stages and cause in fault.causes


def test_the_causes_of_all_five_logs_are_shown():
    ids = {f.id for f, _ in shown()}
    assert {"M01", "M04", "M05", "M06", "M11", "M12", "M19", "M32"} <= ids


def test_the_page_leaves_out_maps_and_right_stages():
    table = "a    1   ok\nb        not judged\ny    9    9  culprit"
    message = f"FAIL  y\n\n{table}\n\nWhere\n       #.\n       (# wrong, . right)\n\nCase"
    assert script().shortened(message) == "FAIL  y\n\n...\ny    9    9  culprit\n\nWhere\n\nCase\n"
