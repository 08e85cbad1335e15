"""A small language model on bytes with very many tiny experts, and a dense one with as many active parameters.

Both are the same decoder (RMSNorm, causal attention with rotary positions) with the same seed and batches. One has
`router.OmniMoE` (or `router.PEER`) instead of SwiGLU: a token's k experts, its shared expert and its router together
have as many parameters as the dense model's SwiGLU. The output is loss, held-out loss, and the use of experts.

    python examples/omnimoe_lm.py                               15 seconds of a CPU core: this project's own text
    python examples/omnimoe_lm.py --data my_book.txt --steps 400 --balance 0.01                 a file, or a folder
    python examples/omnimoe_lm.py --layer peer                                  --norm batch has the paper's router

Every tenth piece of the text is held out. Equal seeds print equal digits on one machine.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from goldsmith import router
from mhc_lm import Attention, Residual, RMSNorm, read_text, show, split

COLOURS = ("#c2410c", "#1d4ed8", "#2f8045", "#8a4fb0")


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The routed layer; it keeps its selection for the measurement."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        if args.layer == "omnimoe":
            options = {} if args.norm == "batch" else {"router_norm": args.norm}
            make = router.OmniMoE.paper if args.norm == "batch" else router.OmniMoE
            self.layer = make(args.dim, args.experts, args.k, intermediate_size=args.dim, **options)
        else:
            heads = peer_heads(args.k)
            self.layer = router.PEER(args.dim, args.experts, args.k // heads, heads=heads, query_norm=args.norm)
        self.routed: router.RouterOutput | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.routed = self.layer(x, return_router=True)
        return y

    def active(self) -> int:
        """Active parameters of a token: everything but the tables, and its own rows of them."""
        tables = {"w_in", "w_out"}
        own = sum(p.numel() for name, p in self.layer.named_parameters() if name not in tables)
        listed = self.layer.k * getattr(self.layer, "heads", 1)
        return own + 2 * listed * self.layer.hidden_size


def peer_heads(k: int) -> int:
    """The number of heads: four experts each, or one head with fewer."""
    return max(1, k // 4)


class LM(nn.Module):
    def __init__(self, args: argparse.Namespace, dense: bool):
        super().__init__()
        torch.manual_seed(args.seed)
        self.embed = nn.Embedding(256, args.dim)
        active = Experts(args).active()

        def feed_forward() -> nn.Module:
            return SwiGLU(args.dim, max(1, round(active / (3 * args.dim)))) if dense else Experts(args)

        self.blocks = nn.Sequential()
        for _ in range(args.layers):
            for layer in (Attention(args.dim, args.heads, args.seq), feed_forward()):
                self.blocks.append(Residual(layer, RMSNorm(args.dim)))
        self.norm, self.head = RMSNorm(args.dim), nn.Linear(args.dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.experts = [m for m in self.modules() if isinstance(m, Experts)]
        self.active = active if self.experts else sum(p.numel() for p in self.blocks[1].layer.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean nats per byte of [batch, seq + 1]; on a GPU products are bfloat16, the rest float32."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = self.head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def balance(self) -> Tensor:
        losses = [router.load_balance_loss(e.routed.x, e.routed.y, e.routed.indices) for e in self.experts]
        return torch.stack(losses).mean()


def train(args: argparse.Namespace, dense: bool, data: Tensor, held_out: Tensor) -> dict:
    model, name = LM(args, dense).to(args.device), "dense" if dense else args.layer
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min((i + 1) / warm, 0.1 + 0.9 * (1 - i / args.steps))
    )
    draw = torch.Generator().manual_seed(args.seed)
    losses, evenness = [], []
    every = max(1, args.steps // 20)  # reading the loss waits for the device, so it is read seldom
    used = [None] * len(model.experts)
    started = last_printed = time.perf_counter()
    for step in range(args.steps):
        at = torch.randint(len(data) - args.seq, (args.batch,), generator=draw)
        batch = torch.stack([data[i : i + args.seq + 1] for i in at.tolist()]).long()
        loss = model(batch)
        total = loss + args.balance * model.balance() if args.balance and not dense else loss
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
        for i, layer in enumerate(model.experts):
            now = router.usage(layer.routed.indices, args.experts)
            used[i] = now if used[i] is None else used[i] + now
        last = step == args.steps - 1
        if last or step % every == every - 1 or time.perf_counter() - last_printed > 2:
            show(f"{name}: step {step + 1} of {args.steps}, loss {losses[-1].item():.4f}", last)
            last_printed = time.perf_counter()
        if model.experts and (last or step % every == every - 1):
            row = [{name: getattr(u, name).item() for name in ("share_used", "kl", "max_load")} for u in used]
            evenness.append({"step": step + 1, "layers": row})
            used = [None] * len(model.experts)
    losses = torch.stack(losses).tolist()
    seconds = time.perf_counter() - started
    model.eval()
    with torch.no_grad():
        held_out_loss = torch.stack([model(part.long()) for part in held_out.split(args.batch)]).mean().item()
    return {
        "loss": losses, "held_out": held_out_loss, "usage": evenness, "active": model.active,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": args.steps * args.batch * args.seq / seconds,
    }  # fmt: skip


def means(losses: list[float]) -> list[tuple[int, float]]:
    """At most two hundred points, each the mean of the steps since the last point."""
    size = -(-len(losses) // 200)
    groups = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [(min((i + 1) * size, len(losses)), sum(group) / len(group)) for i, group in enumerate(groups)]


def svg(runs: dict[str, dict]) -> str:
    """A plot of the losses, and a plot per layer of experts: share used, and KL from uniform."""
    routed = next(iter(runs.values()))["usage"]
    steps = len(next(iter(runs.values()))["loss"])
    panels = [("loss, nats per byte", [(name, means(run["loss"])) for name, run in runs.items()])]
    for key, title in (("share_used", "share of experts used"), ("kl", "KL from uniform, nats")):
        layers = range(len(routed[0]["layers"]) if routed else 0)
        lines = [(f"layer {i + 1}", [(row["step"], row["layers"][i][key]) for row in routed]) for i in layers]
        panels.append((title, lines))
    parts = []
    for number, (title, lines) in enumerate(p for p in panels if p[1]):
        top = 20 + 170 * number
        most = max(v for _, line in lines for _, v in line) or 1.0
        parts.append(f'<text x="50" y="{top}">{title}, 0 to {most:.3g}; steps 0 to {steps}</text>')
        parts.append(f'<rect x="50" y="{top + 8}" width="560" height="120" fill="none" stroke="#888"/>')
        for i, (name, line) in enumerate(lines):
            points = " ".join(f"{50 + 560 * x / steps:.1f},{top + 128 - 120 * y / most:.1f}" for x, y in line)
            colour, at = COLOURS[i % len(COLOURS)], 350 + min(110, 260 // len(lines)) * i
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<text x="{at}" y="{top}" fill="{colour}">{name}</text>')
    size = f'width="640" height="{40 + 170 * len(parts and [p for p in panels if p[1]])}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return head + '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"


def report(runs: dict[str, dict], unigram: float) -> None:
    rows = [("nats per byte", "loss", "held out", "active", "parameters", "tokens/s")]
    for name, run in runs.items():
        last = sum(run["loss"][-10:]) / len(run["loss"][-10:])
        counts = (f"{run['active']:,}", f"{run['parameters']:,}", f"{run['tokens_per_s']:,.0f}")
        rows.append((name, f"{last:.4f}", f"{run['held_out']:.4f}", *counts))
    rows.append(("unigram", f"{unigram:.4f}", *[""] * 4))  # a model that knows nothing but the bytes' frequencies
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows))
    for name, run in runs.items():
        for row in run["usage"][:: max(1, len(run["usage"]) // 4)] if run["usage"] else ():
            output = "; ".join(
                f"{u['share_used']:.1%} used, KL {u['kl']:.3f}, max {u['max_load']:.1f}" for u in row["layers"]
            )
            print(f"{name}, up to step {row['step']}: {output}")
    for name, run in runs.items():
        gap = unigram - run["held_out"]
        print(f"held out, {name}: {abs(gap):.4f} nats {'below' if gap > 0 else 'above'} the unigram entropy")
    if len(runs) == 2:
        first, dense = (run["held_out"] for run in runs.values())
        print(f"held out, experts minus dense: {first - dense:+.4f} ({'worse' if first > dense else 'better'})")


def device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        message = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used here: {message}") from error
    return name


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE_OR_FOLDER", help="default: this project's own docs and source")
    parser.add_argument("--layer", choices=("omnimoe", "peer"), default="omnimoe")
    parser.add_argument("--norm", choices=("layer", "none", "batch"), default="layer", help="of logits, or of queries")
    parser.add_argument("--balance", type=float, default=0.0, help="weight of the load balance loss")
    sizes = {"steps": 200, "dim": 64, "layers": 2, "heads": 4, "seq": 64, "batch": 8, "experts": 4096, "k": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar=name[0].upper())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; small models take one")
    parser.add_argument("--json", metavar="FILE", help="write every loss, and the conditions")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw losses and usage")
    args = parser.parse_args(argv)
    for name in (*sizes, "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1 is needed")
    root = math.isqrt(args.experts)
    if root * root != args.experts:
        parser.error(f"--experts {args.experts}: expected a square; the nearest are {root**2} and {(root + 1) ** 2}")
    if args.k > args.experts:
        parser.error(f"--k {args.k}: there are only {args.experts} experts (--experts)")
    if args.layer == "peer":
        if args.k % peer_heads(args.k):
            parser.error(f"--k {args.k}: --layer peer has heads of four experts; take 1, 2, 3, or a multiple of 4")
    for name in ("lr", "balance"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: expected a finite number of at least 0")
    if args.data is not None and not Path(args.data).exists():
        parser.error(f"--data {args.data}: there is no such file or folder")
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim}: --heads {args.heads} needs a multiple of {2 * args.heads}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    on = args.device
    if torch.device(on).type == "cpu":
        # on a busy machine small products wait for their threads: on two cores at a load of 5, 20 steps ran at 10,015
        # tokens/s with one thread and at 495 with two, with the same digits
        torch.set_num_threads(args.threads)
        on += f", {torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1)
    torch.use_deterministic_algorithms(True)  # without it, attention's backward on a GPU does not repeat bit for bit
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write every new tensor twice
    text, least = read_text(args.data), 20 * (args.seq + 1)
    if len(text) < least:
        raise SystemExit(f"omnimoe_lm: --data has {len(text)} bytes of text; --seq {args.seq} needs at least {least}")
    data, held_out, unigram = split(text, args.seq, torch.device(args.device))
    print(f"{len(data):,} bytes for training, {len(held_out)} windows held out, on {on}")
    runs = {args.layer: train(args, False, data, held_out), "dense": train(args, True, data, held_out)}
    report(runs, unigram)
    if args.json:
        Path(args.json).write_text(json.dumps({"runs": runs, "unigram": unigram, "conditions": vars(args)}) + "\n")
    if args.plot:
        Path(args.plot).write_text(svg(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
