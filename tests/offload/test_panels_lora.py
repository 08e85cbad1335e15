"""LoRA beside packed panels on a GPU: the kernels hold to the golden of experts.slots."""

import pytest
import torch

from goldsmith import assay
from goldsmith.experts._factors import LayerLora, total
from goldsmith.experts._kernels import low_rank, panels
from goldsmith.experts.slots import reference
from offload import stores
from offload.test_panels import DEVICE, GPU, E, K, kernels

RANKS = {
    "all": {"gate": 3, "up": 5, "down": 17},
    "up": {"up": 2},
    "down": {"down": 4},
    "gate_down": {"gate": 4, "down": 1},
}


def draw(store, ranks, *, shared=False, dtype=torch.float32, seed=0):
    """A LoRA for the experts of a store whose effect is as large as the experts' own."""
    make = torch.Generator().manual_seed(seed)
    H, I, experts = store.hidden_size, store.intermediate_size, store.num_experts(0)

    def numbers(*shape):
        return (torch.randn(*shape, generator=make) * shape[-1] ** -0.5).to(dtype)

    factors = {}
    for target, r in ranks.items():
        out, width = (H, I) if target == "down" else (I, H)
        factors[target] = numbers(experts, r, width), numbers(experts, out, r)
    if shared:
        factors["up"] = factors["gate"][0], numbers(experts, I, ranks["gate"])
    return LayerLora(factors, {target: 0.5 + i for i, target in enumerate(factors)})


def target(store, lora, most=None):
    """Rows [T, K, H] of an arena whose experts have another order than the factors."""
    numbers = [store.dequantize(0, e) for e in range(E)]
    stacked = {name: torch.stack([n[name] for n in numbers]).to(DEVICE) for name in numbers[0]}
    arena = store.raw_layer(0).flip(0).to(DEVICE)
    base = store.blocks.base(arena)
    H, I = store.hidden_size, store.intermediate_size

    def candidate(x, ids):
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E).tolist()
        config = panels.pick(most or max(counts))
        starts = [sum(counts[:e]) for e in range(E)]
        which, first, rows = panels.tiles_of(list(range(E)), counts, starts, config.rows)
        tiles = [[E - 1 - e for e in which], first, rows, which]
        h, y = (x.new_empty(len(flat), n, dtype=torch.float32) for n in (I, H))
        tokens, tiles = (order // K).int(), torch.tensor(tiles, dtype=torch.int32, device=x.device)
        memory = torch.empty(low_rank.nbytes_of(lora), dtype=torch.uint8, device=x.device)
        low = torch.full((len(flat) * low_rank.rank_of(lora),), float("nan"), device=x.device)
        extra = torch.full((len(flat) * 2 * I,), float("nan"), device=x.device)
        factors = low_rank.PanelFactors(lora, memory, low, extra)
        panels.panels_forward(x, tokens, tiles, base, h, y, config, lora=factors, **store.options)
        return torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)

    def golden(x, ids):
        base = [None if t is None else t.to(x.dtype) for t in map(stacked.get, ("gate_up", "down"))]
        base += [None if t is None else t.to(x.dtype) for t in map(stacked.get, ("gate_up_bias", "down_bias"))]
        scales = {f"{name}_scale": float(lora.scaling.get(name, 1.0)) for name in ("gate", "up", "down")}
        pairs = [lora.factors.get(name, (None, None)) for name in ("gate", "up", "down")]
        factors = [None if t is None else t.to(x.device, x.dtype) for pair in pairs for t in pair]
        return reference.forward(x, ids, *base, *factors, layout="", **scales, **store.options)[0]

    @assay.case(T=[5])
    def few(make, T):
        ids = make.uniform(T, E, dtype=torch.float32).topk(K).indices
        return {"x": make.normal(T, store.hidden_size), "ids": ids}

    return assay.Target(candidate, golden, cases=few, backward=None)


@kernels
@pytest.mark.parametrize("most", [None, 1000], ids=["few", "many"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_every_combination_of_targets_holds_to_the_golden(tmp_path, ranks, most):
    store = stores.build(tmp_path / "a.store", (0,), E=E, H=35, I=19, bias=True, activation="swiglu_oai", limit=7.0)
    assay.check(target(store, draw(store, ranks), most), device=DEVICE, probes=["values"])


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if GPU else [])])
@pytest.mark.parametrize("format", ["bf16", "int4", "fp8_block"])
def test_packed_formats_hold_to_the_golden_with_one_A_for_gate_and_up(tmp_path, format, dtype):
    group = {"group_size": 32} if format == "int4" else {}
    store = stores.build(
        tmp_path / "a.store", (0,), format=format, E=E, H=160 if format == "fp8_block" else 32, I=32, **group
    )
    lora = draw(store, {"gate": 4, "up": 4, "down": 4}, shared=True, dtype=dtype)
    assert lora.shared
    assay.check(target(store, lora), device=DEVICE, probes=["values"])


def test_the_sum_of_two_adapters_has_the_sum_of_their_deltas(tmp_path):
    """In whole numbers, and scalings that are multiples of a half: every product is exact."""
    store = stores.build(tmp_path / "a.store", (0,), E=E, H=35, I=19)
    one, two = (whole_numbers(draw(store, RANKS[name], seed=seed)) for seed, name in enumerate(("all", "up")))
    both = total([one, two])
    for name in ("gate_up", "down"):
        parts = [lora.of_expert(1).get(name, torch.zeros(())) for lora in (one, two)]
        assert torch.equal(both.of_expert(1)[name], parts[0] + parts[1])


def whole_numbers(lora):
    factors = {target: tuple((10 * factor).round() for factor in pair) for target, pair in lora.factors.items()}
    return LayerLora(factors, dict(lora.scaling))
