"""The process of the ``clearhead`` command: Ctrl-C before and after a command, and standard streams that are closed.

``import clearhead`` takes a second or more, as it loads torch, and comes before any line of the command line. So the
package itself calls ``begin`` first. It needs the standard library alone, and does nothing in other programs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

__all__ = [
    "INTERRUPTED",
    "INTERRUPTED_LINE",
    "begin",
    "end_interrupted",
    "leave_on_interrupt",
    "open_streams",
    "raise_on_interrupt",
]

#: The exit status after Ctrl-C: 128 and the number of SIGINT, as shells have it.
INTERRUPTED: Final = 130
INTERRUPTED_LINE: Final = "clearhead: interrupted."
_interruptions: Final[list[int]] = []
_STREAMS: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}


def begin() -> None:
    """Prepare the process if it is the command's: ``clearhead ...`` or ``python -m clearhead ...``."""
    if _is_command():
        open_streams()
        leave_on_interrupt()
        # Registered first, so it runs last.
        atexit.register(_end)


def _is_command() -> bool:
    """Whether the interpreter was started to run the command.

    ``sys.argv`` alone does not say: a spawned child process has that of its parent.
    """
    arguments = getattr(sys, "argv", [])
    place = len(sys.orig_argv) - len(arguments)
    return bool(arguments) and place > 0 and Path(sys.orig_argv[place]).stem == "clearhead"


def open_streams() -> None:
    """Open the null device in place of each standard stream that is closed, as after ``clearhead doctor >&-``.

    Commands then run without output. A descriptor that stays free would be that of the next file: what kernels and
    child processes print would get into it.
    """
    for name, mode in _STREAMS.items():
        if getattr(sys, name) is None:
            # The lowest free descriptor, so the one of the stream.
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, True)
            stream = open(handle, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def leave_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, with one line, while there is nothing to finish."""
    if _may_handle() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that a command can finish its files."""
    if _may_handle() and signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_interrupted() -> None:
    """Let the process end with ``INTERRUPTED``, after what is registered with ``atexit``.

    CPython remembers a KeyboardInterrupt that passed through ``exec`` of a text, as in the definition of a dataclass,
    and kills itself by the signal at the end even if it was caught.
    """
    _interruptions.append(INTERRUPTED)


def _end() -> None:
    """Ignore Ctrl-C while the interpreter ends: it removes handlers, and the signal would then kill the process."""
    if _may_handle():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _interruptions:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(INTERRUPTED)


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Exceptions raised inside an import are swallowed or replaced by some modules, so none is raised.
    with suppress(OSError):
        os.write(2, f"{INTERRUPTED_LINE}\n".encode())
    os._exit(INTERRUPTED)
