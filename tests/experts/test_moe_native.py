"""The native backend of experts.moe from Python: its bits do not depend on threads, callers or forks."""

import os
import threading

import pytest
import torch

from goldsmith import Op, assay, experts
from goldsmith.cli.targets import op_target
from goldsmith.core import native, processors
from goldsmith.experts import _native_abi

REASON = native.reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"native: {REASON}")
E, H, I, T, K = 5, 48, 40, 37, 3
MOE = Op.get("experts.moe")
LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
VALUES = ("values", "ensemble", "statistics", "poison", "guard", "alias")


def step(partitions=2, format="int4", seed=0):
    """One training step: y, and the gradients of x, the weights and the LoRA."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    group = 8 if format == "int4" else None
    base = experts.pack(drawn(E, 2 * I, H), drawn(E, H, I), format=format, group_size=group, partitions=partitions)
    leaves = [drawn(T, H), torch.rand(T, K, generator=generator), drawn(E, 7, H), drawn(E, I, 7), drawn(E, 3, I)]
    x, w, gate_a, gate_b, down_a, down_b = [t.requires_grad_() for t in (*leaves, drawn(E, H, 3))]
    ids = torch.rand(T, E, generator=generator).topk(K).indices
    lora = {"gate": (gate_a, gate_b), "down": (down_a, down_b)}
    y = experts.moe(x, ids, w, base, lora=lora, backend="native")
    return [y.detach(), *torch.autograd.grad(y, [x, w, gate_a, gate_b, down_a, down_b], torch.ones_like(y))]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def threads(monkeypatch):
    """torch.set_num_threads, made to set the number of native threads even for small calls and few processors."""
    monkeypatch.setattr(processors, "worth", lambda: 1024)
    monkeypatch.setattr(_native_abi, "busy", lambda weights, flop: 1024)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["int4", "bf16"])
def test_the_bits_do_not_depend_on_the_number_of_threads(threads, format):
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(step(format=format))
    assert all(same(results[0], other) for other in results[1:])


def test_callers_in_several_threads_get_the_same_results(threads):
    threads(2)
    wanted, results = [step(seed=s) for s in range(4)], [None] * 4

    def run(seed):
        results[seed] = [step(seed=seed) for _ in range(3)]

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(same(wanted[seed], again) for seed in range(4) for again in results[seed])


@pytest.mark.forks
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_computes_the_same(threads):
    threads(2)
    wanted, alike = step(), 0
    child = os.fork()
    if child == 0:
        try:
            alike = same(wanted, step())
        finally:  # after an exception the child would continue as a second pytest
            os._exit(0 if alike else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(wanted, step())


def check_level(level, probes, names):
    before = native.isa()
    if LEVELS.index(level) > LEVELS.index(before):
        pytest.skip(f"this machine has {before}")
    target, runs = op_target(MOE, "native"), 0
    native.check(native.library().gs_set_level(LEVELS.index(level)))
    try:
        assert native.isa() == level
        for name in names:
            for dtype in target.dtypes:
                assay.check(target, name, dtype=dtype, probes=probes)
                runs += 1
    finally:
        native.check(native.library().gs_set_level(LEVELS.index(before)))
    assert runs == 2 * len(names)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_instructions_stays_within_the_bounds(level):
    check_level(level, ("values", "poison", "guard", "alias"), ["many_tokens", "int4_slices"])


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_instructions_passes_all_cases(level):
    check_level(level, VALUES, [case.name for case in MOE.cases if "large" not in case.tags])


def test_the_assay_detects_a_broken_gradient(monkeypatch):
    """The assay catches a backward that omits one expert's dA."""
    from goldsmith.experts.moe import _native

    honest = _native.backward

    def broken(grads, tensors, options, needs):
        results = honest(grads, tensors, options, needs)
        results["gate_a"][1].zero_()
        return results

    monkeypatch.setattr(_native, "backward", broken)
    report = assay.check(op_target(MOE, "native"), "few_tokens", dtype=torch.float32, raises=False, probes=VALUES)
    assert {f.tensor for f in report.findings} == {"gate_a.grad"}, str(report)
