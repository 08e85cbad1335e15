"""Equalities that need no golden: the plain residual network, boundary, recomputation, permuted streams."""

import pytest
import torch
from torch import nn

from goldsmith import Op, assay, mhc
from goldsmith.assay.declare.case import Case
from goldsmith.mhc import _side_effects
from mhc import formulas
from mhc.networks import DIM, Layer, Norm, connection, gradients, target_against_formulas
from mhc.wrong import check, equal

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = {"reference": [torch.float32, torch.bfloat16, torch.float16, torch.float64], "triton": [torch.float32]}
if GPU:
    DTYPES["triton"] += [torch.bfloat16, torch.float16]
BACKENDS = [(backend, dtype) for backend, dtypes in DTYPES.items() for dtype in dtypes]


# -- the plain residual network ---------------------------------------------------------------------------------------


class ScaleFree(nn.Module):
    """An RMSNorm without eps, so that norm(c x) = norm(x)."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


@pytest.mark.parametrize("stacked", [False, True], ids=["one_by_one", "HyperStack"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_with_zero_scale_and_base_equal_streams_stay_equal_and_form_the_plain_residual_network(n, stacked):
    """h_in is a multiple of x, which the norm cancels; h_post is 1; the mix scales x by the sum of a column."""
    depth, eps = 4, 1e-6
    connections = [mhc.HyperConnection(DIM, Layer(), n=n, norm=ScaleFree(), backend="reference") for _ in range(depth)]
    for c in connections:
        nn.init.zeros_(c.scale)
    module = mhc.HyperStack(connections) if stacked else nn.Sequential(*connections)
    names = [name for name, _ in module.named_parameters() if name.endswith("layer.weight")]
    flat = torch.zeros(n, n, dtype=torch.float64)
    column = formulas.sinkhorn_deepseek(flat, 20, eps).sum(-2)[0].item()
    # the last step divides a column by its sum s + eps; the step before divided rows by r + eps with r <= 1 + n eps,
    # which leaves s >= 1 - eps, so that s / (s + eps) >= 1 - eps / (1 - eps)
    assert 1 - eps / (1 - eps) <= column < 1, "a plain residual network, up to about eps per layer"

    def draw(make):
        weights = {f"weight_{i}": make.normal(DIM, DIM, std=0.4) for i in range(depth)}
        return {"x": make.normal(5, DIM), **weights}

    def streams(x, **weights):
        arguments = dict(zip(names, weights.values(), strict=True))
        return torch.func.functional_call(module, arguments, (mhc.expand(x, n, backend="reference"),))

    def plain(x, **weights):
        for weight in weights.values():
            x = column * x + torch.tanh(ScaleFree()(x) @ weight.mT)
        return torch.stack([x] * n, -2)

    assay.check(assay.Target(streams, plain, cases=[Case("network", draw)]), probes=["values"])


# -- boundary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, dtype", BACKENDS)
@pytest.mark.parametrize("name", ["odd_dim", "three_streams", "out_in", "leading_dimensions", "cann"])
def test_boundary_equals_post_then_pre_bit_for_bit(name, backend, dtype):
    op = Op.get("mhc.boundary")
    values = next(c for c in op.cases if c.name == name).build(dtype, DEVICE)
    options = {o: values[o] for o in op.options}
    orientation = options.pop("orientation")
    x, f, h_post, h_res, phi, alpha, bias = (values[i] for i in op.inputs[:7])
    after = {"gamma": values.get("gamma"), "backend": backend, **options}
    fused = mhc.boundary(x, f, h_post, h_res, phi, alpha, bias, orientation=orientation, **after)
    x_next = mhc.post(x, f, h_post, h_res, orientation=orientation, backend=backend)
    for one, two in zip(fused, (x_next, *mhc.pre(x_next, phi, alpha, bias, **after)), strict=True):
        assert equal(one, two)


@pytest.mark.parametrize("backend, dtype", BACKENDS)
def test_pre_equals_pre_without_sinkhorn_followed_by_sinkhorn(backend, dtype):
    """Bit for bit, except h_res on a GPU, where the two kernels add in different orders."""
    op = Op.get("mhc.pre")
    case = next(c for c in op.cases if c.name == "three_streams")

    def split(**tensors):
        inputs, options = (
            [tensors[i] for i in op.inputs[:4]],
            {o: tensors[o] for o in op.options} | {"backend": backend},
        )
        h_in, h_post, logits = mhc.pre(*inputs, gamma=tensors["gamma"], **options | {"sinkhorn": False})
        settings = {"iterations": options["iterations"], "eps": options["sinkhorn_eps"], "backend": backend}
        return {"h_in": h_in, "h_post": h_post, "h_res": mhc.sinkhorn(logits, **settings)}

    def whole(**tensors):
        results = op.reference.forward(*(tensors[i] for i in op.inputs), **{o: tensors[o] for o in op.options})
        return dict(zip(("h_in", "h_post", "h_res"), results, strict=False))

    values = case.build(dtype, DEVICE)
    one = op(*(values[i] for i in op.inputs), **{o: values[o] for o in op.options}, backend=backend)
    same = dict(zip(op.outputs, map(equal, one, split(**values).values()), strict=True))
    assert same["h_in"] and same["h_post"]
    if backend == "triton" and GPU:
        target = assay.Target(split, whole, cases=[case], name="pre, then sinkhorn", backward=None, dtypes=(dtype,))
        check(target, device=DEVICE)
    else:
        assert same["h_res"]


@pytest.mark.parametrize("backend, dtype", BACKENDS)
def test_coefficients_equal_those_of_pre_bit_for_bit(backend, dtype):
    op = Op.get("mhc.pre")
    values = next(c for c in op.cases if c.name == "odd_dim").build(dtype, DEVICE)
    inputs, options = [values[i] for i in op.inputs[:4]], {o: values[o] for o in op.options} | {"backend": backend}
    _, h_post, h_res = mhc.pre(*inputs, gamma=values["gamma"], **options)
    _, h_post_2, h_res_2 = mhc.coefficients(*inputs, gamma=values["gamma"], **options)
    assert equal(h_post, h_post_2) and equal(h_res, h_res_2)


# -- recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, dtype", [b for b in BACKENDS if b[1] != torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"gamma": True, "orientation": "out_in"}, {"coefficient_dtype": torch.bfloat16}]
)
def test_recomputation_changes_no_bit(options, backend, dtype):
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = connection(recompute=recompute, backend=backend, **options).to(DEVICE, dtype)
        x = torch.randn(2, 4, DIM).to(DEVICE, dtype)
        results.append(gradients(module, x, list(module.parameters())))
    assert all(equal(kept, again) for kept, again in zip(*results, strict=True))


def test_recomputation_with_autocast_and_dropout_in_the_layer_changes_no_bit():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = connection(recompute=recompute)
        module.layer = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))  # it runs only once and keeps its mask
        x = torch.randn(8, 4, DIM)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(module, x, list(module.parameters())))
    assert all(equal(kept, again) for kept, again in zip(*results, strict=True))


class Batch(nn.BatchNorm1d):
    """A BatchNorm over the tokens; its running statistics are buffers."""

    def forward(self, h):
        return super().forward(h.flatten(0, -2)).view_as(h)


class Counting(Norm):
    """Scales by its number of calls, kept as a number and as a tensor that is not a buffer."""

    calls, total = 0, torch.zeros(())

    def forward(self, h):
        self.calls += 1
        self.total = self.total + 1
        return super().forward(h) * self.calls * self.total


class Drawing(Norm):
    """Adds noise from its own generator."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, h):
        return super().forward(h) + torch.randn(h.shape, generator=self.generator)


def with_noise(module, args, result):
    return result + torch.randn_like(result)


def hooked():
    norm = nn.RMSNorm(DIM)
    norm.register_forward_hook(with_noise)
    return norm


UNREPEATABLE = {
    "dropout": lambda: nn.Sequential(nn.RMSNorm(DIM), nn.Dropout(0.5)),
    "a_function_with_dropout": lambda: lambda h: nn.functional.dropout(h, 0.5),
    "a_hook_with_noise": hooked,
    "batch_norm": lambda: Batch(DIM),
    "spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    "attributes": Counting,
    "a_method": lambda: Counting().forward,
    "its_own_generator": Drawing,
}


@pytest.mark.parametrize("make", UNREPEATABLE.values(), ids=list(UNREPEATABLE))
def test_a_norm_with_side_effects_is_called_only_once(make):
    """Gradients, statistics and the following random numbers equal those of recompute=False."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = mhc.HyperConnection(DIM, Layer(), norm=make(), recompute=recompute, backend="reference")
        x = torch.randn(3, 2, 4, DIM)
        every = [t for step in x for t in gradients(module, step, list(module.parameters()))]
        results.append([*every, *module.buffers(), torch.rand(3)])
    assert all(equal(kept, again) for kept, again in zip(*results, strict=True))


def test_a_norm_with_hidden_state_raises_when_recomputed():
    calls = []

    def norm(h):
        calls.append(1)
        return h * len(calls)

    module = mhc.HyperConnection(DIM, torch.tanh, norm=norm, recompute=True, backend="reference")
    y = module(torch.randn(2, 4, DIM))
    with pytest.raises(RuntimeError, match="recomputing a connection gave different tensors"):
        y.sum().backward()


def test_random_operators_are_detected_during_graph_capture(monkeypatch):
    """During a capture generator states cannot be read; the capture is simulated here."""
    monkeypatch.setattr(_side_effects, "_is_capturing", lambda device: True)
    for norm, draws in ((nn.Dropout(0.5), True), (nn.Dropout(0.5).eval(), False), (Norm(), False), (Batch(DIM), True)):
        state, h = _side_effects.State(norm, torch.device("cpu")), torch.randn(5, DIM)
        with state.watching():
            norm(h)
        assert state.has_changed() == draws, norm


def test_writing_to_the_streams_before_a_recomputed_backward_raises():
    module = connection(recompute=True)
    x = torch.randn(2, 4, DIM)
    y = module(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[2, 4, 6\] is at version 1, was at 0"):
        y.sum().backward()


# -- permuted streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 4])
def test_permuting_the_streams_permutes_the_output(n):
    """x, the columns of phi, and the rows of phi and bias get the same permutation."""
    torch.manual_seed(n)
    order = torch.randperm(n)
    assert order.tolist() != list(range(n))
    matrix = torch.arange(2 * n, 2 * n + n * n).reshape(n, n)[order][:, order].flatten()
    mixes = torch.cat([order, n + order, matrix])
    target = target_against_formulas(connection(n=n), [""], n=n)

    def permuted(x, fn, base, **tensors):
        fn = fn[mixes].unflatten(1, (n, DIM))[:, order].flatten(1)
        return target.golden(x[..., order, :], fn=fn, base=base[mixes], **tensors)

    def back(x, **tensors):
        return permuted(x, **tensors)[..., order.argsort(), :]

    assay.check(assay.Target(target.candidate, back, cases=target.cases), probes=["values"])
    report = assay.check(assay.Target(target.candidate, permuted, cases=target.cases), probes=["values"], raises=False)
    assert report.verdict == "fail"
