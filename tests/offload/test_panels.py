"""The GPU's kernels over packed panels: every format decodes as in the reference."""

import os
import subprocess
import sys

import pytest
import torch

from goldsmith import assay
from goldsmith.experts._kernels import panels, vectors
from goldsmith.experts.slots import reference
from offload import stores
from offload.processes import interpreter

E, K = 3, 2
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(not GPU and interpreter() is not None, reason=f"kernels on a CPU: {interpreter()}")
on_a_cpu = pytest.mark.skipif(interpreter() is not None, reason=f"bits of the interpreter's sums: {interpreter()}")
FORMATS = ("fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block")


def target(store, most=None):
    """Rows [T, K, H] of an arena whose experts have another order; most: the token count for which kernels are
    picked.
    """
    numbers = [store.dequantize(0, e) for e in range(E)]
    stacked = {name: torch.stack([n[name] for n in numbers]).to(DEVICE) for name in numbers[0]}
    arena = store.raw_layer(0).flip(0).to(DEVICE)
    base = store.blocks.base(arena)

    def candidate(x, ids):
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E).tolist()
        config = panels.pick(most or max(counts))
        starts = [sum(counts[:e]) for e in range(E)]
        tiles = panels.tiles_of([E - 1 - e for e in range(E)], counts, starts, config.rows)
        h, y = (x.new_empty(len(flat), n, dtype=torch.float32) for n in (store.intermediate_size, store.hidden_size))
        tokens, tiles = (order // K).int(), torch.tensor(tiles, dtype=torch.int32, device=x.device)
        panels.panels_forward(x, tokens, tiles, base, h, y, config, **store.options)
        return torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)

    def golden(x, ids):
        base = [None if t is None else t.to(x.dtype) for t in map(stacked.get, ("gate_up", "down"))]
        base += [None if t is None else t.to(x.dtype) for t in map(stacked.get, ("gate_up_bias", "down_bias"))]
        scales = dict.fromkeys(("gate_scale", "up_scale", "down_scale"), 1.0)
        return reference.forward(x, ids, *base, *(None,) * 6, layout="", **scales, **store.options)[0]

    @assay.case(T=[5])
    def few(make, T):
        ids = make.uniform(T, E, dtype=torch.float32).topk(K).indices
        return {"x": make.normal(T, store.hidden_size), "ids": ids}

    return assay.Target(candidate, golden, cases=few, backward=None)


@kernels
@pytest.mark.parametrize("most", [None, 1000], ids=["few", "many"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_holds_to_the_golden(tmp_path, format, most):
    group = 32 if format in ("int8", "int4", "int4_asym") else None
    width = 160 if format == "fp8_block" else 32  # more than a block of 128
    options = {"bias": True, "activation": "swiglu_oai", "limit": 7.0} if format == "mxfp4" else {}
    store = stores.build(tmp_path / "a.store", (0,), format=format, group_size=group, E=E, H=width, I=32, **options)
    assay.check(target(store, most), device=DEVICE, probes=["values"])


@kernels
@pytest.mark.parametrize("format, group", [("int8", 8), ("int4_asym", 48)])
def test_a_prompt_has_groups_of_any_size(tmp_path, format, group):
    """Tiles of 8 rows are too few for tensor cores; tiles of 48 multiply 16 at a time."""
    store = stores.build(tmp_path / "a.store", (0,), format=format, group_size=group, E=E, H=96, I=48)
    for dtype in (torch.float32, torch.float16):
        assert panels._product(store.blocks.layout, dtype)["PARTS"] == (group > 8 and dtype == torch.float16)
        assay.check(target(store, 1000), dtype=dtype, device=DEVICE, probes=["values"])


@kernels
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_every_activation_holds_to_the_golden(tmp_path, activation):
    store = stores.build(tmp_path / "a.store", (0,), activation=activation, E=E, H=35, I=19)
    assay.check(target(store), device=DEVICE, probes=["values"])


@on_a_cpu
def test_a_row_has_the_same_bits_for_every_tile_size(tmp_path):
    store = stores.build(tmp_path / "a.store", (0,), E=E, H=35, I=19)
    x, ids, _ = stores.call(store, 0, 5, K, dtype=torch.bfloat16)
    one, two, four = (target(store, most).candidate(x, ids) for most in (1, 2, 4))
    assert torch.equal(one, two) and torch.equal(one, four)


def test_tiles_cover_each_row_once():
    tiles = panels.tiles_of([7, 4, 9], [40, 0, 16], [3, 43, 43], 16)
    assert tiles == [[7, 7, 7, 9], [3, 19, 35, 43], [16, 16, 8, 16]]


def test_no_kernel_compiles_anew_for_another_number_of_tiles():
    """A compilation takes a second; in a prompt with all experts on the GPU, each layer has its own number of tiles."""
    code = """
from goldsmith.experts._kernels import panels, vectors
for kernel in (panels._hidden_kernel, panels._down_kernel, vectors.hidden_kernel, vectors.down_kernel):
    by_name = {p.name: p for p in kernel.params}
    assert by_name["TILES"].do_not_specialize, kernel
    lists = [p for name, p in by_name.items() if name in ("tokens_ptr", "tiles_ptr")]
    assert lists and all(p.do_not_specialize_on_alignment for p in lists), kernel
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Kernel:
    """Stands for a Triton kernel: remembers whether it was run or only compiled."""

    def __init__(self):
        self.events = []

    def warmup(self, *arguments, grid, num_warps):
        self.events.append(("compiled", arguments, grid, num_warps))

    def __getitem__(self, grid):
        return lambda *arguments, num_warps: self.events.append(("ran", arguments, grid, num_warps))


def test_a_prompt_compiles_the_kernels_for_one_token_and_runs_none_of_them(tmp_path, monkeypatch):
    store = stores.build(tmp_path / "a.store", (0,), format="int4", E=E, H=64, I=32)
    hidden, down = Kernel(), Kernel()
    monkeypatch.setattr(vectors, "hidden_kernel", hidden)
    monkeypatch.setattr(vectors, "down_kernel", down)
    vectors._launches.cache_clear()
    x, lists = torch.randn(3, 64), torch.zeros(3, dtype=torch.int32)
    base, h, y = store.experts(0), torch.zeros(32), torch.zeros(1, 64)
    arguments = x, lists[:1], lists.view(3, 1), base, None, h, y, 1
    try:
        vectors.forward(*arguments, compile_only=True, **store.options)
        vectors.forward(*arguments, **store.options)
    finally:
        vectors._launches.cache_clear()
    for kernel in (hidden, down):
        (_, *compiled), (_, *ran) = kernel.events
        assert [event[0] for event in kernel.events] == ["compiled", "ran"]
        assert [id(a) for a in compiled[0] if torch.is_tensor(a)] == [id(a) for a in ran[0] if torch.is_tensor(a)]
        assert compiled[1:] == ran[1:]
