"""TorchRecording: a dispatch mode that records every torch operation, of autograd's backward as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...support.dispatch_mode import DispatchMode
from .faulty_line import SourceLine
from .recorder import Key, Recorder

MOVES = frozenset(
    "view _unsafe_view reshape t transpose permute expand unsqueeze squeeze slice select clone _to_copy copy copy_ "
    "contiguous cat stack index gather index_select detach alias split split_with_sizes unbind roll flip lift_fresh "
    "as_strided unfold diagonal narrow masked_select repeat constant_pad_nd index_put index_put_ scatter scatter_ "
    "movedim set_ slice_backward select_backward _reshape_alias resize_ fill_ zero_ masked_fill masked_fill_".split()
)
_INDEXED = {"index": 1, "gather": 2, "index_select": 2, "index_put": 1, "index_put_": 1, "scatter": 2, "scatter_": 2,
            "index_add": 2, "index_add_": 2, "scatter_add": 2, "scatter_add_": 2, "masked_fill": 1, "masked_fill_": 1,
            "where": 0, "embedding": 1}  # fmt: skip

_OVERWRITTEN = {"copy_": 0, "copy": 0, "index_put_": 0, "index_put": 0, "fill_": 0, "zero_": 0, "scatter_": 0}
_WRITTEN = {"copy_": 1, "index_put_": 2, "index_put": 2, "scatter_": 3}  # the operand with the new numbers


class TorchRecording(DispatchMode):
    """Records into a recorder while it is active."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self.count = 0
        self.within: dict[int, int] = {}  # the same number -> operations of its backward so far
        self.lines: dict[int, tuple[Key | None, SourceLine | None]] = {}  # autograd's number of an operation

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.paused:
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        name = func._schema.name.split("::")[1]
        where, backward = self._where()
        loose_at = _INDEXED.get(name, -1)
        strong, loose = set[int](), set[int]()
        skipped = _OVERWRITTEN.get(name, -1)  # the operand whose old numbers do not count
        for i, argument in enumerate((*args, *kwargs.values())):
            for tensor in _tensors(argument):
                if i != skipped:
                    (loose if i == loose_at else strong).update(recorder.read(tensor))
        out = func(*args, **kwargs)
        recorder.paused = True
        try:
            self._record(func, name, where, backward, strong, loose, args, out, number)
        finally:
            recorder.paused = False
        return out

    def _record(
        self, func: Any, name: str, where: tuple[Key | None, SourceLine | None], backward: bool, strong: set[int],
        loose: set[int], args: tuple, out: object, number: int,
    ) -> None:  # fmt: skip
        recorder, written = self.recorder, bool(func._schema.is_mutable)
        adds = name.startswith("index_put") and args[3:4] == (True,)
        for i, tensor in enumerate(_tensors(out)):
            value = args[_WRITTEN[name]] if name in _WRITTEN and len(args) > _WRITTEN[name] else tensor
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse or "empty" in name:
                value = None
            recorder.alive.append(tensor)
            step = recorder.add(
                where,
                f"{name}.{i}" if i else name,
                value,
                strong,
                loose,
                moves=name in MOVES and not adds,
                backward=backward,
                factory=not strong and not written,
                roundoff=_roundoff(tensor),
            )
            recorder.made(tensor, step, written=written)
            if not i:
                own = recorder.steps[step]
                own.numbers.append(number)
                own.args, own.result = args, tensor

    def _where(self) -> tuple[tuple[Key | None, SourceLine | None], bool]:
        """The place of an operation, and whether autograd made it from the forward's operation there."""
        key, at = self.recorder.place()
        node = torch._C._current_autograd_node()
        if at is not None or node is None:
            self.lines[torch.autograd._get_sequence_nr() - 1] = key, at
            return (key, at), False
        number = node._sequence_nr()
        key, at = self.lines.get(number, (None, None))
        self.within[number] = turn = self.within.get(number, 0) + 1
        return ((*key, node.name(), turn) if key is not None else None, at), at is not None


def _roundoff(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []
