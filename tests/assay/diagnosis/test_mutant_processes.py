"""Processes that try edits: two at once, and kernels that are rewritten for the interpreter once."""

import importlib
import socket
import threading
import time

import pytest

from goldsmith.assay.diagnosis.source.children import mutant_process
from goldsmith.assay.diagnosis.source.children.known_kernels import reuse_rewritten
from goldsmith.assay.diagnosis.source.children.mutants import Mutants
from goldsmith.assay.diagnosis.source.children.parallel_makers import alternating
from goldsmith.assay.gate.isolation.protocol import NONCE_BYTES, Connection


def test_two_makers_share_a_list_and_stop_with_their_reader():
    seen, both = {}, threading.Barrier(2, timeout=10)

    def maker(name):
        def make(items):
            both.wait() if name not in seen else None
            for item in items:
                seen.setdefault(name, []).append(item)
                yield name, item
                time.sleep(0.001)

        return make

    results = alternating([maker("a"), maker("b")], range(40))
    found = list(results)
    assert sorted(item for _, item in found) == list(range(40)) and set(seen) == {"a", "b"}
    seen.clear()
    results = alternating([maker("a"), maker("b")], range(4000))
    next(results)
    results.close()
    assert sum(map(len, seen.values())) < 400


def test_an_error_of_a_maker_reaches_the_reader():
    def fails(items):
        raise OSError("no process")
        yield

    with pytest.raises(OSError, match="no process"):
        list(alternating([fails], [1]))


class Ended:
    def __init__(self):
        self.connection, self.closed = Connection(socket.socket(), bytes(NONCE_BYTES)), False

    def close(self):
        self.connection.socket.close()
        self.closed = True


def test_a_process_that_ends_leaves_the_second_one_alone():
    mutants, own = object.__new__(Mutants), Ended()
    mutants.child, mutants.second, mutants.number, mutants.restarts = own, Ended(), 0, 0
    assert mutants._asked({"do": "layouts"}, 1.0, bool) is None
    assert own.closed and mutants.child is None and not mutants.second.closed
    mutants.close()
    assert mutants.second.closed


def test_a_further_process_runs_the_files_as_they_are_before_it_times_an_edit(monkeypatch):
    """The alarm of its first edit rang inside of `import triton`, which then failed for every later edit."""
    loaded = []
    monkeypatch.setattr(mutant_process.interpreter, "MODULE", "")  # else Triton is patched in this process

    class Modules:
        misfits = frozenset()

        def load(self, texts, origin, own):
            loaded.append(texts)
            raise ImportError

    known = {"results": {}, "wrong": ["y"], "decided": 0, "misfits": [], "outcome": {"state": "wrong"}}
    message = {
        "origin": "",
        "backward": None,
        "problems": [{}],
        "edited": {"a.py": ""},
        "unseen": False,
        "known": known,
    }
    assert mutant_process._Mutant(Modules(), message).first() == {"state": "wrong"} and loaded == [{"a.py": ""}]


KERNEL = """
def kernel(x, n: {kind} = 3):
    y = x {operator} n
    return y
"""


def test_an_unchanged_kernel_is_rewritten_once_and_reads_its_own_module(tmp_path, monkeypatch):
    interpreter = importlib.import_module("triton.runtime.interpreter")
    rewriter, rewritten = interpreter.FunctionRewriter, []

    def rewrite_ast(self):
        rewritten.append(self.fn)
        names = {}
        exec(
            compile("def kernel(x, n):\n    return interpreter_semantic, scale\n", "file", "exec"),
            self.fn.__globals__,
            names,
        )
        return names["kernel"]

    monkeypatch.setattr(rewriter, "rewrite_ast", rewrite_ast)
    reuse_rewritten(interpreter)
    try:
        kernels = []
        for kind, operator, scale in (("int", "+", 1), ("float", "+", 2), ("int", "-", 3)):
            names = {"scale": scale, "interpreter_semantic": None}
            exec(compile(KERNEL.format(kind=kind, operator=operator), f"file{scale}", "exec"), names)
            kernels.append(rewriter(names["kernel"]).rewrite_ast())
    finally:
        del rewriter._goldsmith_known
    assert len(rewritten) == 2 and [k(0, 0)[1] for k in kernels] == [1, 2, 3]
    assert kernels[1].__annotations__ == {"n": float} and kernels[1].__defaults__ == (3,)
