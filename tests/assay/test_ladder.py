"""Every rung catches the wrong kernels that it can see, and passes right ones."""

import pytest
import torch

from assay.ladder_bench import BF16, F32, F64, draw_dot, draw_norm, matvec, reference, rms_norm, rungs, verdict
from goldsmith.assay.judge.ladder import judge
from goldsmith.assay.noise import summation_orders as orders

SEEDS = range(3)


def honest_dot(store=F32, order=None):
    def run(leaves):
        a, b = leaves["a"], leaves["b"]
        return (a @ b if order is None else orders.matmul(a, b, order)).to(store)

    return run


def truncated(y):
    """float32 -> bfloat16 by dropping the lower half"""
    return (y.view(torch.int32) & ~0xFFFF).view(F32).to(BF16)


def bf16_accumulator(leaves):
    acc = torch.zeros(leaves["a"].shape[0], leaves["b"].shape[1], dtype=BF16)
    for i in range(leaves["a"].shape[1]):
        acc = acc + (leaves["a"][:, i : i + 1] * leaves["b"][i]).to(BF16)
    return acc.float()


# right kernels


@pytest.mark.parametrize("store", [F32, BF16, torch.float16])
@pytest.mark.parametrize("style", [None, "as_stored", "permuted", "tiles", "pairwise"])
def test_every_legal_order_passes(style, store):
    order = None if style is None else orders.Order(style, 99, 32)
    for seed in SEEDS:
        j = verdict(matvec, honest_dot(store, order), draw_dot(1024), store, seed)
        assert j.findings == [] and j.row.state == "ok" and j.row.max_over_bound <= 1


@pytest.mark.parametrize("store", [F32, BF16])
def test_an_honest_norm_with_another_formula_passes(store):
    def candidate(leaves):
        x = leaves["x"]
        return (x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) * leaves["w"]).to(store)

    for seed in SEEDS:
        assert verdict(rms_norm, candidate, draw_norm(), store, seed).findings == []


def test_an_honest_float64_candidate_passes():
    draw = lambda seed: {n: t.double() for n, t in draw_dot(500)(seed).items()}  # noqa: E731
    order = orders.Order("permuted", 1, 16)
    for seed in SEEDS:
        j = verdict(matvec, lambda L: orders.matmul(L["a"], L["b"], order), draw, F64, seed, compute=F64)
        assert j.findings == [] and j.row.dtype == "float64"


# wrong kernels


@pytest.mark.parametrize("k", [1024, 4096, 16384])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_dropped_term_is_caught(k, seed):
    j = verdict(matvec, lambda L: L["a"][:, :-1] @ L["b"][:-1], draw_dot(k), F32, seed)
    assert not j.ok, j.row


@pytest.mark.parametrize("k", [1024, 4096, 16384])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_scale_of_one_plus_2_to_the_minus_12_is_caught(k, seed):
    j = verdict(matvec, lambda L: (L["a"] @ L["b"]) * (1 + 2.0**-12), draw_dot(k), F32, seed)
    assert not j.ok, j.row


def test_a_scale_of_one_plus_2_to_the_minus_16_is_systematic():
    j = verdict(matvec, lambda L: (L["a"] @ L["b"]) * (1 + 2.0**-16), draw_dot(2048, m=256), F32)
    assert rungs(j) in (["STATISTICAL"], ["SYSTEMATIC"]), j.row
    assert j.row.slope == pytest.approx(2.0**-16, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bf16_accumulator_is_caught(seed):
    assert not verdict(matvec, bf16_accumulator, draw_dot(1024), F32, seed).ok
    wide = verdict(matvec, lambda L: bf16_accumulator(L).to(BF16), draw_dot(1024), BF16, seed)
    assert not wide.ok


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [64, 16384])
def test_a_truncating_bf16_store_is_caught(k, seed):
    """By the bound where it is tight, by the slope where n = 16384 terms make it wide."""
    j = verdict(matvec, lambda L: truncated(L["a"] @ L["b"]), draw_dot(k), BF16, seed)
    assert rungs(j) == ["CERTAIN" if k == 64 else "SYSTEMATIC"], j.row


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("store", [F32, BF16])
def test_one_wrong_element_is_caught_and_named(store, seed):
    def candidate(leaves):
        y = leaves["a"] @ leaves["b"]
        y[3, 2] += 0.2 * y.abs().mean()
        return y.to(store)

    j = verdict(matvec, candidate, draw_dot(1024), store, seed)
    assert not j.ok
    assert j.findings[0].location.axes == {"0": [(3, 3)], "1": [(2, 2)]}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [0.5, 1 + 2.0**-10])
def test_one_wrong_row_is_caught_and_named(factor, seed):
    def candidate(leaves):
        y = rms_norm(leaves)
        y[17] *= factor
        return y

    j = verdict(rms_norm, candidate, draw_norm(), F32, seed)
    assert not j.ok and j.findings[0].location.axes.get("0") == [(17, 17)]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_wrong_segment_is_caught_and_named(seed):
    def candidate(leaves):
        y = rms_norm(leaves)
        y[:, 8:24] *= 1.001
        return y

    segments = {"pre": (1, 0, 4), "post": (1, 4, 8), "res": (1, 8, 24)}
    j = verdict(rms_norm, candidate, draw_norm(dim=24), F32, seed, segments=segments)
    assert not j.ok and j.findings[0].location.segments == ("res",)
    assert "segment res" in j.findings[0].text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scale_of_1_01_in_bf16_is_caught(seed):
    assert not verdict(rms_norm, lambda L: (rms_norm(L) * 1.01).to(BF16), draw_norm(), BF16, seed).ok
    assert not verdict(matvec, lambda L: (L["a"] @ L["b"] * 1.01).to(BF16), draw_dot(4096), BF16, seed).ok


def test_zeros_are_caught_and_described():
    j = verdict(rms_norm, lambda L: torch.zeros_like(L["x"]), draw_norm())
    assert rungs(j) == ["CERTAIN"] and "all zeros" in j.findings[0].text
    assert "every element" in j.findings[0].text


def test_a_slow_drift_within_the_bound_of_one_tile_column_is_systematic():
    """Every fourth column is 2^-20 too large: each element is within the limit of rung 2, together they are not."""

    def candidate(leaves):
        y = leaves["a"] @ leaves["b"]
        y[:, 1::4] *= 1 + 2.0**-20
        return y

    j = verdict(matvec, candidate, draw_dot(512, m=256, n=32), F32)
    assert rungs(j) == ["SYSTEMATIC"] and "axis 1 at 1 mod 4" in j.findings[0].text, j.findings


def test_errors_well_above_the_noise_within_every_other_rung_are_quality():
    def candidate(leaves):
        y = rms_norm(leaves)
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(int(leaves["x"][0, 0] * 1e6) % 2**31))
        return y * (1 + noise * 3e-7)

    j = verdict(rms_norm, candidate, draw_norm(256, 128), F32)
    assert rungs(j) == ["QUALITY"] and j.ok and j.row.state == "quality", (j.row, j.findings)


@pytest.mark.parametrize("exponent,rung", [(-20, "SYSTEMATIC"), (-17, "STATISTICAL")])
def test_a_bias_toward_zero_of_tensor_cores_is_quality_not_failure(exponent, rung):
    for sign, expected in ((-1, "QUALITY"), (1, rung)):
        candidate = lambda L, s=sign: (L["a"] @ L["b"]) * (1 + s * 2.0**exponent)  # noqa: E731
        plain = verdict(matvec, candidate, draw_dot(512, m=256, n=8), F32)
        cores = verdict(matvec, candidate, draw_dot(512, m=256, n=8), F32, tensor_cores=True)
        assert rungs(plain) == [rung] and rungs(cores) == [expected]
        assert cores.ok == (sign < 0)


def test_an_alarm_that_a_fresh_seed_does_not_repeat_is_dropped():
    leaves = draw_dot(1024)(0)
    ref = reference(matvec, leaves, F32)
    wrong, right = leaves["a"][:, :-1] @ leaves["b"][:-1], leaves["a"] @ leaves["b"]
    quiet = ref.bounded.bound * 1e9  # rung 1 would see it, so a wide bound leaves it to the rungs above
    ref.bounded.bound = torch.where(ref.bounded.bound > 0, ref.bounded.bound, quiet)
    requests = []

    def confirm(got):
        return lambda attempt: (requests.append(attempt) or got, ref)

    small = right + (wrong - right) * 2e-3
    assert rungs(judge("y", small, ref, confirm=confirm(small))) == ["STATISTICAL"]
    assert rungs(judge("y", small, ref, confirm=confirm(right))) == []
    assert rungs(judge("y", small, ref, confirm=None)) == []
    assert requests == [1, 1]


# masks, shapes, dtypes


def spoilt(index, value):
    def candidate(leaves):
        y = rms_norm(leaves)
        y[index] = value
        return y

    return candidate


@pytest.mark.parametrize("value,text", [(float("nan"), "NaN where the golden is a number"),
                                        (float("inf"), "Inf where the golden is finite")])  # fmt: skip
def test_nan_and_inf_where_the_golden_has_none_are_certain(value, text):
    j = verdict(rms_norm, spoilt((slice(1, 3), slice(None)), value), draw_norm())
    assert rungs(j) == ["CERTAIN"] and text in j.findings[0].text
    assert j.findings[0].location.axes == {"0": [(1, 2)]}
    assert (j.row.max_error, j.row.max_over_bound, j.row.state) == (float("inf"), float("inf"), "bad")


def test_a_nan_of_the_golden_must_appear_in_the_candidate():
    def draw(seed):
        leaves = draw_norm()(seed)
        leaves["x"][5, 0] = float("nan")
        return leaves

    assert verdict(rms_norm, rms_norm, draw).findings == []
    swallowed = verdict(rms_norm, lambda L: torch.nan_to_num(rms_norm(L)), draw)
    assert rungs(swallowed) == ["CERTAIN"] and "a number where the golden is NaN" in swallowed.findings[0].text


def test_an_infinity_has_its_sign():
    golden = lambda L: L["x"] / L["z"]  # noqa: E731
    draw = lambda seed: {"x": torch.tensor([1.0, -1.0, 2.0]), "z": torch.tensor([0.0, 0.0, 1.0])}  # noqa: E731
    assert verdict(golden, golden, draw).findings == []
    j = verdict(golden, lambda L: golden(L).abs(), draw)
    assert any("not Inf where the golden is Inf" in f.text for f in j.findings)


def test_an_overflow_of_the_store_is_legal_and_elsewhere_it_is_not():
    golden = lambda L: L["x"] * 30000  # noqa: E731
    draw = lambda seed: {"x": torch.tensor([1.0, 2.0, 3.0])}  # noqa: E731
    good = verdict(golden, lambda L: golden(L).to(torch.float16), draw, torch.float16)
    assert good.findings == []
    bad = verdict(golden, lambda L: torch.tensor([torch.inf, 60000, torch.inf]).half(), draw, torch.float16)
    assert rungs(bad) == ["CERTAIN"] and bad.findings[0].location.axes == {"0": [(0, 0)]}


def test_an_overflow_of_the_golden_in_the_same_precision_is_excused():
    golden = lambda L: torch.exp(L["x"]) / torch.exp(L["x"]).sum()  # noqa: E731
    draw = lambda seed: {"x": torch.tensor([100.0, 1.0, 2.0])}  # noqa: E731
    assert verdict(golden, golden, draw).findings == []
    soft = lambda L: torch.softmax(L["x"], 0)  # noqa: E731
    assert verdict(golden, soft, draw).findings == []
    assert rungs(verdict(soft, golden, draw)) != []  # the golden is a softmax, which shifts by the maximum


def test_a_flushed_subnormal_is_a_note():
    golden = lambda L: L["x"] * 2.0**-130  # noqa: E731
    draw = lambda seed: {"x": torch.tensor([1.0, 3.0, 2.0**10])}  # noqa: E731

    def flushing(leaves):
        y = golden(leaves)
        return torch.where(y.abs() < torch.finfo(F32).smallest_normal, 0.0, y)

    j = verdict(golden, flushing, draw)
    assert j.findings == [] and [n.id for n in j.notes] == ["flushes_subnormals"] and j.row.state == "note"
    assert verdict(golden, golden, draw).notes == []


def test_a_nonzero_where_nothing_but_zero_is_possible_is_certain():
    golden = lambda L: L["x"].tril()  # noqa: E731
    draw = lambda seed: {"x": draw_norm(8, 8)(seed)["x"]}  # noqa: E731

    def leaking(leaves):
        y = golden(leaves)
        y[0, 7] = 1e-44
        return y

    assert verdict(golden, golden, draw).findings == []
    j = verdict(golden, leaking, draw)
    assert rungs(j) == ["CERTAIN"] and "nonzero where only 0 is possible" in j.findings[0].text
    assert "%" in j.findings[0].location.text and "inf" not in j.findings[0].text


def test_copies_must_be_exact_to_the_bit():
    golden = lambda L: L["x"].flip(0)  # noqa: E731
    draw = lambda seed: {"x": draw_norm(8, 8)(seed)["x"]}  # noqa: E731
    assert verdict(golden, golden, draw).findings == []
    off = verdict(golden, lambda L: torch.nextafter(golden(L), torch.tensor(9.0)), draw)
    assert rungs(off) == ["CERTAIN"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integer_and_bool_outputs_are_compared_exactly(dtype):
    golden = lambda L: (L["x"] > 0).to(dtype)  # noqa: E731
    draw = draw_norm(8, 8)
    assert verdict(golden, golden, draw, dtype).findings == []

    def wrong(leaves):
        y = golden(leaves)
        y[2, 2] = 1 - y[2, 2].int()
        return y

    j = verdict(golden, wrong, draw, dtype)
    assert rungs(j) == ["CERTAIN"] and j.findings[0].location.axes == {"0": [(2, 2)], "1": [(2, 2)]}


def test_empty_and_zero_dimensional_tensors_are_judged():
    draw = draw_norm(0, 8)
    j = verdict(rms_norm, rms_norm, draw)
    assert j.findings == [] and j.row.shape == (0, 8) and j.row.max_error == 0
    total = lambda L: rms_norm(L).sum()  # noqa: E731
    assert verdict(total, total, draw_norm()).findings == []
    assert rungs(verdict(total, lambda L: total(L) + 100, draw_norm())) == ["CERTAIN"]


def test_a_missing_tensor_and_a_wrong_shape_are_certain():
    ref = reference(rms_norm, draw_norm(4, 8)(0), F32)
    for got, text in ((None, "no tensor came"), (torch.zeros(4, 7), "shape [4, 7] came, expected shape [4, 8]")):
        j = judge("y", got, ref)
        assert rungs(j) == ["CERTAIN"] and text in j.findings[0].text and j.row.state == "bad"


def test_an_unproven_operator_is_a_note_and_the_noise_still_judges():
    golden = lambda L: torch.lgamma(L["x"].abs() + 1)  # noqa: E731
    j = verdict(golden, golden, draw_norm())
    assert j.findings == [] and j.notes[0].id == "not_proven" and "lgamma" in j.notes[0].text
    assert not verdict(golden, lambda L: golden(L) * 1.01, draw_norm()).ok
    assert not verdict(golden, lambda L: golden(L) * float("nan"), draw_norm()).ok
