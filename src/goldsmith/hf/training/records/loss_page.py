"""loss.html: one page on the course of a run, in the style of the project's reports, without scripts or network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .chart import Line, chart, smooth
from .checkpoints import replace
from .journal import LogRow

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Facts = Sequence[tuple[str, str]]
Curve = Sequence[tuple[int, float]]


def write(path: Path, rows: Sequence[LogRow], steps: int, *, title: str, trained: Facts, run: Facts) -> None:
    """Writes the page atomically. `trained` and `run` are tables of (name, value)."""
    replace(path, page(rows, steps, title=title, trained=trained, run=run))


def page(rows: Sequence[LogRow], steps: int, *, title: str, trained: Facts, run: Facts) -> str:
    """The page as HTML."""
    from ....assay.report.html.page import now, style

    loss = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    evaluations = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    first = escape(headline(loss, steps, evaluations))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}: loss</title>'
        f"<style>{style()}{_style()}</style></head><body>"
        f'<header class="top"><p class="brand">goldsmith <span>finetune</span></p><p class="made">{now()}</p></header>'
        f'<main><section class="run"><p class="kicker">{escape(title)}</p><h1>{first}</h1>'
        f"{_lede(loss, evaluations)}{_facts(rows, steps)}</section>"
        f"{_charts(rows, loss, evaluations)}"
        f'<section class="foot"><div class="columns">{_table("Trained parameters", trained)}{_table("The run", run)}'
        "</div></section></main></body></html>\n"
    )


def headline(loss: Curve, steps: int, evaluations: Curve = ()) -> str:
    """The course of the loss in one sentence: on held-out text, if there is any, because only that shows learning."""
    if not loss:
        return f"No step of {steps:,} is done yet."
    done = loss[-1][0]
    until = f"{done:,} steps" if done == steps else f"{done:,} of {steps:,} steps"
    if evaluations:
        return f"{_course('The held-out loss', evaluations[0][1], evaluations[-1][1])} nats per token in {until}."
    if averaged(loss) == 1:
        first, last = ends(loss)
        return f"The training loss was {first:.3f} nats per token at the first step and {last:.3f} after {until}."
    return f"{_course('The training loss', *ends(loss))} nats per token in {until}."


def _course(subject: str, first: float, last: float) -> str:
    if f"{first:.3f}" == f"{last:.3f}":
        return f"{subject} stayed at {first:.3f}"
    return f"{subject} {'fell' if last < first else 'rose'} from {first:.3f} to {last:.3f}"


def averaged(loss: Curve) -> int:
    """The number of steps at either end whose mean is compared: a tenth of the steps, at most 20."""
    return max(1, min(20, len(loss) // 10))


def ends(loss: Curve) -> tuple[float, float]:
    """The mean loss of the first and of the last steps."""
    count = averaged(loss)
    return sum(v for _, v in loss[:count]) / count, sum(v for _, v in loss[-count:]) / count


def _lede(loss: Curve, evaluations: Curve) -> str:
    """The best held-out loss, and the training loss; or why there is no held-out loss."""
    if not loss:
        return ""
    if not evaluations:
        return '<p class="lede">No held-out text was given (--eval-data), so this does not show what it learned.</p>'
    best = min(evaluations, key=lambda point: point[1])
    text, count = _course("The training loss", *ends(loss)), averaged(loss)
    if count == 1:  # two steps differ by their rows, so nothing rose or fell
        text = "The training loss was {:.3f} at the first step and {:.3f} at the last".format(*ends(loss))
    else:
        text += f" (means of {count} steps)"
    if best[0] != evaluations[-1][0]:
        text = f"The lowest held-out loss, {best[1]:.3f}, was at step {best[0]:,}. {text}"
    return f'<p class="lede">{text}.</p>'


def _facts(rows: Sequence[LogRow], steps: int) -> str:
    step_rows = [row for row in rows if "loss" in row]
    if not step_rows:
        return ""
    seconds, tokens = sum(row["seconds"] for row in step_rows), sum(row["tokens"] for row in step_rows)
    facts = (
        f"{len(step_rows):,} of {steps:,} steps",
        f"{tokens:,} tokens",
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s",
    )
    return f'<ul class="facts">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>'


def _charts(rows: Sequence[LogRow], loss: list[tuple[int, float]], evaluations: list[tuple[int, float]]) -> str:
    if not loss:
        return ""
    lines = [Line("raw", loss), Line("mean", smooth(loss)), Line("held", evaluations, dots=True)]
    keys = '<span><b class="k-held"></b>held-out text</span>' if evaluations else ""
    keys += '<span><b class="k-raw"></b>training, each step</span><span><b></b>training, running mean</span>'
    drawing = chart("tall", "", lines, unit="nats per token")
    text = f'<section><h2>Loss by step</h2><p class="keys">{keys}</p>{drawing}'
    small = (
        ("lr", "Learning rate", ""),
        ("grad_norm", "Gradient norm before clipping", ""),
        ("tokens_per_s", "Speed", "tokens per second"),
    )
    text += '<div class="three">'
    for name, title, unit in small:
        line = Line("one", [(row["step"], value) for row in rows if isinstance(value := row.get(name), float | int)])
        text += chart("low", title, [line], zero=True, unit=unit)
    return f"{text}</div></section>"


def _table(title: str, facts: Facts) -> str:
    lines = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in facts)
    return f'<table class="facts-table"><caption>{escape(title)}</caption><tbody>{lines}</tbody></table>'


@functools.cache
def _style() -> str:
    return (Path(__file__).parent / "loss.css").read_text(encoding="utf-8")
