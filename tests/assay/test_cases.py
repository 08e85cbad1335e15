"""Cases: every combination of the sizes, drawn from a seed, equal in every dtype and on every device up to rounding."""

import copy
import random

import numpy as np
import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Make


def make(seed=0, dtype=torch.float32):
    return Make(dtype, "cpu", seed)


@assay.case(T=[0, 1, 13], D=[32, 100], tags=("small",), why="odd sizes")
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


def test_every_combination_is_a_case_with_name_sizes_and_reason():
    assert [str(c) for c in tokens] == [f"tokens[T={t},D={d}]" for t in (0, 1, 13) for d in (32, 100)]
    assert tokens[3].sizes == {"T": 1, "D": 100} and tokens[3].why == "odd sizes" and tokens[3].tags == ("small",)


def test_a_case_without_sizes_has_the_name_of_its_function():
    @assay.case()
    def plain(make):
        return {"x": make.ones(2)}

    @assay.case(D=8)
    def one(make, D):
        return {"x": make.ones(D)}

    assert [str(c) for c in (*plain, *one)] == ["plain", "one[D=8]"]


@assay.case()
def from_every_generator(make):
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {"x": torch.tensor(numbers, dtype=torch.float64), "k": numbers}


def test_the_seed_fixes_what_a_case_draws_from_global_generators_and_leaves_them_as_they_were():
    (case,) = from_every_generator

    def after():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    undisturbed = after()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    first = case.build(seed=1)["k"]
    assert after() == undisturbed, "a draw does not change the caller's generators"
    assert case.build(seed=1)["k"] == first
    assert all(a != b for a, b in zip(case.build(seed=2)["k"], first, strict=True))
    assert case.variant(1).build(seed=1)["k"] != first


def test_every_method_of_make_is_documented():
    methods = [value for name, value in vars(Make).items() if callable(value) and not name.startswith("_")]
    assert len(methods) >= 8 and all(method.__doc__ for method in methods)


def test_a_target_can_be_copied():
    target = assay.Target(lambda x: x, lambda x: x, cases={"x": torch.ones(2)})
    assert copy.copy(target).cases == target.cases


def test_equal_seeds_draw_equal_values_and_another_seed_or_case_draws_others():
    case, other = tokens[2], tokens[4]
    first, again = case.build(seed=1), case.build(seed=1)
    assert torch.equal(first["x"], again["x"]) and first["eps"] == 1e-6
    assert not torch.equal(first["x"], case.build(seed=2)["x"])
    assert not torch.equal(first["w"], other.build(seed=1)["w"])
    assert not torch.equal(first["x"], case.variant(1).build(seed=1)["x"])


def test_dtypes_differ_only_by_rounding():
    full, half = tokens[2].build(torch.float32)["x"], tokens[2].build(torch.bfloat16)["x"]
    assert half.dtype == torch.bfloat16 and torch.equal(full.bfloat16(), half)


def test_drawn_tensors_lie_in_their_documented_ranges():
    m = make()
    assert abs(float(m.normal(10000, std=3.0).std()) - 3) < 0.1
    uniform = make(dtype=torch.bfloat16).uniform(20000)
    assert 0 <= float(uniform.min()) and float(uniform.max()) < 1
    integers = m.integers(-1, 3, 1000)
    assert set(integers.tolist()) == {-1, 0, 1, 2} and integers.dtype == torch.int64
    assert sorted(m.permutation(7).tolist()) == list(range(7))
    tied = make(dtype=torch.float16).tied(5, 50, levels=4)
    assert set(tied.unique().tolist()) == {-1.0, -0.5, 0.0, 0.5}
    assert m.ones(2, 3).eq(1).all() and m.full(2, value=0.25, dtype=torch.float64).dtype == torch.float64
    assert m.normal([2, 3]).shape == m.normal(2, 3).shape == (2, 3) and m.normal().shape == ()
    assert isinstance(m.generator, torch.Generator) and m.dtype == torch.float32 and m.device.type == "cpu"


@assay.case(T=[2, 3, 40])
def indices(make, T):
    return {
        "i": make.integers(0, 10**6, T),
        "rows": make.integers(0, 10**6, 2, T),
        "one": make.integers(0, 10**6, T, 1),
    }


def _repeats(values):
    return len(values.unique()) < values.numel()


@pytest.mark.parametrize("case", indices, ids=str)
def test_integers_of_a_repeating_variant_repeat_in_each_row(case):
    drawn = case.variant(1, repeating=True).build()
    assert all(map(_repeats, (drawn["i"], *drawn["rows"], drawn["one"])))
    assert not any(map(_repeats, case.variant(1).build().values()))


def test_integers_do_not_repeat_where_the_case_excludes_it():
    def distinct(i):
        return not _repeats(i)

    @assay.case(T=3, where=distinct)
    def drawn_once(make, T):
        return {"i": make.integers(0, 10**6, T)}

    @assay.case(T=3)
    def drawn_until_distinct(make, T):
        i = make.integers(0, 10**6, T)
        while _repeats(i):
            i = make.integers(0, 10**6, T)
        return {"i": i}

    for case in (*drawn_once, *drawn_until_distinct):
        assert not _repeats(case.variant(1, repeating=True).build()["i"])


@pytest.mark.parametrize("parts, total, empty", [(5, 40, 1), (5, 40, 4), (1, 7, 1), (3, 0, 1), (4, 2, 0)])
def test_offsets_run_from_zero_to_the_total_and_leave_parts_empty(parts, total, empty):
    offsets = make(3).offsets(parts, total, empty)
    sizes = offsets.diff()
    assert offsets.shape == (parts + 1,) and int(offsets[0]) == 0 and int(offsets[-1]) == total
    assert bool((sizes >= 0).all()) and int((sizes == 0).sum()) >= min(empty, parts - 1)


def test_a_literal_dict_is_one_case_called_given_that_keeps_its_tensors():
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    target = assay.Target(lambda x: x * 1, lambda x: x * 1, cases={"x": x})
    (case,) = target.cases
    built = case.build(torch.bfloat16)
    x.zero_()
    assert str(case) == "given" and built["x"].dtype == torch.float64 and built["x"][2, 1] == 5
    other = case.variant(1).build()["x"]
    assert sorted(other.flatten().tolist()) == [0, 1, 2, 3, 4, 5]  # its rows in another order


def test_each_dict_of_a_list_is_a_case_with_its_own_name():
    target = assay.Target(lambda x: x, lambda x: x, cases=[{"x": torch.ones(1)}, {"x": torch.ones(2)}])
    assert [case.name for case in target.cases] == ["given1", "given2"]
    assert assay.check(target).cases == ["given1", "given2"]


def test_draws_of_torch_and_of_make_are_different_numbers():
    @assay.case(T=[5])
    def both(make, T):
        return {"x": make.normal(T), "y": torch.randn(T)}

    drawn = both[0].build()
    assert not torch.equal(drawn["x"], drawn["y"])


def test_a_method_that_make_does_not_have_is_explained():
    @assay.case(T=[1])
    def wrong(make, T):
        return {"x": make.gaussian(T)}

    with pytest.raises(assay.TargetError, match="make has no 'gaussian'; it has: normal, uniform, integers, perm"):
        wrong[0].build()


def test_errors_in_a_case_name_the_case():
    with pytest.raises(assay.TargetError, match=r"^case: T=\[\] leaves no case; give at least one value$"):
        assay.case(T=[])
    with pytest.raises(assay.TargetError, match=r"^case wrong: called as wrong\(make, T\), takes \(make, S\): "):

        @assay.case(T=[1])
        def wrong(make, S):
            return {}

    @assay.case()
    def tensor(make):
        return make.ones(1)

    with pytest.raises(assay.TargetError, match="^case tensor: must return a dict of inputs and scalars, got Tensor$"):
        tensor[0].build()
    for size in (1.5, True, -1):
        built = assay.case(T=size)(lambda make, T: {"x": make.normal(T, 3)})[0]
        message = rf"could not be drawn: ValueError: sizes must be whole numbers >= 0, got {size} in \[{size}, 3\]$"
        with pytest.raises(assay.TargetError, match=message):
            built.build()
