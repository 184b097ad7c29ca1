"""The commands, and their errors: one line and an exit status."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import typer
from tests.commands import lines_of
from tests.processes import reported

from clearhead.cli.app import COMMANDS, EXTRAS
from clearhead.errors import DataError

BECOME = Callable[[Callable[..., None]], None]


@pytest.fixture
def doctor_does(monkeypatch: pytest.MonkeyPatch) -> BECOME:
    """Replace what `clearhead doctor` does, so that its errors can be looked at from outside."""

    def replace(command: Callable[..., None]) -> None:
        name = "clearhead.cli.doctor"
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)

    return replace


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_help(name: str) -> None:
    module = importlib.import_module(f"clearhead.cli.{name}")
    assert hasattr(module, "command") != hasattr(module, "app"), "a function `command` or a Typer `app`"
    code, out, err = lines_of(name, "--help")
    assert code == 0
    assert err == []
    prose = [line for line in out if line.strip() and "Usage:" not in line and line.strip()[0].isalpha()]
    assert prose, f"clearhead {name} --help has no sentence"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands_and_shows_examples(arguments: tuple[str, ...]) -> None:
    code, out, _ = lines_of(*arguments)
    text = "\n".join(out)
    assert code == 0
    assert "clearhead train classify --data reviews.csv" in text
    listed = text.partition("Commands")[2]
    assert [name for name in COMMANDS if name not in listed] == []


def test_version_is_the_installed_version() -> None:
    assert lines_of("--version") == (0, [f"clearhead {importlib.metadata.version('clearhead')}"], [])


def test_unknown_command_suggests_a_similar_one() -> None:
    code, out, err = lines_of("trian")
    assert (code, out) == (2, [])
    assert err == ["clearhead: No such command 'trian'. Did you mean 'train'? Run 'clearhead --help' for its options."]


def test_wrong_option_names_the_command_and_its_help(doctor_does: BECOME) -> None:
    doctor_does(lambda: None)
    code, out, err = lines_of("doctor", "--nope")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("clearhead doctor: No such option: --nope")
    assert err[0].endswith("Run 'clearhead doctor --help' for its options.")


def test_clearhead_error_is_printed_as_one_line(doctor_does: BECOME) -> None:
    def fail() -> None:
        raise DataError.about("doctor", "file", must="exist", got="x.csv", then="Name another.")

    doctor_does(fail)
    assert lines_of("doctor") == (2, [], ["doctor: file must exist; got x.csv. Name another."])


def test_missing_extra_names_the_install_command(doctor_does: BECOME) -> None:
    source = "def command():\n    raise ModuleNotFoundError(name='tokenizers.models')\n"
    scope: dict[str, Callable[[], None]] = {"__name__": "clearhead.cli.doctor"}  # type: ignore[dict-item]
    exec(source, scope)
    doctor_does(scope["command"])
    expected = "clearhead doctor: needs the extra 'train'; install clearhead[train]."
    assert lines_of("doctor") == (2, [], [expected])


def test_interruption_prints_one_line_and_exits_with_130(doctor_does: BECOME) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    doctor_does(interrupt)
    assert lines_of("doctor") == (130, [], ["clearhead: interrupted."])


def test_command_can_set_the_exit_status(doctor_does: BECOME) -> None:
    def leave() -> None:
        raise typer.Exit(3)

    doctor_does(leave)
    assert lines_of("doctor") == (3, [], [])


def test_other_exceptions_keep_their_traceback(doctor_does: BECOME) -> None:
    def divide() -> None:
        raise ZeroDivisionError("a bug")

    doctor_does(divide)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        lines_of("doctor")


def test_missing_module_without_extra_keeps_its_traceback(doctor_does: BECOME) -> None:
    def miss() -> None:
        raise ModuleNotFoundError("No module named 'clearhed'", name="clearhed")

    doctor_does(miss)
    with pytest.raises(ModuleNotFoundError):
        lines_of("doctor")


def test_console_script_exits_with_status_and_one_line() -> None:
    done = reported("from clearhead.cli.app import main; main()", ["--nope"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.slow
def test_python_m_clearhead_runs_the_command() -> None:
    run = [sys.executable, "-m", "clearhead", "--version"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.startswith("clearhead ")


def test_every_named_extra_exists() -> None:
    offered = importlib.metadata.metadata("clearhead").get_all("Provides-Extra")
    assert offered is not None
    assert set(EXTRAS.values()) <= set(offered)
