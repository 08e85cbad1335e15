"""Patches of C++ files: a fault of each kind is mended, one build tries many edits, the file stays as it is."""

import ctypes
import os

import pytest

from assay.diagnosis.test_patches import EQUALS, failing
from assay.diagnosis.written_modules import forget, load
from goldsmith import assay
from goldsmith.assay.diagnosis.source import search as searching
from goldsmith.assay.diagnosis.source.children.forked_outcome import forked
from goldsmith.assay.diagnosis.source.cpp.libraries_of_edits import loads
from goldsmith.assay.diagnosis.source.cpp.tokens import CppText
from goldsmith.assay.diagnosis.source.edits.edits import Edit
from goldsmith.assay.diagnosis.source.search import find_patch

SECONDS = 240.0  # a search ends with its patch; a busy machine takes long to build
CPP = """#include <cmath>

namespace {

float inverse_rms(const float* x, int D, float eps) {
    float sum = 0.0f;
    for (int d = 0; d < D; ++d) sum += x[d] * x[d];
    return 1.0f / std::sqrt(sum / D + eps);
}

}  // namespace

extern "C" {

void rms_forward(const float* x, const float* w, float* y, int T, int D, float eps) {
    for (int t = 0; t < T; ++t) {
        const float r = inverse_rms(x + t * D, D, eps);
        for (int d = 0; d < D; ++d) y[t * D + d] = x[t * D + d] * r * w[d];
    }
}

void rms_backward(const float* x, const float* w, const float* g, float* dx, float* dw, int T, int D, float eps) {
    for (int d = 0; d < D; ++d) dw[d] = 0;
    for (int t = 0; t < T; ++t) {
        const float* row = x + t * D;
        const float r = inverse_rms(row, D, eps);
        float inner = 0;
        for (int d = 0; d < D; ++d) {
            inner += g[t * D + d] * w[d] * row[d] * r;
            dw[d] += g[t * D + d] * row[d] * r;
        }
        for (int d = 0; d < D; ++d) dx[t * D + d] = r * (g[t * D + d] * w[d] - row[d] * r * inner / D);
    }
}

}
"""
MODULE = """
import ctypes
import os
from pathlib import Path

import torch

from goldsmith import assay


def rms_norm(library):
    functions = ctypes.CDLL(library)

    def call(name, tensors, results, eps):
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*tensors, *results)]
        T, D = tensors[0].shape
        getattr(functions, name)(*pointers, T, D, ctypes.c_float(eps))
        return results

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, eps):
            x, w = x.contiguous(), w.contiguous()
            ctx.save_for_backward(x, w)
            ctx.eps = eps
            return call("rms_forward", (x, w), (torch.empty_like(x),), eps)[0]

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            results = torch.empty_like(x), torch.empty_like(w)
            return *call("rms_backward", (x, w, grad.contiguous()), results, ctx.eps), None

    return RmsNorm.apply


def golden(x, w, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@assay.case(T=[3, 1], D=[5, 4])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 0.25}


source = assay.CppSource(
    Path(__file__).with_name("rms_norm.cpp"), build="c++ -O1 -shared -fPIC {files} -o {library}", load=rms_norm
)
target = assay.Target(source.loaded(), golden, cases=tokens, name="rms_norm", source=source)
"""
FAULTS = {
    "operator": ("sum / D + eps", "sum * D + eps"),
    "assignment": ("dw[d] += g", "dw[d] = g"),
    "another name": ("y[t * D + d] = x[t * D + d]", "y[t * D + d] = x[t * T + d]"),
    "initial value": ("for (int d = 0; d < D; ++d) sum +=", "for (int d = 1; d < D; ++d) sum +="),
}
SHAPES = """
#define EXPORT extern "C"  // f(int x) { in a comment
#include "half.h"
template <typename T, int N>
static inline T scaled(const T* x, int i = 0) { return x[i] * N; }
constexpr int twice(int n) { return 2 * n; }
struct Pair { float a, b; float sum() const { return a + b; } };
float Pair_of(const Pair& p, float) { return p.a; }
float table[] = {1.0f, 2.0f};
EXPORT void run(float* y, int n) {
    auto f = [&](int i) { return y[i] + 1; };
    for (int i = 0; i < n; ++i) y[i] = f(i) + scaled<float, 3>(y, i);
}
"""


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    monkeypatch.setattr(searching, "_EQUALS", EQUALS)
    monkeypatch.setattr(searching, "_PROCESSES", 1)
    yield
    forget()


def test_functions_are_found_by_tokens():
    functions = {f.name: (f.arguments, f.templates, f.constant) for f in CppText(SHAPES).functions}
    assert functions == {
        "scaled": (("x", "i"), ("T", "N"), False),
        "twice": (("n",), (), True),
        "sum": ((), (), False),
        "Pair_of": (None, (), False),  # an argument without a name cannot be passed on
        "run": (("y", "n"), (), False),
    }


LINE = """template <typename T> T twice(T x) { return x * 2; }
extern "C" int line(int x) { return twice(x) + 1; }
"""


def test_a_library_holds_many_edits_and_drops_what_is_no_cpp(tmp_path):
    path = tmp_path / "line.cpp"
    path.write_text(LINE)
    build = "c++ -O1 -shared -fPIC {files} -o {library}"
    source = assay.CppSource(path, build, lambda library: ctypes.CDLL(library).line)
    data = path.read_bytes()
    edits = [
        Edit(str(path), ((data.index(old), data.index(old) + len(old), new),), "", 1.0, 1)
        for old, new in ((b"* 2", "* 3"), (b"+ 1", "- 1"), (b"+ 1", "+ nothing"), (b"x * 2", "x"))
    ]
    made = loads(source, {str(path): data}, edits)
    assert made[2] is None and len({m["library of edits"].split()[1] for m in made if m}) == 1
    results = [None if m is None else source.parts(m)[0](5) for m in made]
    assert results == [16, 9, None, 6]
    assert source.loaded()(5) == 11 and path.read_bytes() == data


def test_edits_of_several_files_share_a_library(tmp_path):
    main, other = tmp_path / "main.cpp", tmp_path / "parts" / "half.cpp"
    other.parent.mkdir()
    main.write_text('#include "own.h"\nint half(int); extern "C" int line(int x) { return half(x) + OWN; }\n')
    other.write_text("int half(int x) { return x / 2; }\n")
    (tmp_path / "own.h").write_text("#define OWN 1\n")
    build = "c++ -O1 -shared -fPIC -I{here} {files} -o {library}"
    source = assay.CppSource([main, other], build, lambda library: ctypes.CDLL(library).line)
    data = {str(p): p.read_bytes() for p in (main, other)}
    edits = [
        Edit(str(p), ((at, at + 1, new),), "", 1.0, 1)
        for p, old, new in ((main, b"+", "-"), (other, b"/", "*"))
        for at in [data[str(p)].index(old)]
    ]
    assert [source.parts(made)[0](10) for made in loads(source, data, edits)] == [4, 21]
    changed = {str(other): edits[1].applied(data[str(other)]).decode()}
    assert (source.loaded()(10), source.parts(changed)[0](10)) == (6, 21)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_each_kind_is_mended(tmp_path, kind):
    right, wrong = FAULTS[kind]
    assert CPP.count(right) == 1
    text = CPP.replace(right, wrong)
    (tmp_path / "rms_norm.cpp").write_text(text)
    target = load(tmp_path, MODULE).target
    search = find_patch(target, failing(target), SECONDS)
    assert search.patch is not None, search.reason
    assert search.patch.text == CPP and "rms_norm.cpp" in search.patch.diff
    assert (tmp_path / "rms_norm.cpp").read_text() == text  # the user's file stays


def test_a_fault_of_many_edits_has_no_patch(tmp_path):
    (tmp_path / "rms_norm.cpp").write_text(CPP.replace("x[t * D + d] * r * w[d];", "0.125f;"))
    target = load(tmp_path, MODULE).target
    search = find_patch(target, failing(target), 8)
    assert search.patch is None and "edits of the candidate's source were tried, and none" in search.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": "missing.cpp"}, r"files: there is no file .*missing.cpp"),
        ({"files": []}, r"files: expected a path or a list of paths, got \[\]"),
        ({"build": "make"}, r"build: 'make' lacks \{files\}, as in 'c\+\+ -shared -fPIC \{files\} -o \{library\}'"),
        ({"build": 3}, r"build: expected a command or a function, got int"),
        ({"load": None}, r"load: expected a function of the library's path, got NoneType"),
        ({"build": "false {files} {library}"}, r"build: the command failed: false /"),
    ],
)
def test_a_mistake_names_its_argument(tmp_path, arguments, message):
    path = tmp_path / "nothing.cpp"
    path.write_text("")
    build = "c++ -shared -fPIC {files} -o {library}"
    with pytest.raises(assay.TargetError, match=message):
        assay.CppSource(**{"files": path, "build": build, "load": str, **arguments}).loaded()


def _ended_by(kind):
    def outcome(seconds):
        while kind == "runs on":
            pass
        if kind == "ends":
            os._exit(3)
        return {"state": "right"}

    return outcome


@pytest.mark.parametrize(("kind", "state"), [("runs on", "slow"), ("ends", "crashed"), ("returns", "right")])
def test_an_edit_in_a_fork_ends_that_process_only(kind, state):
    assert forked(_ended_by(kind), 0.2)["state"] == state
