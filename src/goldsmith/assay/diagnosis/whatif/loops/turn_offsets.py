"""Loops whose backward reads the states from after each iteration, not from before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments

_LEAST, _MOST = 3, 1024  # iterations
_NEVER = frozenset("detach alias clone copy_".split())
Maker = tuple[str, str]  # name and line of the operator that makes the read tensor


@dataclass
class OperandSequence:
    """One operand of one line, by iteration: position among equal calls -> operand and reader."""

    expression: str
    operand: str
    backward: bool
    at: int  # position among the arguments
    reads: list[tuple[Node, int]] = field(default_factory=list)
    values: dict[int, Tensor] = field(default_factory=dict)
    carried: bool = False  # each iteration reads a result of the previous one


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """All states that a loop's backward reads from before each iteration are taken from after it.

    among: the operators that the wrong tensor depends on.
    """
    carried = [s for s in _sequences(calls, among) if s.backward and s.carried]
    group = tuple(move for s in carried for move in _moved(s, sorted(s.values)))
    if group:
        names = " and ".join(dict.fromkeys(s.operand or "a state" for s in carried))
        text = f"in every step the backward reads {names} from after the step, not from before it"
        yield Change("wrong_saved_tensor", text, group[0][0], group[0][1], {"operand": names, "step": 1}, 0.82,
                     group=group, also=("off_by_one", "shifted"))  # fmt: skip


def _moved(sequence: OperandSequence, places: list[int]) -> Iterator[tuple[int, Changed]]:
    order = {place: i for i, place in enumerate(places)}
    for call, place in sequence.reads:
        i = order[place] + 1
        if i < len(places):
            new = sequence.values[places[i]]
            if new.shape != call.args[sequence.at].shape:
                return
            yield call.index, _replaced_operand(sequence.at, new)


def _replaced_operand(at: int, new: Tensor) -> Changed:
    return with_arguments(lambda args: replaced(args, at, new))


def _sequences(calls: Sequence[Node], among: set[int]) -> Iterator[OperandSequence]:
    lines: dict[Maker, list[int]] = {}
    for call in calls:
        if not call.backward and call.line and call.owns:
            lines.setdefault((call.name, call.line), []).append(call.index)
    sequences: dict[tuple, OperandSequence] = {}
    loose: dict[tuple, list[tuple[Node, int]]] = {}
    for call in calls:
        if call.index not in among or not call.line or not call.owns or call.name in _NEVER:
            continue
        keys = iter(call.makers)
        for i, a in enumerate(call.args):
            key = next(keys) if isinstance(a, Tensor) else -1
            if not floating(a) or not a.numel():
                continue
            maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
            reader = (call.name, call.line, call.backward, i, a.shape)
            maker_line = (maker.name, maker.line) if maker is not None and not maker.backward else ("", "")
            if len(lines.get(maker_line, ())) >= _LEAST:
                kind: tuple = (*reader, maker_line)
                place = lines[maker_line].index(int(key))
            elif a._is_view() or a.storage_offset() or isinstance(key, str):
                kind, place = (*reader, key, a.stride()), a.storage_offset()
                if isinstance(key, str) and not a._is_view() and not a.storage_offset():
                    loose.setdefault(reader, []).append((call, i))  # the first iteration may read an input
            else:
                loose.setdefault(reader, []).append((call, i))
                continue
            entry = sequences.setdefault(kind, OperandSequence(call.expression, call.operand(i), call.backward, i))
            entry.reads.append((call, place))
            entry.values[place] = a
    for kind, sequence in sequences.items():
        if len(sequence.values) == 1 and len(sequence.reads) == 1:
            at = sequence.reads[0][0], sequence.at
            loose.setdefault(kind[:5], []).append(at)  # made by a line that makes several tensors, once each
    for kind, sequence in sequences.items():
        if isinstance(kind[5], tuple) and len(sequence.values) >= _LEAST - 1:
            _extended_at_both_ends(sequence, lines[kind[5]], calls, loose.get(kind[:5], []))
        if _LEAST <= len(sequence.values) <= _MOST:
            yield sequence


def _extended_at_both_ends(
    sequence: OperandSequence, makers: list[int], calls: Sequence[Node], before: list[tuple[Node, int]]
) -> None:
    """Adds the input of the first iteration and the result of the last one to the sequence."""
    places = sorted(sequence.values)
    each = min((b - a for a, b in zip(places, places[1:], strict=False)), default=1)
    like = sequence.values[places[0]]
    if len(before) == 1 and places[0] - each < 0:
        call, i = before[0]
        sequence.values[places[0] - each] = call.args[i]
        sequence.reads.append((call, places[0] - each))
    last = places[-1] + each
    end = _in_the_layout_of(calls[makers[last]].out, like) if last < len(makers) else None
    if end is not None:
        sequence.carried = len(sequence.values) == len(makers)
        sequence.values[last] = end


def _in_the_layout_of(state: Tensor, like: Tensor) -> Tensor | None:
    """The tensor as its reader would see it: a state without a batch is read as a row, or as a column."""
    if state.shape == like.shape:
        return state
    vector = state.numel() == like.numel() == max(like.shape, default=0)
    return state.reshape(like.shape) if vector else None
