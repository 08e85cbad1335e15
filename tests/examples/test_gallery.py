"""The gallery's kernels: the right versions pass, the others fail, and the patches that docs/gallery.md shows pass."""

import importlib.util
import re

import pytest
import torch

from goldsmith import assay
from repo.tree import ROOT


def loaded(path):
    """The module of a file, without a folder on the path: scripts/native.py would hide the folder of that name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery = loaded(ROOT / "scripts" / "gallery.py")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about the assay's NaN
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = gallery.PAGE.read_text(encoding="utf-8")
BLOCKS = {match[2]: match[3] for match in gallery.BLOCK.finditer(PAGE)}
ROWS = gallery.known_rows(PAGE)
PATCHED = [name for name, text in BLOCKS.items() if "\nPatch  " in text]
NAMES = [pytest.param(name, marks=pytest.mark.sweep(10, part=part)) for part, name in enumerate(gallery.FIXES)]


def target_of(text, tmp_path, name):
    """The target of a file with that text."""
    path = tmp_path / f"gallery_{name}.py"
    path.write_text(text, encoding="utf-8")
    return loaded(path).target


def patched(text, report):
    """The text with the diff that a report shows: its lines behind `@@`, indented by two columns."""
    for hunk in re.split(r"^  @@.*$", report, flags=re.M)[1:]:
        lines = [line[2:] for line in re.match(r"\n((?:  [ +-].*\n|  \n)+)", hunk)[1].splitlines()]
        old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def source(name):
    return (gallery.FOLDER / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_right_version_passes_and_the_other_fails(name, tmp_path):
    assert assay.check(target_of(gallery.right(name), tmp_path, f"right_{name}"), device=DEVICE, raises=False).ok
    assert not assay.check(
        target_of(source(name), tmp_path, f"wrong_{name}"), probes="quick", device=DEVICE, raises=False
    ).ok


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PATCHED)
def test_the_patch_on_the_page_passes(name, tmp_path):
    text = patched(source(name), BLOCKS[name])
    assert ("word for word" in ROWS[name]) == (text == gallery.right(name))
    assert assay.check(target_of(text, tmp_path, f"patched_{name}"), device=DEVICE, raises=False).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHED)
def test_a_patch_is_found(name):
    report, _ = gallery.diagnosed(name)
    assert "\nPatch  " in report


def test_the_page_shows_every_kernel_of_the_gallery():
    files = {path.stem for path in gallery.FOLDER.glob("*.py")}
    assert files == set(gallery.FIXES) == set(BLOCKS) == set(ROWS)
    assert gallery.counts([ROWS[name] for name in gallery.FIXES]) in PAGE
    assert PATCHED == [name for name in gallery.FIXES if ROWS[name].split(" | ")[3] != "none"]
