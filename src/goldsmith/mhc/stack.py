"""A sequence of hyper-connections in which post of one and pre of the next run as one operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.shapes import kind
from ._common import check_flag
from .boundary.op import BOUNDARY
from .coefficients.op import COEFFICIENTS
from .collapse.op import COLLAPSE
from .lagged_boundary.op import LAGGED_BOUNDARY
from .modules import HyperConnection, Output, check_x, normed, split
from .post.op import POST
from .pre.op import PRE


class HyperStack(nn.Module):
    """x = connections[-1](... connections[0](x)), where post of one and pre of the next are one `mhc.boundary`

    x [..., n, dim] -> the same shape. Further arguments of forward go to every layer. When layers return (f, *rest),
    the result is (x, [rest of each connection]). Separate post and pre run around connections that must be called as
    modules: those that are independent, recompute, have hooks (their own or global), are compiled themselves or
    override `forward`. The same holds between neighbours with different backends. Values are the same either way.
    keep_every must be 1.

    lagged=True is DeepSeek-V4.1's scheme: a connection collapses its streams with the h_pre of the connection before,
    which `mhc.lagged_boundary` does in one pass. The first connection takes stream 0, and the result is h [..., dim]:
    the last streams, collapsed with the last h_pre; no head follows. Such connections cannot be called as modules.
    Raises the same errors as HyperConnection.
    """

    def __init__(self, connections: Iterable[HyperConnection], *, keep_every: int = 1, lagged: bool = False) -> None:
        super().__init__()
        if isinstance(connections, (HyperConnection, Tensor)) or not isinstance(connections, Iterable):
            value_text = f"connections is {kind(connections)}"
            raise TypeError(f"mhc.HyperStack: {value_text}, expected a list: mhc.HyperStack([connection, ...])")
        connections = list(connections)
        if not connections:
            raise TypeError("mhc.HyperStack: connections is empty, expected at least one mhc.HyperConnection")
        for at, connection in enumerate(connections):
            if not isinstance(connection, HyperConnection):
                value_text = f"connections[{at}] is {kind(connection)}"
                raise TypeError(f"mhc.HyperStack: {value_text}, expected a connection: mhc.HyperConnection(dim, layer)")
        if isinstance(keep_every, bool) or not isinstance(keep_every, int) or keep_every != 1:
            raise ValueError(f"mhc.HyperStack: keep_every={keep_every!r}, but only 1 is supported")
        sizes = {(c.n, c.dim) for c in connections}
        if len(sizes) > 1:
            raise ValueError(f"mhc.HyperStack: connections differ in (n, dim): {sorted(sizes)}")
        check_flag("mhc.HyperStack", "lagged", lagged)
        self.lagged = lagged
        self.connections = nn.ModuleList(connections)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Output:
        if self.lagged:
            return self._forward_lagged(x, args, kwargs)
        rests = []
        connections = cast(list[HyperConnection], list(self.connections))
        entered = None  # h_in, h_post and h_res of the current connection, where boundary has computed them
        for here, after in zip(connections, [*connections[1:], None], strict=True):
            if entered is None and not _fusable(here, after):
                x, rest = split(here(x, *args, **kwargs))
            else:
                if entered is None:
                    check_x("mhc.HyperStack", x, here.n, here.dim)
                    entered = PRE(x, *here.mixing, **here.settings.of_pre)
                h_in, h_post, h_res = entered
                f, rest = split(here.layer(normed(h_in, here.norm), *args, **kwargs))
                h_post, h_res = here.settings.rounded(h_post), here.settings.rounded(h_res)
                if after is not None and _fusable(here, after):
                    options, orientation = after.settings.of_pre, here.settings.orientation
                    x, *entered = BOUNDARY(x, f, h_post, h_res, *after.mixing, orientation=orientation, **options)
                else:
                    x, entered = POST(x, f, h_post, h_res, **here.settings.of_post), None
            rests.append(rest)
        return (x, rests) if any(rests) else x

    def _forward_lagged(self, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Output:
        connections = cast(list[HyperConnection], list(self.connections))
        for at, connection in enumerate(connections):
            if _is_called(connection):
                raise ValueError(
                    f"mhc.HyperStack: connections[{at}] is independent, recomputes, has hooks or overrides forward; a "
                    "lagged stack does not call its connections as modules"
                )
        here, rests = connections[0], []
        check_x("mhc.HyperStack", x, here.n, here.dim)
        h_in = x[..., 0, :]
        h_pre, h_post, h_res = COEFFICIENTS(x, *here.mixing, **here.settings.of_pre)
        for here, after in zip(connections, [*connections[1:], None], strict=True):
            f, rest = split(here.layer(normed(h_in, here.norm), *args, **kwargs))
            rests.append(rest)
            h_post, h_res = here.settings.rounded(h_post), here.settings.rounded(h_res)
            if after is not None:
                options, orientation = after.settings.of_pre, here.settings.orientation
                x, h_in, h_pre, h_post, h_res = LAGGED_BOUNDARY(
                    x, f, h_pre, h_post, h_res, *after.mixing, orientation=orientation, **options
                )
        h = COLLAPSE(POST(x, f, h_post, h_res, **here.settings.of_post), h_pre, backend=here.settings.backend)
        return (h, rests) if any(rests) else h


def _fusable(here: HyperConnection, after: HyperConnection | None) -> bool:
    if after is None or _is_called(here) or _is_called(after):
        return False
    return here.settings.backend == after.settings.backend


def _is_called(connection: HyperConnection) -> bool:
    """Whether `__call__` does other things than pre and post: recomputation, hooks, an overridden `forward`."""
    own = type(connection).forward is HyperConnection.forward and "forward" not in vars(connection)
    hooks = (
        connection._forward_pre_hooks
        or connection._forward_hooks
        or connection._backward_pre_hooks
        or connection._backward_hooks
        or _has_any_global_hook()
    )
    independent = connection.settings.kind == "independent"
    return independent or connection.recompute or not own or bool(hooks) or connection._compiled_call_impl is not None
