"""What training writes down: ``log.jsonl`` and TensorBoard events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clearhead.train.extra import need

__all__ = ["EventLog", "LineLog"]


class LineLog:
    """One JSON object a line. A resumed run first cuts what the checkpoint does not know of."""

    def __init__(self, path: Path, *, keep_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Add one record and hand it to the system at once."""
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        """The bytes written so far, made durable."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventLog:
    """TensorBoard's view of the same numbers."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        need("tensorboard")
        writer = need("torch.utils.tensorboard").SummaryWriter
        purge = first_step + 1 if first_step else None
        self._writer = writer(str(folder), purge_step=purge)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Add every number of a record at ``step``."""
        kind = record["kind"]
        for name, value in record.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write out what is waiting and close the file."""
        self._writer.close()
