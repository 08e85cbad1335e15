"""The patched interpreter: the same bits, the same errors, and Triton restored afterwards."""

import dataclasses
import os
from contextlib import contextmanager

import pytest
import torch

from goldsmith.assay.execute.interpreter_launch import speed_up

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """Unpatched Triton."""


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _halves(x, low: tl.constexpr):
    return (x.to(tl.float16).to(tl.float32), x * 0.5) if low else (x, -x)


@triton.jit
def _mixed_kernel(x_ptr, y_ptr, i_ptr, stride, N: tl.constexpr, low: tl.constexpr):
    """Device functions, tuples, scans, reductions, sorts, dots, integers of several widths, broadcasts."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64) * stride + columns)
    a, b = _halves(x, low)
    total = tl.reduce(a, 1, _larger)[:, None] + tl.cumsum(b, 1) + tl.dot(a, b, input_precision="ieee")
    for step in tl.static_range(2):
        total += step * tl.sum(x, 0)[None, :]
    tl.store(y_ptr + rows * N + columns, total + tl.sort(x, descending=True))
    y = tl.where(x > 0.25, tl.maximum(x, columns * 0.5), tl.minimum(-x, 0.0)) - 2.0 / (1 + x * x)
    y += tl.where(rows < columns, x, 3) * (columns >> 1) + (rows // 3 % 2 != 0) + tl.program_id(0)
    tl.store(y_ptr + N * N + (rows * N + columns).to(tl.int64), y, mask=(columns < N - 3) & (rows % 5 != low))
    whole = (rows * 7 - columns).to(tl.int16)
    whole += tl.xor_sum(whole, 1, keep_dims=True) + tl.xor_sum(whole, 0)[None, :] + tl.xor_sum(whole)
    tl.store(i_ptr + rows * N + columns, whole + tl.program_id(0))


@triton.jit
def _overflow_kernel(y_ptr, factor):
    tl.store(y_ptr, factor * factor)


def interpreter():
    from triton.runtime import interpreter

    return interpreter


@contextmanager
def quick(wanted=True):
    undo = speed_up(interpreter()) if wanted else lambda: None
    try:
        yield
    finally:
        undo()


def mixed(low):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    y, i = torch.zeros(32, 16), torch.empty(16, 16, dtype=torch.int16)
    _mixed_kernel[(1,)](x, y, i, 16, N=16, low=low)
    return y, i


def facts(module):
    core, builder, semantic = module.tl.core, module.interpreter_builder, module.TritonSemantic
    return [
        module._patch_lang, module._get_np_dtype, module.GridExecutor.__call__, builder.options, core.tuple.__init__,
        core.tuple.__getattr__, module.ReduceOps.apply_impl, core.tensor.__add__, module.tl.load, module.tl.reduce,
        core.reduce, core._unwrap_if_constexpr, core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__,
        semantic.cast, semantic.binary_op_type_checking_impl, semantic.maximum, module.TensorHandle.__init__,
    ]  # fmt: skip


@pytest.mark.parametrize("low", [False, True])
def test_the_patched_interpreter_computes_the_same_bits(low):
    plain = mixed(low)
    with quick():
        assert all(torch.equal(a, b) for a, b in zip(mixed(low), plain, strict=True))


def test_triton_is_restored_when_a_kernel_raises():
    mixed(False)  # Triton never undoes the patches of a device function call
    before = facts(interpreter())
    with quick():
        mixed(False)
        inside = facts(interpreter())
        with pytest.raises(Exception, match="module 'triton.language' has no attribute|missing|NoneType"):
            _mixed_kernel[(1,)](None, None, None, 1, N=16, low=False)
        mixed(False)
        assert speed_up(interpreter())() is None, "a second time changes nothing"
        assert all(a is b for a, b in zip(facts(interpreter()), inside, strict=True))
    assert all(a is b for a, b in zip(facts(interpreter()), before, strict=True))


def test_the_skipped_work_is_skipped():
    """The language is patched once for each module that uses it, not once per launch or call."""
    module, patched = interpreter(), []
    patch = module._patch_lang
    module._patch_lang = lambda function: patched.append(function.__name__) or patch(function)
    try:
        with quick():
            assert not module.interpreter_builder.options.sanitize_overflow
            mixed(True)
            mixed(True)
    finally:
        module._patch_lang = patch
    assert patched == ["_mixed_kernel", "cumsum"], "cumsum is Triton's own, and sees triton.language.core"


@pytest.mark.parametrize("wanted", [False, True], ids=["as_it_comes", "quick"])
def test_an_overflow_is_found_in_debug_mode(monkeypatch, wanted):
    builder = interpreter().interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    with quick(wanted), pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        _overflow_kernel[(1,)](torch.empty(1, dtype=torch.int32), 1 << 20)


def test_an_unknown_triton_is_not_patched():
    class Other:
        """A module without the patched attributes."""

    before = dict(vars(Other))
    speed_up(Other)()
    assert dict(vars(Other)) == before
