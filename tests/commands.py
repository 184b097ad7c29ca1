"""The command line, called in this process: exit status, standard output and standard error of a command."""

from __future__ import annotations

from typer.testing import CliRunner

from clearhead.cli.app import app

__all__ = ["called", "lines_of", "texts_of"]


def texts_of(*words: object, stdin: bytes | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def called(*words: object, stdin: bytes | None = None) -> tuple[int, str, list[str]]:
    """The lines of standard error."""
    code, out, err = texts_of(*words, stdin=stdin)
    return code, out, err.splitlines()


def lines_of(*words: object) -> tuple[int, list[str], list[str]]:
    """The lines of both."""
    code, out, err = texts_of(*words)
    return code, out.splitlines(), err.splitlines()
