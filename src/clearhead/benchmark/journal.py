"""A result file that is rewritten after each row, so an interrupted run loses at most one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clearhead.benchmark.results import facts
from clearhead.errors import DataError
from clearhead.train.files import read_json, write_json

__all__ = ["Journal", "peer_versions"]

_PEERS = (
    "onnxruntime", "onnx", "transformers", "openvino", "nncf", "ctranslate2", "gguf", "llama-cpp-python", "torchao",
    "zentorch",
)  # fmt: skip
#: Fields of the head that must be equal for a resumed run, besides its settings.
_SAME = ("machine", "versions", "torch", "kernels", "threads")


def peer_versions() -> dict[str, str]:
    """Versions of the installed peer packages."""
    versions = {}
    for name in _PEERS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Journal:
    """A result file: rows, and a head with machine, versions and threads.

    Args:
        path: the file; its folder is created when the first row is written.
        command: the command line.
        load_before: the machine's load before the start.
        settings: further fields of the head: what was measured of each row, and how long.
        resume: whether to keep the rows of an existing file.

    Raises:
        DataError: the file to resume is no result file, or has another machine, software, threads or settings.
    """

    def __init__(
        self,
        path: Path,
        *,
        command: str,
        load_before: float | None,
        settings: Mapping[str, object] = MappingProxyType({}),
        resume: bool = False,
    ) -> None:
        self.path = path
        self.head = facts(command=command, load_before=load_before) | dict(settings)
        self.head["versions"] = {**self.head["versions"], **peer_versions()}
        self.rows: dict[str, dict[str, Any]] = {}
        if resume and path.exists():
            old = self.read(path)
            self._check_same(old["head"], (*_SAME, *settings))
            self.rows = {row["title"]: row for row in old["rows"]}

    def _check_same(self, old: Mapping[str, Any], names: Sequence[str]) -> None:
        others = [name for name in names if old.get(name) != self.head[name]]
        if others:
            raise DataError.about(
                "bench",
                "--resume",
                must="continue a run on the same machine with the same software and options",
                got=f"{self.path} with other {', '.join(others)}",
                then="Leave --resume out to measure anew, or name another folder with --out.",
            )

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row under its title and write the file."""
        self.rows[row["title"]] = dict(row)
        write_json(self.path, {"head": self.head, "rows": list(self.rows.values())})

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Read a result file: ``head`` and ``rows``.

        Raises:
            DataError: the file is missing, or is not a result file.
        """
        journal = read_json(path, function="bench")
        if not isinstance(journal, dict) or not {"head", "rows"} <= set(journal):
            raise DataError.about(
                "bench",
                str(path),
                must="be written by clearhead bench",
                got="another file",
                then="Name another folder with --out.",
            )
        return journal
