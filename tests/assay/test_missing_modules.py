"""The assay where modules are not installed: what it can do without, and who is blamed for the rest."""

import subprocess
import sys

import pytest
import torch

from goldsmith import assay

# Runs where the modules named on the command line cannot be imported.
WITHOUT = """
import sys

for name in sys.argv[1].split(","):
    sys.modules[name] = None
import torch
from goldsmith import assay

target = assay.Target(lambda x: x[:, :-1].sum(-1), lambda x: x.sum(-1), cases={"x": torch.randn(3, 40)})
report = assay.check(target, raises=False)
print(report.verdict, report.findings[0].rung, assay.diagnose(target).causes[0].id)
"""


def run(modules):
    return subprocess.run([sys.executable, "-c", WITHOUT, modules], capture_output=True, text=True)


def test_the_assay_checks_and_diagnoses_with_torch_and_numpy_alone():
    done = run("triton,rich,typer,click,jinja2,safetensors,transformers")
    assert (done.returncode, done.stdout) == (0, "fail CERTAIN off_by_one\n"), done.stderr


def test_a_missing_numpy_is_named_and_no_finding_about_the_golden():
    done = run("numpy")
    assert done.returncode == 1
    assert "numpy" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith(("ModuleNotFoundError", "ImportError"))


def needs_more(x):
    import no_such_module

    return no_such_module.total(x)


def total(x):
    return x.sum(-1)


def test_a_module_that_the_golden_needs_is_missing_from_the_environment():
    target = assay.Target(total, needs_more, cases={"x": torch.randn(3, 4)})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        assay.check(target, raises=False)


def test_a_module_that_a_case_needs_is_missing_from_the_environment():
    @assay.case()
    def drawn(make):
        return {"x": needs_more(make.normal(3, 4))}

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        assay.check(assay.Target(total, total, cases=drawn), raises=False)
