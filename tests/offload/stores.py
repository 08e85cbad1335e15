"""Small stores of random experts, and the float64 golden of a call over them."""

from pathlib import Path
from types import SimpleNamespace

import torch

from goldsmith.offload import ExpertStore


def weights(E=6, H=64, I=32, *, dtype=torch.bfloat16, seed=0, bias=False, scale=1.0):
    """A layer's experts as ExpertStore.build takes them."""
    make = torch.Generator().manual_seed(seed)

    def draw(*shape, std):
        return (torch.randn(*shape, generator=make) * std).to(dtype)

    tensors = {"gate_up": draw(E, 2 * I, H, std=scale * H**-0.5), "down": draw(E, H, I, std=scale * I**-0.5)}
    if bias:
        tensors |= {"gate_up_bias": draw(E, 2 * I, std=1.0), "down_bias": draw(E, H, std=1.0)}
    return tensors


def build(
    path: Path,
    layers=(0, 1),
    *,
    overwrite=False,
    format="auto",
    group_size=None,
    activation="silu",
    limit=None,
    **sizes,
):
    source = {layer: weights(seed=layer, **sizes) for layer in layers}
    options = {"format": format, "group_size": group_size, "activation": activation, "limit": limit}
    return ExpertStore.build(source, path, overwrite=overwrite, **options)


def call(store, layer, T, k, *, dtype=torch.bfloat16, seed=0):
    """x [T, H], ids [T, k] without repeats, weights [T, k]."""
    make = torch.Generator().manual_seed(seed)
    E = store.num_experts(layer)
    x = torch.randn(T, store.hidden_size, generator=make).to(dtype)
    ids = torch.rand(T, max(E, k), generator=make).topk(k).indices % E
    return x, ids, torch.rand(T, k, generator=make)


def costs(store, **changes):
    """Costs of an imaginary machine: a CPU and a link of the same speed, and a fast device."""
    from goldsmith.offload.planning.costs import Costs

    expert = store.expert_nbytes(store.layers[0])
    rates_given = {
        "expert_bytes": expert, "flops_per_token": 6 * store.hidden_size * store.intermediate_size,
        "cpu_bytes_per_s": 1e9, "cpu_flops": 1e11, "link_bytes_per_s": 1e9, "dram_bytes_per_s": 4e9,
        "device_bytes_per_s": 1e12, "device_flops": 1e14, "cpu_latency": 0.0,
        "link_latency": 0.0, "device_latency": 0.0,
    }  # fmt: skip
    return Costs(**rates_given | changes)


def calibration(store, **changes):
    """A stand-in for a Calibration: the Engine reads only its costs."""
    return SimpleNamespace(costs=costs(store, **changes))
