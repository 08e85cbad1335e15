"""What must hold for the files themselves."""

import re
import subprocess
import tomllib

import pytest

import goldsmith
from repo.tree import ROOT, files, shown

CODE = files(".py", ".cpp", ".h", ".sh", ".j2", ".html")
TEXT = [path for path in files() if path.suffix not in (".png", ".svg", ".jsonl", ".safetensors")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lines_matching(pattern, paths):
    expression = re.compile(pattern)
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if expression.search(line):
                yield f"{shown(path)}:{number}: {line.strip()}"


def test_no_file_of_code_is_longer_than_400_lines():
    assert [(shown(p), n) for p in CODE if (n := len(p.read_text().splitlines())) > 400] == []


def test_no_file_names_a_path_of_one_machine():
    folders = "|".join(("work", "root", "home", "farm", "Users"))
    assert list(lines_matching(rf"(^|[^A-Za-z0-9_.}}\]])/({folders})/", TEXT)) == []


def test_no_file_names_a_package_index():
    words = "|".join(("index" + "-url", "find" + "-links", "pypi" + r"\.org", "python" + "hosted"))
    assert list(lines_matching(words, TEXT)) == []


def test_no_unfinished_words_in_the_source():
    words = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"))
    assert list(lines_matching(rf"\b({words})\b", CODE)) == []


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (?!Unreleased)(\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first and first[1] == goldsmith.__version__


def test_the_version_is_written_in_one_place():
    version = re.escape(goldsmith.__version__)
    places = lines_matching(rf"version.*[\"']{version}[\"']", files(".py", ".toml"))
    assert [place.split(":")[0] for place in places] == ["src/goldsmith/__init__.py"]


def test_constraints_are_exact_and_name_every_direct_dependency():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)", line).groups()
            pins[name.lower().replace("_", "-")] = version
    assert pins["torch"] == "2.13.0"
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    direct = [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["hf"], *extras["serve"]]
    names = {re.match(r"[A-Za-z0-9._-]+", text)[0].lower() for text in direct}
    assert names - set(pins) == set()


def test_every_place_asks_for_the_same_python():
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    major, minor = least.split(".")
    assert PROJECT["tool"]["mypy"]["python_version"] == least
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    assert f"sys.version_info >= ({major}, {minor})" in (ROOT / "scripts/setup.sh").read_text()
    assert f"Python {least}" in (ROOT / "README.md").read_text()


def test_shell_scripts_parse():
    for path in [*files(".sh"), ROOT / ".ci/run"]:
        assert subprocess.run(["bash", "-n", path]).returncode == 0


@pytest.mark.parametrize("script", [ROOT / ".ci/run"], ids=shown)
def test_scripts_that_are_run_by_name_are_executable(script):
    assert script.stat().st_mode & 0o111
