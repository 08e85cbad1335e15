"""Rules about choices, saved tensors, ranks, groups and masks; and about kernels that could not run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....report.results import REFERENCE_FAULT
from ...facts.evidence import CULPRIT
from ...facts.spans import say
from .reading import EXACT, FAINT, HINT, LIKELY, SEEN, Match, Reading, close

_RANKS = ("rank", "world", "shard", "partition", "device", "parts")


def wrong_decision(r: Reading) -> Match | None:
    """A choice that no rounding makes legal."""
    for f in r.findings("decisions"):
        if f.kind in ("illegal_choice", "wrong_side", "drop_rate"):
            if r.chosen_right(f):
                text = "the choice is right in the first run: the values behind it go wrong in another run"
                return Match(FAINT, (f.text, text), {"decision": f.tensor})
            explained = any(w.exact and w.tensor == f.tensor and w.cause != "wrong_decision" for w in r.e.whatif)
            score = LIKELY if f.values.get("out_of_range") or explained else EXACT + 0.03
            if _inherited(r, f.tensor):
                return Match(
                    FAINT, (f.text, f"it is made from {r.e.first_wrong}, which is wrong"), {"decision": f.tensor}
                )
            return Match(score, (f.text,), {"decision": f.tensor})
    return None


def _inherited(r: Reading, decision: str) -> bool:
    """True if something before the choice is wrong on right inputs: the choice may be right for its own inputs."""
    first = r.e.stage(r.e.first_wrong or "")
    names = [s.name for s in r.e.stages]
    if first is None or first.state != CULPRIT or first.kind != "stage" or decision not in names:
        return False
    return names.index(first.name) < names.index(decision)


def wrong_saved_tensor(r: Reading) -> Match | None:
    """The outputs are right, but the backward uses other saved tensors than the golden's."""
    grads = r.e.tensor.endswith(".grad")
    if grads and r.right("golden saved") and r.plain_wrong:  # otherwise it is also right on its own saved tensors
        return Match(EXACT + 0.02, ("on the golden's saved tensors the backward is right",), {})
    saved = [s for s in r.e.stages if s.kind == "saved" and s.state == CULPRIT]
    outputs = [s for s in r.e.stages if s.kind == "output" and s.state not in ("ok", "not judged")]
    named = r.e.tensor if r.e.tensor.startswith("saved.") else saved[0].name if saved else ""
    if named and not outputs and r.plain_wrong:  # otherwise a later call has overwritten it
        rearranged = any(p.kind in ("permuted", "shifted", "reversed", "transposed") for p in r.e.permutations)
        text = f"{named} is wrong, while the outputs are right"
        return Match(LIKELY if rearranged else EXACT + 0.01, (text,), {"saved": named})
    return None


def missing_partition(r: Reading) -> Match | None:
    """Every rank did all the work, or all ranks did the first one's part."""
    ratio = r.ratio()
    names = [n for n in (ratio.named, *ratio.also) if _of_ranks(n)] if ratio is not None else []
    names += [k for k, v in r.e.sizes.items() if ratio is not None and _of_ranks(k) and v == round(ratio.ratio)]
    if ratio is not None and ratio.ratio >= 1.5 and names and abs(ratio.ratio - round(ratio.ratio)) < 1e-3:
        text = f"y / g is {ratio.ratio:g} = {names[0]}: each of them contributes the whole"
        return Match(EXACT + 0.01, (text,), {"times": ratio.ratio, "named": ratio.named})
    for name, parts in _parts(r):
        if name == r.e.tensor and _whole_sum(r):
            text = f"the {parts} parts of {name} are equal, and each is the sum of the golden's {parts}"
            return Match(EXACT + 0.01, (text,), {"times": parts, "stage": name})
        if ratio is not None and abs(ratio.ratio - parts) < 1e-3 * parts:
            text = f"the {parts} parts of {name} are equal, and y / g is {parts}: each holds the whole"
            return Match(EXACT + 0.01, (text,), {"times": parts, "stage": name})
    return _halves(r)


def _whole_sum(r: Reading) -> bool:
    """True if every slice along the first axis is the sum of all the golden's slices."""
    return r.y is not None and r.g is not None and close(r.y, r.g.sum(0, keepdim=True).expand_as(r.g), r.unit)


def _of_ranks(name: str) -> bool:
    return any(word in name.lower() for word in _RANKS)


def _parts(r: Reading) -> Iterator[tuple[str, int]]:
    """Stages whose slices along the first axis are all equal although the golden's are not."""
    own = {r.e.tensor: (r.y, r.g)} if r.y is not None and r.g is not None else {}
    for name, (got, golden) in {**own, **r.e.other}.items():
        if got is None or golden is None or got.dim() < 2 or got.shape != golden.shape or not got.numel():
            continue
        if not 2 <= len(got) <= 64:
            continue
        same = bool((got - got[:1]).abs().max() <= 1e-3 * got.abs().max())
        if same and not bool((golden - golden[:1]).abs().max() <= 1e-3 * golden.abs().max()):
            yield name, len(got)


def _halves(r: Reading) -> Match | None:
    """One of k equal blocks holds another block or the sum of all; the others are zero."""
    if r.pair is None or not 0.3 < r.zeros < 1:
        return None
    y, g = r.pair
    for axis in range(g.dim()):
        for k in (2, 3, 4, 8):
            if g.shape[axis] % k or g.shape[axis] < 2 * k:
                continue
            blocks = y.chunk(k, axis)
            full = [i for i, b in enumerate(blocks) if bool((b != 0).any())]
            if len(full) != 1:
                continue
            wanted = g.chunk(k, axis)
            sums: list[Tensor] = [torch.stack(wanted).sum(0), *(w for i, w in enumerate(wanted) if i != full[0])]
            if any(close(blocks[full[0]], w, r.unit) for w in sums):
                text = f"of {k} equal parts of axis {axis} only part {full[0]} is filled, with the values of others"
                return Match(EXACT, (text, "each rank wrote at the first one's offset"), {"axis": axis, "parts": k})
    return None


def dropout_mismatch(r: Reading) -> Match | None:
    """Forward and backward drop different elements: some are zero and should not be, others the other way round."""
    if r.y is None or r.g is None or r.pair is None:
        return None
    y, g = r.pair
    ours, theirs = y == 0, g == 0
    lost, gained = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    count = g.numel()
    if min(lost, gained) < max(3, 0.02 * count) or r.block and r.spans:
        return None
    both = ~ours & ~theirs
    agree = float(((y - g).abs() <= 1e-2 * g.abs())[both].double().mean()) if bool(both.any()) else 0.0
    if agree <= 0.9:
        return None  # no mask does that
    text = f"{lost} elements are zero and should not be, {gained} are not zero and should be: another mask"
    return Match(SEEN, (text, f"{agree:.0%} of the elements that both keep agree"), {})


def empty_group(r: Reading) -> Match | None:
    """Only a case with an empty group, or without elements, is wrong."""
    empty = [k for k, v in r.e.sizes.items() if isinstance(v, int) and not isinstance(v, bool) and v == 0]
    counts = [k for k, (_, g) in r.e.other.items() if g is not None and _is_counts(g)]
    if empty:
        what = r.e.error or f"the case has {', '.join(f'{k} = 0' for k in empty)}"
        return Match(SEEN + 0.03, (what,), {"sizes": empty})
    if r.e.error and r.e.filled:
        return Match(SEEN + 0.04, (r.e.error, r.e.filled), {"unused": next(iter(r.e.unused.values()), [])})
    if r.e.error and r.e.unused and r.raised.out_of_range:
        name, left = next(iter(r.e.unused.items()))
        last = any(n == max(left) + 1 for n in r.e.sizes.values() if isinstance(n, int))
        text = f"{name} leaves out {', '.join(map(str, left[:4]))}" + (", including the last one" if last else "")
        return Match(SEEN + 0.02 if last else LIKELY, (r.e.error, text), {"unused": left})
    if r.y is None or r.g is None or r.wrong is None or not r.wrong_count:
        return None
    rows = [s for axis, s in r.spans.items() if axis == 0]
    nan = bool((~torch.isfinite(r.y[r.wrong])).all()) and bool((r.g[r.wrong] == 0).all())
    if nan and (r.e.grouped or counts) and _whole_slices(r):  # a group is a whole row, not scattered elements
        place = f"{say(rows[0])} of axis 0" if rows else "in part"
        text = f"only elements where the golden is exactly zero: {place}, a group without members"
        unread = r.nothing_there and r.right("zeroed memory")
        return Match(SEEN + 0.02 if unread else LIKELY, (text,), {"counts": counts})
    return None


def _whole_slices(r: Reading) -> bool:
    """True if some axis has an index that is entirely wrong and one that is entirely right."""
    if r.wrong is None:
        return False
    for axis in range(r.wrong.dim()):
        flags = r.wrong.movedim(axis, 0).flatten(1) if r.wrong.dim() > 1 else r.wrong[:, None]
        if bool(flags.all(1).any()) and not bool(flags.any(1).all()):
            return True
    return False


def _is_counts(g: Tensor) -> bool:
    return (
        g.dim() == 1
        and g.numel() > 1
        and bool((g == g.round()).all())
        and bool((g >= 0).all())
        and bool((g == 0).any())
    )


# kernels that could not run


def exception(r: Reading) -> Match | None:
    """The candidate raised."""
    text = _error(r)
    return Match(HINT + 0.15, (text,), {}) if text else None


def _error(r: Reading) -> str:
    if r.e.error:
        return r.e.error
    finding = r.finding("raised")
    return finding.text if finding is not None else ""


def bad_config(r: Reading) -> Match | None:
    """The error message mentions sizes, divisions or launches."""
    text = _error(r)
    return Match(SEEN, (text,), {}) if text and r.raised.config else None


def reference_fault(r: Reading) -> Match | None:
    """The golden failed its own check, so nothing is said about the candidate."""
    if r.e.report.verdict != REFERENCE_FAULT:
        return None
    sentences = tuple(f.text for f in r.e.report.findings if f.probe == "golden")
    return Match(1.0, sentences or ("the golden failed its own check",), {})
