"""Which mixture-of-experts models of the installed transformers work with goldsmith: `python benchmarks/coverage.py`.

For every class with experts a tiny random model is made and used in four ways:

dispatch   `goldsmith.hf.register(model)`
convert    `goldsmith.hf.convert(model, format="fp32")`
finetune   `goldsmith finetune` on its folder, two steps; stock peft loads the adapter into the plain model
generate   the engine of `goldsmith generate` on its folder, and its greedy text

Each result is compared with the plain eager model in float64 (finetune: with the adapter merged); the assay decides.
"equal" means that; a refusal is a ValueError with a sentence; everything else is "wrong" or "crash".
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from benchmarks import tiny_models  # noqa: E402
from goldsmith import assay  # noqa: E402
from goldsmith.assay.declare.case import Case  # noqa: E402

COLUMNS = ("dispatch", "convert", "finetune", "generate")
RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
TOKENS = (1, 6)
LARGER = 10  # most that the largest error against float64 may exceed the plain float32 model's


class Refused(Exception):
    """A refusal in one sentence."""


class Wide(TorchFunctionMode):
    """float64 wherever the code below asks for float32 by name, as transformers does in norms and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wider = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes that try models at the same time")
    parser.add_argument(
        "--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}, for the table in the docs"
    )
    arguments = parser.parse_args()
    rows = coverage(arguments.types, arguments.jobs, lambda row: print(line(row), flush=True))
    equal = sum(all(row[column] == "equal" for column in COLUMNS) for row in rows.values())
    print(f"{equal} of {len(rows)} are equal in all four columns.")
    if arguments.write:
        RESULTS.write_text(json.dumps({"versions": versions(), "models": rows}, indent=1) + "\n")
    bad = [name for name, row in rows.items() if any(row[column] in ("wrong", "crash") for column in COLUMNS)]
    return 1 if bad else 0


def coverage(
    types: list[str] | None = None,
    jobs: int = 1,
    report: Callable[[dict[str, str]], None] = lambda row: None,
) -> dict[str, dict[str, str]]:
    """{model type: {"class", and for each column "equal", "refused", "wrong" or "crash"; why}}."""
    known = tiny_models.model_types()
    unknown = [name for name in types or () if name not in known]
    if unknown:
        raise SystemExit(f"{unknown[0]} is no model type with experts; known are {', '.join(known)}")
    rows = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        for row in (map if pool is None else pool.map)(examine, types or known):
            rows[row["type"]] = row
            report(row)
            gc.collect()
    return rows


def examine(model_type: str) -> dict[str, str]:
    """The row of one model type."""
    row = {"type": model_type, "class": tiny_models.model_types()[model_type]}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bar()  # they would come between the rows
        try:
            plain = tiny_models.tiny_model(model_type)
            row["class"] = type(plain).__name__
            if hasattr(plain, "set_experts_implementation"):
                plain.set_experts_implementation("eager")
        except ImportError as error:
            return row | dict.fromkeys(COLUMNS, "refused") | {"why": f"transformers needs a package for it: {error}"}
        except Exception as error:  # noqa: BLE001  transformers' own errors, of many classes
            return row | dict.fromkeys(COLUMNS, "refused") | {"why": f"transformers cannot make this model: {error}"}
        trial = Trial(plain, Path(folder))
        for column in COLUMNS:
            try:
                getattr(trial, column)()
                row[column] = "equal"
            except Refused as error:
                row[column] = "refused"
                row.setdefault("why", str(error).replace(f"MODEL {folder}/model: ", ""))
            except (AssertionError, assay.AssayError) as error:
                row[column] = "wrong"
                row[f"why_{column}"] = str(error)[:600]
            except Exception as error:  # noqa: BLE001  a crash is a result
                row[column] = "crash"
                row[f"why_{column}"] = f"{type(error).__name__}: {error}"[:600]
                if os.environ.get("GOLDSMITH_TRACEBACK"):
                    import traceback

                    traceback.print_exc()
    return row


class Trial:
    """One model, tried in four ways."""

    def __init__(self, plain: Any, folder: Path) -> None:
        self.whole = plain  # what is saved; of Qwen3-Omni only the thinker has a forward
        self.plain, self.folder = getattr(plain, "thinker", plain), folder
        self.wide = copy.deepcopy(self.plain).double()
        self._saved = False

    def dispatch(self) -> None:
        from goldsmith import hf

        model = copy.deepcopy(self.plain)
        refusing(lambda: hf.register(model))
        self.compare(lambda ids: logits(model, ids))

    def convert(self) -> None:
        from goldsmith import hf

        model = copy.deepcopy(self.plain)
        refusing(lambda: hf.convert(model, format="fp32"))
        self.compare(lambda ids: logits(model, ids))

    def finetune(self) -> None:
        from peft import PeftModel

        from goldsmith import hf
        from goldsmith.hf.training.model.loading import load
        from goldsmith.hf.training.options import Options

        self.save()
        output = self.folder / "adapter"
        options = dict(
            model=str(self.folder / "model"), data=str(self.folder / "data.txt"), output=str(output), steps=2, lr=0.05,
            warmup=0.0, seq_len=48, batch_size=1, rank=4, format="fp32", pack=False,
        )  # fmt: skip
        self._train(options)
        ours = refusing(lambda: load(Options(**options))).model
        hf.load_adapter(ours, output)
        ours.eval()
        stock = PeftModel.from_pretrained(copy.deepcopy(self.plain), str(output)).eval()
        untrained = float((logits(stock, self.ids()) - logits(self.plain, self.ids())).abs().max())
        if not untrained:
            raise AssertionError("stock peft's model with the adapter computes what it computes without it")
        wide = copy.deepcopy(stock).double().merge_and_unload()
        self.compare(lambda ids: logits(ours, ids), wide)
        self.compare(lambda ids: logits(stock, ids), wide)

    def _train(self, options: dict[str, Any]) -> None:
        from goldsmith.cli.finetune.command import run
        from goldsmith.cli.terminal import Failure
        from goldsmith.hf.training.errors import TrainingError

        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                status = run(options, dry_run=False, as_json=True)
            except (Failure, TrainingError) as error:
                raise Refused(str(error)) from error
        if status:
            raise AssertionError(f"finetune ended with {status}")

    def generate(self) -> None:
        from goldsmith import offload

        self.save()
        os.environ["GOLDSMITH_CACHE"] = str(self.folder / "cache")
        check = refusing(
            lambda: offload.from_pretrained(self.folder / "model", device="cpu", threads=1, dtype=torch.float32)
        )
        with check:
            self.compare(lambda ids: logits(check.model, ids))
            ids = self.ids()[:1]
            options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
            came, wanted = (model.generate(ids, **options) for model in (check.model, self.plain))
            came, wanted = (getattr(output, "sequences", output) for output in (came, wanted))
            if not torch.equal(came, wanted) and not self._tie(came[0], wanted[0]):
                raise AssertionError(f"the text is {came.tolist()}, wanted {wanted.tolist()}")

    def _tie(self, came: Tensor, wanted: Tensor) -> bool:
        """Whether two texts differ first where the plain model's two logits are within its own float32 error."""
        at = int((came != wanted).nonzero()[0])
        exact = widely(self.wide, wanted[None, :at])[0, -1]
        noise = float((logits(self.plain, wanted[None, :at])[0, -1].double() - exact).abs().max())
        return float(exact[wanted[at]] - exact[came[at]]) <= 2 * noise

    def save(self) -> None:
        if self._saved:
            return
        self.whole.save_pretrained(self.folder / "model")
        tokenizer().save_pretrained(self.folder / "model")
        (self.folder / "data.txt").write_text("\n\n".join("abcdefgh ijklmnop qrst uvwx yz"[k:] for k in range(8)))
        self._saved = True

    def ids(self) -> Tensor:
        return torch.randint(3, 33, TOKENS, generator=torch.Generator().manual_seed(1))

    def compare(self, candidate: Callable[[Tensor], Tensor], wide: nn.Module | None = None) -> None:
        """Raises AssertionError unless the assay finds the candidate's logits right, and as exact as the plain model's.

        The assay's proven bounds alone would accept a relative error of 1e-4. Its ensemble cannot run here, because it
        does not see the weights of a golden that is a whole module.
        """
        wide = self.wide if wide is None else wide
        plain = float((logits(self.plain, self.ids()).double() - widely(self.wide, self.ids())).abs().max())
        error = float((candidate(self.ids()).double() - widely(wide, self.ids())).abs().max())
        if not error <= LARGER * plain:
            raise AssertionError(f"the error is {error:.1e}, that of the plain model {plain:.1e}")
        target = assay.Target(
            lambda ids: candidate(ids),
            lambda ids: widely(wide, ids),
            cases=[Case("logits", lambda make: {"ids": make.integers(3, 33, *TOKENS)}, {})],
            name=type(self.plain).__name__,
            backward=None,
        )
        assay.check(target, probes=["values"])


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    torch.manual_seed(0)  # diffusion_gemma draws
    with torch.no_grad():
        inputs = {"input_ids": ids}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        return model(**inputs, use_cache=False).logits


def widely(model: nn.Module, ids: Tensor) -> Tensor:
    with Wide():
        return logits(model, ids)


def refusing(work: Callable[[], Any]) -> Any:
    """The result of the work; Refused if it raises the errors that goldsmith refuses with."""
    from goldsmith.hf.training.errors import TrainingError

    try:
        return work()
    except (ValueError, TrainingError) as error:
        raise Refused(str(error)) from error


def tokenizer() -> Any:
    """A tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: k for k, c in enumerate("abcdefghijklmnopqrstuvwxyz .,", 3)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def versions() -> dict[str, str]:
    import peft
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}


def line(row: dict[str, str]) -> str:
    texts = [f"{row['type']:24}", *(f"{row[column]:8}" for column in COLUMNS)]
    whys = [row[key] for key in ("why", *(f"why_{column}" for column in COLUMNS)) if key in row]
    return " ".join([*texts, " | ".join(" ".join(why.split())[:300] for why in whys)])


if __name__ == "__main__":
    sys.exit(main())
