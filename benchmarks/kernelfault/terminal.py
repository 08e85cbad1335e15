"""Output on the terminal: progress, then the tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from .baseline_names import RULES

GROUPS = ("detected", "stage", "top1", "top3", "params")
TITLES = {
    "detected": "detected", "stage": "stage exact", "top1": "cause first", "top3": "cause among 3",
    "params": "details right",
}  # fmt: skip
RULE_TITLES = {
    "assert_close": "torch.testing.assert_close", "allclose_1e-2": "allclose, 1e-2",
    "twice_torch": "at most 2x torch's error", "calc_diff_1e-3": "calc_diff < 1e-3",
    "gradcheck": "gradcheck", "opcheck": "opcheck",
}  # fmt: skip


def progress(jobs: Iterator[tuple[int, int, dict]], total: int) -> None:
    """Show a progress bar on a terminal; elsewhere, print a line per twentieth of the jobs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began, first = time.monotonic(), None
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("kernelfault", total=total)
        for done, of, job in jobs:
            first = done if first is None else first
            bar.update(task, completed=done, description=f"{job['name'][:32]:32}")
            if not console.is_terminal and (done * 20 // of) != (done - 1) * 20 // of:
                here = done - first + 1
                left = (time.monotonic() - began) / here * (of - done)
                print(f"{done} of {of} jobs, about {left / 60:.0f} min left", file=sys.stderr, flush=True)


def percent(figure: dict[str, Any] | None) -> str:
    """97.5 % (91.4 to 99.3, 78 of 80)"""
    if figure is None or not figure["of"]:
        return "-"
    share, low, high = (100 * figure[k] for k in ("share", "low", "high"))
    return f"{share:.1f} % ({low:.1f} to {high:.1f}; {figure['hits']} of {figure['of']})"


def print_summary(summary: dict[str, Any]) -> None:
    """Print the tables as plain text."""
    for name, rates in summary["rates"].items():
        if rates["detected"]["of"]:
            print(f"{name}: {rates['faults']} faults in {rates['hosts']} hosts")
            for key in GROUPS:
                if rates[key]["of"]:
                    print(f"  {TITLES[key]:<15} {percent(rates[key])}")
    accused, clean, twins = summary["accused"], summary["clean"], summary["twins"]
    print(f"right kernels accused (ties, faulty goldens, rewritings): {accused['hits']} of {accused['of']}")
    print(f"false alarms: {percent(clean)} of clean runs, {percent(twins)} of hosts without a fault")
    if summary["cost"]:
        parts = [f"{k} {v['seconds']:.3f} s ({v['runs']:.0f} runs)" for k, v in summary["cost"].items()]
        print(f"cost, median of the hosts: {', '.join(parts)}")
    if summary["report"]:
        r = summary["report"]
        small = "" if r["small"] is None else f"; case shrunk to {100 * r['small']:.1f} % of its size (median)"
        print(f"time to report: median {r['median_seconds']:.1f} s, 90 % within {r['p90_seconds']:.1f} s{small}")
    for rule in RULES:
        if rule in summary["baselines"]:
            b = summary["baselines"][rule]
            print(
                f"  {RULE_TITLES[rule]:<28} finds {percent(b['faults'])}, rejects right {percent(b['right_kernels'])}"
            )
    for miss in summary["misses"]:
        answers = ", ".join(f"{id} {score:.2f}" for id, score in miss["said"]) or "nothing"
        print(f"MISS {miss['missed']}  {miss['fault']} {miss['case']} seed {miss['seed']}: {miss['what']}")
        print(f"     stage {miss['stage']} (is {' or '.join(miss['wanted_stage'])}); said {answers} "
              f"(is {' or '.join(miss['wanted'])})")  # fmt: skip
        for sentence in miss["evidence"]:
            print(f"     {sentence[:200]}")
    for alarm in summary["alarms"]:
        print(f"ALARM  {alarm['host']} {alarm['backend']} {alarm['case']} seed {alarm['seed']}: {alarm['verdict']}")
        for finding in alarm["findings"][:3]:
            print(f"     {finding[:200]}")
    for row in summary["accused"]["rows"]:
        print(f"ACCUSED  {row['fault']} {row['case']} seed {row['seed']}: {row['verdict']}, notes {row['notes']}")
    print(summary["author"])


def status(summary: dict[str, Any]) -> int:
    """0 where every fault is found and no right kernel is accused, else 1."""
    detected = summary["rates"]["all"]["detected"]
    wrong = summary["accused"]["hits"] + summary["clean"]["hits"] + summary["twins"]["hits"]
    return 1 if detected["hits"] < detected["of"] or wrong else 0
