"""The guard with several errors, or old ones: it names the earliest, with every expert that has it."""

import math
import warnings

import pytest
import torch

from goldsmith.assay.bounds.running_errors import running_bounds, stored
from goldsmith.experts._activations import factors
from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.recomputation import stages
from goldsmith.offload.guard.report import NumericsError, NumericsWarning
from goldsmith.offload.testing import inject
from offload import stores

IDS = torch.arange(18).view(9, 2) % 6  # each of six experts has three tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(1, 3))


def engine_of(store, lanes="mixed", guard="raise"):
    return Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, guard=guard)


def inputs(store, T=9, seed=0):
    x = torch.randn(T, store.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, IDS[:T], torch.full((T, 2), 0.5)


def report_of(engine, *call):
    with pytest.raises(NumericsError) as raised:
        engine(*call)
    return raised.value.report


@pytest.mark.parametrize("first, second, wanted, experts", [
    (("down", 0), ("gate_up", 4), ("gate_up", "overflow"), (4,)),  # the earlier stage, though its expert comes later
    (("product", 1), ("down", 5), ("product", "overflow"), (1,)),
    (("race", 0), ("down", 4), ("down", "overflow"), (4,)),  # a reproducible error comes before another
    (("down", 2), ("down", 5), ("down", "overflow"), (2, 5)),
    (("race", 1), ("race", 3), ("down", "race"), (1, 3)),
    (("weights", 4), ("gate_up", 0), ("weights", "weights"), (4,)),
], ids=lambda value: "-".join(map(str, value)))  # fmt: skip
def test_the_earlier_of_two_faults_is_named_with_all_its_experts(store, first, second, wanted, experts):
    with engine_of(store, "cpu") as engine:
        with inject(engine, first[0], layer=1, expert=first[1]), inject(engine, second[0], layer=1, expert=second[1]):
            report = report_of(engine, 1, *inputs(store))
    assert ((report.stage, report.cause), report.experts) == (wanted, experts)
    hit = torch.isin(IDS, torch.tensor(experts)).any(1).nonzero()[:, 0]
    assert list(report.rows) == hit.tolist() and f"expert {experts[0]}" in report.evidence[0]


def test_the_lane_is_the_first_experts_and_long_lists_are_shortened(store):
    x, ids, weights = inputs(store)
    with engine_of(store) as engine:  # 0 and 3 on the CPU, 1 and 4 copied, 2 and 5 cached
        for experts, lane in (((0, 5), "cpu"), ((4, 5), "copied"), ((2, 3), "cached")):
            with inject(engine, "down", layer=1, expert=experts[0]), inject(engine, "down", layer=1, expert=experts[1]):
                report = report_of(engine, 1, x, ids, weights)
            assert (report.experts, report.lane) == (experts, lane)
        with pytest.raises(NumericsError) as raised:
            engine(1, x * math.nan, ids, weights)
    assert "9 rows: 0, 1, 2, 3, 4, 5, 6, 7, ... (9)." in str(raised.value)
    assert raised.value.report.rows == tuple(range(9))


@pytest.mark.parametrize("stage, before", [
    ("gate_up", "max |x| = "), ("activation", "max |gate_up| = "), ("product", "max |activation| = "),
    ("down", "max |product| = "),
])  # fmt: skip
def test_the_largest_number_before_the_stage_is_reported(store, stage, before):
    with engine_of(store, "cpu") as engine, inject(engine, stage, layer=1, expert=2):
        report = report_of(engine, 1, *inputs(store))
    x = inputs(store)[0][(IDS == 2).any(1)]
    numbers = dict(stages(x, store.dequantize(1, 2), store.options)) | {"x": x.float()}
    most = numbers[before.split("|")[1]].abs().max()
    assert report.evidence[0].startswith(f"{before}{most:.3g}")
    assert report.advice.startswith("Numbers exceed their dtype")


def test_a_skipped_row_is_not_blamed(store):
    x, ids, weights = inputs(store)
    x, ids = x.clone(), ids.clone()
    x[3], ids[3] = math.nan, -1
    with engine_of(store, "cpu") as engine:
        assert torch.isfinite(engine(1, x, ids, weights)).all()
        with inject(engine, "down", layer=1, expert=0):
            report = report_of(engine, 1, x, ids, weights)
    assert (report.stage, report.experts) == ("down", (0,)) and 3 not in report.rows


def test_bytes_damaged_to_large_numbers_are_a_weights_fault_not_an_overflow(tmp_path):
    """3.3e38 is finite: only the checksum shows that the byte changed."""
    path = tmp_path / "a.store"
    store = stores.build(path, layers=(1,))
    large = torch.full((64,), 3.3e38).bfloat16().view(torch.uint8).numpy().tobytes()
    with open(path, "r+b") as file:
        begin, _ = store.blocks.sections["down"]
        file.seek(store.raw(1, 4).data_ptr() - store.whole().data_ptr() + begin)
        file.write(large)
    x = inputs(store)[0] * 1e3
    with engine_of(store, "cpu") as engine:
        report = report_of(engine, 1, x, IDS, torch.full((9, 2), 1e6))
    assert (report.stage, report.cause, report.experts) == ("weights", "weights", (4,))
    assert "is finite in the store, but its bytes" in report.evidence[0]
    assert "(section down)" in report.evidence[0] and report.advice.startswith("The checkpoint or")


def test_rows_finite_only_on_the_cpu_are_a_transfer_and_others_a_race(store):
    """The CPU's rows kept in host memory distinguish a bad transfer from a race."""
    from goldsmith.offload.planning.call import Outcome

    x, ids, weights = inputs(store)
    with engine_of(store, "cpu") as engine:
        look, seen = engine._guard.look, []
        engine._guard.look = lambda call, outcome, wrong=None: seen.append((call, outcome))
        engine(1, x, ids, weights)
        (call, outcome), routes = seen[0], (IDS.reshape(-1) == 2).nonzero()[:, 0]
        rows = outcome.rows.clone()
        rows[routes] = math.nan
        for kept, wanted in ((outcome.rows, ("transfer", "transfer")), (rows, ("down", "race"))):
            flags = torch.zeros(call.routes, dtype=torch.uint8)
            flags[routes] = 1
            there = Outcome(rows, flags, outcome.out, host=(kept[routes].clone(), routes))
            with pytest.raises(NumericsError) as raised:
                look(call, there)
            report = raised.value.report
            assert ((report.stage, report.cause), report.experts) == (wanted, (2,))


# -- a pass over the layers, and the next one


def warned(engine, *call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine(*call)
    return [w.message.report for w in seen if isinstance(w.message, NumericsWarning)]


def bad_x(store):
    x, ids, weights = inputs(store)
    return x * math.nan, ids, weights


def test_a_repeated_layer_begins_a_new_pass(store):
    with engine_of(store, guard="warn") as engine:
        assert warned(engine, 3, *bad_x(store))[0].first
        engine(1, *inputs(store))
        with inject(engine, "down", layer=3, expert=2):
            assert warned(engine, 3, *inputs(store))[0].first
    with engine_of(store, guard="warn") as engine, inject(engine, "down", layer=1, times=2):  # a model of one layer
        assert warned(engine, 1, *bad_x(store))[0].first and warned(engine, 1, *inputs(store))[0].first


def test_the_layer_before_has_the_next_lower_number_in_any_store_order(tmp_path):
    with stores.build(tmp_path / "a.store", layers=(4, 0, 7)) as mixed, engine_of(mixed, guard="warn") as engine:
        assert warned(engine, 4, *bad_x(mixed))
        (report,) = warned(engine, 7, *bad_x(mixed))
        assert "layer 4, the experts before this one, was not clean" in report.evidence[0] and not report.first


def test_positions_belong_to_the_current_forward(store):
    x, ids, weights = inputs(store, 6)
    x[5, 1] = math.nan
    with engine_of(store) as engine:
        engine.begin_forward(2, 3)
        assert report_of(engine, 1, x, ids, weights).positions == ((1, 2),)
        engine.end_forward()
        assert report_of(engine, 1, x, ids, weights).positions == ()


def test_a_nan_after_the_last_experts_is_reported_once_and_only_if_they_are_clean(store):
    def after(engine, *values):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.end_forward(torch.tensor(values))
        return [w.message.report for w in seen]

    clean, nan, inf = [1.0, -math.inf], [0.0, math.nan], [math.inf, 0.0]
    with engine_of(store, guard="warn") as engine:
        engine(1, *inputs(store))
        assert after(engine, clean, clean) == []  # a head masks words with -inf
        (report,) = after(engine, clean, inf)
        assert (report.layer, report.cause, report.kind, report.rows) == (None, "after", "inf", (1,))
        assert after(engine, nan, clean) == []  # once
    with engine_of(store, guard="warn") as engine:
        engine.begin_forward(9, 1)
        assert warned(engine, 1, *bad_x(store))
        assert after(engine, nan) == []  # it originated there, and was reported
        engine.begin_forward(9, 1)
        (report,) = after(engine, nan, inf)
        assert report.kind == "nan" and report.rows == (0, 1)
    with engine_of(store, guard="off") as engine:
        assert after(engine, nan) == []
    with engine_of(store) as engine:
        report_of(engine, 3, *bad_x(store))
        with pytest.raises(NumericsError, match="after the last layer of experts"):
            engine.end_forward(torch.tensor([nan]))  # the raised pass is over


# -- the recomputation equals the computation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [
    {}, {"bias": True, "activation": "swiglu_oai", "limit": 0.5}, {"activation": "gelu_tanh"},
], ids=["silu", "gpt_oss", "gelu"])  # fmt: skip
def test_a_recomputation_computes_the_rows_of_the_lanes(tmp_path, options, dtype):
    """Both are within the rounding that the assay allows the formula: they add in different orders."""
    store = stores.build(tmp_path / "a.store", layers=(0,), **options)
    x = torch.randn(5, store.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Engine(store, device="cpu") as engine:
        result = engine(0, x, torch.full((5, 1), 3), torch.ones(5, 1))
    weights = store.dequantize(0, 3)
    *_, (last, rows) = stages(x, weights, store.options)
    limits = bounds_of_an_expert(x, weights, store.options)
    assert last == "down"
    for y in (result, rows):
        assert bool(((y.double() - limits.value).abs() <= limits.bound).all())


def bounds_of_an_expert(x, weights, options):
    """The rows of one expert in float64, with proven bounds; g, u and h are stored in x's dtype if that is bfloat16."""

    def rounded(value):
        return stored(value, torch.bfloat16) if x.dtype == torch.bfloat16 else value

    def formula(own):
        g, u = rounded(own["x"] @ own["gate_up"].T + own.get("gate_up_bias", 0)).chunk(2, -1)
        act, factor = factors(options["activation"], g, u, options["alpha"], options["limit"])
        return {"y": rounded(act * factor) @ own["down"].T + own.get("down_bias", 0)}

    leaves = {name: t.double() for name, t in {"x": x, **weights}.items()}
    return running_bounds(formula, leaves, compute=torch.float32, stores={"y": x.dtype})["y"]


def test_a_recomputation_rounds_where_the_kernels_do():
    """For bfloat16, g, u and h are bfloat16, whose largest number is 3.39e38; for float16 they are not float16."""
    options = {"activation": "relu2", "alpha": 1.0, "limit": None}
    for dtype, finite in ((torch.bfloat16, False), (torch.float32, True)):
        weights = {"gate_up": torch.tensor([[3.4e38], [1.0]]), "down": torch.tensor([[1.0]])}
        stage, value = next(stages(torch.ones(1, 1, dtype=dtype), weights, options))
        assert stage == "gate_up" and bool(torch.isfinite(value).all()) == finite
    weights = {"gate_up": torch.tensor([[300.0], [1.0]]), "down": torch.tensor([[1e-3]])}
    result = dict(stages(torch.ones(1, 1, dtype=torch.float16), weights, options))
    assert result["product"].item() == 90000.0 and result["down"].item() == pytest.approx(90.0)


def test_flags_computed_late_cover_only_the_rows_in_use():
    from goldsmith.offload.planning.call import Outcome

    rows = torch.tensor([[math.nan], [1.0], [math.inf]])
    late = Outcome(rows, None, rows, place=[1, -1, 2, 1])  # the second route is skipped, so no row is read for it
    assert late.known_flags().tolist() == [0, 0, 1, 0]
