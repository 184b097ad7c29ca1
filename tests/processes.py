"""New processes that skip the seconds of importing torch: each is forked from a server that imported it.

There are two servers: one has imported clearhead too, the other torch alone. They computed nothing and started no
thread.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clearhead.distributed import launch
from clearhead.ops import binary

__all__ = ["reported", "started", "with_torch_alone"]

#: A process has one such server, so it is that of ``run_ranks`` too. It imports what most ranks of the tests need:
#: compiling 160 modules again in each rank took more time than the tests themselves.
_SERVER = launch.fork_server()
_SERVER.set_forkserver_preload(
    [
        *("clearhead.cli.app", "torch._dynamo", "pytest"),
        *(f"clearhead.backends.{name}" for name in ("flex", "sdpa", "tiled", "triton")),
        *(f"clearhead.distributed.{name}" for name in ("parallel", "sharded_attention", "transformers_plan")),
        *(f"clearhead.nn.{name}" for name in ("classifier", "encoder_decoder", "from_torch", "language_model")),
        *("clearhead.functional.exact", "clearhead.linear.attention", "clearhead.observe.observe"),
        *("clearhead.testing", "clearhead.verify.suite", "torch.distributed.tensor.parallel"),
        *("tests.distributed.cases", "tests.distributed.test_parallelize", "tests.verify.broken_ranks"),
    ]
)
#: Runs the program of each line of its input in a child, and prints the child's exit code.
_TORCH_ALONE = """
import json, os, signal, sys, traceback
import torch

def run(code, words, variables, said, errors, timeout):
    signal.alarm(timeout)
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, said, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        os.dup2(os.open(path, flags), stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 0
        try:
            run(*json.loads(line))
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


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


def with_torch_alone(
    code: str, words: Sequence[str] = (), environment: Mapping[str, str] | None = None, *, timeout: int = 120
) -> subprocess.CompletedProcess[str]:
    """The result of ``python -c code words``, where ``import torch`` has happened and ``import clearhead`` has not.

    The exit code is 1 after any exception, ``SystemExit`` included.
    """
    with TemporaryDirectory() as folder:
        said, errors = Path(folder) / "said", Path(folder) / "errors"
        for file in (said, errors):
            file.touch()
        variables = {**os.environ, **(environment or {})}
        server = _torch_alone()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([code, words, variables, str(said), str(errors), timeout]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, status, said.read_text(), errors.read_text())


@cache
def _torch_alone() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-c", _TORCH_ALONE], stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


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
