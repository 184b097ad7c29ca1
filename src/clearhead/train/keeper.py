"""What a training writes into its run folder: checkpoints, the best weights and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from clearhead.train.checkpoint import Place, load_state, save_state, weights_of
from clearhead.train.files import clear_leftovers, write_tensors
from clearhead.train.logs import EventLog, LineLog
from clearhead.train.optimizer import Average
from clearhead.train.ranks import Ranks
from clearhead.train.run import RunFolder
from clearhead.train.sharded_checkpoint import load_shards, remove_others, save_shards
from clearhead.train.sharding import whole

__all__ = ["FolderKeeper"]


class FolderKeeper:
    """Stores the results of training in a run folder.

    The first process writes logs and the best weights. A checkpoint of several processes is written by all.
    """

    def __init__(self, folder: RunFolder, *, function: str, ranks: Ranks | None = None) -> None:
        self.folder, self._function = folder, function
        self._ranks = Ranks() if ranks is None else ranks
        self._lines: LineLog | None = None
        self._events: EventLog | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for log in (self._lines, self._events):
            if log is not None:
                log.close()

    def resumed(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer) -> Place:
        """The last checkpoint's position, or the start without a checkpoint; logs are truncated to it."""
        last = self._ranks.agreed(self._cleared)
        place = Place()
        if last is not None:
            load = load_state if last.is_file() and self._ranks.size == 1 else load_shards
            place = load(last, model=model, average=average.weights, optimizer=optimizer, function=self._function)
        if self._ranks.first:
            self._lines = LineLog(self.folder.log, keep_bytes=place.log_bytes)
            self._events = EventLog(self.folder.path / "tensorboard", first_step=place.step)
        return place

    def _cleared(self) -> Path | None:
        clear_leftovers(self.folder.path)
        return self.folder.last_checkpoint

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Write the record to ``log.jsonl`` and to TensorBoard."""
        if self._lines is not None and self._events is not None:
            self._lines.write({"step": step, **record})
            self._events.write(step, record)

    def best(self, model: nn.Module) -> None:
        """Write ``model.safetensors``."""
        weights = {}
        for name, value in weights_of(model).items():
            gathered = whole(value)
            if self._ranks.first:
                weights[name] = gathered
        self._ranks.agreed(lambda: write_tensors(self.folder.weights, weights))

    def checkpoint(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Write the whole state: ``checkpoint/last.safetensors``, or a folder of several processes' files."""
        if self._lines is not None:
            place.log_bytes = self._lines.size()
        last = self.folder.checkpoint
        if self._ranks.size == 1:
            save_state(last, model=model, average=average.weights, optimizer=optimizer, place=place)
        else:
            last = save_shards(
                last.parent, self._ranks, model=model, average=average.weights, optimizer=optimizer, place=place
            )
        if self._ranks.first:
            remove_others(last)

    def restore_best(self, model: nn.Module) -> None:
        """Load ``model.safetensors``."""
        self.folder.load_best(model, function=self._function)
