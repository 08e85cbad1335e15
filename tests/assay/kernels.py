"""Small targets that the tests of the probes share: a weighted sum of rows, a norm, a product, a router."""

import torch

from goldsmith import assay


@assay.case(T=[12], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


@assay.case(T=[13], D=[100])
def normed(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


@assay.case(M=[1], K=[16384], N=[1])
def long_dot(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


def weighted_sum(x, w):
    return assay.stage("scaled", x * w).sum(-1)


def rmsnorm(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return x * inv_rms * w


def target(kernel, golden=weighted_sum, cases=rows, **more):
    return assay.Target(kernel, golden, cases=cases, name=more.pop("name", "kernel"), **more)


def autograd(forward, backward):
    """A kernel of x and w with a backward of its own: forward(x, w), backward(x, w, g) -> (dx, dw)."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return forward(x, w)

        @staticmethod
        def backward(ctx, g):
            return backward(*ctx.saved_tensors, g)

    return Kernel.apply


def sum_gradients(x, w, g):
    return g[:, None] * w, (g[:, None] * x).sum(0)


def plain_sum(x, w):
    return (x * w).sum(-1)


def probes_of(report):
    return {finding.probe for finding in report.findings}


def texts(report, probe=None):
    return [f.text for f in report.findings if probe in (None, f.probe)]
