"""What the tests of fine-tuning share: a tiny model, a tiny tokenizer, documents."""

import random

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from goldsmith.hf.training.data.documents import Document
from goldsmith.hf.training.data.packing import RowStream
from goldsmith.hf.training.records import journal
from goldsmith.hf.training.run.schedule import Schedule
from goldsmith.hf.training.run.session import LOG, RunCallbacks, TrainingSession
from goldsmith.hf.training.run.trainer import Trainer
from goldsmith.hf.training.run.training_steps import TrainingSteps

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
VERSE = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate.

Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date.

Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;

And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;

But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
"""


def tiny_tokenizer():
    """One token a byte, and some special ones, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: k for k, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    tokenizer.chat_template = CHAT
    return tokenizer


def tiny_model(vocabulary=264, seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | options)))
    model.set_experts_implementation("eager")  # the default takes no float64
    return model


def saved_model(folder, **options):
    """A folder with a tiny model, whose weights bfloat16 holds exactly, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), **options).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def saved_place(folder):
    """A folder with a tiny model and a text."""
    saved_model(folder / "model")
    (folder / "verse.txt").write_text(VERSE)
    return folder


def tiny_documents(count=12, vocabulary=60, seed=0, least=2, most=12):
    draw = random.Random(seed)
    sizes = [draw.randint(least, most) for _ in range(count)]
    return [Document([draw.randrange(vocabulary) for _ in range(n)], [True] * n, True) for n in sizes]


def tiny_trainer(steps=6, *, seed=0, grad_accum=1, batch_size=2, limit=None, kind="cosine", lr=1e-2):
    model = tiny_model(64, num_hidden_layers=1, attention_dropout=0.1)
    parameters = {n: p for n, p in model.named_parameters() if "experts" in n or n.endswith("gate.weight")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parameters)
    stream = RowStream(tiny_documents(), 16, packed=True, seed=seed)
    training_steps = TrainingSteps(steps, batch_size, grad_accum, Schedule(kind, lr, 1, steps), limit)
    return Trainer(model, parameters, stream, training_steps)


# a run in this process

IDENTITY = {"--rank": 8, "--data": "sum"}


def session(folder, **options):
    return TrainingSession(folder, options.pop("identity", IDENTITY), {"threads": 1}, **({"save_every": 2} | options))


def trained(folder, steps=6, resume="auto", **options):
    """A whole run in this process; returns what it trained."""
    training = session(folder, **options)
    start = training.find(resume, RunCallbacks())
    trainer = tiny_trainer(steps)
    training.run(
        trainer, RunCallbacks(), start=start, evaluation=RowStream(tiny_documents(4, seed=9), 16, packed=True, seed=0)
    )
    return {name: tensor for name, tensor in trainer.state().items()}


def rows_without_times(folder):
    """The log without what a clock says."""
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in journal.rows(folder / LOG)
    ]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
