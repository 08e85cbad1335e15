"""Changed goldens: windows of an axis, signs of small integers, stores that should add."""

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def best(target, tensor):
    examination = session_of(target, ("values", "ensemble"))
    first = examination.first
    return explain(examination, tensor, {**first.stages, **first.outputs, **first.grads}[tensor], first)[0]


def assert_explained(target, tensor, cause, text):
    what = best(target, tensor)
    assert (what.cause, what.exact, what.whole) == (cause, True, True), what
    assert text in what.text


# windows


@assay.case(T=[13], K=[3])
def track(make, T, K):
    return {"x": make.normal(2, T), "w": make.normal(K)}


def smoothed(x, w):
    n = len(w) - 1
    return (F.pad(x, (n, 0)).unfold(1, len(w), 1) * w).sum(-1)


def taps(x, w, on):
    """A loop over the taps, each reading its rows `on` places later, cyclically."""
    y = torch.zeros_like(x)
    for j in range(len(w)):
        lag = len(w) - 1 - j
        y[:, lag:] += x[:, : x.shape[1] - lag].roll(-on, 1) * w[j]
    return y


@pytest.mark.parametrize("on", [1, -1])
def test_every_tap_reads_the_position_next_to_its_own(on):
    way = "after it, wrapping around" if on > 0 else "before it, wrapping around"
    assert_explained(assay.Target(lambda x, w: taps(x, w, on), smoothed, cases=track), "y", "shifted", way)


def test_every_window_ends_one_position_late():
    def shifted(x, w):
        return (F.pad(x, (len(w) - 2, 1)).unfold(1, len(w), 1) * w).sum(-1)

    assert_explained(assay.Target(shifted, smoothed, cases=track), "y", "shifted", "reads the positions after it")


@pytest.mark.parametrize("wrong, cause, text", [
    ("stored", "overwritten_accumulator", "of the taps that reach a position the last is left"),
    ("a tap short", "off_by_one", "leaves out the first tap"),
    ("reversed", "permuted", "takes the taps in reverse order"),
])  # fmt: skip
def test_a_backward_with_a_wrong_tap_is_explained(wrong, cause, text):
    def backward(x, w, y, grad_y):
        dx, T, K = torch.zeros_like(x), x.shape[1], len(w)
        for j in range(wrong == "a tap short", K):
            lag = K - 1 - j
            part = grad_y[:, lag:] * w[lag if wrong == "reversed" else j]
            dx[:, : T - lag] = part if wrong == "stored" else dx[:, : T - lag] + part
        return {"x": dx}

    assert_explained(
        assay.Target(smoothed, smoothed, cases=track, backward=backward, grads=("x",)), "x.grad", cause, text
    )


# signs


@assay.case(R=[6], C=[20])
def codes(make, R, C):
    return {"codes": make.integers(0, 8, R, C, dtype=torch.uint8), "scale": make.uniform(R, 1) + 0.5}


@pytest.mark.parametrize("read, text", [
    (lambda c: (c ^ 4) - 4, "as 3 bits with a sign"),
    (lambda c: (c & 3) * (1 - 2 * (c >> 2)), "as a sign and 2 bits"),
])  # fmt: skip
def test_three_bits_are_read_with_a_sign(read, text):
    target = assay.Target(
        lambda codes, scale: read(codes.long()) * scale, lambda codes, scale: codes * scale, cases=codes
    )
    assert_explained(target, "y", "wrong_format", text)


def test_bytes_with_a_sign_are_read_without_it():
    def stored(codes, scale):
        return (codes.to(torch.int8) - 4) * scale

    def read(codes, scale):
        return (codes.long() - 4) % 8 * scale

    assert_explained(assay.Target(read, stored, cases=codes), "y", "wrong_format", "as 3 bits without a sign")


# sums over rows of one place


@assay.case(P=[12], G=[4])
def entries(make, P, G):
    return {"x": make.normal(P, 5), "place": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]), "groups": G}


@pytest.mark.parametrize("together, cause", [(True, "overwritten_accumulator"), (False, "lost_update")])
def test_consecutive_rows_are_summed_in_a_loop_and_others_scattered(together, cause):
    def places(place):
        return place if together else place.flip(0)[torch.tensor([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])]

    def summed(x, place, groups):
        return x.new_zeros(groups, 5).index_add(0, places(place), x)

    def stored(x, place, groups):
        y = x.new_zeros(groups, 5)
        for row, at in enumerate(places(place).tolist()):
            y[at] = x[row]
        return y

    assert_explained(
        assay.Target(stored, summed, cases=entries), "y", cause, "of several updates of one element the last is left"
    )


# stacked inputs, read with the stride of a partition of two


@assay.case(E=[4], T=[3])
def stacks(make, E, T):
    return {
        "x": make.normal(E, T, 6),
        "up": make.normal(E, 6, 8),
        "down": make.normal(E, 8, 2),
        "own": make.normal(E, 5),
    }


def expanded(x, up, down, own):
    return torch.tanh(x @ up) @ down * own.sum(1)[:, None, None]


def half_as_long(w):
    return w.as_strided(w.shape, (w.stride(0) // 2, *w.stride()[1:]))


def test_the_stride_between_stacked_weights_is_that_of_half_an_entry():
    def candidate(x, up, down, own):
        return expanded(x, half_as_long(up), down, own)

    target = assay.Target(candidate, expanded, cases=stacks)
    assert_explained(target, "y", "wrong_stride", "the stride between the entries of up is half of the right one")
