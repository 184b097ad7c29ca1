"""Files of a run: atomic writes, and reads with clear errors."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from clearhead.errors import DataError
from clearhead.train.extra import need

__all__ = [
    "LEFTOVER",
    "check_writable",
    "clear_leftovers",
    "read_json",
    "read_note",
    "read_tensors",
    "replacing",
    "sync_folder",
    "unwritable",
    "write_bytes",
    "write_json",
    "write_tensors",
]

#: The beginning of a temporary file's name, and of a temporary folder's.
LEFTOVER = ".half-written-"
_DEVICES = Path("/dev")


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically: a reader, or a crash, sees the old file or the new one.

    A symbolic link is followed. A pipe or a device is written to directly.
    """
    if _written_in_place(path):
        path.write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` atomically at the end of the block; a symbolic link is followed."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    half = _half_written(path.parent)
    try:
        with half.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _written_in_place(path: Path) -> bool:
    """Whether ``path`` is written to directly instead of being replaced, as a pipe or a device."""
    return path.exists() and (not path.is_file() or path.absolute().is_relative_to(_DEVICES))


def _half_written(folder: Path) -> Path:
    return folder / f"{LEFTOVER}{secrets.token_hex(8)}"


def check_writable(path: Path, *, function: str, argument: str) -> None:
    """Raise ``DataError`` if no file can be written at ``path``; leaves nothing behind.

    The file's folder may be missing, so the nearest folder that exists is tried. Making the missing ones would
    disturb another process that makes them too.
    """
    if _written_in_place(path) and not path.is_dir():
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        parents = Path(os.path.realpath(path)).parents
        place = next(part for part in parents if part.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        half = _half_written(place)
        half.open("xb").close()
        half.unlink(missing_ok=True)
    except OSError as failure:
        raise unwritable(path, failure, function=function, argument=argument) from failure


def unwritable(path: Path, failure: OSError, *, function: str, argument: str) -> DataError:
    """The error for a place that cannot be written."""
    must, then = "be writable", "Choose another place."
    return DataError.about(function, argument, must=must, got=f"{path}: {failure.strerror}", then=then)


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders that a killed process left in ``folder`` and the folders in it."""
    for path in list(folder.rglob(f"{LEFTOVER}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the new directory entry durable, which the file's fsync does not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, *, function: str) -> Any:
    """Read one JSON file of a run; ``function`` names the caller in the error."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        got = "no such file"
    except (OSError, ValueError, RecursionError) as error:
        got = str(error)
    then = "The run is damaged or was never finished; train it again."
    raise DataError.about(function, str(path), must="be a readable JSON file", got=got, then=then)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file with text metadata, atomically."""
    save = need("safetensors.torch").save
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata=dict(note or {})))


def read_note(path: Path, *, function: str) -> dict[str, str]:
    """Read the text metadata of a safetensors file."""
    with _opened(path, function) as file:
        return file.metadata() or {}


def read_tensors(path: Path, *, function: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its text metadata."""
    with _opened(path, function) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def _opened(path: Path, function: str) -> Iterator[Any]:
    safetensors = need("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            yield file
        return
    except FileNotFoundError:
        got = "no such file"
    except (OSError, safetensors.SafetensorError) as error:
        got = str(error)
    then = "The file is damaged or truncated; train the run again."
    raise DataError.about(function, str(path), must="be a complete safetensors file", got=got, then=then)
