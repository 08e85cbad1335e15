"""Tests of `signatures.repeated` with a launch that adds 1 on the CPU, in place of a kernel."""

import ctypes

import pytest
import torch

from goldsmith.core import signatures
from goldsmith.core.signatures import RecordedLaunch, Recording, recording, repeated
from goldsmith.core.tracing import listening


class Adding:
    """An operator: its results are its inputs plus 1, each made by a launch in memory of its own."""

    def __init__(self):
        self.computed, self.settings = 0, ("a device",)

    def launch(self, *pointers):
        one_more(1, 1, 1, 0, *(p.data_ptr() for p in pointers), pointers[0].numel())
        if recording() is not None:
            now = lambda: self.settings  # noqa: E731
            values = (pointers[0].numel(),)
            recording().launches.append(
                RecordedLaunch(one_more, (1, 1, 1), (), pointers, values, self.settings, now, lambda: 0)
            )

    def compute(self, tensors):
        self.computed += 1
        results = [torch.empty(t.shape) for t in tensors]
        for t, result in zip(tensors, results, strict=True):
            self.launch(t, result)
        return tuple(results)

    def __call__(self, *tensors, compute=None):
        return repeated(self, tensors, lambda: (compute or self.compute)(tensors))


def one_more(x, y, z, stream, source, target, count):
    read = (ctypes.c_float * count).from_address(source)
    written = (ctypes.c_float * count).from_address(target)
    for i in range(count):
        written[i] = read[i] + 1


@pytest.fixture
def add():
    signatures._repetitions.clear()
    yield Adding()
    signatures._repetitions.clear()


def assert_adds(add, *tensors, computed, **how):
    results = add(*tensors, **how)
    assert all(torch.equal(r, t + 1) for r, t in zip(results, tensors, strict=True))
    assert add.computed == computed, f"computed {add.computed} times"
    return results


def test_a_repeated_call_takes_the_new_tensors_and_new_memory(add):
    first = assert_adds(add, torch.randn(3), torch.randn(2, 4), computed=1)
    again = assert_adds(add, torch.randn(3), torch.randn(2, 4), computed=1)
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in again}
    assert not any(t._is_view() for t in again)


def test_shapes_strides_alignment_and_settings_belong_to_the_signature(add):
    memory = torch.randn(64)
    assert_adds(add, memory[:4], computed=1)
    assert_adds(add, memory[4:8], computed=1)
    assert_adds(add, memory[:6], computed=2)
    assert_adds(add, memory[1:5], computed=3)
    assert_adds(add, memory[:4].view(2, 2), computed=4)
    add.settings = ("another device",)
    assert_adds(add, memory[:4], computed=5)


def test_views_of_results_keep_their_shape_when_repeated(add):
    compute = lambda tensors: tuple(r.view(2, 2) for r in add.compute([t.view(-1) for t in tensors]))  # noqa: E731
    for _ in range(2):
        result = assert_adds(add, torch.randn(2, 2), compute=compute, computed=1)[0]
    assert result.shape == (2, 2)


def test_a_result_without_elements_is_new_as_well(add):
    compute = lambda tensors: (*add.compute(tensors), tensors[0].new_empty(0, 3))  # noqa: E731
    results = [add(torch.randn(4), compute=compute) for _ in "12"]
    assert [r[1].shape for r in results] == [(0, 3)] * 2
    assert results[0][1] is not results[1][1]
    assert add.computed == 1


def copied(add, t):
    return add.compute([t.clone()])


def decided(add, t):
    return add.compute([t]) if t.sum() != 0 else ()


def in_a_part(add, t):
    memory = torch.empty(t.numel() + 4)
    add.computed += 1
    add.launch(t, memory[4:])
    return (memory[4:],)


@pytest.mark.parametrize("how", [copied, decided, in_a_part], ids=lambda f: f.__name__)
def test_a_call_that_does_more_than_launch_is_computed_each_time(add, how):
    for computed in (1, 2, 3):
        assert_adds(add, torch.randn(4), compute=lambda tensors: how(add, *tensors), computed=computed)


def test_tensors_that_a_launch_would_confuse_are_computed(add):
    x, nothing = torch.randn(4), torch._efficientzerotensor(4)
    for computed in (1, 2):  # two inputs at one address
        assert_adds(add, x, x, computed=computed)
    assert_adds(add, x, computed=3)
    lazily = torch.complex(x, x).conj().imag
    dense = lambda tensors: add.compute([t.resolve_neg().contiguous() for t in tensors])  # noqa: E731
    for computed in (4, 5):
        assert_adds(add, lazily, compute=dense, computed=computed)
    zero = lambda tensors: add.compute([torch.zeros(4)])  # noqa: E731
    assert_adds(add, nothing, compute=zero, computed=6)


def test_a_listener_and_a_mode_see_every_call(add):
    class Listener:
        def visit(self, name, value, at=None, mask=None):
            return value

        def wants(self, name):
            return True

    assert_adds(add, torch.randn(4), computed=1)
    with listening(Listener()):
        assert_adds(add, torch.randn(4), computed=2)
    with Recording():
        assert_adds(add, torch.randn(4), computed=3)
    assert_adds(add, torch.randn(4), computed=3)


def test_an_error_leaves_no_recording_behind(add):
    def fail(tensors):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        add(torch.randn(4), compute=fail)
    assert recording() is None
    assert_adds(add, torch.randn(4), computed=1)
