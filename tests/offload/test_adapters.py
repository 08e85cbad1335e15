"""Adapters of an engine: LoRA beside the packed experts on every lane, by name, within the budget."""

import pytest
import torch

from goldsmith import assay
from goldsmith.core.shapes import ShapeError
from goldsmith.experts._factors import LayerLora
from goldsmith.experts.moe import reference
from goldsmith.offload import engine as engine_module
from goldsmith.offload.adapters import EngineAdapters
from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.testing import inject
from offload import stores
from offload.goldens import decode, inputs
from offload.test_device import Simulation
from offload.test_panels_lora import RANKS, draw

LANES = ("cpu", "copied", "cached", "mixed")
GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 2), format="fp32")


@pytest.fixture(scope="module")
def adapters(store):
    return {
        "one": {0: draw(store, RANKS["all"], seed=1), 2: draw(store, RANKS["down"], seed=2)},
        "two": {0: draw(store, {"gate": 4, "up": 4, "down": 2}, shared=True, seed=3)},
    }


@assay.case(T=[11], kind=["holes", "twice"])
def prompt(make, T, kind):
    return inputs(make, T, kind=kind)


def golden_of(store, loras):
    """The golden of layer 0 with the sum of these LoRA merged into its weights in float64."""
    numbers = [store.dequantize(0, e) for e in range(store.num_experts(0))]
    stacked = {name: torch.stack([n[name] for n in numbers]).double() for name in ("gate_up", "down")}
    for lora in loras:
        pairs = {name: (lora.scaling[name] * b.double() @ a.double()) for name, (a, b) in lora.factors.items()}
        none = torch.zeros(store.num_experts(0), store.intermediate_size, store.hidden_size, dtype=torch.float64)
        stacked["gate_up"] = stacked["gate_up"] + torch.cat([pairs.get("gate", none), pairs.get("up", none)], 1)
        stacked["down"] = stacked["down"] + pairs.get("down", torch.zeros_like(stacked["down"]))

    def golden(x, ids, weights):
        skipped = torch.where(ids >= store.num_experts(0), -1, ids)
        options = {name: 1.0 for name in ("gate_scale", "up_scale", "down_scale")} | store.options
        base = (stacked[name].to(x.device, torch.promote_types(x.dtype, torch.float32)) for name in ("gate_up", "down"))
        arguments = (x, skipped, weights, *base, *(None,) * 9)
        return reference.forward(*arguments, layout="", dropout=0.0, save=False, **options)[0]

    return golden


def check(store, engine, loras, cases, *, dtype=torch.float32, device="cpu"):
    stored = {} if dtype == torch.float16 else {"g": "x", "u": "x", "h": "x"}
    golden = golden_of(store, loras)
    target = assay.Target(
        lambda x, ids, weights: engine(0, x, ids, weights), golden, cases=cases, backward=None, stored=stored,
        dtypes=(dtype,),
    )  # fmt: skip
    assay.check(target, device=device, probes=["values", "second_call"])


@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_on_a_cpu_adds_the_chosen_adapters(store, adapters, lanes):
    one, two = (adapters[name][0] for name in ("one", "two"))
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, guard="off", adapters=adapters) as engine:
        assert engine.adapters.active == ("one",)
        check(store, engine, [one], [*decode, *prompt])
        engine.set_adapter("two")
        check(store, engine, [two], decode)
        engine.set_adapter(["one", "two"])
        check(store, engine, [one, two], [*decode, *prompt])
        engine.set_adapter(None)
        check(store, engine, [], decode)


def test_the_lanes_of_a_cpu_give_the_same_bits(store, adapters):
    arguments, outs = stores.call(store, 2, 7, 3, dtype=torch.float32), []
    for lanes in LANES:
        with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, adapters=adapters) as engine:
            outs.append(torch.cat([engine(layer, *arguments) for layer in (0, 2, 0)]))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.fixture
def simulated(monkeypatch):
    """An Engine with the lanes of a simulated GPU, whose adapters have their place there."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        engine_module, "EngineAdapters", lambda store, arguments, _: EngineAdapters(store, arguments, cuda)
    )

    class WithAdapters(Simulation):
        def _row_bytes(self):
            return super()._row_bytes() + self.adapters.row_bytes

    return WithAdapters


@pytest.mark.skipif(GPU, reason="the GPU's own lanes are tested below")
@pytest.mark.parametrize("lanes", ["cpu", "copied", "mixed"])
def test_the_lanes_of_a_simulated_gpu_add_the_chosen_adapters(store, adapters, simulated, lanes):
    one, two = (adapters[name][0] for name in ("one", "two"))
    with simulated(store, device="cpu", gpu_budget="24MiB", lanes=lanes, guard="off", adapters=adapters) as engine:
        assert engine.spending.total <= 24 << 20 and engine.spending.adapters == engine.adapters.nbytes > 0
        assert "for adapters" in str(engine.explain())
        check(store, engine, [one], [*decode, *(prompt[:1] if lanes == "mixed" else ())])
        engine.set_adapter(["one", "two"])
        check(store, engine, [one, two], decode)
        engine.set_adapter(None)
        check(store, engine, [], decode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("lanes", [*LANES, "auto"])
@pytest.mark.parametrize("format", ["bf16", "int4", "fp8_block"])
def test_every_lane_next_to_a_gpu_adds_the_chosen_adapters(tmp_path, format, lanes, dtype):
    group = {"group_size": 32} if format == "int4" else {}
    store = stores.build(tmp_path / "a.store", layers=(0, 2), format=format, **group)
    one = {0: draw(store, RANKS["all"], seed=1, dtype=torch.bfloat16), 2: draw(store, RANKS["down"], seed=2)}
    two = {0: draw(store, {"gate": 4, "up": 4, "down": 2}, shared=True, seed=3)}
    options = {"device": "cuda", "gpu_budget": "64MiB", "lanes": lanes, "guard": "off", "exact": False}
    with Engine(store, **options, adapters={"one": one, "two": two}) as engine:
        check(store, engine, [one[0]], [*decode, *prompt], dtype=dtype, device="cuda")
        engine.set_adapter(["one", "two"])
        check(store, engine, [one[0], two[0]], [*decode, *prompt], dtype=dtype, device="cuda")
        engine.set_adapter(None)
        check(store, engine, [], decode, dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_adapters_take_no_memory_beyond_the_budget_of_a_gpu(store, adapters):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Engine(store, device="cuda", gpu_budget="64MiB", adapters=adapters) as engine:
        for names in ("one", ("one", "two"), None, "two"):
            engine.set_adapter(names)
            engine(0, *(t.cuda() for t in stores.call(store, 0, 40, 3, dtype=torch.float32)))
        assert torch.cuda.memory_allocated() - before <= engine.spending.total <= 64 << 20


def test_an_overflow_in_the_factors_is_found_by_the_guard(store):
    lora = draw(store, RANKS["down"])
    large = LayerLora({name: (a * 1e30, b * 1e30) for name, (a, b) in lora.factors.items()}, lora.scaling)
    with Engine(store, device="cpu", adapters={"large": {0: large}}) as engine:
        with pytest.raises(NumericsError) as raised:
            engine(0, *stores.call(store, 0, 4, 3, dtype=torch.float32))
        assert (raised.value.report.stage, raised.value.report.cause) == ("down", "overflow")
        engine.set_adapter(None)
        engine(0, *stores.call(store, 0, 4, 3, dtype=torch.float32))


def test_an_injected_fault_is_found_with_an_adapter_active(store, adapters):
    with Engine(store, device="cpu", adapters=adapters) as engine:
        with inject(engine, "product", layer=0, expert=1), pytest.raises(NumericsError) as raised:
            engine(0, *stores.call(store, 0, 9, 3, dtype=torch.float32))
        assert raised.value.report.stage == "product" and raised.value.report.experts == (1,)


def test_factors_without_reserved_memory_are_refused_beside_a_gpu(store, adapters, simulated):
    """Its lanes would have computed without them."""
    with simulated(store, device="cpu", gpu_budget="24MiB") as engine:
        with pytest.raises(ValueError, match="'late' have no room on the GPU: 0 bytes were reserved"):
            engine.adapters.add("late", adapters["one"])
        assert engine.adapters.names == ()


def test_a_budget_too_small_for_the_factors_leaves_the_device_off(store, adapters, simulated, monkeypatch):
    needed = EngineAdapters(store, adapters, torch.device("cuda")).nbytes
    monkeypatch.setattr(simulated, "_machine", Engine._machine)
    with simulated(store, device="cpu", gpu_budget=needed + 1000, adapters=adapters) as engine:
        assert not engine.spending.device_lane and "two slots beside the adapters" in engine.spending.why_off


@pytest.mark.parametrize("change, error, text", [
    (lambda one: {1: one[0]}, ValueError, "adapter 'a' has layer 1; the store has [0, 2]"),
    (lambda one: [one], TypeError, "adapter 'a' is a list, expected {layer: LayerLora}"),
    (lambda one: {0: LayerLora({"mid": one[0].factors["up"]}, {"mid": 1.0})}, ValueError, "has the target 'mid'"),
    (lambda one: {0: LayerLora({"up": one[0].factors["down"]}, {"up": 1.0})}, ShapeError, "expected [6, r, 64] and"),
    (lambda one: {0: LayerLora({"up": one[0].factors["up"][::-1]}, {"up": 1.0})}, ShapeError, "of up has A [6, 32"),
    (lambda one: {0: LayerLora(one[0].factors, dict.fromkeys(one[0].factors, float("nan")))}, ValueError, "scaling"),
])  # fmt: skip
def test_factors_that_do_not_fit_are_refused(store, adapters, change, error, text):
    with pytest.raises(error) as raised:
        Engine(store, device="cpu", adapters={"a": change(adapters["one"])})
    assert text in str(raised.value)


def test_unknown_names_are_refused_and_change_nothing(store, adapters):
    with Engine(store, device="cpu", adapters=adapters) as engine:
        with pytest.raises(ValueError, match="there is no adapter 'three'; known: 'one', 'two'"):
            engine.set_adapter("three")
        with pytest.raises(ValueError, match="name one twice"):
            engine.set_adapter(["one", "one"])
        with pytest.raises(ValueError, match="already an adapter 'one'"):
            engine.adapters.add("one", adapters["two"])
        engine.adapters.add("three", adapters["two"])
        assert engine.adapters.active == ("one",) and engine.adapters.names == ("one", "two", "three")
