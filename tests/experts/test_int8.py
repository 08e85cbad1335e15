"""experts.moe with compute="int8": the rounding, and integer sums that are the same on every instruction set."""

import math

import pytest
import torch

from goldsmith import experts
from goldsmith.core import native
from goldsmith.experts import _native_abi
from goldsmith.experts.moe_int8.reference import rounded

E, T = 3, 21
needs_native = pytest.mark.skipif(native.reason() is not None, reason=f"native: {native.reason()}")
BASES = {
    "rows": ("int8", None, 600, 330, 3),
    "odd_groups": ("int8", 24, 72, 48, 1),
    "groups": ("int4", 8, 40, 48, 3),
    "wide_groups": ("int4", 320, 640, 320, 1),
    "zeros": ("int4_asym", 32, 96, 64, 1),
}


def drawn(format, group, H, I, partitions, dtype=torch.float32):
    base = experts.pack(
        torch.randn(E, 2 * I, H), torch.randn(E, H, I), format=format, group_size=group, partitions=partitions
    )
    return torch.randn(T, H).to(dtype), torch.randint(0, E, (T, 1)), torch.ones(T, 1), base


def test_codes_are_the_nearest_integers_and_ties_go_to_even():
    codes, scales = rounded(torch.tensor([[127.0, 0.5, 1.5, -2.5], [254.0, -254.0, 1.0, 3.0]]), 4)
    assert scales.tolist() == [[1], [2]]
    assert codes.tolist() == [[[127, 0, 2, -2]], [[127, -127, 0, 2]]]


def test_every_group_has_its_own_scale():
    codes, scales = rounded(torch.tensor([[127.0, 1.0, 12.7, -6.35, 0.0, 0.0]]), 2)
    assert codes.tolist() == [[[127, 1], [127, -64], [0, 0]]]
    assert scales[0, 0] == 1 and scales[0, 2] == 0


def test_codes_stay_finite_when_the_scale_is_nan_or_0():
    tiny = 2.0**-149  # / 127 is 0, and / 1 rounds to 0
    codes, scales = rounded(torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [tiny, 0.0], [3e38, -3e38]]), 2)
    assert codes.tolist() == [[[0, 0]], [[0, 0]], [[0, 0]], [[127, -127]]]
    assert scales.isnan().flatten().tolist() == [True, True, False, False] and scales[2] == 0


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BASES)
def test_every_level_of_instructions_gives_the_same_bits(name, dtype):
    # relu2 and a single slot of weight 1: levels compute nothing else that may differ
    x, ids, w, base = drawn(*BASES[name], dtype=dtype)
    library, outputs = native.library(), []
    before = library.gs_level()
    try:
        for level in range(library.gs_machine_level() + 1):
            native.check(library.gs_set_level(level))
            outputs.append(experts.moe(x, ids, w, base, activation="relu2", compute="int8", backend="native"))
    finally:
        native.check(library.gs_set_level(before))
    assert outputs[0].isfinite().all() and outputs[0].count_nonzero() > 0.9 * outputs[0].numel()
    for level, y in zip(native.LEVELS, outputs, strict=False):
        assert torch.equal(y, outputs[0]), level


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BASES)
def test_few_rows_have_the_bits_of_many_on_every_level(name, dtype):
    # up to 8 rows of an expert are multiplied as bytes from memory (csrc/experts/few_rows), more as decoded words
    x, ids, w, base = drawn(*BASES[name], dtype=dtype)
    ids.zero_()
    library = native.library()
    before = library.gs_level()
    try:
        for level in range(library.gs_machine_level() + 1):
            native.check(library.gs_set_level(level))
            options = {"activation": "relu2", "compute": "int8", "backend": "native"}
            many = experts.moe(x, ids, w, base, **options)
            for rows in (1, 2, 3, 5, 8):
                few = experts.moe(x[:rows], ids[:rows], w[:rows], base, **options)
                assert torch.equal(few, many[:rows]), (native.LEVELS[level], rows)
    finally:
        native.check(library.gs_set_level(before))


@needs_native
def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(_native_abi, "busy", lambda weights, flop: 8)
    arguments, before = drawn(*BASES["rows"]), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            outputs.append(experts.moe(*arguments, compute="int8", backend="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
def test_nan_and_infinity_stay_in_their_token(backend, value):
    x, ids, w, base = drawn(*BASES["groups"])
    wanted = experts.moe(x, ids, w, base, compute="int8", backend=backend)
    x[4, 17] = value
    y = experts.moe(x, ids, w, base, compute="int8", backend=backend)
    others = torch.arange(T) != 4
    assert y[4].isnan().all() and torch.equal(y[others], wanted[others])


def test_lora_uses_the_unrounded_inputs():
    x, ids, w, base = drawn(*BASES["groups"])
    lora = {"gate": (torch.randn(E, 2, 40), torch.randn(E, 48, 2))}
    nothing = {"gate": (lora["gate"][0], torch.zeros(E, 48, 2))}
    plain = experts.moe(x, ids, w, base, compute="int8")
    assert torch.equal(experts.moe(x, ids, w, base, lora=nothing, compute="int8"), plain)
    assert not torch.equal(experts.moe(x, ids, w, base, lora=lora, compute="int8"), plain)


@needs_native
def test_the_benchmark_states_the_error_and_the_perplexity(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path))
    pytest.importorskip("transformers", reason="comes with the extra hf")
    from benchmarks.experts import int8

    rows = list(int8.layers_error("int4", (64, 32), ["scalar"]))
    exact, in_8_bits = (next(row for row in rows if row["compute"] == name) for name in int8.COMPUTES)
    assert exact["state"] == "ok" and exact["rms_over_noise"] < 2
    assert 1e-3 < in_8_bits["relative"] < 5e-2 and in_8_bits["rms_over_noise"] > 100
    *_, last = int8.perplexities(["int4"], 40)
    assert (last["format"], last["compute"], last["tokens"]) == ("int4", "int8", 39) and last["perplexity"] > 1
    assert "int4       int8    perplexity" in int8.line(last)
