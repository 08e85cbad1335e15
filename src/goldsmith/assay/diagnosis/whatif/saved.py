"""The backward reads another forward tensor than the golden's does."""

from __future__ import annotations

from collections.abc import Iterator

from .calls import Call, Change, Key, floating

_MOST = 16  # tensors that may be meant, and as many that may stand in their place


def changes(calls: list[Call]) -> Iterator[Change]:
    forward: dict[Key, str] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    read: dict[Key, str] = {}
    for call in calls:
        for key, name, tensor in zip(call.made, call.operands, call.tensors, strict=True):
            if not floating(tensor) or tensor.numel() < 2 or key == -1:
                continue
            if not call.backward:
                forward.setdefault(key, name)
                shapes.setdefault(key, tuple(tensor.shape))
            elif key in forward:
                read.setdefault(key, name)
        if not call.backward and floating(call.out) and call.out.numel() > 1:
            forward.setdefault(call.index, call.said)
            shapes.setdefault(call.index, tuple(call.out.shape))
    for what, name in list(read.items())[:_MOST]:
        others = [k for k in forward if k != what and shapes[k] == shapes[what]]
        for by in others[:_MOST]:
            yield _read_instead(calls, what, by, name, forward[by])


def _read_instead(calls: list[Call], what: Key, by: Key, name: str, other: str) -> Change:
    """An operand read in place of the product or the sum that it is part of is a factor, or a term, left out."""
    text, cause, params = f"the backward reads {other} in place of {name}", "wrong_saved_tensor", {}
    maker = calls[what] if isinstance(what, int) and 0 <= what < len(calls) else None
    if maker is not None and by in maker.made and len(maker.operands) == 2:
        left_out = maker.operands[1 - maker.made.index(by)] or "the other"
        if maker.name in ("mul", "div"):
            cause, params = "wrong_factor", {"factor": left_out, "named": f"1/{left_out}"}
        if maker.name in ("add", "sub"):
            cause, params = "missing_term", {"term": left_out}
    return Change(cause, text, -1, None, {"saved": name, "by": other, **params}, 0.5, saved=(what, by))
