"""lm-eval on the small model: transformers' own model beside the offloaded one, task by task.

    python -m benchmarks.evaluation            prints both columns
    python -m benchmarks.evaluation --write    and records them for docs/evaluate.md (then: python scripts/tables.py)

Needs lm-eval. The tasks come from the last act of Macbeth, on which the model was not trained: a perplexity, the true
next speech among four, and the greedy end of a speech.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "shakespeare-moe"
TEXT = ROOT / "examples" / "macbeth" / "act-5.txt"
RESULTS = ROOT / "benchmarks" / "results" / "evaluation.json"
CHOICES = 4
KINDS = {
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "next_speech": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "end_of_line": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{end}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def speeches(text: str) -> list[str]:
    """Paragraphs of at least two lines that begin with a speaker's name."""
    return [part for part in text.split("\n\n") if part.startswith("**") and part.count("\n") > 1]


def documents(kind: str, text: str) -> Iterator[dict[str, Any]]:
    parts = speeches(text)
    if kind == "perplexity":
        yield from ({"text": text[at : at + 1500]} for at in range(0, len(text), 1500))
    elif kind == "next_speech":
        for i in range(0, len(parts) - CHOICES, 2):
            answer = (7 * i) % CHOICES  # the true speech stands in every place equally often
            wrong = parts[i + 2 : i + 1 + CHOICES]
            choices = [*wrong[:answer], parts[i + 1], *wrong[answer:]]
            yield {"text": parts[i] + "\n\n", "choices": choices, "answer": answer}
    else:
        for part in parts[::2]:
            *before, last = part.splitlines()
            words = last.split()
            yield {"text": "\n".join([*before, " ".join(words[:-1])]), "end": " " + words[-1]}


def write_tasks(folder: Path, limit: int | None) -> list[str]:
    """Writes one task of lm-eval for each kind, with its documents; returns their names."""
    import yaml

    text = TEXT.read_text()
    for kind, settings in KINDS.items():
        data = folder / f"{kind}.jsonl"
        rows = list(documents(kind, text))[:limit]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": f"macbeth_{kind}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}}, "metadata": {"version": 1}, **settings,
        }  # fmt: skip
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump(task))
    return [f"macbeth_{kind}" for kind in KINDS]


def answers(samples: list[dict[str, Any]]) -> list[Any]:
    """For each document the generated text, or the number of the likeliest choice, or None for a perplexity."""

    def answer(responses: list[Any]) -> Any:
        if isinstance(responses[0], str):
            return responses[0]
        if len(responses) == 1:
            return None
        return max(range(len(responses)), key=lambda choice: responses[choice][0])

    return [answer(sample["filtered_resps"]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def figures(limit: int | None = None, dtype: str = "float32") -> list[dict[str, Any]]:
    """One row for each task and metric: transformers' value, ours, and how many documents have the same answer."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from goldsmith.hf.evaluation import register_lm_eval

    with tempfile.TemporaryDirectory() as place:
        tasks = write_tasks(Path(place), limit)
        manager = TaskManager(include_path=place, include_defaults=False)

        def results(model: Any) -> dict[str, Any]:
            return lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0)

        plain = results(HFLM(str(MODEL), device="cpu", dtype=dtype, batch_size=4))
        harness = register_lm_eval()(str(MODEL), device="cpu", dtype=dtype, batch_size=4)
        try:
            ours = results(harness)
        finally:
            harness.close()
    rows = []
    for task in tasks:
        count = plain["n-samples"][task]["effective"]
        pairs = list(zip(answers(plain["samples"][task]), answers(ours["samples"][task]), strict=True))
        alike = sum(one == other for one, other in pairs) if None not in pairs[0] else None
        for key, value in plain["results"][task].items():
            metric, _, rest = key.partition(",")
            if rest == "none" and not metric.endswith("stderr"):
                other = ours["results"][task][key]
                rows.append(
                    {"task": task, "metric": metric, "documents": count, "plain": value, "goldsmith": other,
                     "same_answers": alike}
                )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--write", action="store_true", help=f"record the rows in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    rows = figures(arguments.limit)
    for row in rows:
        same = "" if row["same_answers"] is None else f"{row['same_answers']} answers are the same"
        print(
            f"{row['task']:20} {row['metric']:16} {row['documents']:4} {row['plain']:.9g} {row['goldsmith']:.9g} {same}"
        )
    if arguments.write:
        packages = {"torch": "torch", "transformers": "transformers", "lm-eval": "lm_eval"}
        versions = {name: version(package) for name, package in packages.items()}
        RESULTS.write_text(json.dumps({"versions": versions, "dtype": "float32", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
