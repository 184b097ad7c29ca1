"""Files of a run: written whole or not at all, and read with an error that says what is wrong."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.errors import DataError
from clearhead.train.extra import need

__all__ = ["clear_leftovers", "read_json", "read_tensors", "write_bytes", "write_json", "write_tensors"]

_LEFTOVER = ".half-written-"
_ORDINARY = 0o644  # mkstemp's own mode would hide a run from everyone but its owner


def write_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step: a reader, or a crash, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_LEFTOVER)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), _ORDINARY)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process left in ``folder`` and the folders in it."""
    for path in folder.rglob(f"{_LEFTOVER}*"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable; a file's own fsync does not."""
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
    except (OSError, ValueError) as error:
        got = str(error)
    then = "The run is damaged or was never finished; train it again."
    raise DataError.about(function, str(path), must="be a readable JSON file", got=got, then=then)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file with a text note in its header, atomically."""
    save = need("safetensors.torch").save
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata=dict(note or {})))


def read_tensors(path: Path, *, function: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and the note in its header."""
    safetensors = need("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        got = "no such file"
    except (OSError, safetensors.SafetensorError) as error:
        got = str(error)
    then = "The file is damaged or was cut short; train the run again."
    raise DataError.about(function, str(path), must="be a whole safetensors file", got=got, then=then)
