"""The printed line that replays a bundle works as printed, wherever the target came from."""

import html
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import goldsmith
from goldsmith import assay
from goldsmith.assay.diagnosis.report import page as diagnosis_page
from goldsmith.assay.diagnosis.report import replay_command

pytestmark = pytest.mark.sweep(8)

SOURCE = Path(goldsmith.__file__).resolve().parents[1]
MODULE = """
import torch
from goldsmith import assay

INPUTS = {"x": torch.arange(6.0)}
wrong = assay.Target(lambda x: x * 3, lambda x: x * 2, cases=INPUTS, name="threefold", backward=None)
several = [wrong, assay.Target(lambda x: x * 4, lambda x: x * 2, cases=INPUTS, name="fourfold", backward=None)]
"""
PRINTING = """
import sys
from goldsmith import assay
from {module} import {name} as target
target = target{item}
found = assay.diagnose(target, out="kept")
print(found)
"""


def python(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


def printed(text):
    return next(line.strip() for line in text.splitlines() if "replay" in line)


def test_the_printed_command_runs(tmp_path):
    (tmp_path / "own_targets.py").write_text(MODULE)
    (tmp_path / "main.py").write_text(PRINTING.format(module="own_targets", name="several", item="[1]"))
    process = python(tmp_path, "main.py")
    assert process.returncode == 0, process.stderr
    line = printed(process.stdout)
    (bundle,) = (tmp_path / "kept").iterdir()
    assert line == f"goldsmith diagnose 'own_targets:several#2' --replay {bundle.relative_to(tmp_path)}"
    assert line in html.unescape((bundle / "diagnosis.html").read_text().replace("<wbr>", ""))
    replayed = python(tmp_path, "-m", *shlex.split(line))
    assert replayed.returncode == 1 and replayed.stdout.startswith("FAIL  y is wrong"), replayed.stderr


def test_a_program_is_imported_by_the_name_of_its_file(tmp_path):
    text = MODULE + 'if __name__ == "__main__":\n    print(assay.diagnose(wrong, out="kept"))\n'
    (tmp_path / "program.py").write_text(text)
    line = printed(python(tmp_path, "program.py").stdout)
    assert line.startswith("goldsmith diagnose program:wrong --replay kept/")
    assert python(tmp_path, "-m", *shlex.split(line)).returncode == 1


def test_a_target_without_a_name_is_replayed_in_python(tmp_path):
    inputs = {"x": torch.arange(6.0)}
    target = assay.Target(lambda x: x * 3, lambda x: x * 2, cases=inputs, name="threefold", backward=None)
    assert replay_command.importable(target) is None
    diagnosis = assay.diagnose(target, out=tmp_path)
    line = printed(str(diagnosis))
    assert line == f'goldsmith.assay.replay("{diagnosis.bundle}", target)'
    assert eval(line, {"goldsmith": goldsmith, "target": target}).environment["replay"]["answer"] == "reproduced"
    assert "goldsmith.assay.replay(" in diagnosis_page.render(diagnosis).replace("<wbr>", "")


def test_a_module_from_elsewhere_cannot_be_named(tmp_path, monkeypatch):
    (tmp_path / "own_targets_elsewhere.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    from own_targets_elsewhere import wrong

    assert replay_command.importable(wrong) is None
    monkeypatch.chdir(tmp_path)
    assert replay_command.importable(wrong) == "own_targets_elsewhere:wrong"
