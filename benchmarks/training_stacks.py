"""`goldsmith finetune` and TRL's SFTTrainer on the same model, rows and LoRA: `python -m benchmarks.training_stacks`.

Each stack trains examples/shakespeare-moe on a CPU, in processes of its own:

whole      without an interruption; the median of its steps per second of CPU time, on one thread, without the
           first steps (other processes of the machine do not count)
between    killed with SIGKILL after a step between two checkpoints, then the same command again
saving     killed with SIGKILL while it writes a checkpoint, after the weights and before the rest, then again
changed    killed as in `between`, then the same command with another learning rate

Of the last three, the adapter is compared bit by bit with that of `whole`. `--write` records the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from datasets import load_dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from goldsmith.cli import app  # noqa: E402
from goldsmith.hf.training.model import loading as _imported_once  # noqa: E402, F401
from goldsmith.hf.training.records import checkpoints  # noqa: E402
from goldsmith.hf.training.run.trainer import Trainer  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "training_stacks.json"
MODEL = ROOT / "examples" / "shakespeare-moe"
TEXT = ROOT / "examples" / "macbeth" / "acts-1-4.txt"
STACKS = {"goldsmith": "goldsmith finetune", "trl": "TRL's SFTTrainer"}
STEPS, SAVE, KILLED, FIRST = 20, 8, 13, 3  # KILLED is between two checkpoints; the first steps are not timed
BATCH, LENGTH, RANK, ALPHA, LR = 4, 128, 8, 16, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"record the rows in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        rows = {name: measured(name, Path(folder)) for name in STACKS}
    result = {"versions": versions(), "machine": machine(), "steps": STEPS, "stacks": rows}
    print(json.dumps(result, indent=1))
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def write_rows(folder: Path) -> None:
    """Rows of text that both stacks read alike, each about as long as a sequence."""
    words = TEXT.read_text().split()
    rows = [" ".join(words[k : k + LENGTH // 2]) for k in range(0, len(words), LENGTH // 2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def measured(stack: str, folder: Path) -> dict[str, object]:
    whole = folder / f"{stack}-whole"
    status, text = run(stack, folder, whole)
    if status:
        raise RuntimeError(text)
    seconds = json.loads((whole / "seconds.json").read_text())[FIRST:]
    row: dict[str, object] = {"steps_per_cpu_s": round(1 / statistics.median(seconds), 3)}
    for case in ("between", "saving", "changed"):
        output = folder / f"{stack}-{case}"
        status, text = run(stack, folder, output, kill="between" if case == "changed" else case)
        if status != -signal.SIGKILL:
            raise RuntimeError(f"{stack}, {case}: was not killed:\n{text}")
        status, text = run(stack, folder, output, lr=2 * LR if case == "changed" else LR)
        row[case] = f"fails: {last_line(text)}".replace(str(folder), "DIR") if status else compared(whole, output)
    return row


def last_line(text: str) -> str:
    """The error that ended a process: a paragraph of goldsmith's, or the last line of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[-4:])[-400:] if lines and "Error" not in lines[-1] else lines[-1][:400]


def compared(whole: Path, output: Path) -> str:
    from safetensors.torch import load_file

    one, other = (load_file(path / "adapter_model.safetensors") for path in (whole, output))
    equal = one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )
    return "same bits" if equal else "other bits"


def run(stack: str, folder: Path, output: Path, *, kill: str | None = None, lr: float = LR) -> tuple[int, str]:
    """A run in a process of its own, which begins with this one's imports; its status and the end of what it wrote."""
    process = get_context("fork").Process(target=worker, args=(stack, folder, output, kill, lr))
    process.start()
    process.join()
    status = process.exitcode
    if status is None:
        raise RuntimeError(f"{output.name} did not end")
    print(f"{output.name}, kill={kill}, lr={lr}: status {status}", file=sys.stderr)
    return status, output.with_suffix(".log").read_text()[-3000:]


def worker(stack: str, folder: Path, output: Path, kill: str | None, lr: float) -> None:
    with open(output.with_suffix(".log"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    {"goldsmith": with_goldsmith, "trl": with_trl}[stack](folder, output, kill, lr)


def with_goldsmith(folder: Path, output: Path, kill: str | None, lr: float) -> None:
    step, write = Trainer.step, checkpoints._write_synced

    seconds: list[float] = []

    def timed_step(self: Any) -> Any:
        began = time.process_time()
        row = step(self)
        seconds.append(time.process_time() - began)
        if kill == "between" and self.done == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    def killed_write(path: Path, raw: bytes) -> None:
        if path.name == checkpoints.FACTS and f"step-{2 * SAVE:06d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, raw)

    Trainer.step = timed_step  # type: ignore[method-assign]
    if kill == "saving":
        checkpoints._write_synced = killed_write
    words = ["finetune", MODEL, "--data", folder / "rows.jsonl", "--output", output, "--steps", STEPS, "--lr", lr]
    words += ["--no-pack", "--batch-size", BATCH, "--seq-len", LENGTH, "--rank", RANK, "--alpha", ALPHA]
    words += ["--save-every", SAVE, "--threads", 1]
    try:
        app([str(word) for word in words])  # leaves with SystemExit
    finally:
        (output / "seconds.json").write_text(json.dumps(seconds))


def with_trl(folder: Path, output: Path, kill: str | None, lr: float) -> None:
    torch.set_num_threads(1)
    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            seconds.append(time.process_time() - self.began)
            if kill == "between" and state.global_step == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)

    class KilledWhileSaving(SFTTrainer):  # type: ignore[misc]
        def _save_optimizer_and_scheduler(self, *words: Any, **more: Any) -> None:
            if kill == "saving" and self.state.global_step == 2 * SAVE:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_optimizer_and_scheduler(*words, **more)

    data = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))
    lora = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    options = SFTConfig(
        str(output),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        max_length=LENGTH,
        save_steps=SAVE,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    trainer = KilledWhileSaving(
        model=model,
        args=options,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=lora,
        callbacks=[Clock()],
    )
    last = get_last_checkpoint(str(output)) if output.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(output))
    (output / "seconds.json").write_text(json.dumps(seconds))


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("goldsmith", "torch", "transformers", "peft", "trl", "accelerate")}


def machine() -> str:
    from goldsmith.core.device import machine as here

    return f"{here().cpu}, 1 thread of {here().cores} cores, {platform.system()}"


if __name__ == "__main__":
    main()
