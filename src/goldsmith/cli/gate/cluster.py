"""Judging on a Ray cluster: a task for every few candidates. Ray schedules, retries and moves the problem's files.

Each task is judged by a judge process of the node that it runs on, as on one machine; the judges of a Ray worker stay
warm between tasks. goldsmith must be installed on every node, in the versions of this one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...assay.gate.bad_problem import BadProblem
from ...assay.gate.candidate import Candidate
from ...assay.gate.judges import Judges, NoJudge, Pair
from ...assay.gate.judging import GateOptions
from ...assay.gate.problem_pack import packed, unpacked
from ...assay.gate.verdict import REFUSED, Verdict
from ..terminal import Failure

BATCH = 4  # candidates of one task
CONNECT_S = 10.0  # seconds in which a cluster must answer
RETRIES = 3  # of a task whose worker or node died


def run(
    pairs: Sequence[Pair], options: GateOptions, address: str, *, jobs: int | None
) -> Iterator[tuple[int, Verdict]]:
    """(number, verdict) of each pair, as tasks finish. address: of a cluster, "auto", or "local" for one started here.

    jobs: processors of a local cluster, or the most tasks at a time on another one.
    """
    ray = _ray()
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, address, jobs)
    try:
        yield from _run(ray, pairs, options, jobs if address != "local" else None)
    finally:
        if mine:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise Failure("--cluster needs ray, which is not installed here: pip install 'goldsmith[cluster]'.") from None
    return ray


def _check_answers(address: str) -> None:
    """Raise Failure where nothing listens at HOST:PORT: Ray would try for minutes, and print a warning each time."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" or "local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        why = f"nothing answered within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error
        raise Failure(f"--cluster {address}: no connection ({why}).") from None


def _connect(ray: Any, address: str, jobs: int | None) -> None:
    _check_answers(address)
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        with contextlib.chdir("/"):  # its workers import from the folder that is the current one here
            if address == "local":
                ray.init(num_cpus=jobs, include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Failure(f"--cluster {address}: {str(error).strip().splitlines()[0]}") from error


def _run(ray: Any, pairs: Sequence[Pair], options: GateOptions, most: int | None) -> Iterator[tuple[int, Verdict]]:
    gpus = 1 if options.device.startswith("cuda") else 0
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(judge_batch)
    batches, problems = _batches(pairs), dict[str, object]()
    data = options.to_json()
    if gpus:
        data["device"] = "cuda"  # Ray shows a task only its own
    running: dict[object, list[int]] = {}
    left = list(reversed(batches))
    try:
        while left or running:
            while left and (most is None or len(running) < most):
                numbers = left.pop()
                problem = pairs[numbers[0]][0]
                key = json.dumps(problem.to_json(), sort_keys=True)
                try:
                    if key not in problems:
                        problems[key] = ray.put(packed(problem))
                except (BadProblem, OSError, ValueError) as error:
                    yield from ((n, _refused(pairs[n][1], "problem", str(error))) for n in numbers)
                    continue
                running[task.remote(problems[key], [pairs[n][1].to_json() for n in numbers], data)] = numbers
            if not running:
                break
            for done in ray.wait(list(running))[0]:
                yield from _finished(ray, done, running.pop(done), pairs)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _finished(ray: Any, done: Any, numbers: Sequence[int], pairs: Sequence[Pair]) -> Iterator[tuple[int, Verdict]]:
    try:
        verdicts = [Verdict.from_json(verdict) for verdict in ray.get(done)]
    except ray.exceptions.RayError as error:
        text = f"its task failed on the cluster: {str(error).strip().splitlines()[0]}"[:300]
        verdicts = [_refused(pairs[n][1], "judge", text) for n in numbers]
    yield from zip(numbers, verdicts, strict=True)


def _batches(pairs: Sequence[Pair]) -> list[list[int]]:
    """Numbers of pairs, at most BATCH of one problem together."""
    batches: list[list[int]] = []
    for number, (problem, _) in enumerate(pairs):
        last = batches[-1] if batches else []
        if last and len(last) < BATCH and pairs[last[0]][0] == problem:
            last.append(number)
        else:
            batches.append([number])
    return batches


def _refused(candidate: Candidate, reason: str, text: str) -> Verdict:
    return Verdict(REFUSED, reason, candidate.name, evidence=[text])


# in a Ray worker

_judges: dict[str, Judges] = {}


def judge_batch(
    pack: Mapping[str, object], candidates: Sequence[Mapping[str, object]], options: Mapping[str, object]
) -> list[dict[str, object]]:
    """The verdicts on a few candidates, as JSON."""
    key = json.dumps(dict(options), sort_keys=True)
    if key not in _judges:
        _judges[key] = Judges(1, GateOptions.from_json(options))
        atexit.register(_judges[key].close)
    problem = unpacked(pack)
    pairs = [(problem, Candidate.from_json(c)) for c in candidates]
    try:
        return [verdict.to_json() for verdict in _judges[key].in_order(pairs)]
    except NoJudge as error:
        return [_refused(c, "judge", f"no judge could be started there: {error}").to_json() for _, c in pairs]
