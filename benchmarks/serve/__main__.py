"""Tokens per second of `goldsmith serve`, `transformers serve` and llama.cpp's server: `python -m benchmarks.serve`.

Every server runs the same model in bfloat16 on this machine's CPU, with all of its threads. 1, 4 and 16 clients
send greedy completions of TOKENS tokens and read them as streams. All servers are loaded first and are timed in turns.
`--llama DIR` is a build of llama.cpp with bin/llama-server. `--write` records the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..generate.engines.llama import version_of
from . import clients, gguf_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "serve.json"
MODEL = ROOT / "examples" / "shakespeare-moe"
PROMPT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate."
TOKENS, PARALLEL, TURNS = 64, 16, 3
CLIENTS = {1: 2, 4: 1, 16: 1}  # clients -> requests of each
ALIKE = 64  # tokens of the text that is compared: in bfloat16 two logits may tie
OURS = "goldsmith serve"


@dataclass
class Peer:
    """One server: its command, the model's name in requests, and more fields of a request."""

    label: str
    command: list[str]
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    port: int = 0


def peers(llama: Path | None, folder: Path) -> Iterator[Peer]:
    python = [sys.executable, "-m"]
    ours = [*python, "goldsmith", "serve", str(MODEL), "--device", "cpu", "--port", "{port}"]
    yield Peer(OURS, ours, MODEL.name)
    yield Peer("goldsmith serve --parallel 1", [*ours, "--parallel", "1"], MODEL.name)
    theirs = [*python, "transformers.cli.transformers", "serve", str(MODEL), "--device", "cpu", "--port", "{port}"]
    yield Peer("transformers serve", theirs, str(MODEL))
    yield Peer("transformers serve --continuous-batching", [*theirs, "--continuous-batching"], str(MODEL))
    if llama is not None:
        gguf_model.write(MODEL, folder / "model.gguf")
        server = [str(llama / "bin" / "llama-server"), "-m", str(folder / "model.gguf"), "--port", "{port}"]
        room = ["-np", str(PARALLEL), "-c", str(PARALLEL * 1024), "-t", str(os.cpu_count()), "--no-webui"]
        yield Peer("llama.cpp's llama-server", [*server, *room], "model", {"cache_prompt": False})


@contextlib.contextmanager
def running(peer: Peer, log: Path) -> Iterator[None]:
    """Starts a server, and waits until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        peer.port = free.getsockname()[1]
    command = [word.format(port=peer.port) for word in peer.command]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait(peer, process, log)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def wait(peer: Peer, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise SystemExit(f"{peer.label} does not start: {log.read_text()[-1500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, help="a build of llama.cpp")
    parser.add_argument("--only", action="append", help="label of a server; the recorded rows of the others stay")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--write", action="store_true", help=f"record the rows in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no server is left behind
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        servers = [
            peer for peer in peers(arguments.llama, folder) if not arguments.only or peer.label in arguments.only
        ]
        for number, peer in enumerate(servers):
            stack.enter_context(running(peer, folder / f"{number}.log"))
        rows = measured(servers, arguments.clients, arguments.tokens, arguments.turns)
    content = {"conditions": conditions(arguments.llama), "rows": rows}
    print(json.dumps(content, indent=1))
    if arguments.write:
        if arguments.only and RESULTS.exists():
            before = json.loads(RESULTS.read_text())
            others = [row for row in before["rows"] if row["server"] not in arguments.only]
            content = {"conditions": before["conditions"], "rows": others + rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def measured(servers: list[Peer], numbers: list[int], tokens: int, turns: int) -> list[dict[str, Any]]:
    bodies = {peer.label: {"model": peer.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0} | peer.fields
              for peer in servers}  # fmt: skip
    texts = {peer.label: clients.text_of(peer.port, bodies[peer.label] | {"max_tokens": ALIKE}) for peer in servers}
    plain = texts.get(OURS) or next(iter(texts.values()))
    for peer in servers:
        clients.load(peer.port, bodies[peer.label], max(numbers), 1)
    loads: dict[tuple[str, int], list[clients.Load]] = {}
    for _ in range(turns):
        for number in numbers:
            for peer in servers:
                load = clients.load(peer.port, bodies[peer.label], number, CLIENTS[number])
                loads.setdefault((peer.label, number), []).append(load)
    return [
        {
            "server": label,
            "clients": number,
            "tokens_per_s": round(statistics.median(load.tokens / load.seconds for load in all_loads), 1),
            "least": round(min(load.tokens / load.seconds for load in all_loads), 1),
            "most": round(max(load.tokens / load.seconds for load in all_loads), 1),
            "first_text_s": round(statistics.median(first for load in all_loads for first in load.first), 3),
            "turns": turns,
            "tokens": sum(load.tokens for load in all_loads),
            "same_characters": len(os.path.commonprefix([texts[label], plain])),
            "characters": len(plain),
        }
        for (label, number), all_loads in loads.items()
    ]  # fmt: skip


def conditions(llama: Path | None) -> dict[str, Any]:
    names = ("goldsmith", "torch", "transformers")
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "machine": f"{cpu.partition(': ')[2] or platform.machine()}, {os.cpu_count()} cores",
        "model": MODEL.name,
        "tokens": TOKENS,
        "versions": {name: version(name) for name in names} | ({"llama.cpp": version_of(llama)} if llama else {}),
        "measured": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
