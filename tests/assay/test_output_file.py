"""A file is written whole or stays as it was; a check whether it can be written leaves nothing behind."""

import errno
import os
from pathlib import Path

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.support.output_file import why_not, write_whole


@pytest.fixture
def full_disk(monkeypatch):
    """Every new file takes one character less than it should."""

    def write(path, content, *arguments, **options):
        with open(path, "wb") as file:
            file.write(b"x" * (len(content) - 1))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Path, "write_bytes", write)


def test_a_file_is_replaced_with_its_mode_and_through_a_link(tmp_path):
    path, link = tmp_path / "new" / "page.html", tmp_path / "link.html"
    write_whole(path, "one")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    assert sorted(p.name for p in path.parent.iterdir()) == ["page.html"]


def test_an_earlier_page_survives_a_full_disk(tmp_path, full_disk):
    path = tmp_path / "page.html"
    with open(path, "w") as file:
        file.write("the page of yesterday")
    report = assay.check(assay.Target(lambda x: x, lambda x: x, cases={"x": torch.ones(3)}))
    with pytest.raises(OSError, match="No space left"):
        report.to_html(path)
    assert path.read_text() == "the page of yesterday" and list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_in_place():
    write_whole("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["page.html", "new/folder/page.html"])
def test_a_check_leaves_no_file_and_no_folder(tmp_path, name):
    assert why_not(tmp_path / name) == "" and not list(tmp_path.iterdir())
    (tmp_path / "kept").write_text("kept")
    assert why_not(tmp_path / "kept") == "" and (tmp_path / "kept").read_text() == "kept"
    assert why_not(tmp_path) == "Is a directory" and why_not(tmp_path / "kept" / "page.html")


def test_a_bundle_that_cannot_be_written_costs_no_diagnosis(tmp_path, full_disk):
    target = assay.Target(lambda x: x * 3, lambda x: x * 2, cases={"x": torch.ones(3)}, backward=None)
    diagnosis = assay.diagnose(target, out=tmp_path)
    assert diagnosis.verdict == "fail" and diagnosis.bundle is None
    words = " ".join(str(diagnosis).split())
    assert f"The bundle could not be written into {tmp_path}: No space left on device." in words
    assert not list(tmp_path.iterdir())
