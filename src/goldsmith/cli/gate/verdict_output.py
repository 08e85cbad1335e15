"""The output of --json. Verdicts that an earlier run wrote to its file count where nothing has changed since."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ...assay.gate.bad_problem import BadProblem
from ...assay.gate.candidate import Candidate
from ...assay.gate.formats.problem_source import ProblemSource
from ...assay.gate.judges import Pair
from ...assay.gate.judging import GateOptions
from ...assay.gate.problem_pack import files_of
from ...assay.gate.verdict import REFUSED, Verdict
from ...assay.support.output_file import write_whole
from ...core.device import machine
from ...core.json_values import JsonRows, parse_json
from ..source import digest
from ..terminal import Failure, write_stdout

JUDGED = "judged"  # field of a row: a digest of what was judged, and by what


class VerdictOutput:
    """Verdicts as they are finished, and in the order of the candidates; nothing of it is written without --json.

    Methods raise OSError where a verdict cannot be written. kept: number of a candidate -> verdict of an earlier run;
    resumes: whether a later run can keep these
    """

    resumes = False

    def __init__(self) -> None:
        self.kept = dict[int, Verdict]()

    def finished(self, number: int, verdict: Verdict) -> None:
        """A verdict is there, though it may wait for earlier ones."""

    def following(self, verdict: Verdict) -> None:
        """The next verdict in the order of the candidates."""

    def close(self) -> None: ...


class VerdictStream(VerdictOutput):
    """Stdout, a device or a pipe."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.stream = None if path == "-" else open(path, "w", encoding="utf-8")

    def following(self, verdict: Verdict) -> None:
        line = json.dumps(verdict.to_json()) + "\n"
        if self.stream is None:
            write_stdout(line)
        else:
            self.stream.write(line)
            self.stream.flush()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


class VerdictFile(VerdictOutput):
    """Rows are added as candidates are finished; `close` leaves one for each of this run, in their order."""

    resumes = True

    def __init__(self, path: Path, pairs: Sequence[Pair | Verdict], options: GateOptions, *, resume: bool) -> None:
        super().__init__()
        _check_verdicts(path)
        if not resume and path.exists():
            path.write_text("")
        self.file = JsonRows(path)
        digests = _Digests(options)
        self.judged = [None if isinstance(pair, Verdict) else digests.of(*pair) for pair in pairs]
        earlier = {row[JUDGED]: row for row in self.file.rows if isinstance(row, dict) and row.get(JUDGED)}
        self.rows = {number: earlier[key] for number, key in enumerate(self.judged) if key in earlier}
        self.kept = {number: _verdict(row) for number, row in self.rows.items()}

    def finished(self, number: int, verdict: Verdict) -> None:
        # a refused candidate may be judged another time: its package was installed meanwhile, its problem mended
        judged = None if verdict.status == REFUSED else self.judged[number]
        self.rows[number] = verdict.to_json() | {JUDGED: judged}
        self.file.add(self.rows[number])

    def close(self) -> None:
        write_whole(self.file.path, "".join(json.dumps(self.rows[number]) + "\n" for number in sorted(self.rows)))


class Shown(VerdictOutput):
    """An output whose first error is shown, so that it costs no verdict. Raises BrokenPipeError without a reader."""

    def __init__(self, output: VerdictOutput, name: str, err: Console) -> None:
        self.output, self.kept, self.resumes, self.name, self.err = output, output.kept, output.resumes, name, err
        self.failed = False

    def finished(self, number: int, verdict: Verdict) -> None:
        self._try(partial(self.output.finished, number, verdict))

    def following(self, verdict: Verdict) -> None:
        self._try(partial(self.output.following, verdict))

    def close(self) -> None:
        self._try(self.output.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self.failed:
                why = error.strerror or error
                self.err.print(f"[yellow]Cannot write {self.name}: {why}. Verdicts are only shown.[/]")
            self.failed = True


@contextlib.contextmanager
def verdict_output(
    to: str | None, pairs: Sequence[Pair | Verdict], options: GateOptions, err: Console, *, resume: bool
) -> Iterator[VerdictOutput]:
    """The output of --json; options: with the seed that was asked for."""
    try:
        if to is None:
            output = VerdictOutput()
        elif to == "-" or Path(to).exists() and not Path(to).is_file():
            output = VerdictStream(to)
        else:
            output = VerdictFile(Path(to), pairs, options, resume=resume)
    except NoVerdicts as error:
        raise Failure(f"--json {to}: {error}, and would be lost. Give another file, or remove this one.") from None
    except OSError as error:
        raise Failure(f"--json {to} cannot be read: {error.strerror or error}.") from error
    lenient = Shown(output, to or "", err)
    try:
        yield lenient
    finally:
        lenient.close()


class NoVerdicts(Exception):
    """A file holds something else."""


def _check_verdicts(path: Path) -> None:
    """Raise NoVerdicts where a file has text that is no verdict; a kill may have cut its last line short."""
    if not path.is_file():
        return
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, *([] if last.startswith(b"{") else [last])], 1):
        try:
            row = parse_json(line) if line.strip() else {"status": ""}
        except ValueError:
            row = None
        if not isinstance(row, dict) or "status" not in row:
            raise NoVerdicts(f"its line {number} is not a verdict")


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict.from_json({name: value for name, value in row.items() if name != JUDGED})


class _Digests:
    """Digests of candidates with their problems, the options, goldsmith and the machine.

    options: with the seed that was asked for. A run without one draws another seed each time, so that nobody can write
    a candidate for the seed of an earlier verdict.
    """

    def __init__(self, options: GateOptions) -> None:
        here = machine()
        self.by = [digest(), here.cpu, here.isa, here.python, here.torch, here.triton, here.gpus, options.to_json()]
        self.problems = dict[str, list[tuple[str, str]] | None]()
        self.files = dict[Path, str]()

    def of(self, problem: ProblemSource, candidate: Candidate) -> str | None:
        """None where the problem cannot be read."""
        where = json.dumps(problem.to_json(), sort_keys=True)
        if where not in self.problems:
            try:
                self.problems[where] = [(name, self._file(file)) for name, file in files_of(problem)]
            except (BadProblem, OSError, ValueError):
                self.problems[where] = None
        if self.problems[where] is None:
            return None
        text = json.dumps([candidate.to_json(), where, self.problems[where], self.by], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _file(self, file: Path) -> str:
        if file not in self.files:
            with open(file, "rb") as content:
                self.files[file] = hashlib.file_digest(content, "sha256").hexdigest()
        return self.files[file]
