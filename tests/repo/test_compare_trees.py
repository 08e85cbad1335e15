"""scripts/compare_trees.py: what it accepts as a move or a renaming, and what it does not."""

import sys

import pytest

from repo.tree import ROOT

sys.path.append(str(ROOT / "scripts"))
from compare_trees import compare

SOURCE = '''
import torch

def f(x, y):
    """Doc."""
    return max(x, y)

def h(x, y):
    return torch.sin(x) + y.sum()

class C:
    def m(self):
        return "text"
'''
OLD = {"a.py": SOURCE}


def test_a_moved_renamed_and_redocumented_function_is_equal():
    new = {
        "b.py": "def g(left, right):\n    return max(left, right)\n",
        "d.py": "def h(a, b):\n    return torch.sin(a) + b.sum()\n",
        "c.py": 'class D:\n    """Other."""\n\n    def n(self):\n        return "text"\n',
    }
    names, gone, added = compare(OLD, new, False)
    assert gone == added == [] and names["x", "left"] == 2 and names["f", "g"] == 1


@pytest.mark.parametrize(
    "before, after",
    [
        ("max(x, y)", "max(y, x)"),
        ("max(x, y)", "min(x, y)"),
        ("max(x, y)", "max(x, x)"),
        ("max(x, y)", "max(x, y, 1)"),
        ("max(x, y)", "x.max(y)"),
        ("torch.sin(x)", "torch.cos(x)"),
        ("y.sum()", "y.mean()"),
        ('"text"', '"other"'),
    ],
)
def test_a_changed_function_is_listed(before, after):
    new = {"a.py": OLD["a.py"].replace(before, after)}
    _, gone, added = compare(OLD, new, False)
    assert len(gone) == len(added) == 1


def test_texts_may_differ_when_asked():
    new = {"a.py": OLD["a.py"].replace('"text"', '"other"')}
    assert compare(OLD, new, True)[1:] == ([], [])
