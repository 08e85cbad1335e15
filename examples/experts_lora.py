"""LoRA on the experts of a model: convert, train, save, load in stock peft, generate.

    python examples/experts_lora.py                            a small random Qwen3-MoE, made here
    python examples/experts_lora.py examples/shakespeare-moe   a trained model, or a folder of your own
    python examples/experts_lora.py MODEL --format int4        its experts in 4 bits
    python examples/experts_lora.py --steps 5 --out DIR

The text is a few lines of Hamlet, as bytes or through the tokenizer of MODEL. The saved adapter is plain peft: the last
part does not need goldsmith.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import goldsmith.hf as hf

TEXT = """To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles
And by opposing end them."""


def plain_model(name: str | None) -> torch.nn.Module:
    """MODEL, or a random model, in transformers; in float32, because peft rounds W + BA to the dtype."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def converted(name: str | None, options: argparse.Namespace) -> torch.nn.Module:
    """The model with packed experts and LoRA. A folder is streamed, so its experts never exist as floats."""
    lora = {"rank": options.rank, "alpha": 2 * options.rank}
    if name is None:
        return hf.convert(plain_model(None), format=options.format, lora=lora)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    return hf.convert(model, format=options.format, lora=lora, checkpoint=name)


def train(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    model.train()
    for step in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1:3}  loss {loss.item():.4f}")
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of a transformers MoE model")
    parser.add_argument(
        "--format", default="auto", help="format of the packed experts (default: bf16, or the codes of MODEL)"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the adapter (default: a temporary one)")
    options = parser.parse_args()
    if options.model is not None and not Path(options.model).is_dir():
        parser.error(f"MODEL {options.model}: there is no such folder")
    if options.model is None:
        tokens, text = torch.tensor([list(TEXT.encode())]), lambda ids: bytes(ids.tolist()).decode(errors="replace")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokens, text = tokenizer(TEXT, return_tensors="pt").input_ids, tokenizer.decode

    model = converted(options.model, options)
    trained = hf.trainable_report(model)["trained_parameters"]
    print(f"{trained['total']:,} parameters are trained, all of them LoRA on experts: {trained['expert_lora']:,}")
    train(model, tokens, options.steps)
    folder = options.out or Path(tempfile.mkdtemp(prefix="experts-lora-"))
    hf.save_adapter(model, folder)
    print(f"saved: {folder}")

    with warnings.catch_warnings():  # peft 0.21 warns that it ignores rank_pattern for parameters, but applies it
        warnings.filterwarnings("ignore", "The following .*_pattern keys")
        stock = PeftModel.from_pretrained(plain_model(options.model), folder)
    with torch.no_grad():
        ours, theirs = model(tokens).logits, stock(tokens).logits
    print(f"stock peft's logits differ from ours by at most {(ours - theirs).abs().max():.2g}")
    prompt = tokens[:, :8]
    made = stock.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    print(f"it goes on: {text(made[0])!r}")


if __name__ == "__main__":
    main()
