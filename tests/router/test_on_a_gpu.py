"""Tests that need a GPU: more than 2^31 elements, more experts than a grid axis allows, no waiting, graph capture."""

from dataclasses import replace

import pytest
import torch

from goldsmith import assay, router
from goldsmith.cli.targets import op_dtypes, op_target
from goldsmith.router.atomic_experts.op import ATOMIC_EXPERTS
from router.layers import D, layer
from router.test_memory import CHUNKS, PER_EXPERT, PER_PAIR, ROWS

pytestmark = pytest.mark.gpu
STRATEGIES = ("gather", "sorted", "dense")


SMALL_CASES = [case for case in ATOMIC_EXPERTS.cases if "large" not in case.tags]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_every_strategy_computes_every_case(case, strategy):
    target, forced = op_target(ATOMIC_EXPERTS, "triton", device="cuda"), {**case.sizes, "strategy": strategy}
    for dtype in op_dtypes(ATOMIC_EXPERTS):
        probes = ("values", "ensemble", "second_call")
        assay.check(target, replace(case, sizes=forced), dtype=dtype, device="cuda", probes=probes)


def experts(h, w_in, w_out, weights, indices, strategy):
    return ATOMIC_EXPERTS(
        h, w_in, w_out, weights, indices, activation="silu", strategy=strategy, sparse_grad=False, backend="triton"
    )


def routed(T, K, N, dim, dtype=torch.bfloat16):
    """Inputs whose indices include the first and the last expert."""
    torch.manual_seed(T + K)
    h = torch.randn(T, dim, device="cuda", dtype=dtype)
    weights = torch.rand(T, K, device="cuda", dtype=torch.float32)
    indices = torch.randint(0, N, (T, K), device="cuda", dtype=torch.int32)
    indices[0, :2] = torch.tensor([N - 1, 0], dtype=torch.int32)
    return h, weights, indices


def differentiated(h, w_in, w_out, weights, indices, strategy):
    leaves = [t.detach().requires_grad_() for t in (h, w_in, w_out, weights)]
    y = experts(*leaves, indices, strategy)
    dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


APART = 64  # a block of the dense sums: with one chosen expert per block, the order of the sums is always the same


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tables_beyond_two_to_the_31_elements_give_the_same_as_small_tables_of_their_rows(strategy):
    """The rows are far apart in the large tables and close in the small ones; the arithmetic is the same."""
    dim, used = 1024, 512
    N = 2**31 // dim + 1000  # 4 GiB per table, and as much for each gradient
    h, weights, places = routed(64, 16, used, dim)
    near = torch.arange(used, device="cuda") * APART
    far = torch.arange(used, device="cuda") * (N // used // APART * APART)
    far[-1] = (N - 1) // APART * APART
    assert far[-1] * dim >= 2**31
    rows = [torch.randn(used, dim, device="cuda").bfloat16() for _ in range(2)]
    results = []
    for at, size in ((near, used * APART), (far, N)):
        tables = [torch.zeros(size, dim, device="cuda", dtype=torch.bfloat16).index_copy_(0, at, r) for r in rows]
        y, dh, *grads, dweights = differentiated(h, *tables, weights, at[places.long()].int(), strategy)
        for grad in grads:
            rest = grad.view(torch.int16).count_nonzero() - grad[at].view(torch.int16).count_nonzero()
            assert rest == 0, "an unselected row has a gradient"
        results.append([y, dh, dweights, *(grad[at] for grad in grads)])
        del tables, grads
    assert all(map(torch.equal, *results))


def test_more_than_two_to_the_31_logits_are_routed_correctly():
    s, rows = 2048, 2**31 // 2048 + 64
    x, y = (torch.randn(rows, s, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights, indices = router.product_topk(x, y, 8, backend="triton")[:2]
    at = torch.tensor([0, 1, rows // 2, rows - 65, rows - 1], device="cuda")
    few = router.product_topk(x[at], y[at], 8, backend="triton")
    assert torch.equal(weights[at], few[0]) and torch.equal(indices[at], few[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_used_experts_than_a_grid_axis_allows(strategy):
    """The second and third axis of a grid allow at most 65,535."""
    N, dim = 100_000, 32
    h, weights, _ = routed(2048, 64, N, dim, torch.float32)
    indices = torch.randperm(2048 * 64, device="cuda").remainder(N).int().view(2048, 64)
    assert len(indices.unique()) > 65_535
    w_in, w_out = (torch.randn(N, dim, device="cuda") for _ in range(2))
    results = differentiated(h, w_in, w_out, weights, indices, strategy)
    for grad, table in zip(results[2:4], (w_in, w_out), strict=True):
        assert grad.shape == table.shape and bool((grad != 0).any(-1)[indices.unique().long()].all())
    first = differentiated(h[:16], w_in, w_out, weights[:16], indices[:16], strategy)
    assert torch.equal(results[0][:16], first[0]) and torch.equal(results[1][:16], first[1])


LAYERS = ["omnimoe", "omnimoe_pairs", "peer", "peer_relu"]


def placed(name, backend="auto"):
    return layer(name, backend=backend).cuda(), torch.randn(3, 5, D, device="cuda", requires_grad=True)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_never_waits_for_the_gpu(name):
    module, h = placed(name)
    module(h).sum().backward()  # compiles the kernels, and tunes those that are tuned
    h.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(h).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_a_cuda_graph_replays_a_training_step_on_other_tokens(name):
    module, h = placed(name)
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.train()

    def step(tokens):
        return torch.autograd.grad(module(tokens).square().sum(), [tokens, *parameters], allow_unused=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(h)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(h)
    others = torch.randn_like(h)
    with torch.no_grad():
        h.copy_(others)
    graph.replay()
    eager = step(others.detach().requires_grad_())
    for one, other in zip(captured, eager, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


SMALL = {"T": 700, "K": 24, "N": 3000, "dim": 320}


def small(dtype=torch.bfloat16):
    h, weights, indices = routed(**SMALL, dtype=dtype)
    indices[5:9] = -1
    indices[20, :3] = indices[20, 3]
    return h, *(torch.randn(SMALL["N"], SMALL["dim"], device="cuda").to(dtype) for _ in range(2)), weights, indices


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_waits_for_the_gpu(strategy):
    tensors = small()
    differentiated(*tensors, strategy)
    leaves = [t.detach().requires_grad_() for t in tensors[:4]]
    dy = torch.randn_like(tensors[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = torch.autograd.grad(experts(*leaves, tensors[4], strategy), leaves, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cuda_graph_replays_every_strategy_on_other_tokens_and_another_routing(strategy):
    *floats, indices = small()
    leaves = [t.detach().requires_grad_() for t in floats]
    dy = torch.randn_like(floats[0])

    def step():
        y = experts(*leaves, indices, strategy)
        return y, *torch.autograd.grad(y, leaves, dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(floats[0]))
        indices.copy_(indices.flip(0).remainder(SMALL["N"] // 2))
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_runs_give_the_same_bits(strategy, dtype):
    tensors = small(dtype)
    first = differentiated(*tensors, strategy)
    for _ in range(20):
        assert all(map(torch.equal, differentiated(*tensors, strategy), first))


SIZES = {
    "wide": {"T": 2048, "K": 256, "N": 2048, "dim": 4096},
    "long_lists": {"T": 1024, "K": 1024, "N": 4096, "dim": 2048},
    "many_tokens": {"T": 300_000, "K": 4, "N": 512, "dim": 64},
    "float32": {"T": 4096, "K": 64, "N": 16_384, "dim": 1024, "dtype": torch.float32},
    "half": {"T": 16, "K": 64, "N": 2**18, "dim": 1024, "dtype": torch.float16, "train": False},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SIZES)
def test_kernels_work_in_as_much_memory_as_is_promised(name, strategy):
    """Includes the memory of torch.sort; test_memory.py checks more sizes without it."""
    sizes = dict(SIZES[name])
    run = differentiated if sizes.pop("train", True) else experts
    h, weights, indices = routed(**sizes)
    (T, K), (N, dim) = indices.shape, (sizes["N"], sizes["dim"])
    w_in, w_out = (torch.randn(N, dim, device="cuda", dtype=h.dtype) for _ in range(2))
    run(h, w_in, w_out, weights, indices, strategy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run(h, w_in, w_out, weights, indices, strategy)
    peak = torch.cuda.max_memory_allocated() - before
    result_bytes = sum(t.nbytes for t in (results if run is differentiated else [results]))
    drawn = 4 * T * dim if run is differentiated else 0  # dy before it is rounded, of `differentiated` itself
    most = PER_PAIR * T * K + ROWS * 4 * T * dim + PER_EXPERT * (N + 1) + (CHUNKS if strategy == "dense" else 0)
    assert peak <= result_bytes + drawn + most, (
        f"{peak / 2**20:.0f} MiB, expected {(result_bytes + drawn + most) / 2**20:.0f} at most"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k, size", [(20, 256), (40, 256), (20, 77)])
def test_logits_at_any_address_are_read_correctly(k, size, dtype):
    """16-bit logits that start at a word boundary are read two at a time."""
    torch.manual_seed(k)
    memory = torch.randn(2 * 300 * size + 3, device="cuda").to(dtype)
    for first in (1, 2, 3):
        x, y = memory[first : first + 2 * 300 * size].view(2, 300, size)
        indices = [router.product_topk(x, y, k, backend=backend)[1] for backend in ("triton", "reference")]
        assert torch.equal(*indices)
