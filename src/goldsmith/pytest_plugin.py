"""The pytest plugin: failing checks as reports, seeds that belong to tests, one page of all, diagnoses and bundles.

Inert unless the assay is used: this module imports neither torch nor the assay, which is looked for among the loaded
modules when a test begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative

SCHEMA = 1
BUNDLES = "assay-bundles"
ATTRIBUTE = "goldsmith_assay"  # of a test report: what was checked, as JSON, which travels from workers of xdist
KEY: pytest.StashKey[_Watch] = pytest.StashKey()
SLOW: pytest.StashKey[_Slow] = pytest.StashKey()
PATIENCE = 60.0  # seconds that a run of a candidate may take before it is named
MARK = (
    "assay(seed=None, diagnose=False): the seed of this test's checks; diagnose what fails, whatever the command line"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("assay", "goldsmith's assay")
    group.addoption("--assay-html", metavar="FILE", help="write all checks of the run as one HTML page")
    group.addoption("--assay-json", metavar="FILE", help="write all checks of the run as JSON")
    group.addoption(
        "--assay-diagnose", action="store_true", help="say of each failing check which stage is wrong first, and why"
    )
    group.addoption(
        "--assay-bundles",
        metavar="DIR",
        help=f"where diagnoses leave the smallest failing cases; implies --assay-diagnose (default: {BUNDLES})",
    )
    group.addoption("--assay-seed", metavar="N", type=int, help="seed of all checks (default: each test has its own)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    if config.getoption("--assay-bundles"):
        _writable(Path(config.rootpath, config.getoption("--assay-bundles")))
    config.pluginmanager.register(_Collector(config), "goldsmith-collector")
    config.stash[SLOW] = slow = _Slow()  # here, where stderr is not captured yet
    config.add_cleanup(slow.end)


def _writable(folder: Path) -> None:
    """Say before the tests, not in place of their diagnoses, that none can be kept there."""
    from .assay.support.output_folder import unwritable

    why = unwritable(folder)
    if why:
        raise pytest.UsageError(f"--assay-bundles: {folder} cannot be written: {why}")


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> Any:
    """`goldsmith.assay`, with the seed of this test as `assay.seed`."""
    watch = request.node.stash[KEY]
    watch.begin()
    return _Assay(watch.seed)


class _Assay:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getattr__(self, name: str) -> Any:
        import goldsmith.assay

        return getattr(goldsmith.assay, name)


class _Watch:
    """Sees the checks of one test."""

    def __init__(self, item: pytest.Item) -> None:
        option, mark = item.config.getoption, item.get_closest_marker("assay")
        named = _named(item, mark)
        seeds = (named.get("seed"), option("--assay-seed"))
        self.seed: int = next((s for s in seeds if s is not None), _seed_of(item.nodeid))
        self.folder = Path(item.config.rootpath, option("--assay-bundles") or BUNDLES)
        self.diagnoses: bool = bool(named.get("diagnose") or option("--assay-diagnose") or option("--assay-bundles"))
        self.kept = bool(option("--assay-html") or option("--assay-json"))
        self.checks: list[Any] = []
        self.slow, self.test = item.config.stash[SLOW], item.nodeid
        self.hooks: Any = None
        self.before = 0

    def begin(self) -> None:
        """From here on, if the assay is loaded: until `end`, its checks are this test's."""
        package = sys.modules.get("goldsmith.assay")
        if package is None or self.hooks is not None:
            return
        from goldsmith.assay.execute import hooks

        self.hooks, self.before = hooks, hooks.DEFAULT_SEED[0]
        hooks.DEFAULT_SEED[0] = self.seed
        hooks.CHECKS.append(self.checks.append)
        self.slow.begin(self.test, hooks.RUNNING)

    def end(self) -> None:
        if self.hooks is not None:
            self.hooks.DEFAULT_SEED[0] = self.before
            self.hooks.CHECKS.remove(self.checks.append)
            self.hooks = None

    def diagnosed(self, report: Any) -> Any:
        """The diagnosis of the check that this report is of; None where that is not known."""
        from goldsmith import assay

        made = next((c for c in self.checks if c.report is report), None)
        if made is None:
            return None
        return assay.diagnose(
            made.target, made.case, dtype=made.dtype, device=made.device, seed=report.seed, out=self.folder
        )


def _named(item: pytest.Item, mark: pytest.Mark | None) -> dict[str, Any]:
    """What the marker says; a misspelt argument is an error, and not ignored."""
    if mark is None:
        return {}
    wrong = [*map(repr, mark.args), *(k for k in mark.kwargs if k not in ("seed", "diagnose"))]
    seed = mark.kwargs.get("seed")
    if wrong or not (seed is None or isinstance(seed, int)):
        raise pytest.UsageError(
            f"{item.nodeid}: mark.assay takes seed=<int> and diagnose=<bool>, got {wrong or seed!r}"
        )
    return dict(mark.kwargs)


def _seed_of(nodeid: str) -> int:
    """The same on every machine, in every order and in every worker."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")


# one test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    watch = item.stash[KEY] = _Watch(item)
    try:
        return (yield)
    finally:
        watch.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[KEY].begin()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[KEY].begin()  # a fixture may have brought the assay in
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, pytest.TestReport]:
    report: pytest.TestReport = yield
    watch = item.stash.get(KEY, None)
    if watch is None:
        return report
    found = None
    error: Any = call.excinfo.value if call.excinfo is not None else None
    if error is not None and _is_assay_error(error):
        report.longrepr = _shown(call.excinfo, error)
        if watch.diagnoses and report.failed:
            found = _diagnose(item, watch, error.report, report)
    if watch.kept and watch.checks:
        _keep(item, watch, report, found)
    watch.checks.clear()
    return report


def _is_assay_error(error: Any) -> bool:
    results = sys.modules.get("goldsmith.assay.report.results")
    return results is not None and isinstance(error, results.AssayError)


def _shown(excinfo: Any, error: Any) -> ReprExceptionInfo:
    """The report, and below it the line of the test: what stands above in the trace is the assay's own."""
    inside = [entry for entry in excinfo.traceback if not _is_ours(str(entry.path))]
    entry = inside[-1] if inside else excinfo.traceback[-1]
    message = str(error).split("\n\n", 1)[0]
    place = ReprFileLocation(str(entry.path), entry.lineno + 1, " ".join(message.split()))
    return ReprExceptionInfo(reprcrash=place, reprtraceback=ReprTracebackNative([f"{error}\n", f"{_at(entry)}\n"]))


def _is_ours(path: str) -> bool:
    return Path(path).is_relative_to(Path(__file__).parent)


def _at(entry: Any) -> str:
    try:
        path = Path(entry.path).relative_to(Path.cwd())
    except ValueError:
        path = Path(entry.path)
    return f"{path}:{entry.lineno + 1}: {str(entry.statement).strip()}"


def _diagnose(item: pytest.Item, watch: _Watch, checked: Any, report: pytest.TestReport) -> Any:
    try:
        found = watch.diagnosed(checked)
    except Exception as error:  # noqa: BLE001  the test's own failure must be shown, whatever becomes of its diagnosis
        report.sections.append(("assay diagnosis", f"could not be made: {type(error).__name__}: {error}"))
        return None
    if found is None:
        return None
    text = str(found)
    if found.bundle is not None:
        text += f"\nPage  {found.bundle / 'diagnosis.html'}\n"
    report.sections.append(("assay diagnosis", text))
    if found.partial == "interrupted":
        item.session.shouldstop = "interrupted while a failing check was diagnosed"
    return found


class _Slow:
    """Says on stderr which run of a candidate does not end, once for each: nothing can end it in this process."""

    def __init__(self) -> None:
        try:
            self.to = os.dup(sys.stderr.fileno())
        except (AttributeError, OSError, ValueError):  # no file behind it
            self.to = -1
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        self.test, self.running = "", list[Any]()

    def begin(self, test: str, running: list[Any]) -> None:
        self.test, self.running = test, running
        if self.thread is None and self.to >= 0:
            self.thread = threading.Thread(target=self._look, name="goldsmith-slow", daemon=True)
            self.thread.start()

    def _look(self) -> None:
        named: Any = None
        while not self.over.wait(PATIENCE / 12):
            for run in [r for r in self.running if r is not named and r.seconds > PATIENCE]:
                named = run
                text = f"run {run.run!r} of probe {run.probe} (case {run.case}, seed {run.seed}) has not ended"
                os.write(self.to, f"\n{self.test}: {text} after {run.seconds:.0f} s\n".encode())

    def end(self) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        if self.to >= 0:
            os.close(self.to)


# all tests


def _keep(item: pytest.Item, watch: _Watch, report: pytest.TestReport, found: Any) -> None:
    made = {
        "nodeid": item.nodeid,
        "outcome": report.outcome,
        "reports": [check.report.to_json() for check in watch.checks],
        "diagnosis": None if found is None else found.to_json(),
    }
    setattr(report, ATTRIBUTE, json.dumps(made))


class _Collector:
    """Gathers what was checked, in the process that writes: with xdist that is the controller, which has a terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, ATTRIBUTE, None)
        if text is not None:
            self.tests.append(json.loads(text))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        to_json, to_html = (self.config.getoption(name) for name in ("--assay-json", "--assay-html"))
        if not to_json and not to_html:
            return
        tests = sorted(self.tests, key=lambda t: t["nodeid"])
        terminalreporter.section("assay")
        checks = sum(len(t["reports"]) for t in tests)
        terminalreporter.line(f"{checks} checks in {len(tests)} tests" if tests else "no test used the assay")
        if to_json:
            path = Path(to_json)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"schema": SCHEMA, "tests": tests}) + "\n", encoding="utf-8")
            terminalreporter.line(f"JSON: {path}")
        if to_html and tests:
            terminalreporter.line(f"page: {_page(tests, Path(to_html))}")


def _page(tests: list[dict[str, Any]], path: Path) -> Path:
    """One matrix: a line for each test function and target, with its cases."""
    from .assay.report.check_report import Report
    from .assay.report.html import page
    from .assay.report.html.view import Entry
    from .cli.verify.merge import merge

    groups: dict[tuple[str, str], list[Report]] = {}
    for test in tests:
        for data in test["reports"]:
            report = Report.from_json(data)
            groups.setdefault((report.target, test["nodeid"].partition("[")[0]), []).append(report)
    entries = [Entry(target, where, merge(target, reports)) for (target, where), reports in groups.items()]
    failed = [t["nodeid"] for t in tests if t["outcome"] == "failed"]
    remarks = [f"Failed: {', '.join(failed)}"] if failed else []
    return page.write(entries, path, title="pytest: assay", remarks=remarks)
