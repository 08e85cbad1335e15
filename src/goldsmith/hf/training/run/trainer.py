"""Trainer: computes loss, gradient and update of each training step, and the state that a checkpoint stores."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..data.attention_masks import Masks, no_masks
from ..data.packing import Batch, RowStream
from ..errors import Diverged, TrainingError
from ..ranks.one_process import OneProcess
from ..records.journal import LogRow
from .loss import Evaluation, loss_and_hits, summed_loss
from .training_steps import TrainingSteps

STATE = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


class Trainer:
    """Trains `parameters` (by their names in the model) on a stream of rows.

    `done` counts the finished steps; it alone says which rows come next. After `restore` of an earlier `state`, every
    later step has the same bits as in a run without interruption (on a CPU with the same number of threads).

    With several ranks, each computes its own rows of a step, and all apply the summed gradient: the rows, the loss and
    the update are those of one process with `ranks` times the batch, up to rounding.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        stream: RowStream,
        training: TrainingSteps,
        masks: Masks = no_masks,
        ranks: OneProcess | None = None,
    ):
        self.model, self.parameters, self.stream, self.training = model, dict(parameters), stream, training
        self.masks = masks
        self.ranks = OneProcess() if ranks is None else ranks
        self.device = next(iter(self.parameters.values())).device
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=training.schedule.lr, weight_decay=training.weight_decay
        )
        self.done = 0

    def step(self) -> LogRow:
        """Runs the next step and returns its row of the log.

        Raises Diverged if the loss or the gradient is not finite; the state is then that before the step.
        """
        began, number = time.perf_counter(), self.done + 1
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.schedule.at(number)
        batches = list(self._window())
        if self.ranks.world > 1:  # other masks of dropout on each rank, which repeat when the run resumes
            torch.manual_seed((self.stream.seed * 1_000_003 + number * self.ranks.world + self.ranks.rank) % 2**63)
        counts = self.ranks.gathered((sum(b.targets for b in batches), sum(b.tokens for b in batches)))
        targets, tokens = (sum(each) for each in zip(*counts, strict=True))
        seeds, loss = [], 0.0
        for batch in batches:
            seeds.append(self._random_states())
            batch_loss = self._loss(batch)
            loss += float(batch_loss.detach())
            if not math.isfinite(loss):
                break
            (batch_loss / targets).backward()
        loss = self._sum_over_ranks(loss)
        norm = self._clip_gradient() if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise Diverged(self._divergence_on_ranks(number, loss, norm, batches, seeds, targets))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done = number
        seconds = time.perf_counter() - began
        return {
            "step": number,
            "loss": loss / targets,
            "lr": self.training.schedule.at(number),
            "grad_norm": norm,
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1),
            "seconds": round(seconds, 4),
        }

    def _loss(self, batch: Batch) -> Tensor:
        return summed_loss(self.model, batch.to(self.device), self.masks)

    def _window(self) -> Iterator[Batch]:
        first, end = self.done * self.training.window, (self.done + 1) * self.training.window
        end = end if self.training.limit is None else min(end, self.training.limit)
        size = self.training.batch_size
        for row in range(first + self.ranks.rank * size, end, size * self.ranks.world):
            yield self.stream.batch(row, min(size, end - row))

    def _sum_over_ranks(self, loss: float) -> float:
        """Sums the gradients over ranks, if the loss is finite on all of them; returns the sum of their losses."""
        if self.ranks.world == 1:
            return loss
        parameters = list(self.parameters.values())
        losses, present = zip(*self.ranks.gathered((loss, [p.grad is not None for p in parameters])), strict=True)
        total = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
        if math.isfinite(total):
            used = [p for p, some in zip(parameters, map(any, zip(*present, strict=True)), strict=True) if some]
            for parameter in used:  # a rank without rows in the last step has no gradient
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            self.ranks.add([p.grad for p in used if p.grad is not None])
        return total

    def _clip_gradient(self) -> float:
        """Clips the gradient to `training.max_grad_norm` and returns its norm before clipping."""
        max_norm = self.training.max_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm))

    def evaluate(self, stream: RowStream) -> Evaluation:
        """Loss and hits over all target tokens of `stream`; draws no random numbers. Ranks take turns at batches."""
        self.model.eval()
        size, ranks = self.training.batch_size, self.ranks
        own = []
        with torch.no_grad():
            for first in range(ranks.rank * size, len(stream), size * ranks.world):
                batch = stream.batch(first, min(size, len(stream) - first))
                own.append((first, *loss_and_hits(self.model, batch.to(self.device), self.masks), batch.targets))
        self.model.train()
        loss, hits, targets = 0.0, 0, 0
        for _, batch_loss, batch_hits, batch_targets in sorted(itertools.chain(*ranks.gathered(own))):
            loss += batch_loss  # in the order of one process
            hits += batch_hits
            targets += batch_targets
        return Evaluation(loss, hits, targets)

    def check_ranks(self) -> None:
        """Raises TrainingError if a trained parameter differs between ranks, which no later step would mend."""
        if self.ranks.world == 1:
            return
        digests = {name: _digest(p) for name, p in self.parameters.items()}
        every = self.ranks.gathered(digests)
        for rank, other in enumerate(every):
            for name, digest in every[0].items():
                if other[name] != digest:
                    raise TrainingError(
                        f"After step {self.done}, {name} differs between rank 0 and rank {rank}. Do the ranks' "
                        "machines have different processors, versions or faulty memory?"
                    )

    def state(self) -> dict[str, Tensor]:
        """Copies of everything that the next step depends on."""
        tensors = {f"trained/{name}": p.detach() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        tensors |= {f"random/{k}": value for k, value in enumerate(self._random_states())}
        return {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, Tensor], done: int) -> None:
        """Resumes after step `done` with the tensors of `state`. Raises ValueError if they do not fit the model."""
        model_shapes = {f"trained/{name}": tuple(p.shape) for name, p in self.parameters.items()}
        saved_shapes = {name: tuple(t.shape) for name, t in state.items() if name.startswith("trained/")}
        for name in sorted(model_shapes.keys() | saved_shapes.keys()):
            if model_shapes.get(name) != saved_shapes.get(name):
                difference = f"{name.removeprefix('trained/')} is {saved_shapes.get(name, 'missing')} in the checkpoint"
                raise ValueError(f"{difference}, but {model_shapes.get(name, 'missing')} in the model")
        self._check_state(state)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state[f"trained/{name}"])
                moments = {key: state.get(f"optimizer/{name}/{key}") for key in STATE}
                self.optimizer.state.pop(parameter, None)
                if moments["step"] is not None:
                    self.optimizer.state[parameter] = {
                        key: value.clone() if key == "step" else value.to(parameter.device)
                        for key, value in moments.items()
                        if value is not None
                    }
        self._set_random_states([state[f"random/{k}"] for k in range(2) if f"random/{k}" in state])
        self.done = done

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError for tensors that no run has written: other dtypes, sizes or numbers, or missing ones."""
        for name, parameter in self.parameters.items():
            _check_numbers(name, state[f"trained/{name}"], parameter.shape, parameter.dtype)
            moments = {key: state.get(f"optimizer/{name}/{key}") for key in STATE}
            if all(value is None for value in moments.values()):
                continue
            for key, value in moments.items():
                if value is None:
                    raise ValueError(f"the optimizer's {key} of {name} is missing")
                like = (torch.Size(), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
                _check_numbers(f"the optimizer's {key} of {name}", value, *like)
                if key == "exp_avg_sq" and bool((value < 0).any()):
                    raise ValueError(f"the optimizer's {key} of {name} has a negative number")
        expected = torch.get_rng_state()
        random = state.get("random/0")
        if random is None or random.dtype != expected.dtype or random.shape != expected.shape:
            shown = "missing" if random is None else f"{str(random.dtype)[6:]} {list(random.shape)}"
            raise ValueError(f"the random state is {shown}, expected {str(expected.dtype)[6:]} {list(expected.shape)}")

    def _random_states(self) -> list[Tensor]:
        """The states of torch's generators: the CPU's and, on a GPU, the GPU's."""
        on_cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_cuda]

    def _set_random_states(self, states: list[Tensor]) -> None:
        try:
            torch.set_rng_state(states[0])
        except RuntimeError as error:
            raise ValueError(f"the random state is not one of torch's: {error}") from error
        if self.device.type == "cuda" and len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)

    def _divergence_on_ranks(
        self, number: int, loss: float, norm: float, batches: list[Batch], seeds: list[list[Tensor]], targets: int
    ) -> str:
        """The explanation of the first rank that finds the value; every rank repeats its own batches."""
        explanations = self.ranks.gathered(self._divergence(number, loss, norm, batches, seeds, targets))
        rank = next((rank for rank, (origin, _) in enumerate(explanations) if origin), 0)
        return f"{explanations[rank][1]} (rank {rank})" if self.ranks.world > 1 else explanations[rank][1]

    def _divergence(
        self, number: int, loss: float, norm: float, batches: list[Batch], seeds: list[list[Tensor]], targets: int
    ) -> tuple[bool, str]:
        """Explains a non-finite step by repeating it under `watch`, with the same random numbers: (found, sentence)."""
        from ....assay import NonFinite, watch  # imported here because only a run that diverges needs them

        symptom = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        event = None
        try:
            for batch, seed in zip(batches, seeds):
                self._set_random_states(seed)
                with watch(self.model, norms=False, stop=True):
                    (self._loss(batch) / targets).backward()
        except NonFinite as error:
            event = error.event
        finally:
            if seeds:
                self._set_random_states(seeds[0])
            self.optimizer.zero_grad()
        if event is None:
            return (
                False,
                f"Step {number}: {symptom}. The same batch gave finite values when repeated: suspect the machine.",
            )
        origin = "from finite inputs" if event.born else f"carried over from {event.source}"
        name = {"nan": "NaN", "inf": "Inf"}[event.kind]
        cause = f"{name} in the {event.phase}, {event.tensor} of {event.op}, {origin}"
        if event.likely.id != "unknown":
            cause += f"; likely {event.likely.id}: {event.likely.evidence}"
        where = event.module or "the loss itself"
        return True, f"Step {number}: {symptom}. The first non-finite value is in {where}: {cause}."


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _check_numbers(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} is {list(tensor.shape)} in the checkpoint, but {list(shape)} in the model")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {str(tensor.dtype)[6:]} in the checkpoint, but {str(dtype)[6:]} in the model")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has NaN or Inf")
