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
            text = f"the backward reads {forward[by]} in place of {name}"
            yield Change(
                "wrong_saved_tensor", text, -1, None, {"saved": name, "by": forward[by]}, 0.5, saved=(what, by)
            )
