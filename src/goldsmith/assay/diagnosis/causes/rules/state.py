"""Rules about state of earlier calls, and about timing."""

from __future__ import annotations

from ....probes.repeats import BACKWARDS
from ....probes.second_call import INTERLEAVED
from ....report.results import Finding
from ...facts.evidence import RunFact
from .reading import EXACT, FAINT, HINT, LIKELY, SEEN, Match, Reading


def _mended(r: Reading) -> bool:
    """True if uninitialised or shared memory explains why calls differ."""
    return r.memory("never_written", "aliased", "output_modified") is not None or any(
        f.probe == "poison" for f in r.e.report.findings
    )


def _by_chance(r: Reading) -> bool:
    """True if repeats go up and down without an order: state would make all of them equal, or drift."""
    repeats = list(r.runs("repeat"))
    apart = [x.difference for x in repeats if not x.right]
    mixed = any(x.right for x in repeats[repeats.index(next(x for x in repeats if not x.right)) :]) if apart else False
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(apart, apart[1:], apart[2:], strict=False))
    return mixed or len(apart) > 5 and 3 * turns >= len(apart) - 2


def _interleaved(r: Reading) -> Finding | None:
    """The finding of a call with other inputs between forward and backward."""
    return next((f for f in r.findings("second_call") if f.run == INTERLEAVED), None)


def stale_state(r: Reading) -> Match | None:
    """A call raises or differs after another one; or one row begins with the values that the previous row left."""
    if r.plain_wrong and r.left_to_the_next:
        return Match(SEEN + 0.01, (r.left_to_the_next, "the state of one row is passed on to the next"), {})
    if r.plain_wrong and r.fails("repeat") is not None:
        return None
    again = r.fails("second call")
    twice = r.finding("backward_twice")
    back = r.fails("back")
    if again is not None:
        sentence = again.text or again.error or "the second call of the same inputs gives another result"
        raises = bool(again.error) or "raised" in again.kinds
        score = EXACT if raises and not r.plain_wrong else SEEN
        return Match(
            min(score, HINT) if _mended(r) or _by_chance(r) else score,
            (sentence, "the first call is right"),
            {"run": again.name},
        )
    if twice is not None:
        return Match(LIKELY, (twice.text,), {"run": "backward twice"})
    if back is not None and not r.plain_wrong:
        text = back.text or "the first inputs again, after others, give another result"
        return Match(LIKELY, (text,), {"run": back.name})
    between = None if r.plain_wrong else _interleaved(r)
    if between is not None:
        state_left = "the backward's data are kept where the next forward writes: keep them with their call, as "
        return Match(SEEN, (between.text, state_left + "ctx.save_for_backward does"), {"run": "interleaved"})
    return None


def stale_copy(r: Reading) -> Match | None:
    """Other inputs of the same shapes give the first result."""
    if r.plain_wrong:
        return _unread(r)
    others = r.fails("other inputs")
    if others is None:
        return None
    raises = bool(others.error) or "raised" in others.kinds
    if raises:
        return Match(FAINT, (others.text or others.error,), {})
    text = others.text or "with other inputs of the same shapes the result is wrong, though the first call is right"
    if others.stale:
        sentence = f"the golden makes it from the other inputs with {', '.join(others.stale)} as in the first call"
        return Match(EXACT if r.fails("second call") is None else HINT, (text, sentence), {"run": others.name})
    if others.stale is not None:  # no input of the first call gives it: those inputs may be wrong in any call
        return Match(FAINT, (text, "no input as it was in the first call makes it"), {"run": others.name})
    return Match(SEEN if r.fails("second call") is None else HINT, (text,), {"run": others.name})


def _unread(r: Reading) -> Match | None:
    """An input without influence on a nonzero result, which an earlier call may have left there."""
    influences = list(r.e.influence.values())
    unread = [i for i in influences if i.none and all(j.none for j in influences if j.input == i.input)]
    if not unread or any(i.extra for i in influences) or r.explained or r.pair is None or r.zeros:
        return None
    name = unread[0].input
    sentence = f"whatever {name} holds, {r.e.tensor} stays as it is, bit for bit, and it is nowhere zero"
    return Match(SEEN, (sentence, f"numbers of an earlier call may stand there in place of {name}"), {"input": name})


def stale_config(r: Reading) -> Match | None:
    """After a call of other sizes, the sizes of the first call are used."""
    sizes = r.fails("other sizes")
    if sizes is not None and not r.plain_wrong:
        text = sizes.text or "wrong after a call of other sizes, right before"
        return Match(EXACT, (text,), {"run": sizes.name})
    if r.plain_wrong and r.right("fresh"):
        text = "right once the state from cases of other sizes is cleared, and wrong with it"
        return Match(EXACT + 0.02, (text,), {"run": "fresh start"})
    return None


def _apart(r: Reading, run: RunFact) -> bool:
    """True if a repeat differs by more than legal orders do: one run is wrong and others right, or they differ much."""
    if not r.plain_wrong:
        return not run.right
    if r.pair is None:
        return run.difference > 0
    return run.difference > 0.1 * float((r.pair[0] - r.pair[1]).abs().max())


def race(r: Reading) -> Match | None:
    """Right with one thread or in another order of programs, or the same call gives several results."""
    turned = next((x for x in r.runs(BACKWARDS) if x.right and not x.same), None)
    if r.numbers_wrong and turned is not None:
        return Match(LIKELY + 0.1, (f"right with {BACKWARDS}, and a GPU promises no order",), {"run": turned.name})
    one = list(r.runs("1 thread"))
    if r.numbers_wrong and one and all(x.right and not x.same for x in one):
        return Match(EXACT, ("right with one thread, wrong with several",), {"run": one[0].name})
    repeats = list(r.runs("repeat"))
    differing = [x for x in repeats if not x.same and _apart(r, x)]
    wider = r.finding("differs", probe="repeats")
    if r.plain_wrong and any(x.right and not x.same for x in repeats):
        good = sum(x.right for x in repeats)
        return Match(SEEN, (f"{good} of {len(repeats)} repeats of the same call are right",), {"right": good})
    if differing or wider is not None:
        text = wider.text if wider is not None else ""
        text = text or f"{len(differing)} of {len(repeats)} repeats of the same call give another result"
        score = EXACT - 0.01 if r.plain_wrong and len(differing) > 1 else LIKELY + 0.1
        return Match(HINT if _mended(r) else score, (text,), {"differing": len(differing)})
    counts = ("2 threads", "4 threads", "8 threads", "1 thread")
    threads = next((fact for fact in map(r.fails, counts) if fact is not None), None)
    if threads is not None and not r.plain_wrong:
        return Match(LIKELY, (threads.text or f"the result depends on the threads ({threads.name})",), {})
    return None


def missing_sync(r: Reading) -> Match | None:
    """Memory is written after the call has returned, or unwritten memory is read in one call of several."""
    late_write = next((x for x in r.runs("watched afterwards") if x.late), None)
    if late_write is not None and r.plain_wrong:
        sentence = (
            f"{late_write.late} bytes of the kernel's own buffers were written after it had returned: nobody waits for "
            "them"
        )
        return Match(EXACT + 0.02, (sentence,), {"bytes": late_write.late})
    repeats = list(r.runs("repeat"))
    poison = r.memory("never_written") is not None
    if poison and any(x.right and not x.same for x in repeats):
        return Match(SEEN + 0.02, ("unwritten memory was read in one call, but not in its repeats",), {})
    return None
