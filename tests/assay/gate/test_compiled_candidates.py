"""Candidates in C++ and CUDA C++: each source is compiled once, in a process that runs no candidate."""

import shutil
import sysconfig
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from goldsmith.assay import gate
from goldsmith.assay.gate import candidate_call, judging
from goldsmith.assay.gate.compiled import library_cache
from goldsmith.assay.gate.compiled import sources as compiled_sources
from goldsmith.assay.gate.isolation.candidate_process import CandidateProcess
from goldsmith.assay.gate.isolation.loading import Refusal
from repo.tree import ROOT

from . import quick_compiler
from .problems import problem

CPP = """
// torch::Tensor candidate(int n) { in a comment }
torch::Tensor
candidate(const torch::Tensor& x, torch::Tensor w) {
    auto e = (x - std::get<0>(x.max(-1, /*keepdim=*/true))).exp();
    return e / e.sum(-1, true) * w;
}
"""


def test_the_prototype_of_a_function_is_found_in_a_source():
    assert (
        compiled_sources.prototype(CPP, "candidate")
        == "torch::Tensor candidate(const torch::Tensor& x, torch::Tensor w);"
    )
    assert compiled_sources.prototype(CPP, "other") == ""
    pair = "std::vector<at::Tensor> run(at::Tensor a) {\n}"
    assert compiled_sources.prototype(pair, "run") == "std::vector<at::Tensor> run(at::Tensor a);"


def test_without_nvcc_a_cuda_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(Refusal, match="needs nvcc"):
        compiled_sources.build(CPP, {}, ["candidate"], "cuda")


def test_a_source_without_the_function_is_refused_before_it_is_compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="it defines no function candidate that returns tensors"):
        compiled_sources.build("int other() { return 1; }", {}, ["candidate"], "cpp")


@pytest.fixture
def compilations(monkeypatch):
    """The sources that were compiled, with a cache that is empty at first."""
    monkeypatch.setattr(library_cache, "_libraries", OrderedDict())
    sources, build = [], CandidateProcess.build

    def counted(process):
        sources.append(process.arguments["source"])
        assert process.number == 0 and process.pid == 0, "something has run there before"
        return build(process)

    monkeypatch.setattr(CandidateProcess, "build", counted)
    return sources


@pytest.fixture
def quick(monkeypatch):
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists() or shutil.which("cc") is None:
        pytest.skip("no C compiler, or no headers of Python")
    monkeypatch.setattr(judging, "BUILDER", "assay.gate.quick_compiler:build")
    monkeypatch.setattr(judging, "Surroundings", partial(judging.Surroundings, paths=(str(ROOT / "tests"),)))


def verdict(source, name="own", **more):
    candidate = gate.Candidate(name, source, language="cpp", **more)
    how = candidate_call.CandidateCall(order=("x", "w")).to_data()
    return gate.judge(candidate, problem(construct=how, backward=None), seed=1, probes="quick")


def test_a_source_is_compiled_once_however_many_processes_import_it(quick, compilations):
    right, wrong = quick_compiler.SOURCE, quick_compiler.SOURCE.replace("PyNumber_Multiply", "PyNumber_Add")
    assert [verdict(source).status for source in (right, wrong)] == ["accepted", "wrong"]
    assert compilations == [right, wrong]  # a wrong candidate is called in a second process
    assert verdict(right, "another").status == "accepted" and compilations == [right, wrong]


def test_another_file_or_name_is_another_library(quick, compilations):
    source = quick_compiler.SOURCE.replace("#include", '#include "scale.h"\n#include').replace("-1)", "SCALE)")
    found = [verdict(source, files={"scale.h": f"#define SCALE {dim}\n"}).status for dim in (-1, 0)]
    assert (found, len(compilations)) == (["accepted", "wrong"], 2)
    renamed = quick_compiler.SOURCE.replace("Tensor candidate(", "Tensor other(")
    assert verdict(renamed, entry="other").status == "accepted" and len(compilations) == 3


def test_what_is_no_library_is_not_kept(quick, compilations):
    for source in (quick_compiler.SOURCE.replace("NULL", "nothing"), "int other() { return 1; }"):
        assert [verdict(source).status for _ in range(2)] == ["refused", "refused"]
    assert len(compilations) == 4 and not library_cache._libraries


def test_old_libraries_make_room(monkeypatch):
    monkeypatch.setattr(library_cache, "_libraries", OrderedDict())
    monkeypatch.setattr(library_cache, "_MOST_BYTES", 25)
    asked = []

    class Compiler:
        def build(self):
            asked.append(1)
            return b"x" * 10

        def close(self):
            pass

    for number in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, which was used least lately
        library_cache.library(Compiler, {"source": str(number), "language": "cpp"})
    assert len(asked) == 4 and len(library_cache._libraries) == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "change, status, text",
    [
        (("", ""), "accepted", ""),
        (("e.sum(-1, true)", "e.sum(0, true)"), "wrong", "y exceeds"),
        (("auto e", "auto e = nothing; auto f"), "refused", "nothing"),
    ],
)
def test_cpp_is_compiled_and_judged(change, status, text):
    candidate = gate.Candidate("own", CPP.replace(*change) if change[0] else CPP, language="cpp")
    how = candidate_call.CandidateCall(order=("x", "w")).to_data()
    limits = gate.Limits(import_seconds=300)  # torch's headers take a minute on a busy machine
    verdict = gate.judge(candidate, problem(construct=how, backward="present"), limits=limits, seed=1, probes="quick")
    assert verdict.status == status, verdict
    assert text in " ".join(verdict.evidence)


@pytest.mark.gpu
@pytest.mark.skipif(cpp_extension.CUDA_HOME is None, reason="no nvcc")
def test_cuda_is_compiled_once_a_source_and_judged_on_the_gpu(compilations):
    source = """
#include <torch/extension.h>
__global__ void scaled(const float* x, const float* w, float* y, int T, int D) {
    int t = blockIdx.x;
    float top = -INFINITY, sum = 0;
    for (int d = 0; d < D; ++d) top = fmaxf(top, x[t * D + d]);
    for (int d = 0; d < D; ++d) sum += expf(x[t * D + d] - top);
    for (int d = threadIdx.x; d < D; d += blockDim.x) y[t * D + d] = expf(x[t * D + d] - top) / sum * w[d];
}
torch::Tensor candidate(torch::Tensor x, torch::Tensor w) {
    x = x.contiguous(); w = w.contiguous();
    auto y = torch::empty_like(x);
    scaled<<<x.size(0), 32>>>(x.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
    return y;
}
"""
    how = candidate_call.CandidateCall(order=("x", "w")).to_data()
    limits = gate.Limits(import_seconds=300)
    right = gate.Candidate("right", source, language="cuda")
    assert gate.judge(right, problem(construct=how, backward=None), device="cuda", limits=limits).status == "accepted"
    wrong = gate.Candidate("wrong", source.replace("/ sum", "/ (sum + 0.01f)"), language="cuda")
    assert gate.judge(wrong, problem(construct=how, backward=None), device="cuda", limits=limits).status == "wrong"
    assert len(compilations) == 2 and torch.cuda.is_available()
    again = gate.Candidate("again", source, language="cuda")
    assert gate.judge(again, problem(construct=how, backward=None), device="cuda", limits=limits).status == "accepted"
    assert len(compilations) == 2
