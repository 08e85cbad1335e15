"""The wheel and the sdist are whole: what they hold, and that the wheel works where nothing else of ours is."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import goldsmith
from repo.tree import SOURCE, files, shown

# What the checkout has compiled of the same sources is taken from there.
COMPILED = Path(__file__).with_name("compiled.py")
LAUNCHED = f"--config-setting=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER={sys.executable};{COMPILED}"
LIBRARY = "goldsmith/lib/libgoldsmith.so"
# Runs where goldsmith is nothing but the wheel. The page's template must have come along, and the native library.
USE = """
import sys
import torch
import goldsmith
from goldsmith import assay, mhc

assert goldsmith.__file__.startswith(sys.prefix), goldsmith.__file__
target = assay.Target(lambda x: x + 1, lambda x: x + 1, cases={"x": torch.randn(3, 4)})
report = assay.check(target)
report.to_html(sys.argv[1])
streams = mhc.expand(torch.randn(5, 8), n=4)
from goldsmith.core import native
print(report.verdict, tuple(streams.shape), goldsmith.__version__, native.reason())
"""


def run(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, sdist): the sdist from a copy of the project's files alone, the wheel from the sdist alone."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for path in files():
        (copy / shown(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / shown(path))
    run(sys.executable, "-m", "build", "--no-isolation", LAUNCHED, "--outdir", out, copy)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The Python of an environment that holds the wheel; goldsmith's dependencies are lent to it by this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[0])
    # on the path, but its own .pth files are not followed: an editable goldsmith stays out
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_is_for_every_python_of_this_platform_and_carries_the_version(built):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert built[0].name == f"goldsmith-{goldsmith.__version__}-py3-none-{platform}.whl"


def test_the_wheel_holds_every_file_of_the_package_and_the_library_and_nothing_else(built):
    ours = {name for name in members(built[0]) if ".dist-info/" not in name}
    package = {str(path.relative_to(SOURCE.parent)) for path in files() if SOURCE in path.parents}
    assert ours == package | {LIBRARY}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in members(built[0]))


def test_the_wheel_holds_the_commands_but_no_peers_benchmarks_kernelfault_or_tests(built):
    names = {name for name in members(built[0]) if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"goldsmith"}
    parts = {part.removesuffix(".py") for name in names for part in name.split("/")}
    assert not parts & {"kernelfault", "peers", "specimens", "tests", "examples", "composites", "product_key_layers"}
    assert [name for name in names if name.startswith("goldsmith/cli/bench/offload")] == []
    assert {f"goldsmith/cli/{file}" for file in ("main.py", "bench/options.py", "bench/timing.py")} <= names


def test_the_package_imports_nothing_that_is_outside_the_wheel():
    outside = ("benchmarks", "tests", "scripts", "examples")
    for path in files(".py"):
        if SOURCE in path.parents:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {name.partition(".")[0] for name in names} & set(outside), f"{shown(path)}: {names}"


def test_the_library_depends_on_the_c_library_only(built, tmp_path):
    with zipfile.ZipFile(built[0]) as archive:
        library = archive.extract(LIBRARY, tmp_path)
    wanted = [line.split()[-1] for line in run("objdump", "-p", library).splitlines() if "NEEDED" in line]
    assert set(wanted) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_the_sdist_holds_what_is_needed_to_build_and_test(built):
    with tarfile.open(built[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for path in files():
        if not shown(path).startswith((".ci/", "benchmarks/results/", ".git")):
            assert shown(path) in held


def test_the_wheel_works_in_an_empty_environment(installed, tmp_path):
    page = tmp_path / "page.html"
    assert (
        run(installed, "-c", USE, page, cwd=tmp_path).split("\n")[0] == f"pass (5, 4, 8) {goldsmith.__version__} None"
    )
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_the_wheel_brings_the_command(installed, tmp_path):
    assert goldsmith.__version__ in run(installed.parent / "goldsmith", "--version", cwd=tmp_path)
