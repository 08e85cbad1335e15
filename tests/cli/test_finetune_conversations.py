"""Which tokens of a conversation count: all that hold a character of the assistant's, whatever the tokenizer is."""

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cli.finetune_tools import CHAT
from goldsmith.hf.training.data.conversations import conversation

CODE = "if x:\n\n    return  y\n\n\tand  more  \n"
TURNS = [
    ("user", "hi there"),
    ("assistant", CODE),
    ("user", "  again"),
    ("assistant", "   \N{GRINNING FACE} caf\xe9 \ufb01n  "),
]
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [CODE, "hi there again, return and more", "   x\n\n    y\n\n\t\t"] * 20
ROLES = ("<|user|>", "<|assistant|>", "<|end|>")
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_level(after=None, regex=True):
    """GPT-2's, Qwen's, Llama 3's; `after` is what trims the places of its tokens, or does not."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    if after is not None:
        inner.post_processor = after
    return inner


def byte_fallback():
    """Llama 2's, Mixtral's: blanks are a letter of their own, an unknown character is its bytes."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", *BYTES], show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def unigram():
    """SentencePiece's other kind, with letters that are taken apart first."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer, inner.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def pieces():
    """BERT's, which has no token for a blank."""
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


TRIMMED = {
    "ByteLevel": processors.ByteLevel(trim_offsets=True),
    "Roberta": processors.RobertaProcessing(("<|end|>", 2), ("<|user|>", 0), trim_offsets=True),
    "Sequence": processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("$A")]),
}
KINDS = {
    "byte level": byte_level,
    "without a regular expression": lambda: byte_level(regex=False),
    "untrimmed": lambda: byte_level(processors.ByteLevel(trim_offsets=False)),
    **{f"trimmed by {name}": lambda after=after: byte_level(after) for name, after in TRIMMED.items()},
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "word pieces": pieces,
}


def tokenizer_of(inner, template=CHAT, **how):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens(
        [AddedToken(role, special=True, normalized=False, **how) for role in ROLES], special_tokens=True
    )
    tokenizer.chat_template = template
    return tokenizer


def messages(turns=TURNS):
    return [{"role": role, "content": content} for role, content in turns]


def counted(tokenizer, turns=TURNS):
    """Runs of tokens that count."""
    runs, before = [], False
    for token, counts in zip(*conversation(messages(turns), tokenizer)):
        if counts:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = counts
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_trained_tokens_agree_with_transformers_own_mask(kind):
    """Whose places must not be trimmed, nor an answer begin with a blank without a token: it then marks nothing."""
    tokenizer = tokenizer_of(KINDS[kind](), MARKED)
    turns = messages([(role, message.strip()) for role, message in TURNS] if kind == "word pieces" else TURNS)
    before = str(tokenizer.backend_tokenizer.post_processor)
    ids, counts = conversation(turns, tokenizer)
    assert str(tokenizer.backend_tokenizer.post_processor) == before
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    marks = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    theirs = tokenizer.apply_chat_template(turns, **marks)
    assert ids == theirs["input_ids"] and counts == [bool(mark) for mark in theirs["assistant_masks"]]


@pytest.mark.parametrize("kind", KINDS)
def test_trained_tokens_are_each_answer_and_its_end_token(kind):
    """With special tokens on both sides no token crosses a border: an answer's tokens are those that it has alone."""
    tokenizer = tokenizer_of(KINDS[kind]())
    alone = [
        tokenizer(f"<|assistant|>{message}<|end|>", add_special_tokens=False)["input_ids"][1:] for _, message in TURNS
    ]
    assert counted(tokenizer) == alone[1::2]


@pytest.mark.parametrize("after", TRIMMED.values(), ids=TRIMMED)
def test_indentation_is_trained_on(after):
    tokenizer = tokenizer_of(byte_level(after))
    output = "".join(tokenizer.convert_ids_to_tokens([token for run in counted(tokenizer) for token in run]))
    assert output.startswith("if\u0120x:\u010a\u010a\u0120\u0120\u0120\u0120return\u0120\u0120y\u010a\u010a\u0109and")
    assert output.endswith("n\u0120\u0120<|end|>") and "<|end|>\u0120\u0120\u0120" in output


@pytest.mark.parametrize("after", [None, TRIMMED["ByteLevel"]], ids=["untrimmed", "trimmed"])
def test_a_word_token_that_includes_the_blank_before_it_is_trained_on(after):
    """`assistant: ` is asked with, and the first word of the answer takes that blank into its token."""
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = tokenizer_of(byte_level(after), turns + "{% if add_generation_prompt %}assistant: {% endif %}")
    (run,) = counted(tokenizer, [("user", "hi"), ("assistant", "return more")])
    assert tokenizer.convert_ids_to_tokens(run)[0] == "\u0120return"


def test_special_tokens_that_swallow_blanks_are_not_trained_on():
    """Phi-3's take the blanks after them, some the blanks before; a template without an end has both borders bare."""
    template = CHAT.replace("<|end|>", "")
    for how in ({"rstrip": True}, {"lstrip": True}):
        tokenizer = tokenizer_of(byte_level(), template, **how)
        run, last = counted(tokenizer)
        assert not {"<|user|>", "<|assistant|>"} & set(tokenizer.convert_ids_to_tokens(run + last)), how
        assert tokenizer.decode(run).strip() == CODE.strip() and "fin" in tokenizer.decode(last).replace("\ufb01", "fi")


def test_blanks_that_end_only_the_last_turn_do_not_shift_other_turns():
    """The last turn ends with a line; where more follows, the next role stands there instead."""
    template = CHAT.replace(
        "{% endfor %}", "{% if loop.last and not add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(byte_level(), template)
    first, last = (tokenizer.decode(run) for run in counted(tokenizer))
    assert first == CODE + "<|end|>" and last.endswith("<|end|>\n")


def test_the_assistants_name_is_not_trained_on_if_it_speaks_first():
    template = "<|user|>\n" + CHAT.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>name:\n")
    tokenizer = tokenizer_of(byte_level(), template)
    assert [tokenizer.decode(run) for run in counted(tokenizer, TURNS[1:2])] == [CODE + "<|end|>"]


def test_a_tokenizer_without_offsets_is_rejected():
    class Slow:
        chat_template = CHAT

        def apply_chat_template(self, turns, **how):
            return tokenizer_of(byte_level()).apply_chat_template(turns, **how)

    with pytest.raises(ValueError, match="no fast version and cannot report"):
        conversation(messages(), Slow())
