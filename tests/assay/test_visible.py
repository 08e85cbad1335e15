"""What others wrote reaches text and page without control characters; the text says what a replay looks at."""

import torch

from goldsmith import assay
from goldsmith.assay.diagnosis.report import page as diagnosis_page
from goldsmith.assay.diagnosis.report.text import SMALLEST, render


def colours(x):
    raise ValueError("\x1b[31mred\x1b[0m \x07\r\x9b2J")


def double(x):
    return x * 2


def test_control_characters_of_a_message_reach_neither_text_nor_page():
    target = assay.Target(colours, double, cases={"x": torch.randn(3)}, backward=None)
    diagnosis = assay.diagnose(target, probes="values")
    for text in (render(diagnosis), str(diagnosis.report), diagnosis_page.render(diagnosis)):
        assert "\\x1b[31m" in text and not any(c in text for c in "\x1b\x07\r\x9b")


@assay.case(T=[5])
def rows(make, T):
    return {"x": make.normal(T, 6)}


def test_the_text_says_that_a_replay_looks_at_the_smallest_case_alone(tmp_path):
    target = assay.Target(lambda x: x * 3, double, cases=rows, backward=None)
    diagnosis = assay.diagnose(target, probes="values", out=tmp_path)
    message, text = SMALLEST.split()[:6], render(diagnosis).split()
    assert diagnosis.case["name"] != diagnosis.examined["name"] and " ".join(message) in " ".join(text)
    diagnosis.examined = diagnosis.case
    assert " ".join(message) not in " ".join(render(diagnosis).split())
