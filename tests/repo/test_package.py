"""The wheel and the sdist are whole: what they hold, and that the wheel works where nothing else of ours is."""

import ast
import email
import os
import re
import shlex
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
from scripts import wheel
from scripts.index_readme import without_local_links
from scripts.native import place, supported

# What the checkout has compiled of the same sources is taken from there.
COMPILED = Path(__file__).with_name("compiled.py")
LAUNCHED = f"--config-setting=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER={sys.executable};{COMPILED}"
LIBRARY = "goldsmith/lib/libgoldsmith.so"
on_the_day_of_the_wheel = pytest.mark.sweep(3, part=0)  # it is built once for all of its tests
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
    return wheel.build(out, [LAUNCHED], copy)[:2]


def environment(folder: Path) -> Path:
    """The Python of a new environment, which borrows goldsmith's dependencies from this one."""
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # on the path, but its own .pth files are not followed: an editable goldsmith stays out
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, package: Path, *options: str) -> None:
    # not in this folder: `pip --python` is started again with that Python, and borrows its build tools as well
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *options)
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, package, cwd=package.parent)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The Python of an environment that holds the wheel."""
    python = environment(tmp_path_factory.mktemp("environment"))
    install(python, built[0])
    return python


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@on_the_day_of_the_wheel
def test_the_wheel_is_for_every_python_on_every_linux_with_glibc_2_28_and_carries_the_version(built):
    name, version, python, abi, platforms = built[0].name.removesuffix(".whl").split("-")
    assert (name, version, python, abi) == ("goldsmith", goldsmith.__version__, "py3", "none")
    assert "manylinux_2_28_x86_64" in platforms.split(".")


def required_versions(library: Path) -> dict[str, set[tuple[int, ...]]]:
    """The symbol versions that a library needs, by family: {"GLIBC": {(2, 14), ...}, "GCC": ...}."""
    versions: dict[str, set[tuple[int, ...]]] = {}
    text = run("objdump", "-p", library).partition("Version References:")[2]
    for family, number in re.findall(r"\b([A-Z]+)_(\d[\d.]*)$", text, re.M):
        versions.setdefault(family, set()).add(tuple(int(part) for part in number.split(".")))
    return versions


@pytest.mark.skipif(not supported(), reason="the native library is for Linux on x86-64")
def test_the_librarys_symbols_are_no_newer_than_those_of_manylinux_2_28():
    versions = required_versions(place("release"))
    assert set(versions) <= {"GLIBC", "GCC"}  # its libstdc++ is inside
    assert max(versions["GLIBC"]) <= (2, 28)
    assert max(versions["GCC"]) <= (8,)


@on_the_day_of_the_wheel
def test_the_wheel_holds_every_file_of_the_package_and_the_library_and_nothing_else(built):
    ours = {name for name in members(built[0]) if ".dist-info/" not in name}
    package = {str(path.relative_to(SOURCE.parent)) for path in files() if SOURCE in path.parents}
    assert ours == package | {LIBRARY}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in members(built[0]))


@on_the_day_of_the_wheel
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


@on_the_day_of_the_wheel
def test_the_library_depends_on_the_c_library_and_libgcc_only(built, tmp_path):
    with zipfile.ZipFile(built[0]) as archive:
        library = archive.extract(LIBRARY, tmp_path)
    wanted = [line.split()[-1] for line in run("objdump", "-p", library).splitlines() if "NEEDED" in line]
    assert set(wanted) <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


@on_the_day_of_the_wheel
def test_the_sdist_holds_what_is_needed_to_build_and_test(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in files():
        if not shown(path).startswith((".ci/", "benchmarks/results/", ".git")):
            assert shown(path) in names


@on_the_day_of_the_wheel
def test_the_wheel_works_in_an_empty_environment(installed, tmp_path):
    page = tmp_path / "page.html"
    assert (
        run(installed, "-c", USE, page, cwd=tmp_path).split("\n")[0] == f"pass (5, 4, 8) {goldsmith.__version__} None"
    )
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


@on_the_day_of_the_wheel
def test_the_wheel_brings_the_command(installed, tmp_path):
    assert goldsmith.__version__ in run(installed.parent / "goldsmith", "--version", cwd=tmp_path)


@on_the_day_of_the_wheel
def test_the_sdist_works_in_an_empty_environment(built, tmp_path):
    python = environment(tmp_path / "environment")
    install(python, built[1], LAUNCHED)
    page = tmp_path / "page.html"
    assert run(python, "-c", USE, page, cwd=tmp_path).split("\n")[0] == f"pass (5, 4, 8) {goldsmith.__version__} None"


@on_the_day_of_the_wheel
def test_the_index_page_has_keywords_versions_and_a_readme_without_links_into_the_checkout(built):
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert "mixture-of-experts" in metadata["Keywords"].split(",")
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12)} <= set(classifiers)
    readme = metadata.get_payload()
    assert readme.startswith("# goldsmith")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link] == []
    assert "<!--" not in readme


def test_an_index_page_shows_the_text_of_the_picture_instead_of_the_picture():
    shown = without_local_links(
        "one\n\n<!-- picture\n```console\n$ ls\n```\n-->\n![ls](images/ls.svg)\n\n[two](two.md)\n"
    )
    assert shown == "one\n\n```console\n$ ls\n```\n\ntwo\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A copy of the project's files, without a built library; cmake and ninja are on the path, as in pip's builds."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder = tmp_path / "a checkout"
    for path in files():
        (folder / shown(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / shown(path))
    return folder


REASON = "import goldsmith; from goldsmith.core import native; print(goldsmith.__file__, native.reason(), sep='\\n')"


@pytest.mark.sweep(3, part=1)
@pytest.mark.skipif(not supported(), reason="the native library is for Linux on x86-64")
def test_an_editable_install_builds_the_native_library(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("CMAKE_CXX_COMPILER_LAUNCHER", f"{sys.executable};{COMPILED}")
    python = environment(tmp_path / "environment")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", "-e", checkout)
    place, reason = run(python, "-c", REASON, cwd=tmp_path).splitlines()
    assert (Path(place).parent, reason) == (checkout / "src/goldsmith", "None")


@pytest.mark.sweep(3, part=2)
@pytest.mark.skipif(not supported(), reason="the native library is for Linux on x86-64")
def test_an_editable_install_without_a_compiler_succeeds_and_says_how_to_build_the_library(
    checkout, tmp_path, monkeypatch
):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    python = environment(tmp_path / "environment")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", "-e", checkout)
    _, reason = run(python, "-c", REASON, cwd=tmp_path).splitlines()
    command = reason.partition("to build it, run: ")[2]
    assert shlex.split(command) == [str(python), str(checkout / "scripts/native.py")]
