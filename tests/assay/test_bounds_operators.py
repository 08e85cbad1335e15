"""Every operator that a golden may use has a rule, and float32 stays within its bound, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from goldsmith.assay.bounds.running_errors import running_bounds
from goldsmith.assay.noise.ensemble import legal_runs

F32 = torch.float32
INDEX = torch.tensor([[0, 2, 1], [4, 4, 3]])
ROWS = torch.tensor([3, 0, 3, 5, 1])
MASK = torch.tensor([[True, False, True, True, False, False]] * 5)


def written(x):
    out = torch.empty_like(x)
    out[:, ::2] = x[:, ::2] / 3
    out[:, 1::2] = x[:, 1::2].exp()
    out.mul_(2.5).add_(x[0])
    return out


def accumulated(x):
    out = torch.zeros(6, 6, dtype=x.dtype)
    return out.index_add_(0, ROWS, x) + out.clone().index_put_((ROWS,), x / 7, accumulate=True)


# name -> f(x, y, p): x, y of shape (5, 6), normal and divided by 3; p the same, positive
OPERATORS = {
    "softmax": lambda x, y, p: F.softmax(3 * x, -1),
    "softmax_first_axis": lambda x, y, p: F.softmax(3 * x, 0),
    "log_softmax": lambda x, y, p: F.log_softmax(3 * x, -1),
    "masked_softmax": lambda x, y, p: F.softmax(x.masked_fill(MASK, float("-inf")), -1),
    "very_negative_mask": lambda x, y, p: F.softmax(x.masked_fill(MASK, -1e30), -1),
    "added_mask": lambda x, y, p: F.softmax(x + MASK * -1e9, -1),
    "logsumexp": lambda x, y, p: torch.logsumexp(3 * x, 1),
    "cross_entropy": lambda x, y, p: F.cross_entropy(3 * x, torch.tensor([0, 5, 2, 2, 1])),
    "nll_sum": lambda x, y, p: F.cross_entropy(x, torch.tensor([0, 5, -100, 2, 1]), reduction="sum"),
    "mse": lambda x, y, p: F.mse_loss(x, y),
    "bce": lambda x, y, p: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)),
    "smooth_l1": lambda x, y, p: F.smooth_l1_loss(3 * x, y),
    "layer_norm": lambda x, y, p: F.layer_norm(x, (6,), p[0], y[0]),
    "group_norm": lambda x, y, p: F.group_norm(x.reshape(1, 6, 5), 2, p[0], y[0]),
    "rms_norm": lambda x, y, p: F.rms_norm(x, (6,), p[0], 1e-6),
    "var": lambda x, y, p: x.var(-1),
    "std": lambda x, y, p: x.std(),
    "var_mean": lambda x, y, p: torch.var_mean(x, 0, keepdim=True)[0],
    "mean": lambda x, y, p: x.mean(),
    "mean_axis": lambda x, y, p: x.mean(0, keepdim=True),
    "sum_axes": lambda x, y, p: (x * y).sum((0, 1)),
    "prod": lambda x, y, p: p.prod(-1),
    "cumsum": lambda x, y, p: x.cumsum(-1),
    "cumprod": lambda x, y, p: p.cumprod(0),
    "norm": lambda x, y, p: torch.linalg.vector_norm(x, dim=-1),
    "norm_one": lambda x, y, p: x.norm(p=1),
    "normalize": lambda x, y, p: F.normalize(x, dim=-1),
    "cosine": lambda x, y, p: F.cosine_similarity(x, y, dim=-1),
    "amax": lambda x, y, p: x.amax(-1, keepdim=True) - x,
    "amin": lambda x, y, p: x.amin(),
    "max_values": lambda x, y, p: x.max(-1).values * x.min(0).values.sum(),
    "topk": lambda x, y, p: x.topk(2, -1).values,
    "sort": lambda x, y, p: x.sort(-1, descending=True).values,
    "maximum": lambda x, y, p: torch.maximum(x, y) + torch.minimum(x, 2 * y),
    "clamp": lambda x, y, p: x.clamp(-0.2, 0.3) + y.clamp(min=0.1),
    "where": lambda x, y, p: torch.where(x > y, x * y, torch.exp(y)),
    "masked": lambda x, y, p: x * (y > 0) + x.masked_fill(y > 0.1, 0.7),
    "silu": lambda x, y, p: F.silu(x) * y,
    "gelu": lambda x, y, p: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "glu": lambda x, y, p: F.glu(x, -1),
    "softplus": lambda x, y, p: F.softplus(5 * x) + F.logsigmoid(y),
    "hard": lambda x, y, p: F.hardtanh(x) + F.hardsigmoid(y) + F.hardswish(x),
    "matmul": lambda x, y, p: x @ y.T @ p,
    "batched": lambda x, y, p: torch.einsum("bi,bj,ij->bj", x, y, p.T @ p),
    "linear": lambda x, y, p: F.linear(x, y, p[:, 0]),
    "outer": lambda x, y, p: torch.outer(x[0], y[1]) + torch.addr(x[0].outer(y[0]), p[0], p[1]),
    "baddbmm": lambda x, y, p: torch.baddbmm(x[None], (y @ p.T)[None], p[None], beta=0.5, alpha=2.0),
    "attention": lambda x, y, p: F.scaled_dot_product_attention(x[None, None], y[None, None], p[None, None]),
    "conv1d": lambda x, y, p: F.conv1d(x[None], y.reshape(2, 5, 3), padding=1),
    "cat": lambda x, y, p: torch.cat([x, y / 3, p.new_zeros(1, 6)]).exp(),
    "stack": lambda x, y, p: torch.stack([x, y * p], 1).transpose(0, 2).contiguous(),
    "chunks": lambda x, y, p: torch.cat([c * i for i, c in enumerate(x.chunk(3, -1), 1)], 0),
    "select": lambda x, y, p: x[2] * y[:, 3:4] + x[..., -1:],
    "index": lambda x, y, p: x[[0, 0, 4]] / 3,
    "gather": lambda x, y, p: x.gather(0, INDEX) * 1.1,
    "take_along": lambda x, y, p: torch.take_along_dim(x, x.argsort(-1), -1),
    "index_select": lambda x, y, p: x.index_select(1, torch.tensor([5, 5, 0])) * p[:, :3],
    "embedding": lambda x, y, p: F.embedding(INDEX, x / 3),
    "index_add": lambda x, y, p: accumulated(x),
    "scatter_add": lambda x, y, p: (y * 1.1).scatter_add(0, INDEX, x[:2, :3] / 3),
    "scatter": lambda x, y, p: (y * 1.1).scatter(0, INDEX[:, :1], x[:2, :1] / 3),
    "index_put": lambda x, y, p: torch.zeros_like(x).index_put((torch.tensor([1, 3]),), y[:2] / 3),
    "pad": lambda x, y, p: F.pad(x / 3, (1, 2)),
    "flip_roll": lambda x, y, p: x.flip(0).roll(2, 1) * 1.1,
    "tril": lambda x, y, p: (x @ y.T).tril() + (x @ p.T).triu(1),
    "expand": lambda x, y, p: x[:1].expand(5, 6) * y,
    "repeat": lambda x, y, p: x.repeat(2, 1) + y.repeat_interleave(2, 0),
    "unfold": lambda x, y, p: x.unfold(1, 3, 1).sum(-1),
    "diagonal": lambda x, y, p: torch.diagonal(x, 0, 0, 1) / 3 + torch.diag_embed(y[0, :5]).sum(0),
    "rope": lambda x, y, p: torch.cat([x[:, :3] * torch.cos(p[:, :3]) - x[:, 3:] * torch.sin(p[:, :3]), x[:, 3:]], -1),
    "written": lambda x, y, p: written(x),
    "logs": lambda x, y, p: torch.log(p) + torch.log2(p) + torch.log1p(p) + torch.log10(p),
    "powers": lambda x, y, p: p**1.5 + p**-0.5 + x**3 + 2**y + p**x,
    "reciprocals": lambda x, y, p: 1 / p + p.rsqrt() + p.sqrt() + p.reciprocal(),
    "trigonometric": lambda x, y, p: torch.sin(x) * torch.cos(y) + torch.tanh(x) + torch.erf(y) + torch.atan(x),
    "sinkhorn": lambda x, y, p: (p / p.sum(-1, keepdim=True)) / (p / p.sum(-1, keepdim=True)).sum(-2, keepdim=True),
    "nan_to_num": lambda x, y, p: torch.nan_to_num(x / 3),
    "lerp": lambda x, y, p: torch.lerp(x, y, p) + torch.addcmul(x, y, p) + torch.addcdiv(x, y, p),
    "logaddexp": lambda x, y, p: torch.logaddexp(x, y),
    "matmul_1_2": lambda x, y, p: x[0] @ y.T,
    "matmul_2_1": lambda x, y, p: x @ y[0],
    "matmul_1_1": lambda x, y, p: x[0] @ y[1],
    "matmul_1_3": lambda x, y, p: x[0, :5] @ torch.stack([y, p]),
    "matmul_3_1": lambda x, y, p: torch.stack([x, p]) @ y[0],
    "matmul_3_2": lambda x, y, p: torch.stack([x, p]) @ y.T,
    "matmul_2_3": lambda x, y, p: x.T @ torch.stack([y, p]),
    "matmul_3_3": lambda x, y, p: torch.stack([x, p]) @ torch.stack([y, y]).mT,
    "matmul_4_3": lambda x, y, p: torch.stack([x, p])[None] @ torch.stack([y, y]).mT,
    "views_in_place": lambda x, y, p: x.clone().unsqueeze_(0).transpose_(0, 1).squeeze_(1).t_().swapaxes_(0, 1) * y,
    "solve_lower": lambda x, y, p: torch.linalg.solve_triangular(p.T @ p, x.T * y.T, upper=False),
    "solve_upper_of_ones": lambda x, y, p: torch.linalg.solve_triangular(
        torch.stack([x @ x.T, y @ y.T]), torch.stack([p, p]), upper=True, unitriangular=True
    ),
    "solve_from_the_right": lambda x, y, p: torch.linalg.solve_triangular(p[:, :5], x.T, upper=True, left=False),
    "multi_dot": lambda x, y, p: torch.linalg.multi_dot([x, y.T, p]),
    "einsum_three": lambda x, y, p: torch.einsum("ij,kj,kl->il", x, y, p),
    "addbmm": lambda x, y, p: torch.addbmm(x @ y.T, torch.stack([x, p]), torch.stack([p, y]).mT),
    "cross": lambda x, y, p: torch.linalg.cross(x[:, :3], y[:, :3]),
    "grouped_attention": lambda x, y, p: F.scaled_dot_product_attention(
        x.reshape(1, 5, 2, 3)[:, :4], y.reshape(1, 5, 2, 3)[:, :2], p.reshape(1, 5, 2, 3)[:, :2], enable_gqa=True
    ),
    "causal_attention": lambda x, y, p: F.scaled_dot_product_attention(x[None], y[None], p[None], is_causal=True),
    "avg_pools": lambda x, y, p: F.avg_pool1d(x, 2) * F.avg_pool2d(p[None, :, :], (1, 2))[0],
    "max_pool": lambda x, y, p: F.max_pool2d(x[None], 2, stride=1),
    "adaptive_pool": lambda x, y, p: F.adaptive_avg_pool1d(x, 4),
    "pixels": lambda x, y, p: F.pixel_shuffle(x[:4].reshape(1, 4, 2, 3), 2) * 1.1,
    "mish": lambda x, y, p: F.mish(x) + F.celu(y, 0.5),
    "threshold": lambda x, y, p: F.threshold(x, 0.1, 0.7),
    "huber": lambda x, y, p: F.huber_loss(3 * x, y),
    "kl": lambda x, y, p: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean"),
    "logit": lambda x, y, p: torch.logit(torch.sigmoid(x)) + torch.xlogy(x, p),
    "pairwise_distance": lambda x, y, p: F.pairwise_distance(x, y),
    "norm_three": lambda x, y, p: torch.linalg.vector_norm(p, 3, dim=-1),
    "median": lambda x, y, p: x.median(-1).values + p.median(),
    "kthvalue": lambda x, y, p: x.kthvalue(2, 0).values,
}  # fmt: skip


def golden(f):
    """Results and three gradients; x, y, p are divided by 3, so that every operator gets arguments with an error."""

    def fn(leaves):
        own = [leaves[k].requires_grad_() for k in "xyp"]
        out = f(*(t / 3 for t in own))
        results = {"out": out}
        cotangent = leaves["g"][: out.numel()].reshape(out.shape)
        for name, g in zip("xyp", torch.autograd.grad(out, own, cotangent, allow_unused=True), strict=True):
            if g is not None:
                results[f"{name}.grad"] = g
        return results

    return fn


def leaves(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(5, 6, generator=generator) for _ in range(2))
    g = torch.randn(400, generator=generator)
    return {"x": x, "y": y, "p": torch.rand(5, 6, generator=generator) * 2 + 0.5, "g": g}


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_stays_within_the_bound_forward_and_backward(name):
    fn, narrow = golden(OPERATORS[name]), leaves()
    wide = {k: t.double() for k, t in narrow.items()}
    bounds = running_bounds(fn, {k: t.clone() for k, t in wide.items()}, compute=F32, stores={})
    with torch.random.fork_rng():
        plain = {k: t.detach() for k, t in fn({k: t.clone() for k, t in narrow.items()}).items()}
    runs = [plain, *legal_runs(fn, wide, compute=F32, stores={}, k=5, seed=1)]
    assert set(bounds) == set(plain)
    for result, bounded in bounds.items():
        assert bounded.notes == [], result
        assert not bool(bounded.open.any()), result
        largest = torch.zeros_like(bounded.bound)
        for run in runs:
            error = (run[result].double() - bounded.value).abs()
            assert bool((error <= bounded.bound).all()), (result, float((error / bounded.bound).nan_to_num(0).max()))
            largest = torch.maximum(largest, error)
        # not vacuous: the error in five tiny runs reaches 1/3000 of the bound
        if bool((bounded.bound > 0).any()):
            assert bool((largest > bounded.bound / 3000)[bounded.bound > 0].any()), result


def test_the_gradient_of_a_max_pool_has_a_bound_without_a_decomposition_of_torch(monkeypatch):
    """The decomposition declines in torch 2.11, and in later versions under deterministic algorithms."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    test_float32_stays_within_the_bound_forward_and_backward("max_pool")


@pytest.mark.parametrize("name", ["softmax", "masked_softmax", "layer_norm", "attention", "index_add", "written"])
def test_float64_candidates_have_bounds_too(name):
    fn = golden(OPERATORS[name])
    wide = {k: t.double() for k, t in leaves().items()}
    bounds, narrow = (
        running_bounds(fn, {k: t.clone() for k, t in wide.items()}, compute=c, stores={}) for c in (torch.float64, F32)
    )
    for run in legal_runs(fn, wide, compute=torch.float64, stores={}, k=5):
        for result, bounded in bounds.items():
            assert bool(((run[result] - bounded.value).abs() <= bounded.bound).all()), result
            # bounds scale with the unit roundoff, times two because the golden itself rounds in float64
            assert bool((bounded.bound <= 2 * 2.0**-29 * narrow[result].bound).all()), result


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_may_start_from_the_number_added_to_it(sign):
    """An accumulator that starts from a large bias rounds at the size of the bias, once for every term."""
    x, w, b = (torch.full((1, 64), s, dtype=torch.float64) for s in (1.75, 2.0**-24, 1.0))
    result = running_bounds(
        lambda t: {"y": (t["x"] * t["w"]).sum(-1) + sign * t["b"][:, 0]}, {"x": x, "w": w, "b": b},
        compute=torch.float32, stores={},
    )["y"]  # fmt: skip
    y = sign * b[:, 0].float()
    for i in range(64):
        y = y + x[:, i].float() * w[:, i].float()
    error = float((y.double() - result.value).abs())
    assert 2.0**-24 < error <= float(result.bound)
