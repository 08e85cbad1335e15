"""The pytest plugin, in sessions of its own: reports, seeds, marker, fixture, one page of all workers, bundles."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from goldsmith import assay
from goldsmith.assay.execute import hooks
from goldsmith.pytest_plugin import BUNDLES, _seed_of

pytestmark = pytest.mark.sweep(5)

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(e.name == "goldsmith" for e in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "goldsmith.pytest_plugin"]
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]

RIGHT, WRONG = (f"test_kernels.py::test_{name}[rows[T=5]]" for name in ("right", "wrong"))
TESTS = """
import pytest
from goldsmith import assay


@assay.case(T=[2, 5], why="two rows and five")
def rows(make, T):
    return {"x": make.normal(T, 6)}


def golden(x):
    return assay.stage("doubled", x * 2) + 1


right = assay.Target(lambda x: assay.stage("doubled", x * 2) + 1, golden, cases=rows, name="right")
wrong = assay.Target(lambda x: assay.stage("doubled", x * 3) + 1, golden, cases=rows, name="wrong")


@pytest.mark.parametrize("case", right.cases, ids=str)
def test_right(case):
    assay.check(right, case, probes="values")


@pytest.mark.parametrize("case", wrong.cases, ids=str)
def test_wrong(case):
    helper(case)


def helper(case):
    assay.check(wrong, case, probes="values")  # the line to be shown


def test_without_the_assay():
    assert True
"""


def run(pytester, *arguments, text=TESTS, name="test_kernels"):
    pytester.makepyfile(**{name: text})
    return pytester.runpytest_inprocess(*PLUGIN, *QUIET, *map(str, arguments))


class OnlyTests:
    """Of the modules that an inner session loads, its tests alone are forgotten: torch cannot be loaded twice."""

    def __init__(self, preserve=None):
        self.before = set(sys.modules)

    def restore(self):
        for name in set(sys.modules) - self.before:
            if name.startswith("test_"):
                del sys.modules[name]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot", OnlyTests)
    monkeypatch.setenv("COLUMNS", "200")
    before = list(hooks.DEFAULT_SEED), list(hooks.CHECKS)
    yield
    assert (hooks.DEFAULT_SEED, hooks.CHECKS) == before


def test_a_failing_check_shows_its_report_and_the_line_of_the_test_and_no_traceback(pytester):
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=2)
    output = result.stdout.str()
    assert "FAIL  wrong: y exceeds its rounding bound" in output
    assert "test_kernels.py:29: assay.check(wrong, case" in output
    assert "check.py" not in output and "Traceback" not in output and "AssayError" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("FAILED") and "T=2" in line]
    assert "test_wrong[rows[T=2]] - FAIL wrong: y exceeds its rounding bound" in line


def test_every_test_has_a_seed_of_its_own_and_one_can_be_given(pytester):
    result = run(pytester, "--assay-json", "all.json")
    result.stdout.fnmatch_lines(["4 checks in 4 tests", "JSON: all.json"])
    seeds = {
        t["nodeid"]: [r["seed"] for r in t["reports"]]
        for t in json.loads((pytester.path / "all.json").read_text())["tests"]
    }
    assert seeds == {nodeid: [_seed_of(nodeid)] for nodeid in seeds} and len(set(map(str, seeds.values()))) == 4
    run(pytester, "--assay-json", "all.json", "--assay-seed", 7)
    tests = json.loads((pytester.path / "all.json").read_text())["tests"]
    assert [r["seed"] for t in tests for r in t["reports"]] == [7] * 4
    assert [t["outcome"] for t in tests] == ["passed", "passed", "failed", "failed"]


def test_a_seed_in_the_call_overrides_the_marker_which_overrides_the_command_line(pytester):
    text = (
        TESTS
        + """

@pytest.mark.assay(seed=11)
def test_marked(assay):
    assert assay.seed == 11
    assert assay.check(right, "rows[T=2]", probes="values").seed == 11
    assert assay.check(right, "rows[T=2]", probes="values", seed=3).seed == 3


def test_the_seed_by_fixture(assay):
    assert assay.check(right, "rows[T=2]", probes="values").seed == assay.seed == 5
"""
    )
    run(pytester, "--assay-seed", 5, "-k", "marked or fixture", "--strict-markers", text=text).assert_outcomes(passed=2)


def test_a_misspelt_argument_of_the_marker_is_an_error(pytester):
    text = "import pytest\n\n@pytest.mark.assay(sed=3)\ndef test_one(assay):\n    pass\n"
    result = run(pytester, text=text)
    assert "mark.assay takes seed=<int> and diagnose=<bool>, got ['sed']" in result.stdout.str() + result.stderr.str()
    assert result.ret != 0


def test_a_failing_check_is_diagnosed_and_leaves_its_bundle(pytester):
    result = run(pytester, "--assay-diagnose", "--assay-json", "all.json", RIGHT, WRONG)
    result.assert_outcomes(passed=1, failed=1)
    output = result.stdout.str()
    assert "- assay diagnosis -" in output and "FAIL  doubled is wrong: " in output
    (bundle,) = (pytester.path / BUNDLES).iterdir()
    assert assay.load_bundle(bundle).meta["stage"] == "doubled"
    assert "<h1>doubled is wrong: " in (bundle / "diagnosis.html").read_text()
    right, wrong = json.loads((pytester.path / "all.json").read_text())["tests"]
    assert right["diagnosis"] is None and wrong["diagnosis"]["first_wrong_stage"] == "doubled"


def test_the_marker_requests_a_diagnosis_and_the_folder_can_be_chosen(pytester):
    text = TESTS.replace("def test_wrong", "@pytest.mark.assay(diagnose=True)\ndef test_wrong")
    result = run(pytester, WRONG, text=text)
    assert "FAIL  doubled is wrong: " in result.stdout.str() and (pytester.path / BUNDLES).is_dir()
    run(pytester, WRONG, "--assay-bundles", pytester.path / "mine")
    assert len(list((pytester.path / "mine").iterdir())) == 1


@pytest.mark.parametrize(
    "folder, why", [("test_kernels.py", "it is not a folder"), ("test_kernels.py/in", "Not a directory")]
)
def test_a_bundle_folder_that_cannot_be_written_is_a_usage_error_before_the_tests(pytester, folder, why):
    result = run(pytester, "--assay-bundles", folder, WRONG)
    text = result.stderr.str()
    assert "--assay-bundles: " in text and f"{folder} cannot be written: {why}" in text and result.ret == 4


def test_an_unused_bundle_folder_is_not_left_behind(pytester):
    run(pytester, "--assay-bundles", "new/mine", RIGHT).assert_outcomes(passed=1)
    assert not (pytester.path / "new").exists()


def test_an_error_in_a_diagnosis_does_not_hide_the_failure(pytester, monkeypatch):
    monkeypatch.setattr(assay, "diagnose", lambda *a, **k: 1 / 0)
    result = run(pytester, "--assay-diagnose", WRONG)
    result.assert_outcomes(failed=1)
    assert "could not be made: ZeroDivisionError: division by zero" in result.stdout.str()
    assert "FAIL  wrong: y exceeds its rounding bound" in result.stdout.str()


def test_other_failures_are_shown_as_usual(pytester):
    result = run(pytester, text="def test_one():\n    assert 1 == 2\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E       assert 1 == 2"])


def test_the_page_has_a_row_for_each_test_function(pytester):
    result = run(pytester, "--assay-html", "new/page.html")
    result.stdout.fnmatch_lines(["page: new/page.html"])
    text = (pytester.path / "new" / "page.html").read_text().replace("<wbr>", "")
    assert re.search(r"<h1>1 of \d+ checks is rejected: wrong\.</h1>", text) and "pytest: assay · fail" in text
    assert text.count('class="matrix tests"') == 1 and "right on test_kernels.py::test_right" in text
    assert "Failed: test_kernels.py::test_wrong[rows[T=2]], test_kernels.py::test_wrong[rows[T=5]]" in text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("lost, kept", [("html", "json"), ("json", "html")])
def test_a_full_disk_costs_neither_the_summary_nor_the_other_file(pytester, lost, kept):
    result = run(pytester, f"--assay-{lost}", "/dev/full", f"--assay-{kept}", "kept")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*: cannot write /dev/full: No space left on device"])
    text = (pytester.path / "kept").read_text()
    assert text.endswith("</html>") if kept == "html" else json.loads(text)["tests"]


def test_without_a_check_there_is_no_page(pytester):
    result = run(pytester, "--assay-html", "page.html", text="def test_one():\n    pass\n")
    result.stdout.fnmatch_lines(["no test used the assay"])
    assert not (pytester.path / "page.html").exists()


def test_ctrl_c_before_the_end_of_a_check_does_not_say_that_no_test_has_one(pytester):
    text = "def test_one(assay):\n    raise KeyboardInterrupt\n"
    pytester.makepyfile(test_kernels=text)
    result = pytester.runpytest_subprocess(*PLUGIN, *QUIET, "--assay-json", "all.json")
    result.stdout.fnmatch_lines(["no check was finished"])


def test_one_page_comes_from_all_workers(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(test_kernels=TESTS)
    result = pytester.runpytest_subprocess(
        *PLUGIN, *QUIET, "-n", "2", "--assay-html", "page.html", "--assay-json", "all.json"
    )
    result.assert_outcomes(passed=3, failed=2)
    assert "FAIL  wrong: y exceeds its rounding bound" in result.stdout.str()
    tests = json.loads((pytester.path / "all.json").read_text())["tests"]
    assert [len(t["reports"]) for t in tests] == [1, 1, 1, 1]
    assert [r["seed"] for t in tests for r in t["reports"]] == [_seed_of(t["nodeid"]) for t in tests]
    text = (pytester.path / "page.html").read_text()
    assert "2 checks, 4 cases" in text


def test_an_installed_goldsmith_brings_the_plugin(pytester, monkeypatch):
    """As pip would have installed it: what pyproject says of entry points, beside the source."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    info = pytester.path / "site" / "made_up-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    lines = "".join(f"{name} = {module}\n" for name, module in points.items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    paths = [str(info.parent), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    pytester.makepyfile("import sys\n\ndef test_one():\n    assert 'torch' not in sys.modules\n")
    result = pytester.runpytest_subprocess("--markers", *QUIET)
    result.stdout.fnmatch_lines(["@pytest.mark.assay(seed=None, diagnose=False): *"])
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=1)


def test_the_plugin_by_itself_imports_neither_torch_nor_the_assay():
    heavy = "{'torch', 'goldsmith.assay', 'jinja2', 'rich', 'typer', 'numpy'}"
    code = f"import sys, goldsmith.pytest_plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


HANGING = """
import time
from goldsmith import assay

INPUTS = {"x": __import__("torch").ones(3)}


def sleeps(x):
    time.sleep(4)
    return x * 2


def test_slow():
    assay.check(assay.Target(sleeps, lambda x: x * 2, cases=INPUTS, backward=None), probes="values")
"""


def test_a_run_that_hangs_is_named_on_stderr_while_it_runs(tmp_path):
    """stderr is captured by pytest until the test ends, which this one would not."""
    (tmp_path / "test_slow.py").write_text(HANGING)
    program = "import sys, pytest, goldsmith.pytest_plugin as p; p.PATIENCE = 0.5; sys.exit(pytest.main(sys.argv[1:]))"
    source = str(ROOT / "src")
    done = subprocess.run(
        [sys.executable, "-c", program, *PLUGIN, *QUIET, "test_slow.py"], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": source}, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    message = "test_slow.py::test_slow: run 'values' of probe values (case given, seed "
    assert done.stderr.count(message) == 1 and "has not ended after 1 s" in done.stderr
