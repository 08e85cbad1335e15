"""Tables of docs/kernelfault*.md and docs/verify-ranks.md, from the faults and benchmarks/results/kernelfault*.json.

python -m benchmarks.kernelfault --json benchmarks/results/kernelfault.json
python -m benchmarks.kernelfault --quick --seeds 1 --clean 0 --baselines \\
    --json benchmarks/results/kernelfault_baselines.json
python -m benchmarks.kernelfault --author stranger --seeds 1 --json benchmarks/results/kernelfault_strangers_1.json
python -m benchmarks.kernelfault.ranks --json benchmarks/results/kernelfault_ranks.json
python scripts/tables.py

kernelfault_ranks_first.json is from the one run before any rule was changed; kernelfault_strangers_N.json is the same
for batch N. Both are never made again. The usual rules have a run of their own, because they take as long as all else.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kernelfault.json"
BASELINES = RESULTS.with_name("kernelfault_baselines.json")
RANKS = RESULTS.with_name("kernelfault_ranks.json")
RANKS_FIRST = RESULTS.with_name("kernelfault_ranks_first.json")
FIRST_SIGHT = "kernelfault_strangers_*.json"
sys.path.insert(0, str(ROOT))

from benchmarks.kernelfault import catalogue, figures, terminal  # noqa: E402
from benchmarks.kernelfault.baseline_names import RULES  # noqa: E402
from benchmarks.kernelfault.ranks import catalogue as rank_catalogue  # noqa: E402
from goldsmith.assay.ranks.causes import CAUSES  # noqa: E402
from recorded_commands import today  # noqa: E402

Table = Callable[[list[str], list[list[str]]], str]


def results() -> dict:
    return json.loads(RESULTS.read_text())


def hosts(table: Table) -> str:
    """The kernels that faults are put into."""
    count = defaultdict(int)
    for fault in catalogue.faults():
        count[fault.host.name] += 1
    rows = [
        [f"`{h.name}`", h.about, ", ".join(h.backends), str(count[h.name]), _written(h)]
        for h in sorted(catalogue.hosts().values(), key=lambda h: (h.held_out, h.author, h.name))
    ]
    return table(["kernel", "what it is", "backends", "faults", ""], rows)


def _written(host: catalogue.Host) -> str:
    return "held out" if host.held_out else "by a stranger" if host.author != catalogue.OURS else ""


def strangers(table: Table) -> str:
    """First results on kernels by a stranger, batch by batch, and the rates of all kernels."""
    files = sorted(RESULTS.parent.glob(FIRST_SIGHT), key=lambda path: int(path.stem.rpartition("_")[2]))
    batches = [json.loads(path.read_text()) for path in files]
    titles = {key: title for key, title in terminal.TITLES.items() if key != "params"}
    groups = [batch["rates"]["all"] for batch in batches]
    rows = [[f"batch {i}: {_size(group)}"] + [terminal.percent(group[key]) for key in titles]
            for i, group in enumerate(groups, 1)]  # fmt: skip
    whole = {k: sum(group[k] for group in groups) for k in ("faults", "hosts")}
    rows.append([f"**all: {_size(whole)}**", *(terminal.percent(_pooled([g[key] for g in groups])) for key in titles)])
    known = results()["rates"]
    rows += [
        [f"{name}, as measured above"] + [terminal.percent(known[name][key]) for key in titles]
        for name in ("held out", "development")
    ]
    accused, alarms = (_pooled([batch[key] for batch in batches]) for key in ("accused", "twins"))
    lines = [
        f"- Right but unusual rewritings that were accused: {terminal.percent(accused)}.",
        f"- Kernels without a fault that failed: {terminal.percent(alarms)}.",
        f"- First causes with a score of at least 0.9 that were right: {terminal.percent(_sure(batches))}.",
        f"- Wrong first causes: {_instead(batches)}.",
    ]
    lines += [f"- Batch {i}: {conditions(batch)}".rstrip() for i, batch in enumerate(batches, 1)]
    return table(["first sight", *titles.values()], rows) + "\n" + "".join(f"{line}\n" for line in lines)


def _sure(batches: list[dict]) -> dict:
    """How often a first cause with a score of at least 0.9 was right."""
    bins = [(round(share * n), n) for entry in batches for low, share, n in entry["calibration"]["development"]
            if low >= 0.9]  # fmt: skip
    return figures.rate(sum(hits for hits, _ in bins), sum(n for _, n in bins))


def _instead(batches: list[dict]) -> str:
    """The wrong first causes, the most frequent ones first."""
    misses = [miss for entry in batches for miss in entry["misses"]]
    firsts = Counter((miss["said"] or [["nothing"]])[0][0] for miss in misses)
    return ", ".join(f"`{id}` {n}" for id, n in firsts.most_common())


def _size(group: dict) -> str:
    return f"{group['faults']} faults, {group['hosts']} kernels"


def _pooled(rates: list[dict]) -> dict:
    return figures.rate(sum(r["hits"] for r in rates), sum(r["of"] for r in rates))


def rates(table: Table) -> str:
    """Rates of detection and diagnosis, with their conditions."""
    content = results()
    rows = []
    for name, group in content["rates"].items():
        if group["detected"]["of"]:
            cells = [terminal.percent(group[key]) for key in terminal.TITLES]
            rows.append([f"{name}: {group['faults']} faults, {group['hosts']} kernels", *cells])
    accused, clean, twins, report = content["accused"], content["clean"], content["twins"], content["report"]
    lines = [
        f"Right kernels drawn at random that failed: {terminal.percent(clean)}." if clean["of"] else "",
        f"Kernels without a fault that failed: {terminal.percent(twins)}.",
        f"Ties, faulty goldens and right rewritings that were accused: {accused['hits']} of {accused['of']}.",
        f"A diagnosis took {report['median_seconds']:.1f} s (median), 90 % at most {report['p90_seconds']:.1f} s.",
        "" if report["small"] is None else f"The case it shows has {100 * report['small']:.1f} % of the size (median).",
        *costs(content),
    ]
    output = "\n".join(f"- {line}" for line in lines if line)
    return table(["", *terminal.TITLES.values()], rows) + f"\n{output}\n\n{conditions(content)}"


def costs(result: dict) -> list[str]:
    names = {"compare": "comparison alone", "stages": "with stages", "all": "with every probe"}
    parts = [
        f"{1000 * result['cost'][k]['seconds']:.0f} ms {title}" for k, title in names.items() if k in result["cost"]
    ]
    return [f"A check took {', '.join(parts)} (medians over the right kernels)."] if parts else []


def conditions(result: dict) -> str:
    c = result["conditions"]
    triton = f", triton {c['triton']} interpreted" if c["triton"] else ""
    seeds = f"{c['seeds']} seed{'s' * (c['seeds'] > 1)}" + (", one case of each fault" if c["quick"] else "")
    load = " with a load of {:.0f} to {:.0f}".format(*c["load"]) if c["load"] else ""
    where = f"{c['date']}, commit {c['commit']}, {c['machine']}{load}, torch {c['torch']}{triton}"
    return (
        f"{where}, Python {c['python']}; {seeds}; `{today(c['command'])}`. In brackets the 95 % Wilson interval. "
        f"{result['author']}\n"
    )


def baselines(table: Table) -> str:
    """The usual rules on the same kernels, with the conditions of their run where it was another one."""
    content = results()
    apart = not content["baselines"]
    content = json.loads(BASELINES.read_text()) if apart else content
    ours = [
        "`goldsmith.assay`",
        terminal.percent(content["rates"]["all"]["detected"]),
        terminal.percent(content["twins"]),
    ]
    rows = [
        [terminal.RULE_TITLES[r], terminal.percent(content["baselines"][r]["faults"])]
        + [terminal.percent(content["baselines"][r]["right_kernels"])]
        for r in RULES if r in content["baselines"]
    ]  # fmt: skip
    text = table(["rule", "faults found", "right kernels rejected"], [ours, *rows])
    return f"{text}\n{conditions(content)}" if apart else text


def faults(table: Table) -> str:
    """A row per fault id, over all its kernels."""
    grouped = defaultdict(list)
    for f in results()["by_fault"]:
        grouped[f["id"][:3]].append(f)
    rows = []
    for id, members in sorted(grouped.items(), key=lambda kv: (kv[0][0] != "M", kv[0])):
        n = sum(f["rows"] for f in members)
        right = sum(f["right_verdict"] for f in members)
        counted = [f for f in members if f["verdict"] == "fail"]
        cells = [f"{sum(f[k] for f in counted)}/{sum(f['rows'] for f in counted)}" if counted else "-"
                 for k in ("stage", "top1", "top3")]  # fmt: skip
        rows.append([id, members[0]["what"], str(len(members)), f"{right}/{n}", *cells])
    return table(["id", "for example", "kernels", "right verdict", "stage", "cause first", "among 3"], rows)


def confusion(table: Table) -> str:
    """Which causes came first, by true cause."""
    rows = []
    for truth, answers in results()["confusion"].items():
        others = sorted(((n, id) for id, n in answers.items() if id != truth), reverse=True)
        wrong = ", ".join(f"{id} {n}" for n, id in others)
        rows.append([f"`{truth}`", f"{answers.get(truth, 0)} of {sum(answers.values())}", wrong])
    return table(["true cause", "came first", "causes that came first instead"], rows)


def amended(table: Table) -> str:
    """Faults whose truth was changed after a run, with the reason."""
    rows = [[f.id, f"`{f.host.name}`", f.backend, f.amended] for f in catalogue.faults() if f.amended]
    return table(["id", "kernel", "backend", "what was changed, and why"], rows)


def rank_scores(table: Table) -> str:
    """How often the assay over ranks is right: the first run, and the newest."""
    rows = []
    for title, path in (("first run", RANKS_FIRST), ("now", RANKS)):
        found = json.loads(path.read_text())
        right = [r for r in found if r["named"] == r["cause"]]
        rows.append(
            [title, str(len(found)), str(sum(r["detected"] for r in found)), str(len(right)),
             str(sum(r["proven"] for r in right)), str(sum(r["right_passes"] for r in found))]
        )  # fmt: skip
    return table(["", "faults", "detected", "named rightly", "of these proven", "right versions that pass"], rows)


def rank_faults(table: Table) -> str:
    """The specimens of the assay over ranks, with what it says about each."""
    known = {f.specimen: f for f in rank_catalogue.faults()}
    rows = []
    for r in json.loads(RANKS.read_text()):
        fault = known[r["specimen"]]
        says = CAUSES[r["named"]].title if r["named"] else "not explained" if r["detected"] else "not detected"
        says += "" if r["named"] == r["cause"] else f"; it is {CAUSES[r['cause']].title}"
        rows.append([f"`{fault.specimen}`", f"[{fault.source}]({fault.url})", fault.what, says])
    return table(["specimen", "after", "the fault", "what the assay says"], rows)
