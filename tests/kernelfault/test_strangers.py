"""Kernels by a stranger to the rules: right without a fault, and so are their rewritings; first sight has them all."""

import json

import pytest

from benchmarks.kernelfault import catalogue, targets
from goldsmith import assay
from repo.tree import ROOT

HOSTS = [host for host in catalogue.hosts().values() if host.author == "stranger"]
RIGHT = [fault for fault in catalogue.select(author="stranger") if fault.verdict == "pass"]
FIRST_SIGHT = sorted((ROOT / "benchmarks" / "results").glob("kernelfault_strangers_*.json"))


def target(host, fault, folder):
    backend = next(iter(host.backends))
    return targets.factory(host, backend, catalogue.copy(host, backend, fault, folder))()


@pytest.mark.sweep(24)
@pytest.mark.parametrize("host", HOSTS, ids=lambda h: h.name)
def test_the_kernel_is_right_without_a_fault(host, tmp_path):
    kernel_target = target(host, None, tmp_path)
    for case in kernel_target.cases:
        assay.check(kernel_target, case)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("fault", RIGHT, ids=lambda f: f.key)
def test_a_right_rewriting_is_not_accused(fault, tmp_path):
    kernel_target = target(fault.host, fault, tmp_path)
    for case in kernel_target.cases:
        assay.check(kernel_target, case)


def test_an_author_selects_faults_and_an_unknown_one_is_refused():
    ours, theirs = catalogue.select(author="goldsmith"), catalogue.select(author="stranger")
    assert {f.host.name for f in theirs} == {h.name for h in HOSTS}
    assert len(ours) + len(theirs) == len(catalogue.faults())
    assert not any(h.held_out for h in HOSTS)  # rules were mended on them since: they are development
    with pytest.raises(catalogue.CatalogueError, match="no author 'nobody'; there are: goldsmith, stranger"):
        catalogue.select(author="nobody")


def test_first_results_have_every_fault_of_a_stranger_once():
    rows = [fault for path in FIRST_SIGHT for fault in json.loads(path.read_text())["by_fault"]]
    seen = [f"{row['id']} {row['host']} {row['backend']}" for row in rows]
    assert sorted(seen) == sorted(f.key for f in catalogue.select(author="stranger"))
    assert sum(row["verdict"] == "fail" for row in rows) >= 70
