"""The batcher behind `goldsmith serve`: texts that share steps, and failures that each have one answer."""

import collections
import copy
import os
import queue
import time

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch

from cli.finetune_tools import tiny_model, tiny_tokenizer
from goldsmith.hf.experts_spec import experts_modules
from goldsmith.hf.offload import stepping
from goldsmith.hf.offload.generation import Generation, encoded, generate
from goldsmith.hf.serving import batcher
from goldsmith.hf.serving.batcher import ServingLimits
from goldsmith.hf.serving.messages import chat_prompt
from goldsmith.hf.serving.native_rows import NativeRows
from goldsmith.hf.serving.refusals import RequestRefusal
from goldsmith.hf.serving.request_fields import COMPLETIONS, read_fields
from goldsmith.hf.serving.rows import CacheKind
from goldsmith.hf.serving.running_text import RunningText
from goldsmith.hf.serving.stop_strings import StopStrings
from hf import models
from hf.batcher_runs import PROMPTS, Run, whole


@pytest.fixture
def run(tmp_path):
    running = Run(tiny_model(len(tiny_tokenizer())), tmp_path)
    yield running
    running.close()


def logits_of_steps(monkeypatch):
    """{id of a text: the logits of its steps}, filled from now on."""
    seen, step = collections.defaultdict(list), NativeRows.step

    def recorded(rows, model):
        logits = step(rows, model)
        for text, row in zip(rows.texts, logits, strict=True):
            seen[id(text)].append(row.clone())
        return logits

    monkeypatch.setattr(NativeRows, "step", recorded)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_client_has_the_logits_that_it_gets_alone(dtype, tmp_path, monkeypatch):
    """Plain texts beside texts of two adapters; some join in the middle of others, one is given up."""
    plain = tiny_model(len(tiny_tokenizer()), num_experts=2).to(dtype)
    for seed, (name, targets) in enumerate({"a": ["q_proj", "o_proj"], "b": ["v_proj"]}.items()):
        models.with_peft(plain, rank=2 + seed, target_modules=targets, seed=seed).save_pretrained(tmp_path / name)
    run = Run(plain, tmp_path, limits=ServingLimits(16, 256, 8192, 16), adapters=[tmp_path / "a", tmp_path / "b"])
    try:
        requests = [(prompt * (1 + i), adapter) for i, adapter in enumerate(("a", None, "b")) for prompt in PROMPTS]
        seen, alone = logits_of_steps(monkeypatch), []
        for prompt, adapter in requests:
            text = run.text(prompt, 24, adapter)
            alone.append((whole(text), seen.pop(id(text))))
        assert len({text for text, _ in alone}) == len(alone) and all(len(logits) == 23 for _, logits in alone)
        given_up = run.text("Rough", 200)
        texts = []
        for prompt, adapter in [*requests, *requests[3:6]]:  # ten plain texts at once: more than a native call takes
            texts.append(run.text(prompt, 24, adapter))
            while len(texts) % 4 == 0 and len(seen[id(texts[-1])]) < 2:  # the others join later
                time.sleep(0.001)
        run.batcher.cancel(given_up)
        for text, (want, logits) in zip(texts, [*alone, *alone[3:6]], strict=True):
            assert whole(text) == want
            assert all(map(torch.equal, seen[id(text)], logits)) and len(seen[id(text)]) == len(logits)
        assert 1 < len(seen[id(given_up)]) < 199 and run.offloaded.model.forward.why_not == ""
    finally:
        run.close()


def test_a_step_that_fails_and_a_model_that_is_changed_go_on_with_the_same_text(run, monkeypatch):
    want = [run.generated(prompt, 60) for prompt in PROMPTS]
    seen, step, hooks = logits_of_steps(monkeypatch), stepping.StepForward.step_sequences, []

    def fails_once(forward, tokens, sequences):
        logits = step(forward, tokens, sequences)
        if len(tokens) == 2 and not hooks:
            hooks.append(run.offloaded.model.model.layers[0].self_attn)
            raise torch.OutOfMemoryError("out of memory, on purpose, after the keys were written")
        return logits

    monkeypatch.setattr(stepping.StepForward, "step_sequences", fails_once)
    texts = [run.text(prompt, 60) for prompt in PROMPTS[:2]]
    assert [whole(text) for text in texts] == want[:2] and len(hooks) == 1
    assert {len(seen[id(text)]) for text in texts} == {59}
    texts = [run.text(prompt, 60) for prompt in PROMPTS]
    while len(seen[id(texts[2])]) < 5:
        time.sleep(0.001)
    hook = hooks[0].register_forward_hook(lambda *_: None)
    assert [whole(text) for text in texts] == want
    assert "has a hook" in run.offloaded.model.forward.why_not and len(seen[id(texts[2])]) < 59
    hook.remove()


def during(model, work):
    """Calls work(rows) before the experts of the last layer compute."""
    *_, (_, last) = experts_modules(model)
    return last.register_forward_pre_hook(lambda module, arguments: work(arguments[0]))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_texts_that_share_steps_are_those_of_generate(family, tmp_path):
    """gpt-oss attends to the last keys only, so its texts take turns instead; long prompts come in chunks."""
    name, kind, options = models.FAMILIES[family]
    import transformers

    more = {"layer_types": ["sliding_attention"], "sliding_window": 8} if family == "gpt_oss" else {}
    sizes = models.COMMON | options | more | {"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 2048}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, name)(**sizes)).eval()
    run = Run(model, tmp_path, limits=ServingLimits(4, 2048, 8192, 8))
    try:
        assert CacheKind(run.offloaded.model).joined == (family != "gpt_oss")
        prompts = [*PROMPTS, "long " * 150]
        want = [run.generated(prompt) for prompt in prompts]
        texts = [run.text(prompt) for prompt in prompts]
        assert [whole(text) for text in texts] == want
    finally:
        run.close()


def by_length(kind):
    """A tiny model whose angles depend on the length of the text, from 24 tokens on."""
    import transformers

    if kind == "dynamic":
        ropes = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
        return tiny_model(len(tiny_tokenizer()), max_position_embeddings=24, rope_parameters=ropes)
    ropes = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)], "short_mscale": 1.0, "long_mscale": 1.5,
    }  # fmt: skip
    sizes = dict(models.COMMON, vocab_size=len(tiny_tokenizer()), max_position_embeddings=256, num_hidden_layers=2)
    sizes["eos_token_id"] = None
    torch.manual_seed(0)
    return transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(
            **sizes, intermediate_size=24, num_local_experts=4, rope_parameters=ropes,
            original_max_position_embeddings=24, sliding_window=None,
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_those_of_each_text_alone(kind, tmp_path, monkeypatch):
    """transformers keeps the angles of the longest text for the next one, and takes one length for a whole call."""
    model = by_length(kind).eval()
    for parameter in model.parameters():  # attention that depends on angles
        parameter.data.mul_(3) if parameter.dim() > 1 else parameter.data.add_(0.1)
    tokenizer, prompts, want = tiny_tokenizer(), [PROMPTS[2] * 2, *reversed(PROMPTS), "Rough winds, Thou " * 2], []
    for prompt in prompts:
        ids = encoded(tokenizer, [prompt])["input_ids"]
        wish = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        fresh = copy.deepcopy(model).generate(ids, **wish)
        want.append(tokenizer.decode(fresh[0, ids.shape[1] :], skip_special_tokens=True))
    monkeypatch.setattr(batcher, "CHUNK", 16)
    run = Run(model, tmp_path)
    try:
        assert [whole(run.text(prompt, 20)) for prompt in prompts] == want
        assert [whole(text) for text in [run.text(prompt, 20) for prompt in prompts]] == want
        generation = Generation([])
        generate(
            run.offloaded.model, tokenizer, prompts, generation=generation, inputs=encoded(tokenizer, prompts),
            max_new_tokens=20,
        )  # fmt: skip
        assert [output.text for output in generation.outputs] == want
    finally:
        run.close()


def test_the_chunks_of_a_prompt_do_not_depend_on_who_else_has_one(tmp_path, monkeypatch):
    """Chunks that end elsewhere round differently, so the same request could get another text."""
    model = tiny_model(len(tiny_tokenizer()), max_position_embeddings=1024)
    run = Run(model, tmp_path, limits=ServingLimits(4, 1024, 4096, 8))
    try:
        sizes, call = [], stepping.StepForward.__call__

        def recorded(forward, *arguments, **options):
            sizes.append((arguments[0] if arguments else options["input_ids"]).shape[1])
            return call(forward, *arguments, **options)

        monkeypatch.setattr(stepping.StepForward, "__call__", recorded)
        long = "x" * 600
        assert whole(run.text(long, 1)) == run.generated(long, 1) and sizes == [512, 88] * 2  # generate's are the same
        held = during(model, lambda rows: time.sleep(0.01))
        texts = [run.text("Thou", 1), run.text(long, 1), run.text(long, 1)]
        assert all(map(whole, texts))
        held.remove()
        assert sorted(size for size in sizes[4:] if size > 4) == [88, 88, 512, 512]
    finally:
        run.close()


def test_sampling_and_penalties_are_those_of_generate(run):
    config = run.offloaded.model.generation_config
    config.repetition_penalty, config.no_repeat_ngram_size, config.min_new_tokens = 1.3, 3, 5
    wishes = [{"temperature": 0.9, "seed": seed, "top_p": 0.95, "top_k": 50} for seed in range(3)] + [{}]
    want = [run.generated("Thou", **wish) for wish in wishes]
    texts = [run.text("Thou", **wish) for wish in wishes]
    assert [whole(text) for text in texts] == want
    assert len(set(want)) == 4


def test_a_step_without_memory_fails_for_its_cause_alone(run):
    """The step of all rows fails, then each row has its own: the row that still fails is refused, the others go on."""
    want = [run.generated(prompt) for prompt in PROMPTS]
    failures = []

    def fail_once(rows):
        if rows.shape[0] == 2 and not failures:
            failures.append(rows)
            raise torch.OutOfMemoryError("out of memory, on purpose")

    hook = during(run.offloaded.model, fail_once)
    texts = [run.text(prompt) for prompt in PROMPTS[:2]]
    assert [whole(text) for text in texts] == want[:2] and failures
    hook.remove()

    def fail_for_long_prompts(rows):
        if rows.shape[0] > 10:
            raise MemoryError

    hook = during(run.offloaded.model, fail_for_long_prompts)
    good, bad = run.text("Thou"), run.text(PROMPTS[2])
    refusal = whole(bad)
    assert (refusal.status, refusal.code) == (507, "out_of_memory") and refusal.sentence.startswith("Out of memory:")
    assert whole(good) == want[1]
    hook.remove()
    assert whole(run.text(PROMPTS[2])) == want[2]


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_row_without_probabilities_and_a_join_without_memory_hurt_no_other_row(own_forward, run, monkeypatch):
    """Rows of different lengths: the longest has not had its token when another one fails."""
    if own_forward:  # a model with hooks has no native step
        during(run.offloaded.model, lambda rows: None)
    prompts = [PROMPTS[1], PROMPTS[2]]
    want = [run.generated(prompt) for prompt in prompts]
    choose = RunningText.next_token

    def fails(text, logits):
        if text.new_tokens == 5:
            raise ArithmeticError("the largest logit is nan")
        return choose(text, logits)

    monkeypatch.setattr(RunningText, "next_token", fails)
    bad = run.text("Thou art", temperature=1.0)
    good = [run.text(prompt) for prompt in prompts]
    assert whole(bad).status == 500 and [whole(text) for text in good] == want
    monkeypatch.undo()
    if own_forward:
        place, name, fails_at = torch, "cat", 3  # two of a join in the first layer
    else:
        place, name, fails_at = stepping, "SequenceCache", 2  # the second text's
    own, calls = getattr(place, name), []

    def no_memory(*arguments, **options):
        first = arguments[0]
        joins = len(arguments) == 1 and not options and isinstance(first, tuple) and first[0].dim() == 4
        if joins or name != "cat":
            calls.append(first)
            if len(calls) == fails_at:
                raise torch.OutOfMemoryError("out of memory, on purpose")
        return own(*arguments, **options)

    monkeypatch.setattr(place, name, no_memory)
    texts = [run.text(prompt) for prompt in prompts]
    first, second = whole(texts[0]), whole(texts[1])
    assert len(calls) == fails_at and first == want[0] and second.status == 507


def test_a_prompt_under_way_ends_between_two_layers(run):
    """Both for a client that has gone and for the end of the server; an answer does not wait for the call."""
    entered = queue.Queue()
    *_, (_, last) = experts_modules(run.offloaded.model)
    first = next(iter(experts_modules(run.offloaded.model)))[1]

    def wait(module, arguments):
        entered.put(None)
        time.sleep(0.3)

    reached = []
    hooks = [first.register_forward_pre_hook(wait), last.register_forward_hook(lambda *_: reached.append(1))]
    gone = run.text(PROMPTS[0])
    entered.get(timeout=10)
    run.batcher.cancel(gone)
    later = run.text(PROMPTS[1])
    entered.get(timeout=10)
    assert not reached
    begun = time.monotonic()
    run.batcher.stop(RequestRefusal(503, "The server is ending."))
    assert whole(later).sentence == "The server is ending." and time.monotonic() - begun < 0.2
    assert run.batcher.join(10) and not reached
    with pytest.raises(RequestRefusal, match="The server is ending"):
        run.text(PROMPTS[0])
    for hook in hooks:
        hook.remove()


def test_a_full_queue_is_refused_and_requests_wait_for_room(tmp_path):
    run = Run(tiny_model(len(tiny_tokenizer())), tmp_path, limits=ServingLimits(2, 128, 128, 3))
    try:
        want = run.generated("Thou", 60)
        seen = []
        hook = during(run.offloaded.model, lambda rows: seen.append(rows.shape[0]))
        texts = []
        with pytest.raises(RequestRefusal, match="3 requests are waiting already: try again later") as caught:
            for _ in range(20):
                texts.append(run.text("Thou", 60))
        assert caught.value.status == 503
        assert {whole(text) for text in texts} == {want}
        assert max(size for size in seen if size <= 2) == 2  # two of 64 tokens have room, not three
        hook.remove()
    finally:
        run.close()


@pytest.mark.parametrize("which", ["store", "model"])
def test_a_file_that_changes_under_the_server_ends_its_texts(which, tmp_path):
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "config.json"
    weights.write_text("{}")
    run = Run(tiny_model(len(tiny_tokenizer())), tmp_path, files=[tmp_path / "model"])
    try:
        changed = tmp_path / "store" if which == "store" else weights
        state = {"calls": 0}

        def change(rows):
            state["calls"] += 1
            if state["calls"] == 5:
                os.utime(changed, ns=(1, 1))

        during(run.offloaded.model, change)
        text = run.text("Thou", 200)
        refusal = whole(text)
        assert refusal.status == 503 and text.new_tokens == 4  # the token of the step in which it changed is not sent
        assert refusal.sentence.endswith(
            "has changed since the server started, and its text could be wrong: start it again."
        )
        with pytest.raises(RequestRefusal, match="has changed"):
            run.text("Thou")
    finally:
        run.close()


def test_a_store_that_is_replaced_or_deleted_does_no_harm(run, tmp_path):
    want = run.generated("Thou")
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", tmp_path / "store")
    assert whole(run.text("Thou")) == want
    os.unlink(tmp_path / "store")
    assert whole(run.text("Thou")) == want


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_is_found_across_pieces(cut):
    text, stop = "one two three", "two t"
    stops = StopStrings([stop, "unseen"])
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert "".join(map(stops.add, pieces)) + stops.end() == "one " and stops.found
    other = StopStrings(["three!"])
    assert "".join(map(other.add, pieces)) + other.end() == text and not other.found


def test_a_template_gets_all_keys_of_a_message():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.name }}:{{ m.content }};{% endfor %}"
    parts = [{"type": "text", "text": "Thou"}]
    body = {"messages": [{"role": "user", "name": "Anne", "content": parts}]}
    assert tokenizer.decode(chat_prompt(tokenizer, body)[0]) == "Anne:Thou;"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, [], {}, "1"])
def test_a_field_of_another_type_is_refused(value):
    for field in ("temperature", "top_p", "max_tokens", "seed", "top_k"):
        with pytest.raises(RequestRefusal, match=field):
            read_fields({"prompt": "x", field: value}, COMPLETIONS)
