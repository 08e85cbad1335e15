"""re + i im = scale sum_n (x + i u)[n] exp(-2 pi i k n / N): a Fourier transform by matrices, and its adjoint."""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(B=[3], N=[12])
def signals(make, B, N):
    return {"x": make.normal(B, N), "u": make.normal(B, N), "scale": N**-0.5}


@assay.case(B=[5], N=[7])
def odd(make, B, N):
    return signals[0].draw(make, B, N)


def golden(x, u, scale):
    n = torch.arange(x.shape[1], dtype=x.dtype)
    angle = 2 * math.pi * torch.outer(n, n) / x.shape[1]
    c, s = torch.cos(angle), torch.sin(angle)
    return (x @ c + u @ s) * scale, (u @ c - x @ s) * scale


def twiddles(N):
    """cos and sin of 2 pi (k n mod N) / N: the remainder keeps the angle small and exact."""
    n = torch.arange(N)
    angle = torch.outer(n, n).remainder(N).double() * (2 * math.pi / N)
    return angle.cos().float(), angle.sin().float()


def forward(x, u, scale):
    c, s = twiddles(x.shape[1])
    re = x @ c + u @ s
    im = u @ c - x @ s
    return re * scale, im * scale


def backward(x, u, scale, grad_re, grad_im):
    c, s = twiddles(x.shape[1])
    dx = grad_re @ c - grad_im @ s
    du = grad_re @ s + grad_im @ c
    return {"x": dx * scale, "u": du * scale}


def target():
    return assay.Target(forward, golden, cases=[signals, odd], name="dft", outputs=("re", "im"), backward=backward)
