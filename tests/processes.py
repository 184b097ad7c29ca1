"""New processes that skip the seconds of importing torch: each is forked from a server that imported it.

The server computed nothing and started no thread.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clearhead.ops import binary

__all__ = ["reported", "started"]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["clearhead.cli.app", "torch._dynamo", "pytest"])


def started(function: Callable[..., Any], *arguments: Any, errors: Path) -> ForkServerProcess:
    """A process that runs a function, whose standard error goes to a file."""
    process = _SERVER.Process(target=_run, args=(function, arguments, {}, None, errors), daemon=True)
    process.start()
    return process


def reported(
    code: str, words: Sequence[str] = (), environment: Mapping[str, str] | None = None, *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """The result of ``python -c code words``."""
    with TemporaryDirectory() as folder:
        said, errors = Path(folder) / "said", Path(folder) / "errors"
        variables = {**os.environ, **(environment or {})}
        process = _SERVER.Process(target=_run, args=(_program, (code, words), variables, said, errors))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([sys.executable, "-c", code, *words], timeout)
        return subprocess.CompletedProcess(words, process.exitcode, said.read_text(), errors.read_text())


def _program(code: str, words: Sequence[str]) -> None:
    sys.argv = ["-c", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    said: Path | None,
    errors: Path,
) -> None:
    # Descriptors, not sys.stdout alone: the kernels and forked children write too.
    for stream, path in ((1, said), (2, errors)):
        if path is not None:
            with path.open("w") as file:
                os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    # The server imported clearhead without these variables.
    binary.load.cache_clear()
    function(*arguments)
