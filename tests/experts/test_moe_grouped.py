"""The GPU backend of experts.moe: its formulas are checked on a CPU, with a loop in place of the grouped product."""

import dataclasses
import functools

import pytest
import torch

from goldsmith import BackendUnavailable, Op, assay, experts
from goldsmith.cli.targets import op_target
from goldsmith.experts.moe import _cuda_grouped

pytestmark = pytest.mark.sweep(2)

MOE = Op.get("experts.moe")
NAMES = ("no_tokens", "one_token", "odd_sizes", "ranks", "rank_zero", "gpt_oss", "holes", "nothing", "no_slots")
NAMES += ("twice", "zero_weights", "strided", "dropout")
PROBES = ("values", "ensemble", "statistics", "poison", "guard", "alias")


def exact(a, b):
    return a.float() @ b.float()


def cut(a, b):
    """A product with the error of tensor cores, which truncate instead of rounding."""
    sizes = a.float().abs() @ b.float().abs()
    off = torch.rand(sizes.shape, generator=torch.Generator().manual_seed(sizes.numel()))
    return exact(a, b) - 2.0**-17 * off * sizes


def loop(a, b, ends, product=exact):
    """torch._grouped_mm as a loop; rows beyond the last expert's are NaN: the real one leaves them unwritten."""
    begins = [0, *ends.tolist()[:-1]]
    spans = [slice(x, y) for x, y in zip(begins, ends.tolist(), strict=True)]
    if b.dim() == 2:
        return torch.stack([product(a[:, s], b[s]) for s in spans]).to(a.dtype)
    out = torch.full((a.shape[0], b.shape[-1]), torch.nan, dtype=a.dtype)
    for s, matrix in zip(spans, b, strict=True):
        out[s] = product(a[s], matrix).to(a.dtype)
    return out


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets the backend run without a GPU."""
    here = dataclasses.replace(MOE.backends["cuda_grouped"], machine=lambda tensors: None)
    monkeypatch.setitem(MOE.backends, "cuda_grouped", here)
    monkeypatch.setattr(_cuda_grouped, "grouped", loop)
    monkeypatch.setattr(_cuda_grouped, "unsupported", lambda tensors, options: None)
    return monkeypatch


@pytest.mark.parametrize("name", NAMES)
def test_the_formulas_agree_with_the_golden(on_cpu, name):
    """In float32, where only sums are rounded."""
    on_cpu.setattr(_cuda_grouped.GroupedCall, "store", torch.float32)
    target = dataclasses.replace(op_target(MOE, "cuda_grouped", dtype=torch.float32), stored={})
    assay.check(target, name, probes=PROBES)


@pytest.mark.parametrize("name", ["one_token", "odd_sizes", "gpt_oss", "dropout"])
def test_the_rounding_stays_within_the_bounds_of_the_golden(on_cpu, name):
    on_cpu.setattr(_cuda_grouped, "grouped", functools.partial(loop, product=cut))
    target = op_target(MOE, "cuda_grouped", dtype=torch.bfloat16)
    assay.check(target, name, dtype=torch.bfloat16, probes=PROBES, seed=0)


def test_a_less_precise_product_is_detected(on_cpu):
    on_cpu.setattr(_cuda_grouped, "grouped", lambda a, b, ends: loop(a, b, ends).to(torch.float8_e4m3fn).to(a.dtype))
    target = op_target(MOE, "cuda_grouped", dtype=torch.bfloat16)
    report = assay.check(target, "odd_sizes", dtype=torch.bfloat16, probes=("values",), raises=False)
    assert "CERTAIN" in {f.rung for f in report.findings}


@pytest.fixture
def call():
    torch.manual_seed(0)
    E, H, I, T, K = 3, 16, 8, 6, 2
    base = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    return torch.randn(T, H).bfloat16(), torch.randint(0, E, (T, K)), torch.rand(T, K), [t.bfloat16() for t in base]


def test_an_id_out_of_range_makes_only_its_token_nan(on_cpu, call):
    x, ids, w, base = call
    results = []
    for wrong in (None, 3, -2):
        spoiled = ids.clone()
        if wrong is not None:
            spoiled[4, 1] = wrong
        leaf = x.clone().requires_grad_()
        y = experts.moe(leaf, spoiled, w, base, backend="cuda_grouped")
        results.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
    others = torch.arange(6) != 4
    for clean, *spoiled in zip(*results, strict=True):
        for t in spoiled:
            assert t[4].isnan().all() and torch.equal(t[others], clean[others])


def test_a_padded_rank_does_not_turn_infinity_into_nan(on_cpu, call):
    x, ids, w, base = call
    x[2, 5] = torch.inf
    lora = {"up": (torch.rand(3, 3, 16) + 0.1, torch.rand(3, 8, 3) + 0.1)}
    base = [t.abs() for t in base]
    y = [experts.moe(x, ids, w, base, lora=lora, backend=b) for b in ("reference", "cuda_grouped")]
    assert y[0][2].isinf().all() and torch.equal(y[0].isinf(), y[1].isinf())


@pytest.mark.parametrize("step, offset", [(2, 0), (1, 1)])
def test_weights_that_the_grouped_product_cannot_read_are_copied(on_cpu, call, step, offset):
    """torch refuses elements that are not next to each other, and addresses that are no multiples of 16 bytes."""
    on_cpu.setattr(_cuda_grouped, "grouped", lambda a, b, ends: torch._grouped_mm(a, b, offs=ends))
    x, ids, w, base = call
    apart = []
    for matrices in base:
        room = torch.zeros(step * matrices.numel() + offset, dtype=matrices.dtype)
        apart.append(room[offset::step].view_as(matrices) if step == 1 else room.view(*matrices.shape, step)[..., 0])
        apart[-1].copy_(matrices)
    plain, stepped = (experts.moe(x, ids, w, b, backend="cuda_grouped") for b in (base, apart))
    assert torch.equal(plain, stepped)


def test_torchs_grouped_product_gives_the_same_result_as_the_loop(on_cpu, call):
    """torch has a slow one for the CPU."""
    x, ids, w, base = call
    slow = experts.moe(x, ids, w, base, backend="cuda_grouped")
    on_cpu.undo()
    here = dataclasses.replace(MOE.backends["cuda_grouped"], machine=lambda tensors: None)
    on_cpu.setitem(MOE.backends, "cuda_grouped", here)
    lora = {"gate": (torch.randn(3, 3, 16), torch.zeros(3, 8, 3))}
    leaf = base[1].clone().requires_grad_()
    y = experts.moe(x, ids, w, (base[0], leaf), lora=lora, backend="cuda_grouped")
    assert torch.equal(y, slow) and torch.autograd.grad(y.sum(), leaf)[0].isfinite().all()


WRONG = {
    "packed": ({"base": "packed"}, r"the base is packed \(int8\); on a GPU it must be plain bfloat16 tensors"),
    "float32": ({"x": torch.float32}, "x is float32, expected bfloat16"),
    "odd": ({"base": "odd"}, "the base has hidden=16 and intermediate=7, expected multiples of 8"),
}


@pytest.mark.parametrize("changed, text", WRONG.values(), ids=list(WRONG))
def test_the_backend_says_why_it_cannot_run(monkeypatch, call, changed, text):
    here = dataclasses.replace(MOE.backends["cuda_grouped"], machine=lambda tensors: None)
    monkeypatch.setitem(MOE.backends, "cuda_grouped", here)
    x, ids, w, (gate_up, down) = call
    base = {
        "packed": experts.pack(gate_up, down, format="int8"),
        "odd": (gate_up[:, 2:].contiguous(), down[..., 1:].contiguous()),
    }.get(changed.get("base"), (gate_up, down))
    with pytest.raises(BackendUnavailable, match=text):
        experts.moe(x.to(changed.get("x", x.dtype)), ids, w, base, backend="cuda_grouped")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [c.name for c in MOE.cases if "large" in c.tags])
def test_the_backend_passes_at_the_usual_sizes(name):
    assay.check(op_target(MOE, "cuda_grouped"), name, dtype=torch.bfloat16, device="cuda", probes=PROBES)
