"""The page in a browser: phone and desktop, light and dark, scripts off. Skipped without Chromium.

GOLDSMITH_SCREENSHOTS=FOLDER keeps the screenshots there.
"""

import os
import struct
import zlib
from pathlib import Path

import pytest
import torch

from assay import chromium
from assay import html_samples as samples
from goldsmith import assay
from goldsmith.assay.diagnosis.report import page as diagnosis_page
from goldsmith.assay.gate import verdict_page
from goldsmith.assay.gate.verdict import Verdict
from goldsmith.assay.report.html import page

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed")

REMARKS = ["Run: 9 cases through all probes.", "Not run: 21 large cases, which a GPU runs."]
PAGES = {
    "pass": lambda path: page.write([samples.passing()], path),
    "fail": lambda path: page.write([samples.failing()], path),
    "reference": lambda path: page.write([samples.reference_fault()], path),
    "hostile": lambda path: page.write([samples.hostile()], path),
    "verify": lambda path: page.write(samples.verify_entries(), path, remarks=REMARKS),
    "watch": lambda path: watched(path),
    "gate": lambda path: judged(path),
    "diagnosis": lambda path: diagnosis_page.write(samples.diagnosis(), path),
    "diagnosis-hostile": lambda path: diagnosis_page.write(samples.hostile_diagnosis(), path),
}


def judged(path):
    timing = {"case": "tokens[T=4096,D=1024]", "time": 12.3, "p10": 12.0, "p90": 12.9, "reference": 55.1}
    timing |= {"speedup": 4.5, "floor": 9.1, "doubts": ["the clock of the GPU changed"]}
    text = "y exceeds its rounding bound up to 2.62e+05 times; worst at [0, 0]: got 0.25, golden -0.33333333"
    verdicts = [
        Verdict("accepted", candidate="kernels/generated/softmax_in_two_passes.py", timing=timing),
        Verdict("wrong", "values", "kernels/generated/softmax_online.py", "rows[T=13,D=100]", evidence=[text]),
        Verdict("cheating", "calls_golden", "kernels/cheat.cu", evidence=["it read `golden`"]),
    ]
    verdict_page.write(verdicts, path)
    return path


def watched(path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    with assay.watch(model) as w:
        for step in range(3):
            y = model(torch.ones(2, 4))
            (y / (y - y) if step == 2 else y).sum().backward()
    w.to_html(path)
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(os.environ.get("GOLDSMITH_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_the_width_and_uses_the_requested_colour_scheme(browser, folder, name, width, scheme):
    browser.open(PAGES[name](folder / f"{name}.html"), width, scheme)
    assert browser.size()[0] == width, "it scrolls sideways"
    assert browser.broken_words() == []
    shot = folder / f"{name}-{width}-{scheme}.png"
    browser.screenshot(shot)
    assert (corner(shot) > 128) == (scheme == "light")


UNFOLDED = {
    "unfolded": lambda: page.render([*samples.verify_entries(), samples.failing()]),
    "diagnosis-unfolded": lambda: diagnosis_page.render(samples.diagnosis()),
    "diagnosis-hostile-unfolded": lambda: diagnosis_page.render(samples.hostile_diagnosis()),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", UNFOLDED)
def test_the_page_fits_the_width_with_everything_unfolded(browser, folder, name, width):
    path = folder / f"{name}.html"
    text = UNFOLDED[name]()
    path.write_text(text.replace("<details", "<details open"), encoding="utf-8")
    browser.open(path, width)
    assert browser.size()[0] == width, "it scrolls sideways"
    assert browser.broken_words() == []
    browser.screenshot(folder / f"{name}-{width}.png")


def test_a_page_that_is_too_wide_would_be_noticed(browser, tmp_path):
    path = tmp_path / "wide.html"
    path.write_text("<!doctype html><meta name=viewport content='width=device-width'><p style='width:900px'>wide</p>")
    browser.open(path, 380)
    assert browser.size()[0] > 380


def test_words_that_break_in_the_middle_would_be_noticed(browser, tmp_path):
    path = tmp_path / "narrow.html"
    path.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<p style='width:3em;overflow-wrap:anywhere'>extraordinary <p style='width:3em'>well-established"
    )
    browser.open(path, 380)
    (word,) = browser.broken_words()
    assert word.replace("|", "") == "extraordinary" and not word.endswith("|")


def corner(path):
    """The first pixel's red, from a PNG of 8-bit channels."""
    data = path.read_bytes()
    at, packed = 8, b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += size + 12
    return zlib.decompress(packed)[1]
