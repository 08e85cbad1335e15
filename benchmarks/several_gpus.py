"""A language model with mHC and OmniMoE on one GPU and on several, three ways: loss, tokens/s and peak memory.

    python -m benchmarks.several_gpus --ranks 2 --out rows.jsonl                      on a host with two GPUs
    python -m benchmarks.several_gpus --ranks 2 --device cpu --smoke                  gloo, in seconds

Each way runs on one rank and on `--ranks`, with the same global batch, seed and program:

    fsdp       FSDP2 in bfloat16 over all ranks; every rank has its own rows
    sequence   the same groups, but every rank has a part of each row's tokens; attention gathers keys and values
    experts    ExpertParallel: every rank has its own rows and its own experts; the rest is averaged; autocast

A row is one run. `loss_difference` is the largest difference between the losses of this run and of one rank, over all
steps. `loss_spread` is the same between two runs of one rank, of which one computes each batch in as many parts as
there are ranks: what another order of rounding does, without any other rank. With --float32, both should be tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import parallelize_module

from goldsmith import __version__, mhc, router
from goldsmith.distributed import ExpertParallel, average_gradients, clip_grad_norm, shard

WAYS = ("fsdp", "sequence", "experts")
SIZES = {  # the model and the batch; "smoke" only shows that the program runs
    "full": {"dim": 1024, "layers": 6, "heads": 16, "experts": 65536, "k": 32, "seq": 1024, "batch": 16, "steps": 60},
    "smoke": {"dim": 32, "layers": 2, "heads": 2, "experts": 64, "k": 4, "seq": 16, "batch": 4, "steps": 4},
}
WARM = 10  # steps before the clock starts, at most a quarter of all
VOCABULARY = 256


class Attention(nn.Module):
    """Causal attention; with a mesh, each rank has consecutive positions of every row."""

    def __init__(self, dim: int, heads: int, mesh: DeviceMesh | None):
        super().__init__()
        self.heads, self.mesh = heads, mesh
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, dim]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.mesh is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = (
                DTensor.from_local(t.contiguous(), self.mesh, [Shard(2)]).full_tensor(grad_placements=[Partial()])
                for t in (k, v)
            )
            own = self.mesh.get_local_rank() * q.shape[2] + torch.arange(q.shape[2], device=x.device)
            earlier = own[:, None] >= torch.arange(k.shape[2], device=x.device)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=earlier)
        return self.out(y.transpose(1, 2).flatten(2))


class LM(nn.Module):
    """Bytes in, logits out; each layer is attention and then OmniMoE, both in a HyperConnection with four streams."""

    def __init__(self, size: dict[str, int], mesh: DeviceMesh | None):
        super().__init__()
        dim = size["dim"]
        self.embed, self.place = nn.Embedding(VOCABULARY, dim), nn.Embedding(size["seq"], dim)
        layers: list[nn.Module] = []
        for _ in range(size["layers"]):
            moe = router.OmniMoE(dim, num_experts=size["experts"], k=size["k"], intermediate_size=dim)
            layers += [Attention(dim, size["heads"], mesh), moe]
        self.stack = mhc.HyperStack([mhc.HyperConnection(dim, layer, norm=nn.RMSNorm(dim)) for layer in layers])
        self.head, self.unembed = mhc.HyperHead(dim), nn.Linear(dim, VOCABULARY, bias=False)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        return self.unembed(self.head(self.stack(mhc.expand(x))))


def run(way: str, size: dict[str, int], device: str, dtype: torch.dtype, parts: int) -> dict[str, object]:
    """Train on this rank; returns losses, tokens per second and peak memory (the largest of all ranks)."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    model = LM(size, mesh if way == "sequence" else None).to(device)
    parallelize(model, way, mesh, dtype)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, foreach=way != "experts")
    draw = torch.Generator().manual_seed(1)
    losses, began, counted = [], 0.0, 0
    warm = min(WARM, size["steps"] // 4)
    for step in range(size["steps"]):
        if step == warm:
            wait(device)
            began = time.perf_counter()
        rows, loss = text(size, draw).to(device), torch.zeros((), device=device)
        for part in rows.chunk(parts):
            tokens, targets, positions = own_part(way, part, rank, world)
            with torch.autocast(device, dtype, enabled=way == "experts" and dtype == torch.bfloat16):
                logits = model(tokens, positions)
            part_loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / parts
            part_loss.backward()
            loss += part_loss.detach()
        if way == "experts":
            average_gradients(model.parameters(), mesh)
        clip_grad_norm(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss)
        counted += rows[:, 1:].numel() if step >= warm else 0
    wait(device)
    seconds = time.perf_counter() - began
    mean = torch.stack(losses)
    distributed.all_reduce(mean)
    peak = torch.tensor(float(torch.cuda.max_memory_allocated() if device == "cuda" else 0), device=device)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    return {
        "losses": [round(value, 6) for value in (mean / world).tolist()],
        "tokens_per_s": round(counted / seconds, 1),
        "peak_memory_gb": round(peak.item() / 1e9, 3),
    }


def parallelize(model: LM, way: str, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    connections = cast("list[mhc.HyperConnection]", list(model.stack.connections))
    if way == "experts":
        for connection in connections:
            if isinstance(connection.layer, router.OmniMoE):
                parallelize_module(connection.layer, mesh, ExpertParallel(equal_tokens=True))
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for connection in connections:
        shard(connection, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)


def text(size: dict[str, int], draw: torch.Generator) -> Tensor:
    """Rows [batch, seq + 1] of bytes with something to learn: each is its predecessor plus 1, 2 or 3."""
    steps = torch.randint(1, 4, (size["batch"], size["seq"] + 1), generator=draw)
    return steps.cumsum(1) % VOCABULARY


def own_part(way: str, rows: Tensor, rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets = rows[:, :-1], rows[:, 1:]
    positions = torch.arange(tokens.shape[1], device=rows.device).expand_as(tokens)
    along = 1 if way == "sequence" else 0
    tokens, targets, positions = (t.chunk(world, along)[rank].contiguous() for t in (tokens, targets, positions))
    return tokens, targets, positions


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# processes


def work(arguments: argparse.Namespace) -> None:
    """One rank, which torchrun started."""
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    distributed.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    size = size_of(arguments)
    dtype = torch.float32 if arguments.float32 else torch.bfloat16
    result = run(arguments.way, size, arguments.device, dtype, arguments.parts)
    if distributed.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(result))
    distributed.destroy_process_group()


def size_of(arguments: argparse.Namespace) -> dict[str, int]:
    size = SIZES["smoke" if arguments.smoke else "full"]
    return {**size, "steps": arguments.steps or size["steps"]}


def launch(
    arguments: argparse.Namespace, ranks: int, way: str, folder: Path, *more: str, gpu: int | None = None
) -> dict[str, object]:
    out = folder / f"{way}-{ranks}{''.join(more)}.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "benchmarks.several_gpus", "--way", way, "--device", arguments.device, "--out", str(out)),
        *(("--smoke",) if arguments.smoke else ()),
        *(("--float32",) if arguments.float32 else ()),
        *(("--steps", str(arguments.steps)) if arguments.steps else ()),
        *more,
    ]
    print(f"{way} on {ranks} rank{'s' * (ranks > 1)}{' ' * bool(more)}{' '.join(more)}", file=sys.stderr, flush=True)
    environment = dict(os.environ) if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    subprocess.run(command, check=True, env=environment)
    return json.loads(out.read_text())


def one_rank(arguments: argparse.Namespace, way: str, folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The run of one rank, and the one that computes each batch in parts: at the same time, on two GPUs."""
    gpus = (0, 1) if arguments.device == "cuda" else (None, None)
    with ThreadPoolExecutor(2 if arguments.device == "cuda" else 1) as pool:
        whole = pool.submit(launch, arguments, 1, way, folder, gpu=gpus[0])
        in_parts = pool.submit(launch, arguments, 1, way, folder, "--parts", str(arguments.ranks), gpu=gpus[1])
        return whole.result(), in_parts.result()


def difference(one: dict[str, object], other: dict[str, object]) -> float:
    pairs = zip(cast("list[float]", one["losses"]), cast("list[float]", other["losses"]), strict=True)
    return round(max(abs(a - b) for a, b in pairs), 6)


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    size = size_of(arguments)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu"
    facts = {"machine": machine, "torch": torch.__version__, "goldsmith": __version__, **size}
    facts["dtype"] = "float32" if arguments.float32 else "bfloat16"
    for way in arguments.ways.split(","):
        alone, in_parts = one_rank(arguments, way, folder)
        spread = difference(alone, in_parts)
        for ranks in (1, arguments.ranks):
            result = alone if ranks == 1 else launch(arguments, ranks, way, folder)
            row = {"way": way, "ranks": ranks, **result, "loss_difference": difference(alone, result)}
            yield {**row, "loss_spread": spread, **facts}


def line(row: dict[str, object]) -> str:
    last = cast("list[float]", row["losses"])[-1]
    return (
        f"{row['way']:10}{row['ranks']:6}{row['tokens_per_s']:12,.0f}{row['peak_memory_gb']:9.2f}{last:11.4f}"
        f"{row['loss_difference']:12.6f}{row['loss_spread']:10.6f}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="as many as there are GPUs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ways", default=",".join(WAYS), help="some of: " + ", ".join(WAYS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model and four steps")
    parser.add_argument("--steps", type=int, help="default: 60, with --smoke 4")
    parser.add_argument("--float32", action="store_true", help="compute in float32 instead of bfloat16")
    parser.add_argument("--out", default="several_gpus.jsonl", help="a file to which the rows are added")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.way:
        work(arguments)
        return 0
    if unknown := set(arguments.ways.split(",")) - set(WAYS):
        parser.error(f"--ways has {', '.join(sorted(unknown))}; known: {', '.join(WAYS)}")
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--ranks {arguments.ranks} needs as many GPUs; torch sees {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'way':10}{'ranks':>6}{'tokens/s':>12}{'peak GB':>9}{'last loss':>11}{'difference':>12}{'spread':>10}")
        for row in rows(arguments, Path(folder)):
            print(line(row), flush=True)
            with Path(arguments.out).open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
