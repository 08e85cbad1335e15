"""The `goldsmith` program: without arguments, its version, wrong arguments, missing packages."""

import atexit
import gc
import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import goldsmith
from goldsmith.cli import app, doctor
from goldsmith.cli.bench import command as bench
from goldsmith.cli.signals import terminate_like_ctrl_c
from goldsmith.core.device import machine
from goldsmith.core.op import Op

SOURCE = Path(goldsmith.__file__).resolve().parents[1]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_programs_end_searches_no_garbage(monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with pytest.raises(SystemExit):
        app(["--version"])
    assert at_exit == [gc.freeze]


def test_without_a_command_it_lists_its_commands():
    result = run()
    assert result.exit_code == 0
    assert all(command in result.output for command in ("verify", "diagnose", "replay", "doctor", "bench"))


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_help_points_to_the_three_doors(arguments):
    output = run(*arguments).output
    titles = ["Check my kernel", "Train or run a mixture-of-experts model", "Use the operators", "Where to begin"]
    sections = [output.index(title) for title in titles]
    assert sections == sorted(sections)
    assert sections[0] < output.index("  verify") < sections[1] < output.index("  generate") < sections[2]
    assert all(f"goldsmith {words}" in output[sections[3] :] for words in ("new NAME", "generate MODEL", "doctor"))


@pytest.mark.parametrize("command", ["verify", "diagnose", "replay", "doctor", "bench"])
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and "--json" in result.output


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "goldsmith", "--version"], capture_output=True, text=True, cwd=SOURCE)
    assert (done.returncode, done.stdout) == (0, f"goldsmith {goldsmith.__version__}\n")


def test_the_version_option_prints_the_version():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"goldsmith {goldsmith.__version__}\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["polish"], "No such command 'polish'"),
        (["verify", "--colour"], "No such option: --colour"),
        (["verify", "--dtype", "int8"], "'--dtype'"),
        (["verify", "--jobs", "0"], "'--jobs'"),
        (["verify", "--quick", "--thorough"], "--quick and --thorough exclude each other"),
        (["bench", "nosuch"], "no operator 'nosuch'; there are: experts.linear, experts.moe, experts.slots"),
        (["bench", "--device", "tpu"], "--device tpu: not a device"),
        (["bench", "mhc.post", "--case", "nosuch"], "whose name contains nosuch; available: decode[T=1,D=4096]"),
    ],
)
def test_a_mistake_is_one_readable_paragraph_and_status_2(arguments, message, monkeypatch):
    monkeypatch.setattr(bench, "machine", lambda: replace(machine(), interpreter=False))
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_instead_of_a_traceback(package):
    code = f"import sys, runpy; sys.modules[{package!r}] = None; sys.argv[1:] = ['doctor']; "
    code += "runpy.run_module('goldsmith.cli', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)})
    assert done.returncode == 2
    assert f"need the package {package}, which is not installed here: pip install {package}" in done.stderr
    assert "Traceback" not in done.stderr


NEED_HF = [
    ["generate", "a/model", "--prompt", "x"], ["finetune", "a/model", "--data", "x"],
    ["merge", "a/model", "an/adapter", "--output", "x"], ["adapter", "check", "a/model", "an/adapter"],
    ["adapter", "export", "a/model", "an/adapter", "--output", "x"],
]  # fmt: skip


@pytest.mark.parametrize("command", NEED_HF, ids=lambda command: " ".join(command[:2]))
def test_without_transformers_every_command_says_what_to_install(command):
    code = "import sys; sys.modules['transformers'] = None; from goldsmith.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=SOURCE)
    assert done.returncode == 2, done.stderr
    assert "transformers is not installed: pip install" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_targets_import_no_packages_of_the_command_line():
    code = "import sys; import goldsmith.cli.targets; print(*sorted({'typer', 'rich', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)})
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_the_doctor_covers_every_backend_of_every_operator():
    result = run("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert {op["name"]: set(op["backends"]) for op in report["operators"]} == {
        name: set(op.backends) for name, op in Op.all().items()
    }
    for op in report["operators"]:
        assert op["backends"]["reference"] is None and op["backends"][op["auto"]] is None
        assert all(reason is None or len(reason) > 10 for reason in op["backends"].values())


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_doctor_fits_60_columns_and_cuts_nothing(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    shown = run("doctor").output
    assert max(map(len, shown.splitlines())) <= 60 and "…" not in shown
    assert all(
        op["name"] in shown for op in json.loads(run("doctor", "--json").stdout)["operators"] if not op["internal"]
    )


def test_the_doctor_prints_each_reason_once_with_its_operators(monkeypatch):
    reason = "needs a CUDA device; the inputs are on cpu"
    monkeypatch.setattr(Op, "why_not", lambda op, backend, *tensors, **options: reason if backend == "triton" else None)
    result = run("doctor")
    assert result.exit_code == 0
    assert result.output.count(reason) == 1
    for name, op in Op.all().items():
        assert (name in result.output) != op.internal, name


def test_the_doctor_explains_that_numpy_is_too_new_for_the_interpreter(monkeypatch):
    reason = "the interpreter of Triton 3.6.0 needs numpy < 2.4; numpy 2.5.2 is installed (pip install 'numpy<2.4')"
    monkeypatch.setattr(doctor, "interpreter_unavailable", lambda: reason)
    assert "needs numpy < 2.4; numpy 2.5.2 is installed" in " ".join(run("doctor").output.split())
    assert json.loads(run("doctor", "--json").stdout)["interpreter"] == reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_that_a_command_was_started_to_ignore_do_not_end_it(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminate_like_ctrl_c():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt, match=number.name), terminate_like_ctrl_c():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_too_little_address_space_is_said_before_torch_is_imported():
    def little():
        resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))

    command = [sys.executable, "-m", "goldsmith", "doctor"]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=little, timeout=60)
    assert run.returncode == 2 and "600 MiB of address space (ulimit -v)" in " ".join(run.stderr.split())
