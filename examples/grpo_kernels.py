"""GRPO with the gate as its reward: a model that writes kernels learns from verdicts, not from a loose comparison.

    python examples/grpo_kernels.py                         a toy model, on a CPU, in a minute
    python examples/grpo_kernels.py --model NAME --steps N  a language model of yours

The toy writes two words at random: "def candidate(x): return x" and one more. Only "+ x" and "* 2" double x.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from goldsmith.assay import gate

PROBLEM = """
from goldsmith import assay

def golden(x):
    return 2 * x

@assay.case(T=[1, 7])
def cases(make, T):
    return {"x": make.normal(T)}
"""
PROMPT = "Write candidate(x), which doubles a tensor."
WORDS = ("def candidate(x): return x", "+ x", "* 2", "* x", "+ 2", "- x", "/ 2", "")


def toy():
    """(model, tokenizer) with one token for each of the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([PROMPT, "<end>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PROMPT))
    inner.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    inner.decoder = decoders.WordPiece(prefix="", cleanup=False)  # joined with spaces
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=1, eos_token_id=1, bos_token_id=None, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), tokenizer


def train(folder, model, tokenizer, *, steps, rows, length, rate):
    """Trains, and returns the mean reward of each step."""
    problem = Path(folder) / "double.py"
    problem.write_text(PROBLEM)
    reward = gate.reward(problem, scores={"accepted": 1.0, "wrong": 0.1}, options=gate.GateOptions(probes="quick"))
    config = GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=rows, num_generations=rows,
        max_completion_length=length, learning_rate=rate, lr_scheduler_type="constant", logging_steps=1,
        report_to="none", save_strategy="no",
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), disable_tqdm=True, seed=1,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": PROMPT}] * rows)
    trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=reward, args=config, train_dataset=data)
    trainer.train()
    reward.close()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a causal language model; default: the toy")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer, sizes = AutoTokenizer.from_pretrained(arguments.model), {"rows": 8, "length": 1024, "rate": 1e-6}
    else:
        (model, tokenizer), sizes = toy(), {"rows": 16, "length": 2, "rate": 0.03}
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(folder, model, tokenizer, steps=arguments.steps, **sizes)
    print("mean reward by step:", " ".join(f"{value:.2f}" for value in rewards))


if __name__ == "__main__":
    main()
