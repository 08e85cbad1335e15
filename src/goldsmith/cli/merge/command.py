"""`goldsmith merge`: one run, from the options to the merged folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ...core.messages import about, sentence
from ..signals import loading_hf, terminate_like_ctrl_c
from ..terminal import Failure, Interruption, announce, console, percent, print_paragraph, write_json

if TYPE_CHECKING:
    from ...hf.merging.merged_model import MergeReport


def run(model: str, adapter: str, output: Path, format: str, *, as_json: bool) -> int:
    """Merge, report, and return the exit status."""
    announce(f"Loading torch and transformers, then {Path(model).name}")
    with loading_hf():
        from ...hf.merging.codes import LEAST
        from ...hf.merging.merged_model import merge
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    err = console(stderr=True)
    try:
        with terminate_like_ctrl_c(), Progress(
            TextColumn("merging"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"),
            console=err, transient=True, disable=not err.is_terminal,
        ) as bar:  # fmt: skip
            task = bar.add_task("", total=None)
            report = merge(
                model, adapter, output, format=format,
                progress=lambda done, total, name: bar.update(task, completed=done, total=total, description=name),
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interruption(f"Interrupted; {output} was not written.") from None
    except MemoryError as error:
        raise Failure(f"Out of memory; {output} was not written: {error}.") from error
    except (ValueError, TypeError, OSError) as error:
        raise Failure(_sentence(error, model, adapter, output)) from error
    if as_json:
        write_json(report.to_dict())
    else:
        console().print(_text(report), markup=False)
    if report.survival.lost:
        print_paragraph(_warning(report, model, adapter, LEAST))
    return 0


def _text(report: MergeReport) -> str:
    survival = report.survival
    return (
        f"{report.output}: {report.tensors:,} tensors, {report.nbytes / 2**20:,.1f} MiB, in {_format(report)}\n"
        f"{report.merged} weights with the adapter: {percent(survival.along)} of its change arrives, rounding noise "
        f"{percent(survival.noise)} of its norm"
    )


def _format(report: MergeReport) -> str:
    return "the base's own format" if report.format == "as the base" else report.format


def _warning(report: MergeReport, model: str, adapter: str, least: float) -> str:
    survival, worst = report.survival, report.survival.worst
    wider = "fp32" if report.format in ("as the base", "bf16", "fp16") else "bf16 or fp32"
    place = "" if worst is None else f" The smallest share arrives in {worst[0]}: {percent(worst[1])}."
    return (
        f"Only {percent(survival.along)} of the adapter survives rounding to {_format(report)} "
        f"(below {percent(least)}): its changes are smaller than the steps of the format.{place} Keep the adapter "
        f"apart: goldsmith generate {model} --adapter {adapter} adds it without rounding; or merge with "
        f"--format {wider}."
    )


def _sentence(error: Exception, model: str, adapter: str, output: Path | None = None) -> str:
    text = sentence(error, ("format",))
    if text.startswith(("output ", "runtime ")):
        return f"--{text}"
    if output is not None and text.startswith(str(output)):
        return about("--output", output, text)
    return about("ADAPTER", adapter, text) if adapter in text else about("MODEL", model, text)
