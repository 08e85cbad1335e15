"""Writes the generated tables into the documents, between their markers.

    python scripts/tables.py            brings every document up to date
    python scripts/tables.py --check    changes nothing; exit status 1, and names, where documents are out of date

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`, where NAME is a key of TABLES.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for benchmarks
os.environ["TRITON_INTERPRET"] = "1"  # so that kernels answer on a machine without a GPU

import torch
from typer.models import ArgumentInfo

import evaluation_rows
import finetune
import gate_rows
import generation
import kernelfault
import language_model
import liger
import model_coverage
import offload_rows
import router_peers
import serve_rows
import speed_cpu
import speed_short
import strategies
import training_stacks
import watch_cost
from benchmarks.bench import app as bench
from benchmarks.generate.command import app as bench_generate
from benchmarks.offload.command import app as offload
from goldsmith import Op
from goldsmith.assay.declare.case import Case
from goldsmith.cli import app
from recorded_commands import today

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill(text: str) -> str:
    return MARKED.sub(lambda result: result[1] + TABLES[result[2]]() + result[3], text)


def support() -> str:
    """What each backend supports, as it answers itself for every operator's cases."""
    rows, refusals, backends = [], {}, ("reference", "triton", "native", "cuda_grouped")
    for _, op in sorted(Op.all().items()):
        if op.internal:
            continue
        row = [f"`{op.name}`", op.summary, "of all inputs" if op.grads == op.inputs else ", ".join(op.grads) or "none"]
        streams = set()
        for backend in backends:
            entries = []
            for dtype in DTYPES if backend in op.backends else ():
                for case, reason in refused(op, backend, dtype):
                    if reason is None:
                        entries.append(dtype)
                        if backend == "triton":
                            streams.add(case.sizes.get("n"))
                    elif backend == "triton" and "float64" not in reason:
                        refusals.setdefault(reason, []).append(f"`{op.name}`")
            row.append(" ".join(DTYPES[d] for d in dict.fromkeys(entries)) or "-")
        row.append(", ".join(str(n) for n in sorted(streams - {None})) if "triton" in op.backends else "-")
        rows.append(row)
    titles = ["operator", "computes", "gradients", "reference: any device, any n", "Triton: CUDA", "C++: CPU",
              "torch's grouped products: CUDA", "Triton: n tried"]  # fmt: skip
    notes = [f"- Triton, {', '.join(dict.fromkeys(names))}: {reason}.\n" for reason, names in refusals.items()]
    return table(titles, rows) + "\n" + "".join(notes)


def refused(op: Op, backend: str, dtype: str) -> Iterator[tuple[Case, str | None]]:
    """(small case, the backend's reason to refuse it, or None)."""
    for case in op.cases:
        if "large" not in case.tags:
            inputs = case.build(getattr(torch, dtype))
            tensors, options = [inputs.get(name) for name in op.inputs], {name: inputs[name] for name in op.options}
            if backend == "cuda_grouped":  # it answers on a machine without a GPU too
                yield case, op.backend(backend).unsupported(dict(zip(op.inputs, tensors, strict=True)), options)
            else:
                yield case, op.why_not(backend, *tensors, **options)


RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"goldsmith": "ours", "eager": "torch eager", "compile": "torch.compile", "liger": "Liger"}


def speed() -> str:
    """mhc.connection, forward and backward, at training sizes."""
    return speed_table(lambda row: row["op"] == "mhc.connection" and row["case"].startswith("train"))


def speed_all() -> str:
    return speed_table(lambda row: True)


def speed_table(wanted: Callable[[dict], bool]) -> str:
    """A table per machine with each operator's newest rows, and their conditions below."""
    runs: dict[str, dict[tuple, list[dict]]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["op"].startswith("offload.") or row["device"] != "cuda":
                continue
            if row["median_us"] is not None and wanted(row):
                when = (row["date"], row["commit"], json.dumps(row["versions"], sort_keys=True))
                runs.setdefault(row["machine"], {}).setdefault(when, []).append(row)
    text = ""
    for machine, dated in runs.items():
        newest: dict[str, str] = {}  # the date of each operator's last rows; of one day, later lines count
        for (date, *_), rows in dated.items():
            newest |= {row["op"]: max(date, newest.get(row["op"], "")) for row in rows}
        text += one_machine([r for rows in dated.values() for r in rows if r["date"] == newest[r["op"]]], machine)
    return (
        text
        or "No measurement is in benchmarks/results yet: `python -m benchmarks.bench --out FILE` there makes one.\n"
    )


def one_machine(rows: list[dict], machine: str) -> str:
    places: dict[tuple, dict[str, dict]] = {}
    for row in rows:  # a later run replaces an earlier one with its peers, because ratios are of one run
        place = (row["op"], row["case"], row["dtype"], row["direction"], row["mode"])
        result = places.setdefault(place, {})
        if any(run_of(other) != run_of(row) for other in result.values()):
            result.clear()
        result[row["peer"]] = row
    peers = [peer for peer in NAMES if any(peer in result for result in places.values())]
    peers += sorted({row["peer"] for row in rows} - set(peers))
    lines = []
    for (op, case, dtype, direction, mode), result in places.items():
        if "goldsmith" not in result:
            continue
        ours = result["goldsmith"]
        share = "" if ours["share_of_ceiling"] is None else f"{100 * ours['share_of_ceiling']:.0f} %"
        where = f"{case}, {dtype}" + {"graph": ", CUDA graph", "replayed": ", CUDA graph, L2 cold"}.get(mode, "")
        times = [microseconds(result.get(peer)) for peer in peers]
        lines.append([f"`{op}`", where, direction, times[0], share, *times[1:], speed_cpu.checked(ours)])
    titles = ["", "case", "", "ours", "of the copy rate", *(NAMES.get(p, p) for p in peers[1:]), "verified"]
    shown = [row for result in places.values() if "goldsmith" in result for row in result.values()]
    return table(titles, lines) + "\n" + "".join(f"{line}\n" for line in conditions(shown, machine)) + "\n"


def run_of(row: dict) -> tuple:
    return row["date"], row["commit"], json.dumps(row["versions"])


def microseconds(row: dict | None) -> str:
    """The median, and half the distance from the 10th to the 90th percentile in percent."""
    if row is None:
        return "-"
    median = row["median_us"]
    spread = 50 * (row["p90"] - row["p10"]) / median
    return f"{median:.1f} ±{spread:.0f} %" if median < 100 else f"{median:.0f} ±{spread:.0f} %"


def conditions(rows: list[dict], machine: str) -> Iterator[str]:
    """A line per set of versions and commit."""
    for run in dict.fromkeys(run_of(row) for row in rows):
        date, commit, versions = run
        named = ", ".join(f"{name} {version}" for name, version in json.loads(versions).items())
        rates = [row["copy_gb_s"] for row in rows if run_of(row) == run]
        graphs = any(row["mode"] == "graph" for row in rows if run_of(row) == run)
        yield (
            f"{machine}; {named}; commit {commit}; {date}; device time of single calls in microseconds, L2 flushed "
            f"before each{' (not in CUDA graphs of many calls)' if graphs else ''}; median ± half of p10..p90; "
            f"copy rate {max(rates):.0f} GB/s in the same run."
        )


def commands() -> str:
    """Every command with its arguments and options, from the signatures that make its --help."""
    text = ""
    own = [("", command) for command in app.registered_commands if not command.hidden]
    for group in app.registered_groups:
        own += [(f"{group.name} ", command) for command in group.typer_instance.registered_commands]
    own += [("", command) for command in bench_generate.registered_commands]
    others = [("", command) for command in (*bench.registered_commands, *offload.registered_commands)]
    for prefix, command in [*own, *others]:
        name = prefix + (command.name or command.callback.__name__)
        program = "goldsmith" if (prefix, command) in own else "python -m"
        hints = get_type_hints(command.callback, include_extras=True)
        arguments, options, usage = [], [], [program, name]
        for parameter in signature(command.callback).parameters.values():
            kind, about = get_args(hints[parameter.name])[:2]
            if about.hidden:
                continue
            output = one_line(about.help)
            if isinstance(about, ArgumentInfo):
                output += default(parameter.default, about.help)
                arguments.append([f"`{about.metavar}`", output])
                many = "..." if any(get_origin(k) is list for k in (kind, *get_args(kind))) else ""
                usage.append(about.metavar if parameter.default is Parameter.empty else f"[{about.metavar}]{many}")
            else:
                # with Annotated, typer takes the first name for a default
                names = [n for n in (about.default, *(about.param_decls or ())) if str(n).startswith("-")]
                flags = ", ".join(names or [f"--{parameter.name.replace('_', '-')}"])
                on = flags.partition("/")[0] if parameter.default is True else parameter.default
                output += default(on, about.help)
                options.append([f"`{flags}{value(kind, about.metavar)}`", output])
        text += (
            f"## {program} {name}\n\n`{' '.join([*usage, '[options]'])}`\n\n{cleandoc(command.callback.__doc__)}\n\n"
        )
        text += table(["argument or option", "what it does"], arguments + options) + "\n"
    return text.removesuffix("\n")


def value(kind: object, metavar: str | None) -> str:
    """The text after an option: its metavar, or one for its type."""
    kinds = [k for k in get_args(kind) or (kind,) if k is not type(None)]
    if bool in kinds:
        return ""
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return " " + "/".join(kinds[0])
    return " " + (metavar or ("N" if int in kinds else "X" if float in kinds else "NAME"))


def default(value: object, about: str) -> str:
    return "" if value in (None, False, "", Parameter.empty) or "Default" in about else f" Default: {value}."


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def assay_rates() -> str:
    """False alarms and misses of the assay, from the rows of `python -m benchmarks.assay.rates`."""
    path = RESULTS / "assay_rates.json"
    if not path.exists():
        return "No measurement is in benchmarks/results yet.\n"
    result = json.loads(path.read_text())["summary"]
    caught = result["wrong_checks"] - result["escapes"]
    highest, lowest = result["false_alarm_rate_95"][1], result["detection_rate_95"][0]
    rows = [
        ["right kernels drawn at random, with sums in random legal orders", f"{result['clean_runs']:,}"]
        + [f"{result['false_alarms']} fail; at most {100 * highest:.2f} % with 95 % confidence"],
        [f"{result['wrong_kernels']} wrong kernels, each under several seeds", f"{result['wrong_checks']:,}"]
        + [f"{caught} fail; at least {100 * lowest:.1f} % with 95 % confidence"],
        ["right kernels that look like wrong ones", f"{result['twin_checks']:,}", f"{result['twins_accused']} fail"],
    ]
    return table(["what was checked", "checks", "verdicts"], rows) + (
        f"\nCommit {result.get('commit', 'unknown')}; {result['machine']}; `{today(result['command'])}`.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "assay_rates": assay_rates,
    "support": support,
    "speed_short": lambda: speed_short.speed(table),
    "speed": speed,
    "speed_all": speed_all,
    "speed_cpu": lambda: speed_cpu.speed(table),
    "speed_cpu_short": lambda: speed_cpu.short(table),
    "speed_cpu_runs": lambda: speed_cpu.runs(table),
    "experts_memory": lambda: speed_cpu.memory(table),
    "experts_decode": lambda: speed_cpu.decode(table),
    "experts_int8": lambda: speed_cpu.int8(table),
    "commands": commands,
    "liger_verdicts": lambda: liger.verdicts(table),
    "liger_errors": lambda: liger.errors(table),
    "liger_faults": lambda: liger.faults(table),
    "kernelfault_rates": lambda: kernelfault.rates(table),
    "kernelfault_baselines": lambda: kernelfault.baselines(table),
    "kernelfault_strangers": lambda: kernelfault.strangers(table),
    "kernelfault_hosts": lambda: kernelfault.hosts(table),
    "kernelfault_faults": lambda: kernelfault.faults(table),
    "kernelfault_amended": lambda: kernelfault.amended(table),
    "kernelfault_confusion": lambda: kernelfault.confusion(table),
    "kernelfault_rank_scores": lambda: kernelfault.rank_scores(table),
    "kernelfault_rank_faults": lambda: kernelfault.rank_faults(table),
    "generation_rates": lambda: generation.rates(table),
    "generation_memory": lambda: generation.memory(table),
    "generation_rules": lambda: generation.rules(table),
    "generation_parts": lambda: generation.parts(table),
    "generation_module_parts": lambda: generation.module_parts(table),
    "language_model": lambda: language_model.losses(table),
    "offload_calls": lambda: offload_rows.calls(table),
    "offload_steps": lambda: offload_rows.steps(table),
    "offload_guard": lambda: offload_rows.guard(table),
    "offload_memory": lambda: offload_rows.memory(table),
    "router_strategies": lambda: strategies.gather_or_dense(table),
    "router_peers": lambda: router_peers.beside_peers(table, "cuda"),
    "router_cpu": lambda: router_peers.beside_peers(table, "cpu"),
    "finetune": lambda: finetune.runs(table),
    "models": model_coverage.rendered,
    "evaluation": lambda: evaluation_rows.parity(table),
    "training_stacks": training_stacks.rendered,
    "serve": lambda: serve_rows.throughput(table),
    "gate_specimens": lambda: gate_rows.specimens(table),
    "gate_throughput": lambda: gate_rows.throughput(table),
    "gate_hostile": lambda: gate_rows.hostile(table),
    "watch_cost": lambda: watch_cost.by_size(table),
}


def main(arguments: list[str]) -> int:
    stale = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]:
        old = path.read_text()
        new = fill(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(new)
    if stale:
        print(f"{'not up to date' if '--check' in arguments else 'brought up to date'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
