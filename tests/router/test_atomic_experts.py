"""Tests of atomic_experts that test_every_op does not cover: strategies, skipped experts, sparse gradients."""

import itertools
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from goldsmith import assay, router
from goldsmith.router import _common
from goldsmith.router._strategy import DENSE, Dense
from goldsmith.router.atomic_experts import reference
from goldsmith.router.atomic_experts.cases import CASES, inputs
from goldsmith.router.atomic_experts.op import ATOMIC_EXPERTS

STRATEGIES = ("gather", "sorted", "dense")
NAMES = ("h", "w_in", "w_out", "weights", "indices")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the kernels run through the interpreter
SMALL = [case for case in CASES if "large" not in case.tags]


experts = partial(router.atomic_experts, backend="reference")  # kernels in the interpreter take a hundred times as long


def drawn(seed, dtype=torch.float32, **sizes):
    sizes = {"T": 9, "D": 12, "N": 20, "K": 5} | sizes
    values = inputs(assay.Make(dtype, "cpu", seed), **sizes)
    return [values[name] for name in NAMES]


def leaves(tensors):
    return [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in tensors]


def gradients(tensors, dy, **options):
    """y and the gradients of h, w_in, w_out and weights."""
    own = leaves(tensors)
    y = experts(*own, **options)
    wanted = [t for t in own if t is not None and t.requires_grad]
    return y.detach(), *torch.autograd.grad(y, wanted, dy)


def strategy_target(case, strategy):
    """A target: a strategy against gather in float64."""

    def candidate(**inputs):
        tensors = [inputs.get(name) for name in NAMES]
        return experts(*tensors, activation=inputs["activation"], strategy=strategy)

    def golden(**inputs):
        tensors = [inputs.get(name) for name in NAMES]
        options = {"activation": inputs["activation"], "strategy": "gather", "sparse_grad": False}
        return reference.forward(*tensors, **options)[0]

    present = case.build()
    grads = tuple(name for name in ATOMIC_EXPERTS.grads if present[name] is not None)
    return assay.Target(_named(candidate), _named(golden), cases=[case], grads=grads)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_strategy_computes_every_case(case, strategy):
    assay.check(strategy_target(case, strategy), probes=("values", "ensemble"))


def _named(function):
    def call(h, w_out, weights, indices, activation, strategy, sparse_grad, w_in=None):
        return function(h=h, w_in=w_in, w_out=w_out, weights=weights, indices=indices, activation=activation)

    return call


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_depends_only_on_itself_and_the_tables_bit_for_bit(strategy, dtype, seed):
    h, w_in, w_out, weights, indices = drawn(seed, dtype, T=141, D=40, N=300, K=7, kind="holes")
    dy = torch.randn(141, 40).to(dtype)

    def run(rows):
        tensors = (h[rows], w_in, w_out, weights[rows], indices[rows])
        y, dh, _, _, dweights = gradients(tensors, dy[rows], strategy=strategy)
        return y, dh, dweights

    whole = run(torch.arange(141))
    for rows in (torch.arange(1), torch.arange(3, 20), torch.randperm(141), torch.tensor([140]), torch.arange(60, 141)):
        assert all(torch.equal(part, full[rows]) for part, full in zip(run(rows), whole, strict=True))


@pytest.mark.parametrize("strategy", ["gather", "sorted"])
@pytest.mark.parametrize("D, K, T", [(64, 8, 40), (512, 16, 513)])
def test_a_token_alone_in_a_chunk_has_the_same_bits_as_among_others(strategy, D, K, T, seed):
    """From K D = 400 on torch multiplies a batch of one with another kernel."""
    h, w_in, w_out, weights, indices = drawn(seed, torch.float32, T=T, D=D, N=70, K=K)
    dy = torch.randn(T, D)

    def run(first, last):
        rows = slice(first, last)
        tensors = (h[rows], w_in, w_out, weights[rows], indices[rows])
        y, dh, _, _, dweights = gradients(tensors, dy[rows], strategy=strategy)
        return y, dh, dweights

    whole = run(0, T)
    for first, last in ((0, 1), (0, 2), (T - 1, T), (0, T - 1)):
        assert all(torch.equal(a, b[first:last]) for a, b in zip(run(first, last), whole, strict=True)), (first, last)


SMALL_CHUNK = 64 * 16 * 12  # a dense chunk has twelve experts


@pytest.mark.parametrize("strategy", ["gather", "sorted"])
def test_chunk_sizes_change_no_bit(strategy, seed, monkeypatch):
    tensors, dy = drawn(seed, T=70, N=50, kind="holes"), torch.randn(70, 12)
    whole = gradients(tensors, dy, strategy=strategy)
    monkeypatch.setattr(_common, "CHUNK_BYTES", SMALL_CHUNK)
    parts = gradients(tensors, dy, strategy=strategy)
    for name, a, b in zip(("y", "dh", "dw_in", "dw_out", "dweights"), whole, parts, strict=True):
        assert torch.equal(a, b), name


OPTIONS = {"activation": "silu", "sparse_grad": False}


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that was created."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tensor_larger_than_a_chunk_is_created(strategy, seed):
    """The rows of all pairs would take twice as much."""
    tensors, dy = drawn(seed, T=1024, D=64, N=500, K=32), torch.randn(1024, 64)
    assert 1024 * 32 * 64 * 4 == 2 * _common.CHUNK_BYTES
    inputs, options = dict(zip(NAMES, tensors, strict=True)), {"strategy": strategy} | OPTIONS
    with Largest() as largest, torch.no_grad():
        y, preact = reference.forward(*tensors, **options)
        reference.backward({"y": dy}, inputs | {"preact": preact}, options, frozenset(ATOMIC_EXPERTS.grads))
    assert y.nbytes < largest.bytes <= _common.CHUNK_BYTES


@pytest.mark.parametrize("kind", ["uniform", "holes", "twice"])
def test_dense_with_several_chunks_agrees_with_gather(kind, monkeypatch):
    """Chunks add in another order, so the bits differ."""
    monkeypatch.setattr(_common, "CHUNK_BYTES", SMALL_CHUNK)
    case = assay.Case("chunks", inputs, {"T": 70, "D": 12, "N": 50, "K": 5, "kind": kind}, "five chunks of experts")
    assay.check(strategy_target(case, "dense"), probes=("values", "ensemble"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_skipped_experts_are_not_read(strategy, seed):
    h, w_in, w_out, weights, indices = drawn(seed, T=4, K=3)
    indices[:, 1] = -1
    indices[2] = -1
    used = indices.unique()
    if strategy != "dense":  # dense multiplies unused rows by 0
        unused = torch.ones(20, dtype=torch.bool)
        unused[used[used >= 0].long()] = False
        w_in[unused], w_out[unused] = torch.nan, torch.inf
    weights[:, 1] = torch.nan
    weights[2] = torch.inf
    y, dh, dw_in, dw_out, dweights = gradients(
        (h, w_in, w_out, weights, indices), torch.randn(4, 12), strategy=strategy
    )
    assert y.isfinite().all() and dh.isfinite().all() and dw_in.isfinite().all() and dw_out.isfinite().all()
    assert not y[2].any() and not dh[2].any() and not dweights[indices < 0].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ATOMIC_EXPERTS.backends)
def test_skipped_pairs_get_gradient_0_for_any_incoming_gradient(backend, strategy, bad, seed):
    """Token 1 has only skipped experts, and its h and dy are not finite."""
    h, w_in, w_out, weights, indices = (t.to(DEVICE) for t in drawn(seed, T=4))
    h[1], indices[1], indices[2, 3] = bad, -1, -1
    dy = torch.randn(4, 12, device=DEVICE)
    dy[1:3] = bad
    own = leaves([h, w_in, w_out, weights])
    y = router.atomic_experts(*own, indices, strategy=strategy, backend=backend)
    dh, dw_in, dw_out, dweights = torch.autograd.grad(y, own, dy)
    assert (y[1] == 0).all() and (dh[1] == 0).all() and (dweights[1] == 0).all() and dweights[2, 3] == 0
    used = torch.zeros(len(w_in), dtype=torch.bool, device=DEVICE)
    used[indices[2][indices[2] >= 0].long()] = True
    assert dw_in[~used].isfinite().all() and dw_out[~used].isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_list_with_skipped_entries_equals_the_shorter_list(strategy, seed):
    """The middle entry of three is skipped and has weight NaN; the golden's list has only the other two."""
    h, w_in, w_out, weights, indices = drawn(seed, T=4, K=3)
    options = {"activation": "silu", "strategy": "gather", "sparse_grad": False}

    def candidate(h, w_in, w_out, weights, indices):
        holes = torch.full_like(weights[:, :1], torch.nan)
        lists = torch.stack((indices[:, 0], torch.full_like(indices[:, 0], -1), indices[:, 1]), -1)
        return experts(h, w_in, w_out, torch.cat((weights[:, :1], holes, weights[:, 1:]), -1), lists, strategy=strategy)

    def golden(h, w_in, w_out, weights, indices):
        return reference.forward(h, w_in, w_out, weights, indices, **options)[0]

    inputs = dict(zip(NAMES, (h, w_in, w_out, weights[:, ::2].contiguous(), indices[:, ::2].contiguous()), strict=True))
    assay.check(assay.Target(candidate, golden, cases=inputs), probes=("values", "ensemble"))


@pytest.mark.parametrize("wrong", [20, -2, 2**31 - 1])
def test_an_index_out_of_range_is_reported_with_value_and_position(wrong, seed):
    h, w_in, w_out, weights, indices = drawn(seed, T=(2, 3))
    indices[1, 2, 4] = wrong
    text = f"indices[1, 2, 4] is {wrong}, expected -1 (skipped) or 0 <= index < N = 20"
    with pytest.raises(IndexError) as caught:
        experts(h, w_in, w_out, weights, indices)
    assert str(caught.value) == f"router.atomic_experts: {text}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ATOMIC_EXPERTS.backends)
def test_an_index_out_of_range_on_a_gpu_affects_only_its_token(backend, seed):
    tensors = [t.cuda() for t in drawn(seed)]
    dy = torch.randn(9, 12, device="cuda")
    clean = gradients(tensors, dy, backend=backend)
    tensors[4][3, 2] = 20
    y, dh, *tables, _ = gradients(tensors, dy, backend=backend)
    others = torch.arange(9, device="cuda") != 3
    assert y[3].isnan().all() and dh[3].isnan().all()
    assert torch.equal(y[others], clean[0][others]) and torch.equal(dh[others], clean[1][others])
    assert all(t.isfinite().all() for t in tables)


@pytest.mark.parametrize("kind", ["uniform", "skew", "twice", "holes", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients_are_the_rows_of_the_dense_ones_bit_for_bit(kind, dtype, seed):
    tensors, dy = drawn(seed, dtype, kind=kind, T=11, N=60), torch.randn(11, 12).to(dtype)
    dense = gradients(tensors, dy)
    sparse = gradients(tensors, dy, sparse_grad=True)
    used = tensors[4].unique()
    for name, a, b in zip(("y", "dh", "dw_in", "dw_out", "dweights"), dense, sparse, strict=True):
        if name in ("dw_in", "dw_out"):
            assert b.is_sparse and b.is_coalesced() and b.shape == a.shape and b.dtype == dtype
            assert torch.equal(b.indices()[0], used[used >= 0].long())
            assert torch.equal(b.values(), a[b.indices()[0]]) and torch.equal(b.to_dense(), a)
        else:
            assert torch.equal(a, b), name


@pytest.mark.filterwarnings("error:Sparse invariant")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_sparse_gradient_gives_no_warning(backend, seed):
    """torch 2.11 warns once per process if one asks it not to check invariants."""
    tensors = [t.to(DEVICE) for t in drawn(seed, T=2, D=3, N=6, K=2)]
    reason = ATOMIC_EXPERTS.why_not(backend, *tensors, activation="silu", strategy="gather", sparse_grad=True)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        results = gradients(tensors, torch.ones(2, 3, device=DEVICE), backend=backend, sparse_grad=True)
    finally:
        torch.set_warn_always(before)
    assert all(t.is_sparse and t.is_coalesced() and t.device.type == DEVICE for t in results[2:4])


def test_sparse_optimisers_accept_the_gradients(seed):
    h, w_in, w_out, weights, indices = drawn(seed, N=200)
    dy = torch.randn(9, 12)
    for make in (lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)):
        tables = [torch.nn.Parameter(w_in.clone()), torch.nn.Parameter(w_out.clone())]
        optimiser = make(tables)
        for _ in range(2):
            optimiser.zero_grad()
            for _ in range(2):  # two micro-batches accumulate
                experts(h, *tables, weights, indices, sparse_grad=True).backward(dy)
            optimiser.step()
        used = torch.zeros(200, dtype=torch.bool)
        used[indices.unique().long()] = True
        for before, after in zip((w_in, w_out), tables, strict=True):
            moved = (before != after).any(-1)
            assert torch.equal(moved, used)


def test_compiling_with_sparse_gradients_raises(seed):
    tensors = leaves(drawn(seed))
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sparse_grad=True cannot be compiled with gradients"):
        compiled(*tensors, sparse_grad=True)


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)], ids=str)
def test_only_the_needed_gradients_are_computed_and_they_are_the_same(wanted, seed):
    tensors, dy = drawn(seed), torch.randn(9, 12)
    _, *all_of_them = gradients(tensors, dy)
    own = [t.clone().requires_grad_() if i in wanted else t for i, t in enumerate(tensors)]
    needed = torch.autograd.grad(experts(*own), [own[i] for i in wanted], dy)
    assert all(torch.equal(f, all_of_them[i]) for f, i in zip(needed, wanted, strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "identity"])
def test_gradients_agree_with_finite_differences(activation, seed):
    h, w_in, w_out, weights, indices = drawn(seed, torch.float64, T=3, D=4, N=6, K=3)
    floats = leaves([h, w_in, w_out, weights])
    torch.autograd.gradcheck(lambda *t: experts(*t, indices, activation=activation), floats)


def test_activations_agree_with_torch(seed):
    functional = torch.nn.functional
    theirs = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda a: functional.gelu(a, approximate="tanh"),
        "relu": functional.relu,
        "relu2": lambda a: functional.relu(a) ** 2,
        "identity": lambda a: a,
    }
    assert set(theirs) == set(reference.ACTIVATE)
    a = torch.cat([torch.linspace(-9, 9, 1001, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    table = torch.ones(1, 1, dtype=torch.float64)
    weights, indices = torch.ones(1002, 1, dtype=torch.float64), torch.zeros(1002, 1, dtype=torch.int32)
    for name, function in theirs.items():
        own, other = (a.clone().unsqueeze(-1).requires_grad_() for _ in range(2))
        y, wanted = experts(own, table, table, weights, indices, activation=name), function(other)
        y.sum().backward()
        wanted.sum().backward()
        # exp, tanh and erf are accurate to 4 ulp for values up to 1; the factor that multiplies them, in either form of
        # the formula, is at most |a| for the function and 1 + |a| (1 + 0.14 a^2) for its derivative
        unit = 2 * 8 * 2.0**-53
        size = own.detach().abs()
        assert ((y - wanted).abs() <= unit * size.square().clamp(min=0).maximum(size)).all(), name
        assert ((own.grad - other.grad).abs() <= unit * (1 + size + 0.14 * size**3)).all(), name


@pytest.mark.parametrize("backend", ATOMIC_EXPERTS.backends)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
@pytest.mark.parametrize("size", [200.0, 1e13, 3e38])
def test_activations_reach_their_limits_at_large_finite_numbers(activation, size, backend):
    """a or 0, with slope 1 or 0 ("identity": always a and 1)."""
    a = torch.tensor([[size], [-size]], device=DEVICE)
    own, table = a.clone().requires_grad_(), torch.ones(1, 1, device=DEVICE)
    weights, indices = torch.ones(2, 1, device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    y = router.atomic_experts(own, table, table, weights, indices, activation=activation, backend=backend)
    y.sum().backward()
    low = 1.0 if activation == "identity" else 0.0
    assert torch.equal(own.grad, torch.tensor([[1.0], [low]], device=DEVICE)) and torch.equal(y, a * own.grad)


def test_auto_chooses_the_strategy_by_shapes(seed, monkeypatch):
    strategies = []
    inner = ATOMIC_EXPERTS.reference.forward

    def spy(*args, **options):
        strategies.append(options["strategy"])
        return inner(*args, **options)

    monkeypatch.setattr(ATOMIC_EXPERTS.reference, "forward", spy)
    for tokens, n in ((70, 20), (70, 5000), (9, 20)):
        experts(*drawn(seed, T=tokens, N=n))
        assert strategies[-1] == router.choose_strategy(tokens, 5, n, 12, torch.float32, "cpu")
    assert strategies == ["dense", "gather", "gather"]
    monkeypatch.setitem(DENSE, "cpu", Dense(tokens=64, one_in=16, dtypes=(torch.bfloat16,)))  # as on a GPU
    for dtype in (torch.float32, torch.bfloat16):
        experts(*drawn(seed, dtype, T=70, N=20))
    assert strategies[3:] == ["gather", "dense"]


def test_results_are_repeated_bit_for_bit(seed):
    tensors, dy = drawn(seed, T=64, N=30, kind="skew"), torch.randn(64, 12)
    for strategy in STRATEGIES:
        first = gradients(tensors, dy, strategy=strategy)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(tensors, dy, strategy=strategy), strict=True))
