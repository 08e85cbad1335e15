"""Clients of a completions server: each sends one request after another and reads the streamed answer to its end."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """What one measurement gave: tokens and seconds of all clients, and seconds to each answer's first text."""

    tokens: int
    seconds: float
    first: list[float]


def load(port: int, body: dict[str, Any], clients: int, requests: int) -> Load:
    """`clients` at once, each with `requests` requests; the prompt of each differs in its first word."""

    async def client(number: int) -> list[tuple[int, float]]:
        answers = []
        for turn in range(requests):
            prompt = f"{number * requests + turn}. {body['prompt']}"
            answers.append(await _ask(port, body | {"prompt": prompt}))
        return answers

    async def everyone() -> list[list[tuple[int, float]]]:
        return await asyncio.gather(*(client(number) for number in range(clients)))

    begun = time.perf_counter()
    answers = [answer for each in asyncio.run(everyone()) for answer in each]
    seconds = time.perf_counter() - begun
    return Load(sum(tokens for tokens, _ in answers), seconds, [first for _, first in answers])


def text_of(port: int, body: dict[str, Any]) -> str:
    """The whole text of one answer."""
    pieces: list[str] = []
    asyncio.run(_ask(port, body, pieces))
    return "".join(pieces)


async def _ask(port: int, body: dict[str, Any], pieces: list[str] | None = None) -> tuple[int, float]:
    """(tokens of the answer, seconds to its first text)"""
    begun, first, tokens = time.perf_counter(), None, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read())[-400:]!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event))
        text = event["choices"][0].get("text", "") if event.get("choices") else ""
        if text and first is None:
            first = time.perf_counter() - begun
        if pieces is not None:
            pieces.append(text)
        tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
    writer.close()
    return tokens, first or time.perf_counter() - begun
