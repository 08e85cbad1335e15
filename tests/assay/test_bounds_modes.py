"""Bounds of aliases, writes, stores, zeros, NaN, and operators without a rule."""

import torch

from goldsmith.assay.bounds import running_errors
from goldsmith.assay.bounds.bounded import smallest_subnormal
from goldsmith.assay.bounds.running_errors import running_bounds, stored

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
U = 2.0**-24


def bounds(fn, stores=None, **leaves):
    return running_bounds(fn, leaves, compute=F32, stores=stores or {})


def ramp(*shape):
    return (torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64) / 8).reshape(shape)


def test_an_error_follows_its_element_through_views():
    def fn(leaves):
        y = leaves["x"] / 3
        return {"y": y, "t": y.T[1:, ::2], "e": y[:, :1].expand(4, 6), "v": y.view(-1)[5:7], "p": y.permute(1, 0)}

    b = bounds(fn, x=ramp(4, 6))
    assert torch.equal(b["t"].bound, b["y"].bound.T[1:, ::2])
    assert torch.equal(b["e"].bound, b["y"].bound[:, :1].expand(4, 6))
    assert torch.equal(b["v"].bound, b["y"].bound.view(-1)[5:7])
    assert torch.equal(b["p"].bound, b["y"].bound.T)
    assert len(b["y"].bound.unique()) > 10


def test_a_write_into_a_view_changes_the_errors_of_its_base_only_there():
    def fn(leaves):
        out = torch.zeros(4, 6)
        view = out[:, 2:4]
        view.copy_(leaves["x"][:, :2] / 3)
        view[1].mul_(1.7)
        return {"y": out}

    b = bounds(fn, x=ramp(4, 6))["y"]
    assert bool((b.bound[:, 2:4] > 0).all())
    assert bool((b.bound[:, :2] == 0).all()) and bool(b.structural_zero[:, 4:].all())
    assert bool((b.bound[1, 2:4] > 1.5 * 1.7 * U * b.value[1, 2:4] / 1.7).all())


def test_an_overwritten_element_forgets_its_error():
    def fn(leaves):
        y = leaves["x"] / 3
        y[0] = 1.0
        y[1].zero_()
        return {"y": y}

    b = bounds(fn, x=ramp(3, 2))["y"]
    assert bool((b.bound[:2] == 0).all()) and bool((b.bound[2] > 0).all())


def test_an_in_place_operator_has_the_error_of_its_functional_form():
    def inplace(leaves):
        y = leaves["x"] / 3
        return {"y": y.exp_().mul_(leaves["x"]).add_(leaves["x"], alpha=0.3).clamp_(max=2.0)}

    def functional(leaves):
        y = leaves["x"] / 3
        return {"y": torch.clamp(torch.add(torch.exp(y) * leaves["x"], leaves["x"], alpha=0.3), max=2.0)}

    a, b = bounds(inplace, x=ramp(8))["y"], bounds(functional, x=ramp(8))["y"]
    assert torch.equal(a.value, b.value) and torch.equal(a.bound, b.bound)


def test_an_open_bound_of_finite_numbers_needs_no_second_analysis(monkeypatch):
    careful = []
    run = running_errors._run
    monkeypatch.setattr(running_errors, "_run", lambda *a, careful: seen(careful) or run(*a, careful=careful))
    seen = careful.append

    def open_bound(leaves):  # a divisor within its own error: its quotient is open, and 0 times that is NaN
        q = leaves["x"] / (leaves["x"] / 3 - leaves["x"] / 3)[:, :1].exp().sub(1).add(1e-9)
        return {"y": q @ torch.zeros(6, 2, dtype=F64)}

    def overflows(leaves):
        return {"y": open_bound(leaves)["y"] + 1 / (1 + (leaves["x"] * 1e4).exp())[:, :2]}

    masked = {name: run(fn, {"x": ramp(4, 6)}, F32, {}, "ieee", None, careful=True)[0]["y"]
              for name, fn in (("open", open_bound), ("overflow", overflows))}  # fmt: skip
    for name, fn, runs in (("open", open_bound, [False]), ("overflow", overflows, [False, True])):
        careful.clear()
        b = bounds(fn, x=ramp(4, 6))["y"]
        assert careful == runs and bool(b.open.all())
        assert torch.equal(b.bound, masked[name].bound) and torch.equal(b.value, masked[name].value)


def test_structural_zeros_differ_from_sums_that_cancel():
    def fn(leaves):
        x = leaves["x"]
        padded = torch.nn.functional.pad(x / 3, (0, 1))
        return {"masked": (x / 3).tril(), "padded": padded, "cancelled": (x - x.flip(0)).sum(0), "same": x - x}

    b = bounds(fn, x=ramp(2, 2))
    assert b["masked"].structural_zero.tolist() == [[False, True], [False, False]]
    assert b["padded"].structural_zero.tolist() == [[False, False, True]] * 2
    assert b["cancelled"].value.tolist() == [0, 0] and not bool(b["cancelled"].structural_zero.any())
    assert bool((b["cancelled"].bound > 0).all())
    assert bool(b["same"].structural_zero.all())


def test_the_store_adds_half_a_unit_in_the_last_place_and_half_a_subnormal_once():
    x = ramp(7) / 3
    for dtype, u in ((BF16, 2.0**-8), (torch.float16, 2.0**-11), (F32, U)):
        plain = bounds(lambda L: {"y": L["x"] * 1.5}, {"y": dtype}, x=x)["y"]
        early = bounds(lambda L, d=dtype: {"y": stored(stored(L["x"] * 1.5, d), d)}, {"y": dtype}, x=x)["y"]
        e = (x - x.float().double()).abs() * 1.5 + U * plain.value
        expected = e + u * (plain.value + e) + smallest_subnormal(dtype) / 2
        # positive terms, at most eight float64 roundings on each side
        assert bool(((plain.bound - expected).abs() <= 16 * 2.0**-53 * expected).all())
        assert torch.equal(plain.bound, early.bound)


def test_a_result_that_the_store_represents_exactly_has_bound_zero():
    b = bounds(lambda L: {"y": L["x"].flip(0)}, {"y": BF16}, x=ramp(7))["y"]
    assert bool((b.bound == 0).all())


def test_a_stage_stored_in_sixteen_bits_widens_what_follows_it_backward_too():
    def fn(leaves, dtype):
        x = leaves["x"].requires_grad_()
        h = stored(torch.tanh(x), dtype)
        return {"y": h * 3, "x.grad": torch.autograd.grad(h.sum(), x)[0]}

    wide = bounds(lambda L: fn(L, F32), x=ramp(5))
    narrow = bounds(lambda L: fn(L, BF16), x=ramp(5))
    for name in ("y", "x.grad"):
        assert bool((narrow[name].bound > 100 * wide[name].bound).all()), name


def test_stored_outside_of_a_mode_is_the_identity():
    x = torch.tensor([1.0 + 2.0**-20])
    assert stored(x, BF16) is x


def test_an_operator_without_a_rule_opens_only_the_bounds_that_depend_on_it():
    def fn(leaves):
        x = leaves["x"]
        return {"y": torch.cdist(x, x + 1).sum(), "z": x * 3, "i": torch.linalg.matrix_exp(x)[0] * 0.5}

    b = bounds(fn, x=ramp(2, 2))
    assert bool(b["y"].open) and any("cdist" in note for note in b["y"].notes)
    assert bool(b["i"].open.all()) and b["i"].notes == ["aten.linalg_matrix_exp"]
    assert b["z"].notes == [] and not bool(b["z"].open.any())


def test_an_operator_outside_of_aten_opens_the_bound():
    @torch.library.custom_op("goldsmith_test_bounds::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    b = bounds(lambda L: {"y": triple(L["x"]) + 1}, x=ramp(2))["y"]
    assert bool(b.open.all()) and b.notes == ["goldsmith_test_bounds.triple"]


def test_a_number_taken_out_of_a_rounded_tensor_opens_everything_after_it():
    def fn(leaves):
        before = leaves["x"] * 1.1
        scale = (leaves["x"] / 3).max().item()
        return {"before": before, "after": leaves["x"] * scale}

    b = bounds(fn, x=ramp(3))
    assert b["after"].notes == ["aten._local_scalar_dense"] and bool(b["after"].open.all())
    exact = bounds(lambda L: {"y": L["x"] * L["x"].max().item()}, x=ramp(3))["y"]
    assert not bool(exact.open.any())


def test_a_decision_within_the_errors_of_its_sides_is_uncertain():
    x = torch.tensor([1.0, 3.0 * (1 + 2.0**-40), 5.0], dtype=F64)
    b = bounds(lambda L: {"y": torch.where(L["x"] / 3 > 1, 10.0, 20.0) + L["x"] * 0}, x=x)["y"]
    assert b.value.tolist() == [20.0, 10.0, 10.0]
    assert (b.bound > 9).tolist() == [False, True, False]


def test_intermediate_infinities_do_not_open_finite_results():
    def fn(leaves):
        x = leaves["x"].requires_grad_()
        s = (x / 3).masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))
        y = torch.exp(s - s.logsumexp(-1, keepdim=True))
        return {"s": s, "y": y, "x.grad": torch.autograd.grad((y * y.detach()).sum(), x)[0]}

    b = bounds(fn, x=ramp(4, 4))
    for name, bounded in b.items():
        assert not bool(bounded.open.any()), name
    assert bool((torch.diagonal(b["y"].bound) == 0).all())
    assert bool((b["s"].bound[~torch.eye(4, dtype=torch.bool)] > 0).all())


def test_nan_in_the_inputs_leaves_the_other_elements_bounded():
    x = ramp(4, 4)
    x[1, 2] = float("nan")
    x[3, 0] = float("inf")
    b = bounds(lambda L: {"y": torch.softmax(L["x"] / 3, -1), "z": L["x"] / 3 * 1.1}, x=x)
    assert not bool(b["z"].open.any()) and bool((b["z"].bound[0] > 0).all())
    assert not bool(b["y"].open[[0, 2]].any())


def test_empty_and_zero_dimensional_tensors_have_bounds():
    def fn(leaves):
        x, s = leaves["x"].requires_grad_(), leaves["s"].requires_grad_()
        y = torch.softmax(x * s, -1) @ x.T + x.sum() + x.mean(-1).sum()
        return {"y": y, "s.grad": torch.autograd.grad(y.sum() + s.tanh(), s)[0], "l": s.exp().cumsum(0)}

    b = bounds(fn, x=torch.zeros(0, 3, dtype=F64), s=torch.tensor(0.3, dtype=F64))
    assert b["y"].bound.shape == (0, 0) and b["s.grad"].bound.shape == ()
    assert float(b["s.grad"].bound) > 0


def test_integer_results_are_exact_unless_the_decision_is_uncertain():
    def fn(leaves):
        x = leaves["x"]
        return {"i": x.argsort(), "n": (x > 0.4).sum(), "unsure": ((x / 3) >= (0.3 + x * 0)).long()}

    b = bounds(fn, x=torch.tensor([0.9 * (1 + 1e-12), 0.1, 0.5], dtype=F64))
    assert b["i"].value.tolist() == [1, 2, 0] and bool((b["i"].bound == 0).all()) and float(b["n"].bound) == 0
    assert b["unsure"].bound.tolist() == [1, 0, 0]


def test_a_storage_format_that_the_golden_models_rounds_as_specified():
    def fn(leaves):
        return {"spec": leaves["x"].to(BF16).double(), "after": (leaves["x"] / 3).to(BF16).double()}

    x = torch.rand(200, generator=torch.Generator().manual_seed(0)).double()
    b = bounds(fn, x=x)
    assert bool((b["spec"].bound == 0).all())
    assert bool((b["after"].bound >= 2.0**-8 * b["after"].value).all())  # the other neighbour is also legal


def test_the_callers_default_dtype_and_inputs_are_unchanged():
    x = ramp(3)
    before = x.clone()
    bounds(lambda L: {"y": L["x"].mul_(3) + torch.ones(3)}, x=x)
    assert torch.get_default_dtype() == F32 and torch.equal(x, before)


def test_intermediate_complex_numbers_open_only_their_own_bounds():
    def fn(leaves):
        x, angle = leaves["x"].requires_grad_(), leaves["angle"]
        pairs = torch.view_as_complex(x.reshape(3, 2, 2)) * torch.polar(torch.ones_like(angle), angle)
        turned = torch.view_as_real(pairs).flatten(1)
        return {"half": x / 2, "y": turned, "x.grad": torch.autograd.grad(turned.sum(), x)[0]}

    b = bounds(fn, x=ramp(3, 4), angle=ramp(3, 2))
    assert b["half"].notes == [] and bool((b["half"].bound == 0).all())
    assert "aten.polar" in b["y"].notes and bool(b["y"].open.all()) and bool(b["x.grad"].open.all())
    exact = torch.view_as_real(
        torch.view_as_complex(ramp(3, 2, 2)) * torch.polar(torch.ones(3, 2, dtype=F64), ramp(3, 2))
    ).flatten(1)
    assert torch.equal(b["y"].value, exact)


def test_a_rule_without_a_bound_names_its_operator():
    def fn(leaves):
        index = torch.tensor([[0, 0], [1, 1]])
        return {"y": torch.zeros(2, 3, dtype=F64).scatter_reduce(1, index, leaves["x"] / 3, "amax")}

    b = bounds(fn, x=ramp(2, 2))["y"]
    assert bool(b.open.all()) and b.notes == ["aten.scatter_reduce"]


def test_an_operator_runs_undecomposed_if_its_decomposition_declines():
    b = bounds(lambda L: {"y": torch.nn.functional.adaptive_max_pool1d(L["x"] / 3, 3)}, x=ramp(1, 2, 8))["y"]
    assert b.notes == ["aten.adaptive_max_pool2d"] and bool(b.open.all())
