"""The HTTP application: routes, bodies, streams, and every error as one sentence of JSON."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...core.json_values import parse_json
from .answers import Answer, sse
from .batcher import Batcher
from .refusals import BAD_REQUEST, FAILED, TOO_LARGE, UNAVAILABLE, RequestRefusal
from .running_text import End, Piece
from .service import Conversation, Service
from .watched_files import WatchedFiles

IGNORED = 2**27  # bytes of too large a request that are read and dropped: a client that still sends hears no answer
PATIENCE = 60.0  # seconds for a request's body to arrive, and for its head
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed the connection."""


def application(
    service: Service,
    batcher: Batcher,
    watched: WatchedFiles,
    hosts: Sequence[str] | None,
    report: Callable[[str], None],
) -> Starlette:
    """The server's application. hosts: the names under which it may be called, None: any. report: gets our faults.

    Names are checked on a loopback address, where a page in the user's browser could call the server under a name of
    its own that leads there.
    """
    started = int(time.time())

    async def chat(request: Request) -> Response:
        return await _answer(request, service.chat, service.most_bytes)

    async def complete(request: Request) -> Response:
        return await _answer(request, service.complete, service.most_bytes)

    def model(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": started, "owned_by": "goldsmith"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model(name) for name in service.names]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.names:
            raise service.unknown(name)
        return JSONResponse(model(name))

    async def health(request: Request) -> Response:
        watched.check()
        if not batcher.alive:
            raise RequestRefusal(UNAVAILABLE, "The server's computing thread has ended: start the server again.")
        return JSONResponse({"status": "ok", **batcher.state()})

    async def load_model(request: Request) -> Response:
        """What `transformers chat` asks first: the served models are always loaded, and no other is ever."""
        body, _ = await _body(request, service.most_bytes)
        name = body.get("model") if isinstance(body, dict) else None
        if name not in service.names:
            raise service.unknown(name)
        return Response(sse({"status": "ready", "model": name, "cached": True}), media_type="text/event-stream")

    async def failed(request: Request, error: Exception) -> Response:
        report(f"{request.method} {request.url.path} failed: {type(error).__name__}: {error}")
        return JSONResponse(RequestRefusal(FAILED, "The server failed: see its output.").to_dict(), status_code=FAILED)

    middleware = [Middleware(KnownHosts, hosts=hosts)] if hosts is not None else []
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/load_model", load_model, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            RequestRefusal: _refused, HTTPException: _http_error, ClientGone: _gone, ClientDisconnect: _gone,
            Exception: failed,
        },
    )  # fmt: skip


class KnownHosts:
    """Refuses requests whose Host is not one of the names under which the server may be called."""

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        host = dict(scope.get("headers", [])).get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
        if name in self._hosts:
            await self._app(scope, receive, send)
            return
        refusal = RequestRefusal(BAD_REQUEST, f"The server is not called {name!r}: use {min(self._hosts)}.")
        await JSONResponse(refusal.to_dict(), status_code=refusal.status)(scope, receive, send)


async def _answer(
    request: Request, begin: Callable[[object, int], Awaitable[tuple[Answer, Conversation]]], most: int
) -> Response:
    answer, conversation = await begin(*await _body(request, most))
    conversation.submit()
    try:
        first = await _unless_gone(request, conversation.next_event())
        if conversation.stream:
            return EventStream(_stream(answer, conversation, first))
        await _unless_gone(request, _collect(answer, conversation, first))
    except BaseException:
        conversation.cancel()
        raise
    return JSONResponse(answer.whole())


async def _collect(answer: Answer, conversation: Conversation, first: Piece | End) -> None:
    event = first
    _piece(answer, event)
    while not isinstance(event, End):
        event = await conversation.next_event()
        _piece(answer, event)


async def _stream(answer: Answer, conversation: Conversation, first: Piece | End) -> AsyncGenerator[str, None]:
    """The chunks of a streamed answer; if the text fails, its end is an error."""
    event = first
    try:
        yield answer.begin() + _piece(answer, event)
        while not isinstance(event, End):
            event = await conversation.next_event()
            if chunk := _piece(answer, event):
                yield chunk
    except RequestRefusal as refusal:
        yield sse(refusal.to_dict())
    finally:
        conversation.cancel()


def _piece(answer: Answer, event: Piece | End) -> str:
    return answer.end(event) if isinstance(event, End) else answer.add(event)


class EventStream(StreamingResponse):
    """A stream that ends its generator at once when the client has gone."""

    def __init__(self, chunks: AsyncGenerator[str, None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of the work; raises ClientGone as soon as the client closes the connection."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        gone.cancel()
        doing.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> tuple[object, int]:
    """The JSON of a request, and its bytes; raises RequestRefusal for another type, for more than `most` bytes, and for
    what is no JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefusal(BAD_REQUEST, "The request needs the header Content-Type: application/json.")
    data, length = bytearray(), 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= most:
                    data += chunk
                elif length > IGNORED:
                    break
        if length > most:
            raise RequestRefusal(TOO_LARGE, f"The request is larger than {most / 2**20:.3g} MiB: send less.")
        body = parse_json(data, parse_constant=_no_number)
        if b"\\u" in data:  # otherwise UTF-8, which has no halves
            _check_letters(body)
        return body, length
    except TimeoutError as error:
        raise RequestRefusal(408, f"The request's body did not arrive within {PATIENCE:.0f} s.") from error
    except ValueError as error:
        raise RequestRefusal(BAD_REQUEST, f"The body is not JSON: {error}.") from error


def _check_letters(value: object) -> None:
    """Raises ValueError for half of a letter, which JSON can escape and no text can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value[error.start]!r} is half of a pair") from None
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_letters(name)
            _check_letters(part)
    elif isinstance(value, list):
        for part in value:
            _check_letters(part)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestRefusal):
        raise error
    headers = {"Retry-After": "1"} if error.status == UNAVAILABLE else None
    return JSONResponse(error.to_dict(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
    method = f"{request.method} {request.url.path}"
    return JSONResponse(
        RequestRefusal(status, f"There is no {method} here; there is: {known}.").to_dict(), status_code=status
    )


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
