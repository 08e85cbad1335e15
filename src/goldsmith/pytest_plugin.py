"""The pytest plugin: readable reports of failing checks, a seed per test, a page of all checks, diagnoses and bundles.

It does nothing unless a test uses the assay: this module imports neither torch nor the assay, but looks for the assay
among the loaded modules when a test begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard, TypeVar, cast

import pytest
from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative, TracebackEntry

if TYPE_CHECKING:
    from .assay.diagnosis import Diagnosis
    from .assay.execute.hooks import CheckRecord, RunInProgress
    from .assay.report.check_report import Report
    from .assay.report.results import AssayError
    from .pytest_session import RunClock

SCHEMA = 1
BUNDLES = "assay-bundles"
ATTRIBUTE = "goldsmith_assay"  # of a test report: its checks as JSON, so that xdist sends them to the controller
KEY: pytest.StashKey[_TestChecks] = pytest.StashKey()
SLOW: pytest.StashKey[_SlowRunReporter] = pytest.StashKey()
PATIENCE = 60.0  # seconds after which a run of a candidate is reported as slow
MARK = (
    "assay(seed=None, diagnose=False): seed of this test's checks; diagnose its failures even without --assay-diagnose"
)


T = TypeVar("T")


class MarkerArguments(TypedDict, total=False):
    seed: int | None
    diagnose: bool


class CheckedTest(TypedDict):
    """The checks of one test, as JSON."""

    nodeid: str
    outcome: str
    reports: list[dict[str, object]]
    diagnosis: dict[str, object] | None


def pytest_addoption(parser: pytest.Parser) -> None:
    from .pytest_session import SECONDS

    group = parser.getgroup("assay", "goldsmith's assay")
    group.addoption("--assay-html", metavar="FILE", help="write all checks of the run to one HTML page")
    group.addoption("--assay-json", metavar="FILE", help="write all checks of the run as JSON")
    group.addoption(
        "--assay-diagnose", action="store_true", help="diagnose each failing check: the first wrong stage, and why"
    )
    group.addoption(
        "--assay-bundles",
        metavar="DIR",
        help=f"folder for the smallest failing cases; implies --assay-diagnose (default: {BUNDLES})",
    )
    group.addoption("--assay-seed", metavar="N", type=int, help="seed of all checks (default: one per test)")
    limit = f"end a test in which one run of a candidate takes longer (default: {SECONDS:g}; 0: never)"
    group.addoption("--assay-seconds", metavar="N", type=float, default=SECONDS, help=limit)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """A test that a kernel ends with `os._exit(0)` fails: the session runs in a child that the parent watches."""
    from .pytest_session import run_in_child

    return run_in_child(config)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    if config.getoption("--assay-bundles"):
        _writable(Path(config.rootpath, config.getoption("--assay-bundles")))
    config.pluginmanager.register(_Collector(config), "goldsmith-collector")
    config.stash[SLOW] = slow = _SlowRunReporter()  # created here because pytest captures stderr later
    config.add_cleanup(slow.end)


def _writable(folder: Path) -> None:
    """Raise UsageError before the tests run if bundles cannot be written to the folder."""
    from .assay.support.output_folder import unwritable

    why = unwritable(folder)
    if why:
        raise pytest.UsageError(f"--assay-bundles: {folder} cannot be written: {why}")


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> _SeededAssay:
    """`goldsmith.assay`; `assay.seed` is the seed of this test."""
    import goldsmith.assay  # noqa: F401  loaded first, so that the checks of this test are its own

    watch = request.node.stash[KEY]
    watch.begin()
    return _SeededAssay(watch.seed)


class _SeededAssay:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getattr__(self, name: str) -> Any:
        import goldsmith.assay

        return getattr(goldsmith.assay, name)


class _TestChecks:
    """Collects the checks of one test."""

    def __init__(self, item: pytest.Item) -> None:
        option, mark = item.config.getoption, item.get_closest_marker("assay")
        arguments = _marker_arguments(item, mark)
        seeds = (arguments.get("seed"), option("--assay-seed"))
        self.seed: int = next((s for s in seeds if s is not None), _seed_of(item.nodeid))
        self.folder = Path(item.config.rootpath, option("--assay-bundles") or BUNDLES)
        self.diagnoses: bool = bool(
            arguments.get("diagnose") or option("--assay-diagnose") or option("--assay-bundles")
        )
        self.recorded = bool(option("--assay-html") or option("--assay-json"))
        self.checks: list[CheckRecord] = []
        self.slow, self.test = item.config.stash[SLOW], item.nodeid
        child = item.config.pluginmanager.get_plugin("goldsmith-session")
        self.clock: RunClock | None = None if child is None else child.clock
        self.hooks: ModuleType | None = None
        self.before = 0

    def begin(self) -> None:
        """If the assay is loaded, attribute its checks to this test until `end`."""
        package = sys.modules.get("goldsmith.assay")
        if package is None or self.hooks is not None:
            return
        from goldsmith.assay.execute import hooks

        self.hooks, self.before = hooks, hooks.DEFAULT_SEED[0]
        hooks.DEFAULT_SEED[0] = self.seed
        hooks.CHECKS.append(self.checks.append)
        self.slow.begin(self.test, hooks.RUNNING)
        if self.clock is not None:
            hooks.RUNS.append(self.clock.begin)
            hooks.ENDED.append(self.clock.end)

    def end(self) -> None:
        if self.hooks is not None:
            self.hooks.DEFAULT_SEED[0] = self.before
            self.hooks.CHECKS.remove(self.checks.append)
            if self.clock is not None:
                self.hooks.RUNS.remove(self.clock.begin)
                self.hooks.ENDED.remove(self.clock.end)
            self.hooks = None

    def diagnosed(self, report: Report) -> Diagnosis | None:
        """Diagnose the check that this report belongs to; None if it is not one of this test's checks."""
        from goldsmith import assay

        check = next((c for c in self.checks if c.report is report), None)
        if check is None:
            return None
        return assay.diagnose(
            check.target, check.case, dtype=check.dtype, device=check.device, seed=report.seed, out=self.folder
        )


def _marker_arguments(item: pytest.Item, mark: pytest.Mark | None) -> MarkerArguments:
    """The arguments of the marker; raises UsageError for an unknown one."""
    if mark is None:
        return {}
    wrong = [*map(repr, mark.args), *(k for k in mark.kwargs if k not in ("seed", "diagnose"))]
    seed = mark.kwargs.get("seed")
    if wrong or not (seed is None or isinstance(seed, int)):
        raise pytest.UsageError(
            f"{item.nodeid}: mark.assay takes seed=<int> and diagnose=<bool>, got {wrong or seed!r}"
        )
    return cast("MarkerArguments", dict(mark.kwargs))


def _seed_of(nodeid: str) -> int:
    """A seed from the test's id: the same on every machine, in every order and in every worker."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")


# one test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, T, T]:
    watch = item.stash[KEY] = _TestChecks(item)
    try:
        return (yield)
    finally:
        watch.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, T, T]:
    item.stash[KEY].begin()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, T, T]:
    item.stash[KEY].begin()  # a fixture may have imported the assay
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    watch = item.stash.get(KEY, None)
    if watch is None:
        return report
    diagnosis = None
    error = call.excinfo.value if call.excinfo is not None else None
    if call.excinfo is not None and _is_assay_error(error):
        report.longrepr = _failure(call.excinfo, error)
        if watch.diagnoses and report.failed:
            diagnosis = _diagnose(item, watch, cast("Report", error.report), report)
    if watch.recorded and watch.checks:
        _attach_checks(item, watch, report, diagnosis)
    watch.checks.clear()
    return report


def _is_assay_error(error: BaseException | None) -> TypeGuard[AssayError]:
    results = sys.modules.get("goldsmith.assay.report.results")
    return results is not None and isinstance(error, results.AssayError)


def _failure(excinfo: pytest.ExceptionInfo[BaseException], error: AssayError) -> ReprExceptionInfo:
    """The report, followed by the line of the test; frames inside the assay are left out."""
    inside = [entry for entry in excinfo.traceback if not _is_ours(str(entry.path))]
    entry = inside[-1] if inside else excinfo.traceback[-1]
    message = str(error).split("\n\n", 1)[0]
    place = ReprFileLocation(str(entry.path), entry.lineno + 1, " ".join(message.split()))
    return ReprExceptionInfo(reprcrash=place, reprtraceback=ReprTracebackNative([f"{error}\n", f"{_place(entry)}\n"]))


def _is_ours(path: str) -> bool:
    return Path(path).is_relative_to(Path(__file__).parent)


def _place(entry: TracebackEntry) -> str:
    try:
        path = Path(entry.path).relative_to(Path.cwd())
    except ValueError:
        path = Path(entry.path)
    return f"{path}:{entry.lineno + 1}: {str(entry.statement).strip()}"


def _diagnose(item: pytest.Item, watch: _TestChecks, checked: Report, report: pytest.TestReport) -> Diagnosis | None:
    try:
        diagnosis = watch.diagnosed(checked)
    except Exception as error:  # noqa: BLE001  the test's own failure must be shown even if its diagnosis fails
        report.sections.append(("assay diagnosis", f"could not be made: {type(error).__name__}: {error}"))
        return None
    if diagnosis is None:
        return None
    text = str(diagnosis)
    if diagnosis.bundle is not None:
        text += f"\nPage  {diagnosis.bundle / 'diagnosis.html'}\n"
    report.sections.append(("assay diagnosis", text))
    if diagnosis.partial == "interrupted":
        item.session.shouldstop = "interrupted while a failing check was diagnosed"
    return diagnosis


class _SlowRunReporter:
    """Names each slow run of a candidate on stderr, once. Only another process can end a run: `pytest_session`."""

    def __init__(self) -> None:
        try:
            self.stderr = os.dup(sys.stderr.fileno())
        except (AttributeError, OSError, ValueError):  # stderr has no file descriptor
            self.stderr = -1
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        self.test = ""
        self.running: list[RunInProgress] = []

    def begin(self, test: str, running: list[RunInProgress]) -> None:
        self.test, self.running = test, running
        if self.thread is None and self.stderr >= 0:
            self.thread = threading.Thread(target=self._watch, name="goldsmith-slow", daemon=True)
            self.thread.start()

    def _watch(self) -> None:
        reported: RunInProgress | None = None
        while not self.over.wait(PATIENCE / 12):
            for run in [r for r in self.running if r is not reported and r.seconds > PATIENCE]:
                reported = run
                text = f"run {run.run!r} of probe {run.probe} (case {run.case}, seed {run.seed}) has not ended"
                os.write(self.stderr, f"\n{self.test}: {text} after {run.seconds:.0f} s\n".encode())

    def end(self) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        if self.stderr >= 0:
            os.close(self.stderr)


# all tests


def _attach_checks(
    item: pytest.Item, watch: _TestChecks, report: pytest.TestReport, diagnosis: Diagnosis | None
) -> None:
    record: CheckedTest = {
        "nodeid": item.nodeid,
        "outcome": report.outcome,
        "reports": [check.report.to_json() for check in watch.checks],
        "diagnosis": None if diagnosis is None else diagnosis.to_json(),
    }
    setattr(report, ATTRIBUTE, json.dumps(record))


class _Collector:
    """Collects the checks of all tests and writes them; with xdist this happens in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: list[CheckedTest] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, ATTRIBUTE, None)
        if text is not None:
            self.tests.append(json.loads(text))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        to_json, to_html = (self.config.getoption(name) for name in ("--assay-json", "--assay-html"))
        if not to_json and not to_html:
            return
        tests = sorted(self.tests, key=lambda t: t["nodeid"])
        terminalreporter.section("assay")
        checks = sum(len(t["reports"]) for t in tests)
        none = "no check was finished" if exitstatus == pytest.ExitCode.INTERRUPTED else "no test used the assay"
        terminalreporter.line(f"{_count(checks, 'check')} in {_count(len(tests), 'test')}" if tests else none)
        if to_json:
            _keep(terminalreporter, "JSON", Path(to_json), lambda path: _json(tests, path))
        if to_html and tests:
            _keep(terminalreporter, "page", Path(to_html), lambda path: _page(tests, path))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _keep(terminal: pytest.TerminalReporter, word: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file and name it; an error is one line, so that it costs neither the summary nor the exit status."""
    try:
        write(path)
        terminal.line(f"{word}: {path}")
    except Exception as error:  # noqa: BLE001  the tests have their result, whatever is wrong with its page
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        terminal.line(f"{word}: cannot write {path}: {why}", red=True)


def _json(tests: list[CheckedTest], path: Path) -> None:
    from .assay.support.output_file import write_whole

    write_whole(path, json.dumps({"schema": SCHEMA, "tests": tests}) + "\n")


def _page(tests: list[CheckedTest], path: Path) -> Path:
    """Write the page: a matrix with one row per test function and target."""
    from .assay.report.check_report import Report
    from .assay.report.html import page
    from .assay.report.html.view import Entry
    from .assay.report.ranking import severity
    from .cli.verify.merged_report import merge

    groups: dict[tuple[str, str], list[Report]] = {}
    for test in tests:
        for data in test["reports"]:
            report = Report.from_json(data)
            groups.setdefault((report.target, test["nodeid"].partition("[")[0]), []).append(report)
    merged = {key: merge(key[0], reports) for key, reports in groups.items()}
    worst_first = sorted(merged, key=lambda key: severity(merged[key]))
    entries = [Entry(target, where, merged[target, where]) for target, where in worst_first]
    failed = [t["nodeid"] for t in tests if t["outcome"] == "failed"]
    remarks = [f"Failed: {', '.join(failed)}"] if failed else []
    return page.write(entries, path, title="pytest: assay", remarks=remarks, column="test")
