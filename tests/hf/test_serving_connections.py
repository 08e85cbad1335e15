"""Connections of the server: half of a request, and more connections than files."""

import asyncio
import contextlib
import errno
import socket
import threading

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
uvicorn = pytest.importorskip("uvicorn", reason="comes with the extra serve")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from goldsmith.hf.serving import server

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
HALF = REQUEST[:20]


@pytest.fixture
def port(monkeypatch):
    """Of a server that waits 0.2 s for a request and has at most four connections."""
    monkeypatch.setattr(server, "PATIENCE", 0.2)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
    config = uvicorn.Config(app, http=server.PatientProtocol, log_level="critical", lifespan="off", ws="none")
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        running.should_exit = True
        thread.join()


def connected(port, sent=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(sent)
    return connection


def heard(connection, end=b""):
    """What arrives up to these bytes, or up to the connection's end."""
    text = b""
    while (not end or end not in text) and (more := connection.recv(65536)):
        text += more
    return text


@pytest.mark.parametrize("sent, before", [(b"", False), (HALF, False), (HALF, True)], ids=["none", "half", "second"])
def test_half_of_a_request_gets_an_answer_and_its_end(sent, before, port):
    """before: whether the connection has had an answer, after which uvicorn waits 5 s for more"""
    with connected(port, REQUEST if before else b"") as connection:
        if before:
            assert heard(connection, b"hello").startswith(b"HTTP/1.1 200")
        connection.sendall(sent)
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"No request arrived within" in answer


def test_one_connection_too_many_hears_so_and_later_ones_are_served(port):
    open_ones = [connected(port, HALF) for _ in range(4)]
    with connected(port, REQUEST) as fifth:
        answer = heard(fifth)
    assert answer.startswith(b"HTTP/1.1 503") and b"The server has 4 connections: try again later." in answer
    for connection in open_ones:
        connection.close()
    answer = b""
    while b"hello" not in answer:  # the server sees that they are closed a moment later
        with contextlib.suppress(ConnectionResetError), connected(port, LAST) as later:
            answer = heard(later)


def test_no_free_file_for_a_connection_is_one_sentence_and_another_error_is_asyncios(caplog):
    reports, loop = [], asyncio.new_event_loop()
    running = server._Server(uvicorn.Config(None), None, None, reports.append)
    for _ in range(3):  # asyncio asks for each connection that waits
        running.failed(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    assert reports == ["More connections arrive than the process may open files: the next ones wait for a second."]
    assert not caplog.records
    running.failed(loop, {"message": "another", "exception": ValueError("wrong")})
    assert [record.message for record in caplog.records] == ["another"]
    loop.close()
