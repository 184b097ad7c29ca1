"""Model folders of the command line, and the checks before one is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from clearhead.errors import DataError, UnsupportedError

__all__ = ["check", "of_folder", "parameters"]

_WEIGHTS: Final = "*.safetensors"
_INDEX: Final = ".index.json"
#: A header longer than this is none.
_LONGEST_HEADER: Final = 2**27


def of_folder(named: Path) -> Path:
    """The folder with the model: the named folder, or the snapshot in a folder of Hugging Face's cache.

    Raises:
        DataError: there is no such folder.
    """
    if not named.is_dir():
        raise DataError.about(
            "lab",
            str(named),
            must="be a model folder",
            got="a file" if named.exists() else "no such folder",
            then="Name a run of clearhead train, or a folder of a Hugging Face model.",
        )
    head = named / "refs" / "main"
    if (named / "snapshots").is_dir() and head.is_file():
        try:
            snapshot = named / "snapshots" / head.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return named
        return snapshot if snapshot.parent == named / "snapshots" and snapshot.is_dir() else named
    return named


def check(named: Path, folder: Path) -> None:
    """Raise if a file of the folder is outside the named folder.

    Raises:
        DataError: a link, or a name in an index or in the tokenizer's settings, is outside.
    """
    root = _resolved(named, named)
    for path in sorted(folder.iterdir()):
        _within(root, path, str(path.name))
    for path in sorted(folder.glob("*.json")):
        for name in _named_files(path):
            _within(root, folder / name, f"{name[:80]!r} in {path.name}")


def _within(root: Path, path: Path, said: str) -> None:
    if _resolved(path, root).is_relative_to(root) or not path.exists():
        return
    raise DataError.about(
        "lab",
        str(root),
        must="contain all its files",
        got=f"{said}, which is outside",
        then="Copy the model with 'cp -rL', or name the folder that contains all files.",
    )


def _resolved(path: Path, root: Path) -> Path:
    """The resolved path; a loop of links raises ``OSError`` or ``RuntimeError``, depending on the Python version."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        raise DataError.about(
            "lab", str(root), must="contain files", got=f"{path.name[:80]!r}, a link to itself", then="Remove it."
        ) from None


def _named_files(path: Path) -> Iterator[str]:
    """The files that a settings file names: an index's parts, a tokenizer's vocabulary."""
    read = _read(path)
    if path.name.endswith(_INDEX):
        parts = read.get("weight_map")
        yield from {name for name in (parts.values() if isinstance(parts, dict) else ()) if isinstance(name, str)}
    elif path.name == "tokenizer_config.json":
        yield from (value for key, value in read.items() if key.endswith("_file") and isinstance(value, str))


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def parameters(folder: Path, most: int) -> int:
    """The number of parameters in a folder, read from the headers of its safetensors files.

    Raises:
        UnsupportedError: there are more than ``most``.
    """
    count = sum(_numbers(path) for path in folder.glob(_WEIGHTS))
    if count > most:
        raise UnsupportedError.about(
            "lab",
            str(folder),
            must=f"have at most {most:,} parameters",
            got=f"{count:,}",
            then="Use a smaller model here; ch.observe has no limit.",
        )
    return count


def _numbers(path: Path) -> int:
    # The format starts with eight bytes, the length of the JSON header that follows.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        entries = json.loads(header)
        return sum(math.prod(entry["shape"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise DataError.about(
            "lab",
            str(path),
            must="be a complete safetensors file",
            got="a damaged header",
            then="Fetch or train it again.",
        ) from None
