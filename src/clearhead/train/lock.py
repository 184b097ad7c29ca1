"""One writer at a time: a lock on a folder, which the operating system releases when its process ends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from clearhead.errors import DataError
from clearhead.train.files import unwritable

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "one_writer"]

LOCK: Final = ".lock"
#: What a file system without locks answers.
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
#: A folder may be removed, by the end of another writer, between its making and the lock.
_ATTEMPTS: Final = 100


@contextmanager
def one_writer(folder: Path, *, function: str, say: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock of a folder during a block; a second process or thread that asks for it is refused.

    The lock is ``flock`` on the file ``.lock`` in the folder. Its end releases it, and so does the end of the process,
    however it ends, so a file that a killed process left locks nothing. A folder that the lock made is removed if it
    is empty at the end.

    Args:
        folder: the folder; it is made if it is missing.
        function: name of the caller in error texts.
        say: receives a line if the system or the file system has no locks (Windows, some network file systems); the
            block then runs without one.

    Raises:
        DataError: another process or thread holds the lock, or the folder cannot be written.
    """
    made = [part for part in (folder, *folder.parents) if not part.exists()]
    path = folder / LOCK
    try:
        handle = _locked(path)
    except BlockingIOError:
        must, then = "have one writer at a time", "Wait until it ends, or choose another --out."
        got = f"{_holder(path)} as well"
        raise DataError.about(function, str(folder), must=must, got=got, then=then) from None
    except OSError as failure:
        raise unwritable(folder, failure, function=function, argument="--out") from failure
    if handle is None:
        say(f"{folder} is on a system without file locks: run one command at a time in it")
    try:
        yield
    finally:
        _release(path, handle)
        with suppress(OSError):
            for part in made:
                part.rmdir()


def _locked(path: Path) -> int | None:
    """The descriptor of the locked file; None where there are no locks."""
    missing = OSError(errno.ENOENT, "removed again and again")
    for _ in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return None
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except (FileExistsError, FileNotFoundError) as failure:
            # mkdir sees a folder come or go as both, and a file in its place, which stays, as the first.
            missing = failure
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file after it was opened here; its lock then means nothing.
            if _is_open_at(path, handle):
                _sign(handle)
                return handle
        except OSError as failure:
            os.close(handle)
            if failure.errno in _WITHOUT_LOCKS:
                return None
            raise
        os.close(handle)
    raise missing


def _is_open_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _sign(handle: int) -> None:
    """Write the process into the file, for the message of one that is refused."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")[:200] or "another process"
    return "another process"


def _release(path: Path, handle: int | None) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
    if handle is not None:
        os.close(handle)
