"""Similar causes: which of two explanations of the same numbers comes first."""

import math

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def failing_diagnosis(kernel, golden, cases, **declared):
    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=cases, **({"backward": None} | declared)))
    assert diagnosis.verdict == "fail", str(diagnosis)
    return diagnosis


# one buffer for two stages


@assay.case(T=[6], D=[8])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D, D), "u": make.normal(D, D)}


def gated(x, w, u):
    gate = assay.stage("gate", torch.sigmoid(x @ w))
    up = assay.stage("up", x @ u)
    return gate * torch.tanh(up)


def in_buffers(second):
    def kernel(x, w, u):
        room = torch.empty(2, *x.shape)
        gate = assay.stage("gate", torch.sigmoid(x @ w, out=room[0]))
        up = assay.stage("up", torch.matmul(x, u, out=room[second]))
        return gate * torch.tanh(up)

    return kernel


def test_a_stage_written_into_an_earlier_ones_memory():
    assert assay.check(assay.Target(in_buffers(1), gated, cases=tokens, backward=None)).ok
    diagnosis = failing_diagnosis(in_buffers(0), gated, tokens)
    assert diagnosis.causes[0].id == "aliased" and diagnosis.first_wrong_stage == "y", str(diagnosis)
    assert "gate is right when it is computed, and up is then written into its memory" in diagnosis.causes[0].evidence


def test_reusing_memory_after_its_last_read_is_no_fault():
    def kernel(x, w, u):
        gate = assay.stage("gate", torch.sigmoid(x @ w))
        up = assay.stage("up", x @ u)
        y = gate * torch.tanh(up) * 2
        assay.stage("again", gate.mul_(0))
        return y

    diagnosis = failing_diagnosis(kernel, gated, tokens)
    assert diagnosis.causes[0].id != "aliased" and diagnosis.causes[0].id in ("repeated_term", "wrong_factor"), str(
        diagnosis
    )


# pool workspaces


@assay.case(S=[7], N=[6], D=[3])
def series(make, S, N, D):
    return {"x": make.normal(S, N, D), "w": make.normal(D)}


def outer(x, w):
    return torch.einsum("snd,sne->nde", x, x * w)


def pooled(fault):
    def kernel(x, w):
        free, y = [], torch.empty(x.shape[1], x.shape[2], x.shape[2])
        for n in range(x.shape[1]):
            acc = free.pop() if free else torch.zeros(x.shape[2], x.shape[2])
            if fault != "not zeroed":
                acc.zero_()
            for s in range(len(x)):
                acc += x[s, n, :, None] * (x[s, n] * w)
            if fault == "given back":
                free.append(acc.fill_(math.nan))
            y[n] = acc + 0
            if fault != "given back":
                free.append(acc.fill_(math.nan))
        return y

    return kernel


@pytest.mark.parametrize(
    "fault, cause", [("not zeroed", "uninitialised_accumulator"), ("given back", "use_after_free")]
)
def test_pool_memory_is_added_to_or_read_after_it_was_freed(fault, cause):
    assert assay.check(assay.Target(pooled(""), outer, cases=series, backward=None)).ok
    diagnosis = failing_diagnosis(pooled(fault), outer, series)
    assert diagnosis.causes[0].id == cause, str(diagnosis)


# unwritten places


@assay.case(N=[7], G=[5], D=[4])
def grouped(make, N, G, D):
    return {"x": make.normal(N, D), "group": torch.tensor([0, 0, 2, 1, 2, 4, 1]), "G": G}


def summed(x, group, G):
    return torch.zeros(G, x.shape[1], dtype=x.dtype).index_add(0, group, x)


def skips_empty(x, group, G):
    y = torch.empty(G, x.shape[1])
    for g in group.unique().tolist():
        y[g] = x[group == g].sum(0)
    return y


@assay.case(N=[7], M=[4])
def picked(make, N, M):
    return {"x": make.normal(N), "at": make.integers(0, M, N), "M": M}


def spread(x, at, M):
    return torch.zeros(len(x), M, dtype=x.dtype).scatter(1, at.unsqueeze(1), x.unsqueeze(1))


def not_zeroed(x, at, M):
    y = torch.empty(len(x), M)
    y[torch.arange(len(x)), at] = x
    return y


def test_an_empty_row_is_a_group_and_scattered_elements_are_not():
    assert failing_diagnosis(skips_empty, summed, grouped).causes[0].id == "empty_group"
    assert failing_diagnosis(not_zeroed, spread, picked).causes[0].id == "never_written"


# sums in a narrow dtype, whose first one has a single addend


@assay.case(T=[9], D=[6])
def rounded(make, T, D):
    return {"x": make.normal(T, D).bfloat16().float()}


def narrow(x):
    total, out = torch.zeros(x.shape[1]), []
    for row in x.bfloat16().float():
        total = (total + row).bfloat16().float()
        out.append(total)
    return torch.stack(out)


def test_a_running_sum_in_bfloat16_whose_first_row_is_exact():
    def golden(x):
        return torch.stack([x[: t + 1].sum(0) for t in range(len(x))])

    diagnosis = failing_diagnosis(narrow, golden, rounded)
    assert diagnosis.causes[0].id == "low_precision_accumulation", str(diagnosis)
    assert "every element is a bfloat16 number" in diagnosis.causes[0].evidence[0], diagnosis.causes[0].evidence


# a common divisor


@assay.case(N=[20], K=[5])
def windows(make, N, K):
    return {"x": make.normal(N), "taps": make.uniform(K) + 0.5}


def smoothed(x, taps):
    taps = taps / taps.square().sum()
    return x.unfold(0, len(taps), 1) @ taps


def test_a_common_divisor_is_a_factor_and_a_small_addend_an_epsilon():
    change = best(lambda x, taps: x.unfold(0, len(taps), 1) @ (taps / 7.3), smoothed, windows)
    assert change.cause == "wrong_factor", change
    change = best(lambda x, taps: x.unfold(0, 5, 1) @ (taps / (taps.square().sum() + 1e-2)), smoothed, windows)
    assert change.cause == "absolute_eps", change


# a wrong index


@assay.case(N=[6], E=[14], D=[3])
def edges(make, N, E, D):
    ends = {"source": make.integers(0, N, E), "goal": make.integers(0, N, E)}
    return {"x": make.normal(N, D), "w": make.normal(E, 1), **ends}


def gathered(x, w, source, goal):
    return w * torch.tanh(x[source] - 2 * x[goal])


def test_a_wrong_index_is_not_called_a_wrong_tensor():
    change = best(lambda x, w, source, goal: w * torch.tanh(x[source] - 2 * x[source]), gathered, edges)
    assert change.cause == "invalid_index" and "wrong_saved_tensor" in change.also, change


# several equally wrong stages


@assay.case(N=[12], K=[5])
def images(make, N, K):
    taps = 0.1 + make.uniform(K)
    return {"x": 1 + 0.2 * make.uniform(N), "taps": taps / taps.sum()}


def variance(x, taps):
    windows_ = x.unfold(0, len(taps), 1)
    mean = assay.stage("mean", windows_ @ taps)
    square = assay.stage("square", windows_.square() @ taps)
    return square - mean.square()


def twice_as_wide(x, taps):
    return variance(x, taps * 0.6)


def test_equally_wrong_stages_are_wrong_although_each_substitution_makes_it_worse():
    diagnosis = failing_diagnosis(twice_as_wide, variance, images)
    assert diagnosis.first_wrong_stage == "mean", str(diagnosis)
