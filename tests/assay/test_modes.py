"""The assay's dispatch modes do not import torch's compiler, and the compiler does not trace them."""

import subprocess
import sys

import torch
import torch._dynamo

from goldsmith.assay.support.dispatch_mode import DispatchMode

CHECKED = """
import sys
import torch
from goldsmith import assay

report = assay.check(assay.Target(lambda x: x * x, lambda x: x * x, cases={"x": torch.randn(3, 4)}))
print(report.verdict, "torch._dynamo" in sys.modules)
"""


def test_a_check_does_not_import_the_compiler():
    done = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True)
    assert done.stdout == "pass False\n", done.stdout + done.stderr


class Counts(DispatchMode):
    """Counts operators, and those among them that torch's compiler was tracing."""

    def __init__(self):
        super().__init__()
        self.operators = self.traced = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        self.traced += torch.compiler.is_compiling()
        return func(*args, **(kwargs or {}))


def test_compiled_code_is_compiled_without_the_mode():
    """As with torch's own modes, no part of `__torch_dispatch__` enters a graph."""
    x = torch.ones(5)
    with Counts() as counts:
        out = torch.compile(torch.add, backend="eager")(x, x)
    assert torch.equal(out, x + x) and counts.operators and not counts.traced


def test_a_mode_sees_every_operator_with_and_without_the_compiler(monkeypatch):
    x, seen = torch.ones(3), []
    for loaded in (True, False):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch._dynamo", torch._dynamo)
            if not loaded:
                patch.delitem(sys.modules, "torch._dynamo")
            with Counts() as counts:
                x + x * x
        seen.append(counts.operators)
    assert seen == [2, 2]
