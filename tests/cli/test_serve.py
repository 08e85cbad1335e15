"""`goldsmith serve` with the real openai client: generate's text, several at once, refusals, the end."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason="comes with the extra serve")

import openai
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cli.finetune_tools import tiny_model, tiny_tokenizer
from goldsmith.cli import app
from hf.models import randomise
from repo.tree import ROOT

CONTEXT = 256
HELLO = [{"role": "user", "content": "Hello"}]


def saved(folder, **options):
    """A tiny model in float32, in which no two logits tie, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer), **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module", autouse=True)
def cache(place):
    before = os.environ.get("GOLDSMITH_CACHE")
    os.environ["GOLDSMITH_CACHE"] = str(place / "cache")
    yield
    if before is None:
        del os.environ["GOLDSMITH_CACHE"]
    else:
        os.environ["GOLDSMITH_CACHE"] = before


@pytest.fixture(scope="module")
def model(place):
    return saved(place / "tiny")


@pytest.fixture(scope="module")
def adapter(model, place):
    config = LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], target_modules=["q_proj"], r=3)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    randomise(theirs, 0)
    theirs.save_pretrained(place / "lora")
    return place / "lora"


class Server:
    """A server process, its client, and what it printed when it was ready."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "goldsmith", "serve", "--device", "cpu", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [*command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        self.ready = json.loads(line)
        self.port = int(self.ready["url"].rpartition(":")[2].partition("/")[0])
        self.client = openai.OpenAI(base_url=self.ready["url"], api_key="none", max_retries=0, timeout=60)

    def end(self, sent=signal.SIGINT):
        """(exit status, stderr, seconds) after a signal."""
        begun = time.monotonic()
        self.process.send_signal(sent)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err, time.monotonic() - begun


@pytest.fixture(scope="module")
def server(model, adapter):
    running = Server(model, "--adapter", f"lora={adapter}")
    yield running
    running.client.close()
    status, err, _ = running.end()
    assert status == 0, err
    assert "Stopped after" in err and "Traceback" not in err


def generated(model, prompt, *words, tokens=24):
    """The text of `goldsmith generate`."""
    fixed = ["--device", "cpu", "--json", "--max-new-tokens", str(tokens), "--prompt", prompt]
    done = CliRunner().invoke(app, ["generate", str(model), *fixed, *map(str, words)])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)["outputs"][0]


def completed(server, prompt, *, model="tiny", tokens=24, **fields):
    return server.client.completions.create(model=model, prompt=prompt, max_tokens=tokens, **fields).choices[0]


def test_a_text_is_that_of_generate(server, model, adapter):
    want = generated(model, "Shall I compare")
    have = server.client.completions.create(model="tiny", prompt="Shall I compare", max_tokens=24)
    assert (have.choices[0].text, have.choices[0].finish_reason) == (want["text"], want["finish_reason"])
    assert (have.usage.prompt_tokens, have.usage.completion_tokens) == (15, len(want["tokens"]))
    drawn = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed", "7")
    fields = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "extra_body": {"top_k": 20}}
    assert completed(server, "Thou art", **fields).text == generated(model, "Thou art", *drawn)["text"]
    with_lora = generated(model, "Shall I compare", "--adapter", adapter)
    assert completed(server, "Shall I compare", model="lora").text == with_lora["text"] != want["text"]


def test_a_chat_is_that_of_generate_whole_and_streamed(server, model):
    want = generated(model, "Hello", "--chat")["text"]
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 24}
    whole = server.client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == want
    count = {"include_usage": True}
    *chunks, last = list(server.client.chat.completions.create(**ask, stream=True, stream_options=count))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage) and not any(chunk.usage for chunk in chunks)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert server.client.chat.completions.create(**ask | {"messages": parts}).choices[0].message.content == want


def test_requests_at_once_share_steps_and_change_no_text(server, model):
    prompts = ["Shall I compare", "Thou", "Rough winds do shake the darling buds", "And", "x" * 90, "Sometime too"]
    alone = [completed(server, prompt, tokens=40).text for prompt in prompts]
    names = ["tiny", "lora"] * 3
    with_lora = [completed(server, prompt, model=name, tokens=40).text for prompt, name in zip(prompts, names)]
    with ThreadPoolExecutor(12) as pool:
        plain = [pool.submit(completed, server, prompt, tokens=40) for prompt in prompts]
        mixed = [pool.submit(completed, server, p, model=n, tokens=40) for p, n in zip(prompts, names)]
        assert [done.result().text for done in plain] == alone
        assert [done.result().text for done in mixed] == with_lora


def test_a_stop_string_ends_the_text_before_it(server):
    text = completed(server, "Shall I compare").text
    stop = text[5:8]
    want = text[: text.index(stop)]
    whole = completed(server, "Shall I compare", stop=[stop, "never to be seen"])
    assert (whole.text, whole.finish_reason) == (want, "stop")
    ask = {"model": "tiny", "prompt": "Shall I compare", "max_tokens": 24, "stop": stop, "stream": True}
    *chunks, last = list(server.client.completions.create(**ask, stream_options={"include_usage": True}))
    assert last.choices == [] and last.usage.completion_tokens > 0 and not any(chunk.usage for chunk in chunks)
    assert not any(chunk.usage for chunk in server.client.completions.create(**ask))
    assert "".join(chunk.choices[0].text for chunk in chunks) == want
    assert chunks[-1].choices[0].finish_reason == "stop"


def refused(server, *, path="completions", **body):
    """(status, sentence) of a request that gets no text."""
    with pytest.raises(openai.APIStatusError) as caught:
        server.client.post(f"/{path}", body=body, cast_to=dict)
    sentence = caught.value.body["message"]
    assert sentence.endswith(".") and "\n" not in sentence
    return caught.value.status_code, sentence


def test_what_is_not_supported_is_refused_by_name(server, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    status, text = refused(server, model="other", prompt="x")
    assert (status, text) == (404, "The model 'other' is not served here; served: tiny, lora.")
    for name in (str(tmp_path), "../tiny", "tiny@main"):
        assert refused(server, model=name, prompt="x")[0] == 404
    assert refused(server, model="tiny", prompt="x" * (CONTEXT + 1)) == (
        400,
        "The prompt has 257 tokens, but this server takes at most 256, one of them for the text: shorten the prompt.",
    )
    status, text = refused(server, model="tiny", prompt="x" * 250, max_tokens=7)
    assert status == 400 and text.endswith("give max_tokens of at most 6.")
    for url in (secret.as_uri(), str(secret), "http://127.0.0.1:1/x.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        status, text = refused(
            server, path="chat/completions", model="tiny", messages=[{"role": "user", "content": [part]}]
        )
        assert (status, text.split(":")[0]) == (400, "messages") and "text only" in text
    fields = [
        {"n": 2}, {"logprobs": 3}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"echo": True},
        {"suffix": "end"}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"max_tokens": 0},
        {"max_tokens": True}, {"stop": [""]}, {"stop": 5}, {"seed": 2**70}, {"unknown": 1}, {"prompt": ["a", "b"]},
        {"prompt": {}}, {"prompt": [10**6]}, {"temperature": 10**400}, {"top_p": 10**400}, {"max_tokens": 10**4000},
        {"stop": 0}, {"stop": False}, {"stop": {}}, {"user": {}}, {"metadata": 5},
        {"stream_options": {"x": 1}}, {"generation_config": '{"compile": 1}'},
    ]  # fmt: skip
    for field in fields:
        status, text = refused(server, **{"model": "tiny", "prompt": "x", **field})
        assert status == 400 and (next(iter(field)) in text or "prompt" in field) and len(text) < 300, text
    for empty in ([], [[]]):
        assert "the list is empty" in refused(server, model="tiny", prompt=empty)[1]
    assert completed(server, "x", stop=[]).text == completed(server, "x", extra_body={"stop": None}).text
    ask = {"path": "chat/completions", "model": "tiny", "messages": HELLO}
    for name in ("messages", "conversations", "tokenizer", "documents", "y" * 5000):
        status, text = refused(server, **ask, chat_template_kwargs={name: [] if "y" in name else "x"})
        assert status == 400 and text.startswith(f"chat_template_kwargs: {name[:50]}") and len(text) < 200, text
    status, text = refused(server, model="tiny", prompt="x", temperature=1e-320)
    assert (
        status == 400
        and text.startswith("temperature: the largest logit")
        and text.endswith("Give a higher one, or 0.")
    )
    assert refused(server, model="x" * 5000, prompt="x")[1].startswith("The model 'xxx")
    assert max(len(refused(server, **{name: "x" * 5000})[1]) for name in ("model", "y" * 5000, "stop")) < 200
    for fields in (
        {"messages": []}, {"messages": [{"content": "x"}]}, {"messages": [{"role": "user", "content": 5}]},
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"messages": HELLO, "tool_choice": "required"},
    ):  # fmt: skip
        assert refused(server, path="chat/completions", model="tiny", **fields)[0] == 400


def raw(server, text, *, wait=5.0):
    """The bytes that the server sends for these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        connection.sendall(text)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except TimeoutError:
            pass
    return received


def state(server):
    """What /health says."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    return json.loads(raw(server, request).partition(b"\r\n\r\n")[2])


def posted(body, *, kind="application/json", host="127.0.0.1", length=None):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def test_garbage_and_a_client_that_hangs_hurt_nobody(server):
    hanging = socket.create_connection(("127.0.0.1", server.port))
    hanging.sendall(posted(b"", length=100))  # it never sends its body
    for body, part in (
        (b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[" * 100_000, "is not JSON"), (b"[]", "a list"),
        (b'{"model": NaN}', "is not JSON"), (b"null", "null"), (rb'{"prompt": ["\ud800"]}', "half of a pair"),
    ):  # fmt: skip
        answer = raw(server, posted(body)).decode()
        assert answer.startswith("HTTP/1.1 400") and part in answer
    assert "Content-Type: application/json" in raw(server, posted(b"{}", kind="text/plain")).decode()
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"):
        assert b"The server is not called" in raw(server, posted(b"{}", host=host))
    for host in ("localhost", "LOCALHOST:80", f"127.0.0.1:{server.port}", "[::1]:5", "[::1]"):
        assert b"messages" not in (answer := raw(server, posted(b"[]", host=host))) and b"a list" in answer
    answer = raw(server, b"\x00\x01garbage\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b'"error": {"message": "What arrived is no request' in answer
    assert raw(server, posted(b"x" * (9 * 2**20))).startswith(b"HTTP/1.1 413")
    for path in ("/reset", "/v1/responses", "/v1/audio/transcriptions", "/etc/passwd"):
        answer = raw(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404") and b"server_error" not in answer
    assert completed(server, "Thou", tokens=4).text
    hanging.close()


def test_models_are_listed_and_transformers_chat_finds_them(server):
    assert [model.id for model in server.client.models.list()] == ["tiny", "lora"]
    assert server.client.models.retrieve("lora").id == "lora"
    body = json.dumps({"model": "tiny"}).encode()
    request = posted(body).replace(b"/v1/completions", b"/load_model")
    assert b'data: {"status": "ready", "model": "tiny", "cached": true}' in raw(server, request)
    wish = json.dumps({"do_sample": False, "max_new_tokens": 5, "transformers_version": "5.23.0"})
    asked = server.client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"generation_config": wish})
    assert asked.usage.completion_tokens == 5


def test_the_clients_of_the_page_work(server, capsys):
    page = (ROOT / "docs" / "serve.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(block.replace("http://127.0.0.1:8000/v1", server.ready["url"]).replace("shakespeare-moe", "tiny"), {})
    assert capsys.readouterr().out.count("32") >= 1
    addresses = re.findall(r"^\| `(?:GET|POST) (/\S+)`", page, re.M)
    assert addresses == ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health"]


def test_a_client_that_disconnects_costs_no_further_steps(server):
    before = state(server)["tokens"]
    stream = server.client.completions.create(model="tiny", prompt="Thou", max_tokens=250, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while (now := state(server))["running"]:
        assert time.monotonic() < deadline
    assert now["tokens"] - before < 250


def test_a_store_is_shared_with_commands_that_run_beside(server, model):
    """generate finds the server's store in the cache folder, and builds none."""

    def stores():
        files = (path for path in (model.parent / "cache").rglob("*") if path.is_file())
        return {path.name: path.stat().st_ino for path in files}

    before = stores()
    generated(model, "Hello", tokens=3)
    assert stores() == before and before


def test_memory_is_stated_before_and_measured_after(server):
    needs, takes = server.ready["needs"], server.ready["takes"]
    assert takes["own"] > needs["program"] + needs["dense"] and needs["available"] > takes["own"]
    assert server.ready["limits"] == {"parallel": 16, "context": CONTEXT, "tokens": 16 * CONTEXT, "queue": 64}


def drops_what_has_no_memory(server):
    """The keys and values of one request cannot be had, for real: it is refused, and others have their text."""
    pid, kind = server.process.pid, resource.RLIMIT_AS
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (pages * resource.getpagesize() + 2**27, before[1]))
    want = completed(server, "Thou", model="long", tokens=30).text
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(completed, server, "Thou", model="long", tokens=30)
        status, text = refused(server, model="long", prompt="Shall I", max_tokens=900_000)
        assert status == 507 and text.startswith("Out of memory: the server dropped this request.")
        assert other.result().text == want
    resource.prlimit(pid, kind, before)


def test_a_text_that_takes_long_to_read_holds_up_no_other(server):
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(refused, server, model="tiny", prompt="x" * 1_000_000)
        while not long.running():
            pass
        assert completed(server, "Thou", tokens=2) and not long.done()
        assert long.result()[0] == 400


def test_without_memory_one_request_is_dropped_and_ctrl_c_answers_every_other(place):
    """Two that run, one of them streamed, and two that wait."""
    own = Server(saved(place / "long", max_position_embeddings=10**6), "--parallel", "2", "--total-tokens", "1000000")
    drops_what_has_no_memory(own)
    ask = {"model": "long", "prompt": "Thou", "max_tokens": 400_000}
    stream = iter(own.client.completions.create(**ask, stream=True))
    next(stream)
    with ThreadPoolExecutor(3) as pool:
        whole = [pool.submit(own.client.completions.create, **ask) for _ in range(3)]
        deadline = time.monotonic() + 20
        while not {"running": 2, "waiting": 2}.items() <= state(own).items():
            assert time.monotonic() < deadline
        ended = own.end()
        for done in whole:
            with pytest.raises(openai.InternalServerError, match="The server is ending") as caught:
                done.result()
            assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="The server is ending"):
            for _ in stream:
                pass
    own.client.close()
    status, err, seconds = ended
    assert status == 0 and "Traceback" not in err, err
    assert seconds < 10


def test_a_server_that_cannot_start_says_why_in_a_paragraph(model, adapter, monkeypatch):
    def fails(*words):
        done = CliRunner().invoke(app, ["serve", "--device", "cpu", "--port", "0", *map(str, words)])
        assert done.exit_code == 2 and "Traceback" not in done.stderr
        return " ".join(done.stderr.split())

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} is in use on 127.0.0.1: give another one" in fails(model, "--port", port)
    assert "--context 9,999 is more than the 256 tokens" in fails(model, "--context", 9999)
    assert "--total-tokens 5 is less than --context 9" in fails(model, "--context", 9, "--total-tokens", 5)
    assert "both called tiny" in fails(model, "--adapter", f"tiny={adapter}")
    assert "is no address of this machine" in fails(model, "--host", "nowhere.invalid")
    assert "there is no folder" in fails("/nowhere/at/all")
    enormous = "--total-tokens 1,000,000,000,000 does not fit: there is memory for keys and values of"
    assert enormous in fails(model, "--total-tokens", 10**12)
    monkeypatch.setattr("goldsmith.cli.serve.checks.find_spec", lambda name: None if name == "uvicorn" else name)
    assert "needs the package uvicorn, which is not installed here: pip install" in fails(model)
