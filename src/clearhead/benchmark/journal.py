"""Results on disk while they are taken: after each row the file is whole, so a killed run loses one row."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from clearhead.benchmark.results import facts
from clearhead.errors import DataError
from clearhead.train.files import read_json, write_json

__all__ = ["Journal", "peer_versions"]

_PEERS = ("onnxruntime", "onnx")
#: Rows taken elsewhere, or with other software or threads, are not continued.
_SAME = ("machine", "versions", "torch", "kernels", "threads")


def peer_versions() -> dict[str, str]:
    """The versions of the peers that are packages of their own, of those installed."""
    found = {}
    for name in _PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Journal:
    """A file of rows with what a figure needs beside it.

    Args:
        path: the file; its folder is made when the first row is written.
        command: what was called.
        load_before: of the machine before the start.
        resume: whether to keep the rows of the file that is there, if it was made on the same machine with the same
            software and threads.
    """

    def __init__(self, path: Path, *, command: str, load_before: float | None, resume: bool = False) -> None:
        self.path = path
        self.head = facts(command=command, load_before=load_before)
        self.head["versions"] = {**self.head["versions"], **peer_versions()}
        self.rows: dict[str, dict[str, Any]] = {}
        if resume and path.exists():
            old = self.read(path)
            if all(old["head"].get(name) == self.head[name] for name in _SAME):
                self.rows = {row["title"]: row for row in old["rows"]}

    def add(self, row: Mapping[str, Any]) -> None:
        """Hold a row, known by its title, and write all of them."""
        self.rows[row["title"]] = dict(row)
        write_json(self.path, {"head": self.head, "rows": list(self.rows.values())})

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """What a journal wrote: ``head`` and ``rows``.

        Raises:
            DataError: there is no such file, or it is something else.
        """
        found = read_json(path, function="bench")
        if not isinstance(found, dict) or not {"head", "rows"} <= set(found):
            raise DataError.about(
                "bench",
                str(path),
                must="be written by clearhead bench",
                got="another file",
                then="Name another folder with --out.",
            )
        return found
