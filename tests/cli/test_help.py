"""--help: at most 80 columns, every option in a group with a purpose, and values named instead of typed."""

import pytest
import typer
from typer.testing import CliRunner

from goldsmith.cli import app

COMMANDS = [name for name, command in typer.main.get_command(app).commands.items() if not command.hidden]


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_the_help_wraps_at_80_columns_and_names_no_types(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    result = CliRunner().invoke(app, [*([command] if command else []), "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "<" not in result.output and "INTEGER" not in result.output and "[x>=" not in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_purpose_and_an_explanation(command):
    command_object = typer.main.get_command(app).commands[command]
    parameters = [parameter for parameter in command_object.params if not getattr(parameter, "hidden", False)]
    names = [parameter.name for parameter in parameters]
    assert sorted(n for group in command_object.purposes.values() for n in group) == sorted(names)
    shown = CliRunner().invoke(app, [command, "--help"]).output
    for parameter in parameters:
        assert parameter.help and (parameter.opts[0] in shown or parameter.metavar in shown)


def test_choices_and_defaults_are_listed_and_flags_take_no_value():
    shown = " ".join(CliRunner().invoke(app, ["finetune", "--help"]).output.split())
    assert "--schedule NAME" in shown and "One of: cosine, linear, constant. Default: cosine." in shown
    assert "--lr X" in shown and "--steps N" in shown and "--dry-run Show" in shown
    assert "Default: False" not in shown and "Default: None" not in shown
