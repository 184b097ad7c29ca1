"""The logs of training: ``log.jsonl`` and TensorBoard events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clearhead.train.extra import need

__all__ = ["EventLog", "LineLog"]


class LineLog:
    """A log with one JSON object per line; a resumed run first truncates it to ``keep_bytes``."""

    def __init__(self, path: Path, *, keep_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and flush."""
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        """The number of bytes written, after an fsync."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventLog:
    """The same metrics as TensorBoard events."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        need("tensorboard")
        writer = need("torch.utils.tensorboard").SummaryWriter
        purge = first_step + 1 if first_step else None
        self._writer = writer(str(folder), purge_step=purge)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Add every metric of a record at ``step``."""
        kind = record["kind"]
        for name, value in record.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
