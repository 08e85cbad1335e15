"""`goldsmith adapter check` and `goldsmith adapter export`: one run each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ...core.messages import about, sentence
from ..signals import loading_hf, terminate_like_ctrl_c
from ..terminal import Failure, Interruption, announce, console, write_json, write_stdout

if TYPE_CHECKING:
    from ...hf.adapter_check.check import AdapterCheck

SIGNS = {"arrives": "yes", "missing": "-", "unclear": "?"}


def run_check(
    model: str, adapter: str, names: list[str] | None, text: Path | None, merged: Path | None, *, as_json: bool
) -> int:
    """Check, print the findings, and return the exit status."""
    announce(f"Loading torch and transformers, then {Path(model).name}")
    with loading_hf():
        from ...hf.adapter_check.check import check
        from ...hf.adapter_check.runtimes import RUNTIMES
    _quiet()
    words = None
    if text is not None:
        try:
            words = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Failure(f"--text {text} cannot be read: {reason}.") from error
    if merged is not None and not (merged / "config.json").is_file():
        raise Failure(f"--merged {merged} is not the folder of a model: it has no config.json.")
    err = console(stderr=True)
    try:
        with terminate_like_ctrl_c(), err.status("checking") as status:
            result = check(
                model, adapter, which=names or tuple(RUNTIMES), text=words, merged=merged,
                begin=lambda name: status.update(f"running {name}"),
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interruption("Interrupted.") from None
    except (ValueError, TypeError, OSError, MemoryError) as error:
        raise Failure(_sentence(error, model, adapter)) from error
    if as_json:
        write_json(result.to_dict())
    else:
        _show(result)
    missing = [finding for finding in result.findings if finding.verdict == "missing"]
    if len(missing) == len(result.findings):
        raise Failure(f"Nothing was checked: {'; '.join(finding.text for finding in missing)}.")
    return 0 if result.ok else 1


def run_export(model: str, adapter: str, output: Path, *, as_json: bool) -> int:
    """Export, say what was written, and return the exit status."""
    announce(f"Loading torch and transformers, then {Path(model).name}")
    with loading_hf():
        from ...hf.adapter.exporting import export_adapter
    _quiet()
    try:
        with terminate_like_ctrl_c():
            count = export_adapter(model, adapter, output)
    except KeyboardInterrupt:
        raise Interruption("Interrupted.") from None
    except (ValueError, TypeError, OSError) as error:
        raise Failure(_sentence(error, model, adapter, output)) from error
    if as_json:
        write_json({"output": str(output), "tensors": count})
    else:
        write_stdout(f"{output}: an adapter of {count:,} tensors, with one pair per expert and projection\n")
    return 0


def _show(result: AdapterCheck) -> None:
    out = console()
    table = Table(box=None, pad_edge=False)
    for name in ("runtime", "arrives", "share", "error", "finding"):
        table.add_column(name)
    for finding in result.findings:
        share = "-" if finding.share is None else f"{finding.share:.3f}"
        error = "-" if finding.error is None else f"{finding.error:.3f}"
        table.add_row(finding.runtime, SIGNS.get(finding.verdict, "NO"), share, error, finding.text)
    out.print(table)
    out.print(
        f"{result.tokens} tokens; in the trained model the adapter changes a token's log-probability by "
        f"{result.effect:.3g} on average. share: how much of that change the runtime applies. error: the size of the "
        "difference from the trained model's changes, relative to them; rounding to 16 bits gives some hundredths."
    )


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _sentence(error: Exception, model: str, adapter: str, output: Path | None = None) -> str:
    text = sentence(error)
    if text.startswith(("output ", "runtime ")):
        return f"--{text}"
    if output is not None and text.startswith(str(output)):
        return about("--output", output, text)
    return about("ADAPTER", adapter, text) if adapter in text else about("MODEL", model, text)
