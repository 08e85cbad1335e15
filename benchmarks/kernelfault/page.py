"""The report as one HTML page: no network, no script, light and dark."""

from __future__ import annotations

from typing import Any

import jinja2

from . import terminal
from .baseline_names import RULES
from .catalogue import HERE, ROOT

STYLE = ROOT / "src" / "goldsmith" / "assay" / "report" / "html" / "style.css"


def render(summary: dict[str, Any]) -> str:
    """The page's text; texts of the rows are escaped."""
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rates = {n: r for n, r in summary["rates"].items() if r["detected"]["of"]}
    whole = summary["rates"]["all"]
    return environment.get_template("page.html.j2").render(
        s=summary, c=summary["conditions"], style=STYLE.read_text(encoding="utf-8"), all=whole,
        rates=[
            (name, {**r, "cells": [(t, terminal.percent(r[k])) for k, t in terminal.TITLES.items() if r[k]["of"]]})
            for name, r in rates.items()
        ],
        **{k: _of(whole[k]) for k in ("detected", "stage", "top1")},
        right=rows_of_right(summary), cost=rows_of_cost(summary), confusion=confusion(summary),
        baselines=rows_of_baselines(summary),
    )  # fmt: skip


def _of(figure: dict[str, Any]) -> str:
    return "-" if not figure["of"] else f"{100 * figure['share']:.1f}\N{NO-BREAK SPACE}%"


def rows_of_right(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, rate) of alarms on right kernels."""
    accused = summary["accused"]
    return [
        ("right kernels drawn at random that failed", terminal.percent(summary["clean"])),
        ("hosts without a fault that failed", terminal.percent(summary["twins"])),
        ("ties, faulty goldens and right rewritings that were accused", f"{accused['hits']} of {accused['of']}"),
    ]


def rows_of_cost(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, median cost) of the parts of a check and of a diagnosis."""
    names = {
        "plain": "one run, forward and backward", "compare": "comparison with the golden",
        "stages": "comparison and stages", "all": "every probe",
    }  # fmt: skip
    cost = [
        (names[k], f"{1000 * v['seconds']:.0f} ms ({v['runs']:.0f} times a run)") for k, v in summary["cost"].items()
    ]
    report = summary["report"]
    if report:
        cost.append(("a diagnosis", f"{report['median_seconds']:.1f} s, 90 % within {report['p90_seconds']:.1f} s"))
        if report["small"] is not None:
            cost.append(("the smallest failing case", f"{100 * report['small']:.1f} % of the case's size (median)"))
    return cost


def rows_of_baselines(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(rule, faults found, right kernels rejected); the assay's row comes first."""
    if not summary["baselines"]:
        return []
    ours = (
        "goldsmith.assay",
        terminal.percent(summary["rates"]["all"]["detected"]),
        terminal.percent(summary["twins"]),
    )
    baselines = summary["baselines"]
    return [ours] + [
        (terminal.RULE_TITLES[r], *(terminal.percent(baselines[r][k]) for k in ("faults", "right_kernels")))
        for r in RULES if r in baselines
    ]  # fmt: skip


def confusion(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per true cause: how often it came first, and which causes came first instead."""
    out = []
    for truth, answers in summary["confusion"].items():
        others = sorted(((n, id) for id, n in answers.items() if id != truth), reverse=True)
        out.append({
            "truth": truth, "right": answers.get(truth, 0), "of": sum(answers.values()),
            "others": ", ".join(f"{id} {n}" for n, id in others),
        })  # fmt: skip
    return out
