"""Runs the diagnoses of docs/case-studies.md, and writes their output into the page.

    python scripts/case_studies.py [STORY ...]

A story is a fault of KernelFault, such as `M04`; without one, all of them run, which takes minutes. The script fills
the blocks of commands that are marked as made by it, and the table of the long log, which has a row per entry of SEEN.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "case-studies.md"
ONE = ROOT / "benchmarks" / "kernelfault" / "one_fault.py"
MARK = r"<!-- test: not run, made by scripts/case_studies\.py -->\n"
BLOCK = re.compile(rf"({MARK}```console\n\$ ([^\n]*)\n)(.*?)(```\n)", re.S)
TABLE = re.compile(r"(<!-- made by scripts/case_studies\.py -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = ("log", "what was seen", "fault", "what the diagnosis says", "its first reason")
SEEN = (
    ("7", "relative difference 1.36; half of the output is filled", "M11 lora_expert torch"),
    ("8", "values of the right size, and wrong: an expert reads another one's weights", "M25 lora_expert torch"),
    ("9", "the second forward raises: the stack of saved inputs is full", "M13 expert_state torch"),
    ("12", "the norm of a gradient is 0 from one step on", "M16 lora_expert torch"),
    ("13", "double free, far from its cause", "M17 lora_expert torch"),
    ("14", "the gradient of x is incomplete", "M18 lora_expert torch"),
    ("15", "one of two saved tensors is all zeros when it is read", "M19 lora_expert torch"),
    ("16", "the LoRA gradients differ by exactly 1.000000", "M20 lora_expert torch"),
    ("17a", "rows of the saved input are another token's", "M21 lora_expert torch"),
    ("17c", "one gradient of down is wrong", "M22 lora_expert torch"),
    ("19", "both ranks give nearly the same, and their sum is twice what it should be", "M12 lora_expert torch"),
    ("20", "segmentation fault in the backward: the weights were freed after loading", "M26 expert_state torch"),
    ("21", "half of a gradient is zero with two ranks", "M27 lora_expert torch"),
    ("22", "new weights, old results", "M28 expert_state torch"),
    ("23", "SIGFPE: the group size is 0", "M29 expert_load torch"),
    ("26", "weights in another format than the kernel reads", "M30 expert_load torch"),
)


def main(wanted: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda m: m[1] + shown(m[2]) + m[4] if _requested(m[2], wanted) else m[0], text)
    rows = {line.split(" | ")[2].strip("`"): line for line in TABLE.search(text)[2].splitlines()[2:]}
    for number, seen, key in SEEN:
        if not wanted or key.split()[0] in wanted or key not in rows:
            sentence, reason = summary(key)
            rows[key] = f"| {number} | {seen} | `{key}` | {sentence} | {reason} |"
        print(rows[key], flush=True)
    head = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    lines = "\n".join([*head, *(rows[key] for _, _, key in SEEN)])
    PAGE.write_text(TABLE.sub(lambda m: f"{m[1]}{lines}\n{m[3]}", text), encoding="utf-8")
    return 0


def _requested(command: str, wanted: list[str]) -> bool:
    return not wanted or any(f"--fault {name} " in command for name in wanted)


def shown(command: str) -> str:
    """The output of the command without its duration."""
    words = command.split()
    done = run([sys.executable, *words[1:]])
    print(f"$ {command}\n{done}", flush=True)
    return shortened(re.sub(r"\n\d+\.\d\d s(; .*)?\n", "\n", done))


def shortened(output: str) -> str:
    """The output without the map and the other causes, and with `...` for stages that are right or not judged."""
    output = re.sub(r"(\n {7}[#.]+)+\n {7}\(# wrong.*?\)", "", output, flags=re.S)
    output = re.sub(r"\nOther causes\n.*?\n(?=\n)", "", output, flags=re.S)
    output = re.sub(r"(\n\S.* (ok|not judged)\b)+", "\n...", output)
    output = re.sub(r"((?:\n\S.* inherited\b){2})(\n\S.* inherited\b|\n\.\.\.)+", r"\1\n...", output)
    return re.sub(r"(\n\.\.\.)+", "\n...", re.sub(r"\n{3,}", "\n\n", output)).strip() + "\n"


def summary(key: str) -> tuple[str, str]:
    """(first sentence of a fault's diagnosis, first reason for it), a line each."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\n", run([sys.executable, str(ONE), key]))]
    why = next((p for p in parts if p.startswith(("Why - ", "Facts - "))), "")
    reason = re.split(r" - | Try: ", why.removeprefix("Why - ").removeprefix("Facts - "))[0]
    likely = next((p for p in parts if p.startswith("Likely, ")), "")
    guess = re.search(r"\d+ % \w+", likely)
    short = textwrap.shorten(reason.replace("|", "\\|"), 150, placeholder=" ...")
    headline = parts[1].removeprefix("FAIL ")
    headline += f"; likely {guess[0]}" if guess is not None and "not explained" in headline else ""
    return headline.replace("|", "\\|"), short


def run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} printed nothing: {done.stderr[-600:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
