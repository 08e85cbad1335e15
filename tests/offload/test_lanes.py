"""The lanes on a CPU: one result, the golden's, whichever lane computes an expert."""

import json

import pytest
import torch

from goldsmith import assay
from goldsmith.experts.moe.op import MOE
from goldsmith.offload.engine import Engine
from offload import stores
from offload.goldens import K, decode, inputs, target
from turns import by_turns

LANES = ("cpu", "copied", "cached", "mixed")
FORMATS = ("fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block")


@pytest.fixture(scope="module")
def store_of(tmp_path_factory):
    """A store of each format, built on first use."""
    built = {}

    def of(format="bf16", **options):
        key = (format, *options.items())
        if key not in built:
            group = 32 if format in ("int8", "int4", "int4_asym") else None
            path = tmp_path_factory.mktemp("stores") / "a.store"
            built[key] = stores.build(path, format=format, group_size=group, **options)
        return built[key]

    return of


@assay.case(T=[37], why="prefill: experts with many tokens and with few")
def prefill(make, T):
    return inputs(make, T)


@assay.case(T=[9], kind=["holes", "twice"], why="routes that are skipped, an expert twice in a row")
def odd(make, T, kind):
    return inputs(make, T, kind=kind)


@assay.case(T=[0, 2], why="no tokens; an expert a token")
def single(make, T):
    return inputs(make, T, k=1)


@pytest.mark.parametrize("format, dtype", by_turns(FORMATS, [torch.float32, torch.bfloat16, torch.float16]))
def test_mixed_lanes_hold_to_the_golden_in_every_format_and_dtype(store_of, format, dtype):
    store = store_of(format)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed", exact=False, guard="off") as engine:
        assay.check(target(store, engine, dtype, [*decode, *prefill]), probes=["values", "second_call"])


@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_holds_to_the_golden(store_of, lanes):
    store = store_of()
    probes = "default" if lanes == "mixed" else ["values", "second_call"]  # the four give the same bits: see below
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, guard="off") as engine:
        result = target(store, engine, torch.bfloat16, [*decode, *prefill, *odd, *single])
        assay.check(result, probes=probes)


@pytest.mark.parametrize("options", [
    {"bias": True, "activation": "swiglu_oai", "limit": 7.0}, {"activation": "gelu"}, {"activation": "relu2"},
    {"H": 35, "I": 19, "dtype": torch.float32}, {"E": 1},
], ids=["gpt_oss", "gelu", "relu2", "odd_sizes", "one_expert"])  # fmt: skip
def test_biases_activations_and_odd_sizes_hold_to_the_golden(store_of, options):
    dtype = options.get("dtype", torch.bfloat16)
    store = store_of("fp32" if dtype == torch.float32 else "bf16", **options)
    E, H = store.num_experts(0), store.hidden_size

    @assay.case(T=[7])
    def some(make, T):
        return inputs(make, T, k=min(E, K), E=E, H=H)

    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed", guard="off") as engine:
        assay.check(target(store, engine, dtype, some), probes=["values", "second_call"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("T", [0, 1, 2, 37, 400])
def test_the_four_lanes_give_the_same_bits(store_of, format, T):
    store = store_of(format)
    x, ids, weights = stores.call(store, 0, T, K)
    outputs = {}
    for lanes in LANES:
        with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, exact=False) as engine:
            outputs[lanes] = engine(0, x, ids, weights)
            assert torch.equal(engine(0, x, ids, weights), outputs[lanes])  # from a cache that is full by now
    assert all(torch.equal(y, outputs["cpu"]) for y in outputs.values())


def test_a_tokens_cached_and_copied_experts_are_computed_together(store_of, tmp_path):
    """One wave instead of two; with more tokens, cached experts run ahead of the copies."""
    store = store_of("bf16")
    x, _, weights = stores.call(store, 0, 2, 4)
    ids = torch.tensor([[1, 2, 4, 0], [5, 2, 1, 4]])  # copied: 1 and 4, cached: 2 and 5, on the CPU: 0
    waves = []
    with Engine(store, device="cpu", gpu_budget="4MiB", lanes="mixed") as engine:
        engine(0, x, ids, weights)
        for T in (1, 2):
            with engine.trace(tmp_path / "t.json"):
                engine(0, x[:T], ids[:T], weights[:T])
            events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
            waves.append([e["args"]["experts"] for e in events if e["ph"] == "X" and e["name"] == "experts"])
    assert waves == [[1, 3], [1, 2, 2]]  # the CPU's one first


def test_a_call_in_pieces_gives_the_same_bits(store_of):
    store = store_of()
    x, ids, weights = stores.call(store, 0, 37, K)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed", guard="off") as engine:
        whole = engine(0, x, ids, weights)
        engine._lanes.most_rows = 10
        assert torch.equal(engine(0, x, ids, weights), whole)


def test_strides_and_integer_widths_change_nothing(store_of):
    store = store_of()
    x, ids, weights = stores.call(store, 0, 6, K)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed", guard="off") as engine:
        y = engine(0, x, ids, weights)
        turned = torch.stack([x, x], -1)[..., 0], ids.T.contiguous().T.int(), torch.stack([weights] * 2, 1)[:, 0]
        assert not turned[0].is_contiguous() and not turned[1].is_contiguous()
        assert torch.equal(engine(0, *turned), y)
        inputs = (x.clone(), ids.clone(), weights.clone())
        out = engine(0, *inputs)
        assert all(torch.equal(a, b) for a, b in zip(inputs, (x, ids, weights)))
        out.zero_()
        assert torch.equal(engine(0, x, ids, weights), y)  # the result is a fresh tensor


def test_the_merge_adds_in_the_order_of_the_ids(store_of):
    """In float32 the order of k sums shows in the last bits; the engine's is j = 0..k-1, each product rounded first."""
    store = store_of("fp32", dtype=torch.float32)
    x, ids, weights = stores.call(store, 0, 50, 6, dtype=torch.float32)
    rows = torch.empty(50 * 6, 64)
    from goldsmith.experts import slots

    slots(x, ids, store.experts(0), out=rows.view(50, 6, 64), **store.options)
    wanted = torch.zeros(50, 64)
    for j in range(6):
        wanted = wanted + rows.view(50, 6, 64)[:, j] * weights[:, j : j + 1]
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed", guard="off") as engine:
        assert torch.equal(engine(0, x, ids, weights), wanted)


def test_the_engine_computes_what_experts_moe_does(store_of):
    assert MOE.outputs == ("y",)
    from goldsmith.experts import moe

    store = store_of()
    x, ids, weights = stores.call(store, 1, 20, K, dtype=torch.float32)
    with Engine(store, device="cpu") as engine:
        difference = engine(1, x, ids, weights) - moe(x, ids, weights, store.experts(1), **store.options)
    assert float(difference.abs().max()) < 1e-5
