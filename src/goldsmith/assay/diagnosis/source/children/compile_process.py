"""A child process that lowers launched kernels of edited files with Triton's front end, which needs no GPU.

Triton's interpreter takes what its compiler refuses, such as a value that changes its type in a loop.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ....gate.isolation.encoding import receive, send
from ....gate.isolation.protocol import Closed, Connection
from .edited_modules import install
from .launches import Launch

COMPILED, REFUSED, UNKNOWN = "compiled", "refused", "unknown"
_CARD = ("cuda", 90, 32)


def serve(private: socket.socket, request: Mapping[str, object]) -> int:
    """Answers one request with a word of these three: {"modules", "edited", "origin", "backward", "launches"}."""
    sys.path[:] = dict.fromkeys([*map(str, list(request["paths"])), *sys.path])  # type: ignore[call-overload]
    connection = Connection(private, bytes.fromhex(str(request["nonce"])))
    try:
        number, message = receive(connection, pickled=True)
        send(connection, number, _lowered(message))
    except Closed:
        return 0
    return 0


def _lowered(message: Mapping[str, Any]) -> str:
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined, Triton's own ones too
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton" and not n.startswith("triton._C")]:
        del sys.modules[name]
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import ASTSource, ir, make_backend
        from triton.compiler.errors import CompilationError
        from triton.runtime.jit import JITFunction

        install(message["modules"]).load(message["edited"], message["origin"], message["backward"])
        target = GPUTarget(*_CARD)
        backend = make_backend(target)
        options = backend.parse_options({})
        tools = backend.get_codegen_implementation(options), backend.get_module_map()
    except BaseException:  # noqa: BLE001 - the user's modules, and a Triton with other internals, may raise anything
        return UNKNOWN
    known = True
    for launch in message["launches"]:
        kernel = _kernel(launch, JITFunction)
        if kernel is None:
            known = False
            continue
        _, _, types, constants = launch
        try:
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            ASTSource(kernel, dict(types), dict(constants)).make_ir(target, options, *tools, context)
        except CompilationError:
            return REFUSED
        except BaseException:  # noqa: BLE001 - what is no error of the kernel says nothing about it
            known = False
    return COMPILED if known else UNKNOWN


def _kernel(launch: Launch, kind: type) -> object:
    """The compiled kernel of a launch, below autotune and heuristics."""
    value = getattr(sys.modules.get(launch[0]), launch[1], None) if launch is not None else None
    for _ in range(8):
        if value is None or isinstance(value, kind):
            break
        value = getattr(value, "fn", None)
    return value
