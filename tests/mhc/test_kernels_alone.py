"""Kernels called directly, on inputs that no case covers: addresses beyond 2^31, partial sums that cancel."""

import dataclasses
import os

import pytest
import torch

from goldsmith.core.device import triton_unavailable
from goldsmith.mhc._kernels import mix
from goldsmith.mhc._kernels.ordered_sums import finish

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def far_addresses(monkeypatch):
    """Every program is the last of 2^22, loads and stores do nothing, and an int32 overflow raises."""
    import numpy as np
    from triton.runtime import interpreter

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle

    def zeros(pointers, *rest):
        dtype = pointers.get_element_ty()
        return handle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(dtype)), dtype)

    def last_program(axis):
        return handle(np.array([2**22 - 1 if axis == 0 else 0], np.int32), interpreter.tl.int32)

    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    monkeypatch.setattr(builder, "create_get_program_id", last_program)
    monkeypatch.setattr(builder, "create_load", zeros)
    monkeypatch.setattr(builder, "create_masked_load", zeros)
    monkeypatch.setattr(builder, "create_store", lambda *arguments: None)
    monkeypatch.setattr(builder, "create_masked_store", lambda *arguments: None)


T, D = 2**22, 512
LAYOUTS = {  # (stride_xt, stride_xn): tokens outermost, streams outermost, a slice of a wide tensor
    "tokens": (4 * D, D),
    "streams": (D, T * D // 2),
    "wide": (2**31 - 1, 2**30),
}


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("orientation", [False, True], ids=["in_out", "out_in"])
def test_the_mix_addresses_tokens_and_streams_beyond_two_to_the_31(far_addresses, layout, orientation):
    t, n = LAYOUTS[layout]
    x = torch.zeros(1)
    mix._mix_fwd_kernel[(1, 1)](x, x, x, x, x, t, n, D, T, D, 4, orientation, 512)
    mix._mix_bwd_kernel[(1,)](x, x, x, x, x, x, x, x, x, t, n, D, t, n, T, D, 4, orientation, True, 4, 512)


@pytest.mark.skipif(triton_unavailable({}) is not None and DEVICE == "cpu", reason="needs Triton")
@pytest.mark.parametrize("blocks", [3, 3000])
def test_cancelling_partial_sums_leave_the_exact_remainder(blocks):
    """2^25 + 1 - 2^25 is 1, since partial sums are added in float64 and rounded once."""
    n, K = 2, 5
    M = n * (n + 2)
    psi = torch.zeros(3, M, K)
    psi[0], psi[1], psi[2] = 2.0**25, 1.0, -(2.0**25)
    sums = torch.zeros(blocks, 2, M)
    sums[0], sums[blocks // 2], sums[-1] = 2.0**25, 1.0, -(2.0**25)
    phi = torch.arange(1.0, M * K + 1).reshape(M, K)
    gamma, alpha, bias = torch.arange(1.0, K + 1), torch.zeros(3), torch.zeros(M)
    tensors = [v.to(DEVICE) for v in (psi, sums, phi, gamma, alpha, bias)]
    gradients = {name: v.cpu() for name, v in finish(*tensors, n).items()}
    assert torch.equal(gradients["dphi"], gamma.expand(M, K)) and torch.equal(gradients["dgamma"], phi.sum(0))
    assert torch.equal(gradients["dbias"], torch.ones(M)) and gradients["dalpha"].tolist() == [n, n, n * n]
