"""Where a value that is finite in the golden first becomes NaN or Inf in the candidate: at which stage, by what.

Memory starts as zeros here, so that poison left over is not taken for a number that left its range. The operations are
listened to as `assay.watch` does. A kernel that torch's dispatcher does not see is asked through the golden: which of
the golden's operations passes the largest number of a dtype, and does NaN there arrive at exactly the same elements?
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..memory import ZERO_FILL
from ..run import How, Run
from ..session import Session
from ..watch import watch
from ..watch_facts import Event
from .evidence import Born
from .isolate import named, order
from .whatif.calls import Call, Listening, moved
from .whatif.engine import Golden

PROBE = "provenance"
_TRIED = 24  # operations of the golden, at most
_FILLS = ("fill", "full", "masked", "where", "empty", "copy", "scatter", "index_put", "zeros", "ones")


def provenance(session: Session, own: Run) -> Born | None:
    """None where every finite value of the golden is finite in the candidate, or is no more with zeroed memory."""
    if _first(session, own) is None:
        return None
    watching = watch(norms=False)
    with watching:
        how = How(fill=ZERO_FILL, debug=own is not session.first)
        done = session.execute(PROBE, "zeroed memory", how, look=False)
    found = None if done.error is not None else _first(session, done)
    if found is None:
        return None
    stage, got, mask = found
    nan = bool(torch.isnan(got)[mask].any())
    said = [f"{int(mask.sum())} elements that are finite in the golden become NaN or Inf first in {stage}"]
    event = _made(watching.events)
    if event is not None:
        at = f", at {event.stack[0]}" if event.stack else ""
        why = "its argument is too large, in float64, too" if _exponential(event) else event.likely.evidence
        why = event.likely.evidence if event.likely.id != "unknown" else why
        said.append(f"the first operation that makes one of finite values is {event.op}{at}: {why}".removesuffix(": "))
    passed = _passed(session, stage, got, mask)
    if passed is not None:
        call, largest, dtype = passed
        said.append(f"the golden's {call.said} reaches {largest:.4g}, beyond {dtype}, in exactly the elements that "
                    f"{stage} depends on")  # fmt: skip
    cause = "" if event is None else _cause(event)
    cause = "overflow" if passed is not None else cause
    return Born("nan" if nan else "inf", stage, "" if event is None else event.op, cause, tuple(said))


def _first(session: Session, done: Run) -> tuple[str, Tensor, Tensor] | None:
    """(name, tensor, where it alone is not finite) of the first in the golden's order."""
    mine = named(done)
    for name in order(session.ref, done):
        got, golden = mine.get(name, ("", None))[1], session.ref.bounded[name].value
        if got is None or not got.is_floating_point() or got.shape != golden.shape:
            continue
        mask = ~torch.isfinite(got) & torch.isfinite(golden)
        if bool(mask.any()):
            return name, got.detach(), mask
    return None


def _made(events: list[Event]) -> Event | None:
    """The first that was made of finite values, and not written as a constant."""
    born = [e for e in events if e.born and not any(f in e.op.split("::")[-1] for f in _FILLS)]
    return next((e for e in born if e.likely.id != "unknown"), born[0] if born else None)


def _cause(event: Event) -> str:
    """The golden is finite there: an exponential that is not was taken of too large a number."""
    if event.kind == "inf" and _exponential(event):
        return "missing_max_shift"
    return event.likely.id if event.likely.id in ("overflow", "missing_sync") else ""


def _exponential(event: Event) -> bool:
    return event.op.split("::")[-1].rstrip("_") in ("exp", "exp2", "expm1")


def _passed(session: Session, stage: str, got: Tensor, mask: Tensor) -> tuple[Call, float, str] | None:
    """The golden's operation whose result passes a dtype's maximum where it makes exactly the wrong elements."""
    golden = Golden(session.ref)
    mode = Listening().record()
    golden.run_under(mode, session.ref.leaves, stage)
    wide = torch.isfinite(session.ref.bounded[stage].value)
    for call, largest, dtype, limit in list(_large(mode.calls or [], got.dtype, session.dtype))[:_TRIED]:
        change = moved(lambda out, limit=limit: out.masked_fill(out.abs() > limit, torch.nan))
        try:
            value = golden.run_under(Listening({call.index: change}), session.ref.leaves, stage).get(stage)
        except Exception:  # noqa: BLE001 - a golden that cannot go on with NaN answers nothing
            continue
        if value is not None and value.shape == mask.shape and torch.equal(torch.isnan(value) & wide, mask):
            return call, largest, dtype
    return None


def _large(calls: list[Call], *dtypes: torch.dtype) -> Iterator[tuple[Call, float, str, float]]:
    limits = {str(d).removeprefix("torch."): float(torch.finfo(d).max) for d in (*dtypes, torch.float16)}
    for call in calls:
        if isinstance(call.out, Tensor) and call.out.is_floating_point() and call.out.numel():
            largest = float(call.out.abs().nan_to_num(0.0, 0.0, 0.0).max())
            for dtype, limit in limits.items():
                if largest > limit:
                    yield call, largest, dtype, limit
