"""The float64 golden of an engine's call, and the cases it is checked on."""

import torch

from goldsmith import assay
from goldsmith.experts.moe import reference

K = 3


def target(store, engine, dtype, cases):
    """The engine as a candidate, checked against the float64 golden of experts.moe over the store's own numbers."""
    numbers = [store.dequantize(0, e) for e in range(store.num_experts(0))]
    stacked = {name: torch.stack([n[name] for n in numbers]).double() for name in numbers[0]}
    base = [stacked["gate_up"], stacked["down"], stacked.get("gate_up_bias"), stacked.get("down_bias")]

    def candidate(x, ids, weights):
        return engine(0, x, ids, weights)

    def golden(x, ids, weights):
        skipped = torch.where(ids >= store.num_experts(0), -1, ids)
        options = {name: 1.0 for name in ("gate_scale", "up_scale", "down_scale")} | store.options
        rounded = (t if t is None else t.to(x.device, torch.promote_types(x.dtype, torch.float32)) for t in base)
        arguments = (x, skipped, weights, *rounded, *(None,) * 7)
        return reference.forward(*arguments, layout="", dropout=0.0, save=False, **options)[0]

    stored = {} if dtype == torch.float16 else {"g": "x", "u": "x", "h": "x"}
    return assay.Target(candidate, golden, cases=cases, backward=None, stored=stored, dtypes=(dtype,))


def inputs(make, T, k=K, E=6, H=64, kind="uniform"):
    ids = make.uniform(T, max(E, k), dtype=torch.float32).topk(k).indices % E
    if kind == "holes":
        ids = torch.where(make.uniform(T, k, dtype=torch.float32) < 0.3, -1, ids)
        ids = torch.where(make.uniform(T, k, dtype=torch.float32) < 0.3, E, ids)
    if kind == "twice":
        ids[:, 1] = ids[:, 0]
    return {"x": make.normal(T, H), "ids": ids, "weights": make.uniform(T, k, dtype=torch.float32)}


@assay.case(T=[1], why="decode")
def decode(make, T):
    return inputs(make, T)
