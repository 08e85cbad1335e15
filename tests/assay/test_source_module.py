"""A user's file as it is now, although Python's bytecode of it looks current."""

import importlib.util
import os

from goldsmith.assay.declare.source_module import source_module
from goldsmith.assay.gate.formats.problem_source import imported
from goldsmith.cli.user_targets import _import_file


def test_a_file_of_the_same_size_and_second_is_imported_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "edited_twice.py"
    values = []
    for number in (1, 2):
        path.write_text(f"value = {number}\n")
        os.utime(path, (10**9, 10**9))
        module, run = source_module("edited_twice", path)
        run()
        values.append((module.value, imported(path).value))
    assert values == [(1, 1), (2, 2)]


def test_a_file_of_targets_is_not_taken_from_bytecode(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "edited_before.py"
    path.write_text("value = 1\n")
    os.utime(path, (10**9, 10**9))
    spec = importlib.util.spec_from_file_location("edited_before", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # leaves bytecode
    path.write_text("value = 2\n")
    os.utime(path, (10**9, 10**9))
    assert _import_file(path).value == 2
