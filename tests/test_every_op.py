"""Tests of every operator on every backend that can run here; each family has tests for the rest."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from goldsmith import BackendUnavailable, Op, assay
from goldsmith.cli.targets import op_dtypes, op_target
from goldsmith.cli.verify.selection import EVERY_PROBE, VALUES
from goldsmith.cli.verify.selection import USUAL as USUAL_PROBES

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPS = Op.all()
SMALL = [(op, case) for op in OPS.values() for case in op.cases if "large" not in case.tags]
LARGE = [(op, case) for op in OPS.values() for case in op.cases if "large" in case.tags]
USUAL = [(op, op.cases[1]) for op in OPS.values()]  # the second case: one token, or the published sizes
SWEEP = pytest.mark.sweep(16)  # `goldsmith verify`, and with it `make`, checks all cases
DIFFERENTIABLE = [(op, case) for op, case in USUAL if op.grads]


def ids(pairs):
    return [f"{op.name}-{case}" for op, case in pairs]


def backends(pairs):
    """Each pair with each backend of its operator.

    A case tagged "storage" tests how a backend reads its inputs; `goldsmith verify` checks it on the reference.
    """
    return [
        pytest.param(op, b, case, id=f"{op.name}-{b}-{case}", marks=SWEEP)
        for op, case in pairs
        for b in op.backends
        if b != "reference" or "storage" not in case.tags
    ]


def drawn(op, case, *, dtype=torch.float32, grad=False):
    """The inputs in order, leaves with requires_grad where differentiable, and the options."""
    values = case.build(dtype, DEVICE)
    tensors = [values.get(name) for name in op.inputs]
    if grad:
        tensors = [
            t.detach().clone().requires_grad_() if t is not None and name in op.grads and t.is_floating_point() else t
            for name, t in zip(op.inputs, tensors, strict=True)
        ]
    return tensors, {name: values[name] for name in op.options}


def runnable(op, backend, tensors, options):
    reason = op.why_not(backend, *tensors, **options)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def floating(results):
    """The floating-point results; indices have no gradient."""
    return [r for r in as_tuple(results) if r.is_floating_point()]


def dtypes_for(op, backend):
    """Every dtype on a GPU; on a CPU bfloat16 (whose check includes float32), in the interpreter only float32."""
    if GPU:
        return op_dtypes(op)
    return op_dtypes(op)[:1] if backend == "triton" else op_dtypes(op)[-2:][:1]


def probes_for(case, backend):
    """All probes for cases with that tag; dependence, layouts and scaling take dozens of runs and run only there.

    The interpreter runs programs in order, so repeated runs are always equal there and are skipped for other cases.
    """
    if EVERY_PROBE in case.tags:
        return "default"
    return USUAL_PROBES if GPU or backend != "triton" else (*VALUES, "second_call")


@pytest.mark.parametrize("op, backend, case", backends(SMALL))
def test_every_backend_agrees_with_the_golden(op, backend, case):
    runnable(op, backend, *drawn(op, case))
    target = op_target(op, backend, device=DEVICE)
    for dtype in dtypes_for(op, backend):
        assay.check(target, case, dtype=dtype, device=DEVICE, probes=probes_for(case, backend))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("op, backend, case", backends(LARGE))
def test_every_backend_agrees_with_the_golden_at_large_sizes(op, backend, case):
    runnable(op, backend, *drawn(op, case))
    target = op_target(op, backend, device=DEVICE)
    for dtype in op_dtypes(op):
        assay.check(target, case, dtype=dtype, device=DEVICE, probes=probes_for(case, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", USUAL, ids=ids(USUAL))
def test_the_golden_on_a_gpu_is_that_of_the_cpu(op, case):
    """Large cases are judged by a golden on the GPU, small ones by one on the CPU."""
    assay.check(op_target(op, "reference"), case, dtype=torch.float64, device=DEVICE, probes=("values",))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_some_case_is_tagged_for_every_probe(op):
    assert any(EVERY_PROBE in case.tags for case in op.cases)


@pytest.mark.parametrize("op, case", USUAL, ids=ids(USUAL))
def test_opcheck_finds_nothing(op, case):
    tensors, options = drawn(op, case, grad=True)
    torch.library.opcheck(op._custom, (*tensors, *(options[o] for o in op.options), "reference"))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op, case", SMALL, ids=ids(SMALL))
def test_fakes_match_the_results_of_the_reference(op, case):
    tensors, options = drawn(op, case)
    real = op.all_results(*tensors, **options, backend="reference")
    with FakeTensorMode() as mode:
        pretended = [t if t is None else mode.from_tensor(t) for t in tensors]
        fake = op.all_results(*pretended, **options, backend="reference")
    for name, result in real.items():
        facts = [(t.shape, t.dtype, t.device.type, t.stride()) for t in (result, fake[name])]
        assert facts[0] == facts[1], name


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op, case", SMALL, ids=ids(SMALL))
def test_without_gradients_the_result_is_the_same_bit_for_bit(op, case):
    if not op.grads:
        pytest.skip("has no gradients")
    tensors, options = drawn(op, case, grad=True)
    with_gradients = as_tuple(op(*tensors, **options, backend="reference"))
    with torch.no_grad():
        without = as_tuple(op(*tensors, **options, backend="reference"))
    for name, a, b in zip(op.outputs, with_gradients, without, strict=True):
        assert a.requires_grad == a.is_floating_point() and not b.requires_grad
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("op, backend, case", backends(USUAL))
def test_negated_views_and_tensors_without_storage_are_read_as_torch_reads_them(op, backend, case):
    """Views such as `z.conj().imag`, whose memory has the other sign, and zeros without storage."""
    tensors, options = drawn(op, case, grad=bool(op.grads))
    runnable(op, backend, tensors, options)

    def negated(t):
        return torch._neg_view(-t) if t is not None and t.is_floating_point() else t

    def results_of(inputs, cotangent):
        results = as_tuple(op(*inputs, **options, backend=backend))
        leaves = [t for t in tensors if t is not None and t.requires_grad]
        ends = [r for r in results if r.requires_grad]
        if not ends:
            return results
        grads = torch.autograd.grad(ends, leaves, [cotangent(torch.ones_like(r)) for r in ends], allow_unused=True)
        return [r.detach() for r in results] + [g for g in grads if g is not None]

    def zeros(g):
        return torch._efficientzerotensor(g.shape, dtype=g.dtype, device=g.device)

    for (inputs, cotangent), seen in [
        ((tensors, lambda g: g), ([negated(t) for t in tensors], negated)),
        ((tensors, torch.zeros_like), (tensors, zeros)),
    ]:
        for a, b in zip(results_of(inputs, cotangent), results_of(*seen), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op, case", DIFFERENTIABLE, ids=ids(DIFFERENTIABLE))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_as_one_graph_with_the_same_results_and_gradients(op, case, dynamic):
    torch._dynamo.reset()

    def run(function):
        tensors, options = drawn(op, case, grad=True)
        outputs = as_tuple(function(*tensors, **options))
        differentiable = floating(outputs)
        steps = [torch.linspace(-1, 2, o.numel(), device=DEVICE).reshape(o.shape).to(o.dtype) for o in differentiable]
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        return outputs, torch.autograd.grad(differentiable, wanted, steps)

    compiled = torch.compile(lambda *t, **o: op(*t, **o), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for eager, traced in zip(run(op), run(compiled), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.parametrize("op, case", DIFFERENTIABLE, ids=ids(DIFFERENTIABLE))
def test_a_second_derivative_raises_instead_of_being_zero(op, case):
    tensors, options = drawn(op, case, grad=True)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    outputs = floating(op(*tensors, **options, backend="reference"))
    total = sum(o.float().square().sum() for o in outputs)
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    with pytest.raises(NotImplementedError, match=f"{op.name}: second derivatives are not supported"):
        sum(g.float().square().sum() for g in first if g is not None).backward()


@pytest.mark.parametrize("op, case", USUAL, ids=ids(USUAL))
def test_an_operator_without_gradients_says_so(op, case):
    if op.grads:
        pytest.skip("has gradients")
    tensors, options = drawn(op, case)
    tensors = [t if t is None else t.requires_grad_(t.is_floating_point()) for t in tensors]
    results = as_tuple(op(*tensors, **options))
    with pytest.raises(NotImplementedError, match=f"{op.name}: second derivatives are not supported"):
        results[0].sum().backward()


@pytest.mark.parametrize("op, case", DIFFERENTIABLE, ids=ids(DIFFERENTIABLE))
def test_gradients_survive_a_stride_0_cotangent(op, case):
    """`y.sum().backward()` passes a gradient of stride 0."""
    gradients = []
    for dense in (False, True):
        tensors, options = drawn(op, case, grad=True)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        outputs = floating(op(*tensors, **options))
        ones = [torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]
        gradients.append(torch.autograd.grad(outputs, wanted, [o.contiguous() for o in ones] if dense else ones))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("op, case", USUAL, ids=ids(USUAL))
def test_autocast_changes_nothing_inside(op, case):
    tensors, options = drawn(op, case)
    plain = as_tuple(op(*tensors, **options, backend="reference"))
    with torch.autocast(DEVICE, torch.bfloat16):
        cast = as_tuple(op(*tensors, **options, backend="reference"))
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", USUAL, ids=ids(USUAL))
def test_a_cuda_graph_replays_it(op, case):
    if op.backends.keys() == {"native", "reference"}:
        pytest.skip(f"{op.name}: its kernels are the CPU's, and on a card its reference waits for the host")
    tensors, options = drawn(op, case, dtype=torch.bfloat16)
    with torch.no_grad():
        eager = as_tuple(op(*tensors, **options))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = as_tuple(op(*tensors, **options))
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_declaration_is_complete(op):
    names = [case.name for case in op.cases]
    assert len(names) == len(set(names)) and all(case.why for case in op.cases), "a case needs a name and a reason"
    assert op.summary and op.stages
    for case in op.cases:
        assert set(case.build()) == {*op.inputs, *op.options} if "large" not in case.tags else True
    for entry in op.bench:
        assert entry.why and entry.forward_bytes > 0


def test_a_backend_that_cannot_run_says_why():
    op = OPS["mhc.post"]
    values = op.cases[1].build(torch.float64, DEVICE)
    with pytest.raises(BackendUnavailable, match="mhc.post: triton: x is float64, which only the reference supports"):
        op(*(values[n] for n in op.inputs), orientation="in_out", backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'; known: auto, triton, reference"):
        op(*(values[n] for n in op.inputs), orientation="in_out", backend="cuda")
