"""The dense strategy of the kernels: a token has the same bits in every batch and with every chunk size."""

import pytest
import torch

from goldsmith import assay, router
from goldsmith.router._kernels import dense_products
from goldsmith.router.atomic_experts.cases import inputs

NAMES = ("h", "w_in", "w_out", "weights", "indices")
T, D, N, K = 40, 40, 150, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the kernels run through the interpreter
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunk sizes that give three tiles of tokens and three chunks of experts."""
    monkeypatch.setattr(dense_products, "TOKENS", 16)
    monkeypatch.setattr(dense_products, "EXPERTS", 64)


def drawn(seed, dtype, memory=False):
    """Inputs with experts listed twice and with skipped ones."""
    values = inputs(assay.Make(dtype, "cpu", seed), T=T, D=D, N=N, K=K, E=37, kind="twice", memory=memory)
    values["indices"][:, 3] = torch.where(torch.arange(T) % 3 == 0, -1, values["indices"][:, 3])
    return [values[name] for name in NAMES], torch.randn(T, 37).to(dtype)


def by_token(tensors, dy, rows):
    """y and the gradients of h and weights for a batch of only these tokens."""
    h, w_in, w_out, weights, indices = (t if t is None else t.to(DEVICE) for t in tensors)
    h, weights = (t[rows].clone().requires_grad_() for t in (h, weights))
    y = router.atomic_experts(h, w_in, w_out, weights, indices[rows], strategy="dense", backend="triton")
    return y.detach(), *torch.autograd.grad(y, [h, weights], dy.to(DEVICE)[rows])


def batches():
    """Batches of tokens: the first alone, all in another order, the last alone, the last few."""
    return [torch.tensor([0]), torch.randperm(T), torch.tensor([T - 1]), torch.arange(T - 20, T)]


@pytest.mark.parametrize(
    "dtype, memory", [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_a_token_has_the_same_bits_alone_among_others_and_at_another_position(
    dtype, memory, seed, small_chunks, products_by_element
):
    tensors, dy = drawn(seed, dtype, memory)
    whole = by_token(tensors, dy, torch.arange(T))
    for rows in batches():
        assert all(torch.equal(some, full[rows]) for some, full in zip(by_token(tensors, dy, rows), whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_chunks_of_experts_change_no_bit(dtype, seed, products_by_element, monkeypatch):
    """The running sum passes from one chunk to the next."""
    tensors, dy = drawn(seed, dtype)
    whole = by_token(tensors, dy, torch.arange(T))
    monkeypatch.setattr(dense_products, "EXPERTS", 64)
    assert all(map(torch.equal, by_token(tensors, dy, torch.arange(T)), whole))


def test_a_chunk_is_a_whole_number_of_blocks():
    blocks = {block_k for _, _, block_k, _, _ in (dense_products.WIDE_BLOCKS, dense_products.NARROW_BLOCKS)}
    assert all(dense_products.EXPERTS % block_k == 0 for block_k in blocks)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float32_uses_tf32_only_if_torch_allows_it(dtype, allowed, monkeypatch):
    launched = []
    monkeypatch.setattr(dense_products, "run", lambda kernel, grid, *arguments, **meta: launched.append(arguments))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        table = torch.zeros(3, 4, dtype=dtype)
        dense_products.product(torch.zeros(2, 3), table, torch.empty(2, 4))
        dense_products.product(torch.zeros(2, 3, dtype=dtype), table, torch.empty(2, 4))
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = "tf32" if allowed and dtype == torch.float32 else "ieee"
    assert [wanted in arguments for arguments in launched] == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch_on_a_gpu(dtype):
    """At sizes where a library changes its kernels: one token, just over a tile, several tiles of TOKENS."""
    tokens, dim, experts, chosen = 2 * dense_products.TOKENS + 77, 512, dense_products.EXPERTS + 1000, 64
    tensors = [
        torch.randn(tokens, dim, device="cuda").to(dtype),
        (torch.randn(experts, dim, device="cuda") * dim**-0.5).to(dtype),
        torch.randn(experts, dim, device="cuda").to(dtype),
        torch.randn(tokens, chosen, device="cuda"),
        torch.randint(-1, experts, (tokens, chosen), device="cuda", dtype=torch.int32),
    ]
    dy = torch.randn(tokens, dim, device="cuda").to(dtype)
    whole = by_token(tensors, dy, torch.arange(tokens, device="cuda"))
    for size in (1, 2, 16, 100, 129, 1000, dense_products.TOKENS, dense_products.TOKENS + 1):
        rows = torch.randperm(tokens, device="cuda")[:size]
        some = by_token(tensors, dy, rows)
        assert all(torch.equal(part, full[rows]) for part, full in zip(some, whole, strict=True)), size
