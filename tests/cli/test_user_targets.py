"""Names of a user's own targets on the command line: files, modules, lists, and what is said of wrong names."""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from goldsmith.cli import app
from goldsmith.cli.targets import find
from goldsmith.cli.user_targets import UnknownName, load_targets, one_target

pytestmark = pytest.mark.sweep(5)

TEXT = """
import torch
from goldsmith import assay
from {helper} import double

INPUTS = {{"x": torch.ones(2, 3)}}
first = assay.Target(double, lambda x: x * 2, cases=INPUTS, backward=None)
second = assay.Target(lambda x: x * 3, lambda x: x * {factor}, cases=INPUTS, backward=None)
pair = [first, second]
rest = [assay.Target(lambda x: x, lambda x: x, cases=INPUTS, backward=None) for _ in range(2)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    write("inner/kernel_files.py", TEXT.format(helper="helper_of_files", factor=3))
    write("inner/helper_of_files.py", "def double(x):\n    return x * 2\n")
    yield
    for name in set(sys.modules) - before:
        if "files" in name or "package" in name:
            del sys.modules[name]


def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def sources(*names):
    return [(entry.source, entry.index) for entry in find(names)]


def test_a_file_alone_stands_for_each_of_its_targets_once():
    listed = [("first", 0), ("second", 0), ("rest", 0), ("rest", 1)]
    assert sources("inner/kernel_files.py") == [(f"inner/kernel_files.py:{name}", k) for name, k in listed]
    assert sources("inner/kernel_files.py:second") == [("inner/kernel_files.py:second", 0)]
    assert len({entry.name for entry in find(["inner/kernel_files.py"])}) == 4
    assert load_targets(str(Path("inner/kernel_files.py").resolve()) + ":first")[0].name == "double"


def test_a_module_alone_stands_for_its_targets(monkeypatch):
    monkeypatch.chdir("inner")
    assert sources("kernel_files")[0] == ("kernel_files:first", 0) and len(sources("kernel_files")) == 4


def test_a_file_of_a_package_can_use_relative_imports():
    write("outer_package/__init__.py", "")
    write("outer_package/helper_of_files.py", "def double(x):\n    return x * 2\n")
    write("outer_package/kernels.py", TEXT.format(helper=".helper_of_files", factor=3))
    assert one_target("outer_package/kernels.py:first").name == "double"
    assert "outer_package.kernels" in sys.modules


def test_two_files_of_one_name_do_not_replace_each_other():
    write("other/kernel_files.py", TEXT.format(helper="helper_of_files", factor=4))
    one, two = (one_target(f"{folder}/kernel_files.py:second") for folder in ("inner", "other"))
    assert (one.golden(1), two.golden(1)) == (3, 4)


@pytest.mark.parametrize(
    "name, message",
    [
        ("inner/nothing.py", "there is no file inner/nothing.py."),
        ("inner", "inner is a folder; name one of its files, as inner/FILE.py."),
        ("inner/", "inner/ is a folder; name one of its files, as inner/FILE.py."),
        ("inner/kernel_files", "is it inner/kernel_files.py?"),
        ("inner/kernel_files.py:third", "inner/kernel_files.py has no 'third'; its targets are: first, second."),
        ("inner/helper_of_files.py", "defines no assay.Target. `goldsmith new NAME` writes"),
        ("inner/kernel_files.py:", "name a target of your own as module:target, path/to/file.py:target, or a module"),
        (
            "kernel_files:first",
            "no module 'kernel_files' is in the current directory or installed. Run",
        ),
    ],
)
def test_a_wrong_name_is_answered_with_what_would_work(name, message):
    with pytest.raises(UnknownName) as error:
        find([name])
    assert message in str(error.value)


def test_one_target_of_several_must_be_named():
    with pytest.raises(UnknownName) as error:
        one_target("inner/kernel_files.py")
    assert "name one target; there are: inner/kernel_files.py:first (double), " in str(error.value)
    assert "inner/kernel_files.py:rest#2" in str(error.value)
    assert one_target("inner/kernel_files.py:pair#2").golden(1) == 3


def test_verify_lists_every_target_of_a_file_and_diagnose_takes_one():
    write("inner/kernel_files.py", TEXT.format(helper="helper_of_files", factor=4))
    result = CliRunner().invoke(app, ["verify", "inner/kernel_files.py", "--jobs", "1", "--quick"])
    assert result.exit_code == 1 and "1 of 4 checks failed" in " ".join(result.stdout.split()), result.output
    result = CliRunner().invoke(app, ["diagnose", "inner/kernel_files.py:second", "--budget", "20"])
    assert result.exit_code == 1 and "FAIL" in result.stdout, result.output
    result = CliRunner().invoke(app, ["diagnose", "inner/kernel_files.py"])
    assert result.exit_code == 2 and "name one target; there are:" in " ".join(result.stderr.split())


def test_tensors_that_a_file_draws_when_it_is_imported_are_the_same_in_every_run():
    text = "import torch\nfrom goldsmith import assay\ndrawn_{0} = torch.randn(9)\n"
    text += "target = assay.Target(lambda x: x, lambda x: x, cases={{'x': drawn_{0}}}, name='drawn')\n"
    state = torch.get_rng_state()
    drawn = []
    for name in ("one_of_files", "other_of_files"):
        write(f"{name}.py", text.format(name))
        (target,) = load_targets(f"{name}.py:target")
        drawn.append(target.cases[0].build(torch.float32, torch.device("cpu"), 0)["x"])
    assert torch.equal(*drawn) and torch.equal(state, torch.get_rng_state())
