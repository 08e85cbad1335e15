"""The child process of an engine: `python -m benchmarks.generate.workers.worker ENGINE OPTIONS`, with JSON options.

One command a line on stdin, one line of JSON on stdout for each; ends at the end of stdin.

load - -              loads the model; answers with `note` where it differs from what was asked
logits FILE ID...     writes the logits of every token, float32 [tokens, vocabulary]
prompt - ID...        seconds to compute these tokens and choose the next one
decode COUNT ID...    after these tokens, COUNT more, each the most likely one: seconds of each, and the tokens
parts COUNT ID...     the same, with the seconds of each part of the model
golden FILE,N,PACKS ID...   logits of N sequences in float64; random FILE,N,SEED,ARITHMETIC ID...: of a plain model that
                      rounds at random
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ENGINES = {
    "goldsmith": "ours:GoldsmithEngine",
    "torch.compile": "compiled:CompiledEngine",
    "transformers": "plain:TransformersEngine",
    "accelerate": "split:AccelerateEngine",
    "kt-kernel": "kt_experts:KtKernelEngine",
    "golden": "golden:GoldenEngine",
}


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    options: dict[str, Any] = json.loads(sys.argv[2])
    threads = str(options["threads"])
    os.environ["OMP_NUM_THREADS"] = threads
    from goldsmith.cli.openmp import spin_briefly

    spin_briefly()
    import torch

    torch.set_num_threads(int(threads))
    module, _, name = ENGINES[sys.argv[1]].partition(":")
    engine = getattr(importlib.import_module(f".{module}", __package__), name)(options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        verb, word, *numbers = line.split()
        ids = [int(number) for number in numbers]
        try:
            with torch.inference_mode(engine.inference):
                answer = answered(engine, verb, word, ids)
        except Exception as error:  # noqa: BLE001 - the parent reports any error of an engine
            answer = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300].rstrip('.')}"}
        print(json.dumps(answer), file=answers, flush=True)
    engine.close()


def answered(engine: Any, verb: str, word: str, ids: list[int]) -> dict[str, Any]:
    if verb == "load":
        return {"note": engine.load()}
    if verb == "logits":
        engine.logits(ids).numpy().tofile(word)
        return {}
    if verb == "golden":
        file, sequences, packs = word.split(",")
        engine.golden_logits(ids, int(sequences), packs).numpy().tofile(file)
        return {}
    if verb == "random":
        file, sequences, seed, arithmetic = word.split(",", 3)
        engine.rounded_logits(ids, int(sequences), int(seed), arithmetic).numpy().tofile(file)
        return {}
    if verb == "prompt":
        return {"seconds": engine.prompt(ids)}
    if verb == "decode":
        return dict(zip(("seconds", "ids"), engine.decode(ids, int(word)), strict=True))
    if verb == "parts":
        return {"parts": engine.parts(ids, int(word))}
    raise ValueError(f"unknown command {verb}")


def die_with_parent() -> None:
    """On Linux, end when the process that started this one has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            sys.exit("the parent has ended")


ROOT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":
    atexit.register(gc.freeze)  # otherwise the interpreter's end searches torch and transformers for garbage
    main()
