"""KernelFault's faults: every edit fits, every copy is a module, and the truth names what exists."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernelfault import catalogue
from goldsmith.assay.diagnosis.causes import rules
from repo.tree import ROOT

FAULTS = catalogue.faults()
OF_HOST = {name: [fault for fault in FAULTS if fault.host.name == name] for name in catalogue.hosts()}


@pytest.mark.parametrize("host", OF_HOST)
def test_every_edit_fits_once_and_leaves_python_that_parses(host):
    for fault in OF_HOST[host]:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        wrong = catalogue.applied(source, fault)
        assert wrong != source, fault.key
        if fault.file.endswith(".py"):
            ast.parse(wrong, fault.key)


@pytest.mark.parametrize("host", OF_HOST)
def test_truth_names_causes_of_the_catalogue(host):
    for fault in OF_HOST[host]:
        assert set(fault.causes) <= set(rules.CATALOGUE), fault.key
        assert fault.note in ("", *rules.NOTES), fault.key
        assert fault.verdict in ("fail", "pass", "reference_fault"), fault.key


def test_an_edit_that_no_longer_fits_is_refused():
    fault = FAULTS[0]
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    with pytest.raises(catalogue.CatalogueError, match="occurs 2 times"):
        catalogue.applied(source + source, fault)
    with pytest.raises(catalogue.CatalogueError, match="occurs 0 times"):
        catalogue.applied("", fault)


@pytest.mark.parametrize("shipped", [False, True], ids=["specimen", "shipped"])
def test_a_copy_leaves_the_host_as_it_is(shipped, tmp_path):
    fault = next(f for f in FAULTS if bool(f.host.package) is shipped)
    before = (ROOT / fault.file).read_text(encoding="utf-8")
    path = catalogue.copy(fault.host, fault.backend, fault, tmp_path)
    if shipped:  # the folder to import from
        assert path == tmp_path
        path /= Path(fault.file).relative_to("src")
    assert path.is_relative_to(tmp_path) and path.read_text(encoding="utf-8") != before
    assert (ROOT / fault.file).read_text(encoding="utf-8") == before


def test_an_unknown_name_is_refused_with_the_names_that_exist():
    with pytest.raises(catalogue.CatalogueError, match="no host 'nobody'; there are: .*router"):
        catalogue.select(host="nobody")
    with pytest.raises(catalogue.CatalogueError, match="no fault 'M99'; there are: .*M04"):
        catalogue.select(fault="M99")


def test_all_edits_that_no_longer_fit_are_reported_before_anything_runs(monkeypatch):
    fault, other = catalogue.faults()[:2]
    stale = replace(fault, edits=(("this text is not there", ""),))
    output = catalogue.unfit([stale, other])
    assert len(output) == 1 and output[0].startswith(f"{fault.key}: the text to replace occurs 0 times")
    assert catalogue.unfit([fault, other]) == []


def test_a_copied_package_is_imported_before_an_editable_install_of_the_checkout(tmp_path):
    """Such an install finds goldsmith before sys.path is looked at: every fault of a package passed then."""
    program = """
import sys
from pathlib import Path
from benchmarks.kernelfault import catalogue, worker
host = catalogue.hosts()["experts_moe"]
fault = next(f for f in catalogue.faults() if f.host.name == "experts_moe" and f.backend == "reference")
copied = catalogue.copy(host, "reference", fault, Path(sys.argv[1]))
worker.import_from(copied)
import goldsmith
from goldsmith.experts.moe import reference
assert all(Path(m.__file__).is_relative_to(copied) for m in (goldsmith, reference)), (goldsmith, reference)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
