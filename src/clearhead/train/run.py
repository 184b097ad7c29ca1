"""Run folders: their files, and how a run starts, resumes, finishes and is read.

A run folder has ``config.json`` (data, options and versions), ``tokenizer.json`` (text runs), ``model.safetensors``
(the best weights), ``checkpoint/`` (the whole state: a file of one process, or a folder of several), ``log.jsonl``,
``tensorboard/`` and, after the end, ``metrics.json``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from clearhead.errors import DataError
from clearhead.ops.library import isa_name
from clearhead.projection import KINDS, choice
from clearhead.train.checkpoint import load_weights
from clearhead.train.files import read_json, read_tensors, write_json
from clearhead.train.lock import one_writer
from clearhead.train.progress import ProgressReporter
from clearhead.train.ranks import Ranks

__all__ = ["STEP", "RunFolder", "entered", "versions"]

#: Name of a checkpoint of several processes, before its step.
STEP: Final = "step-"


def versions() -> dict[str, str]:
    """The versions of Python, torch and other packages."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {"python": platform.python_version(), "torch": torch.__version__, "kernels": isa_name() or "none"}
    for package in ("clearhead", "tokenizers", "safetensors", "numpy"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _products() -> dict[str, str]:
    """The implementation of each kind of GEMM; another processor may use another, with different rounding."""
    return {kind: choice(kind).path for kind in KINDS}


#: Required fields of the final metrics.
_METRICS: dict[str, tuple[type, ...]] = {
    "held_out": (dict,),
    "best_step": (int,),
    "steps": (int,),
    "seconds": (int, float),
}


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """Data, options and versions of the run, as JSON."""
        return self.path / "config.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, in Hugging Face's format."""
        return self.path / "tokenizer.json"

    @property
    def weights(self) -> Path:
        """The best weights."""
        return self.path / "model.safetensors"

    @property
    def checkpoint(self) -> Path:
        """The whole state at the last checkpoint of one process."""
        return self.path / "checkpoint" / "last.safetensors"

    @property
    def last_checkpoint(self) -> Path | None:
        """The last checkpoint: a file of one process, or a folder of several; None before the first."""
        folders = sorted(self.checkpoint.parent.glob(f"{STEP}*"))
        if folders and self.checkpoint.exists():
            # A run that went on with another number of processes, and was killed before it removed the older one.
            return max(folders[-1], self.checkpoint, key=lambda path: path.stat().st_mtime_ns)
        return folders[-1] if folders else self.checkpoint if self.checkpoint.exists() else None

    @property
    def metrics(self) -> Path:
        """The final metrics; exists after the run has finished."""
        return self.path / "metrics.json"

    @property
    def log(self) -> Path:
        """One JSON object for each evaluation."""
        return self.path / "log.jsonl"

    @contextmanager
    def locked(self, *, watcher: ProgressReporter, function: str) -> Iterator[None]:
        """Hold the folder for one training; raises ``DataError`` if another one holds it, or if it is a file."""
        if self.path.exists() and not self.path.is_dir():
            must, then = "be a folder", "Choose another --out."
            raise DataError.about(function, str(self.path), must=must, got="a file", then=then)
        with one_writer(self.path, function=function, say=watcher.said):
            yield

    def entered(
        self, config: dict[str, Any], *, resume: bool, watcher: ProgressReporter, function: str
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether this run was started before, and its final metrics if it has finished; nothing is written.

        The caller holds the folder (``locked``). Raises ``DataError`` if the folder has another run or other files, or
        if a resumed run would change its task, data or options.
        """
        self._refuse_what_is_there(resume=resume, function=function)
        if self._without_result():
            return False, None
        saved = self._same_config(config, function=function)
        done = self._finished(function=function)
        if done is not None:
            watcher.said("this run has already finished")
            watcher.closed()
            return True, done
        changed = [name for name in ("versions", "threads") if saved.get(name) != config[name]]
        if saved.get("products") != _products():
            changed.append("products")
        if changed:
            watcher.said(f"{' and '.join(changed)} differ from those at the start of the run, so rounding may differ")
        return True, done

    def is_of_job(self, job: str) -> bool:
        """Whether the same torchrun has started this run, and now starts its processes again."""
        if not job or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not self.config.exists():
            return False
        return bool(read_json(self.config, function="train").get("job") == job)

    def _refuse_what_is_there(self, *, resume: bool, function: str) -> None:
        if not self._without_result() and not resume:
            then = "Choose another --out, or add --resume to continue it."
            must, got = "be a new or empty folder", "a folder with a run"
            raise DataError.about(function, str(self.path), must=must, got=got, then=then)
        if not self.config.exists() and self._foreign():
            must, got = "be a new or empty folder", "a folder with other files"
            raise DataError.about(function, str(self.path), must=must, got=got, then="Choose another --out.")

    def _without_result(self) -> bool:
        """Whether the folder has no run, or one without results, so that a new run may start."""
        return not self.config.exists() or not any(
            path is not None and path.exists() for path in (self.last_checkpoint, self.weights, self.metrics)
        )

    def _foreign(self) -> list[Path]:
        """Files in the folder besides a tokenizer, which a run killed at its start may leave."""
        return [item for item in self.path.iterdir() if item != self.tokenizer and item.name[0] != "."]

    def begin(self, config: dict[str, Any]) -> None:
        """Write ``config.json``, the last file that makes a folder a run, with its GEMM implementations."""
        write_json(self.config, {**config, "products": _products()})

    def _same_config(self, config: dict[str, Any], *, function: str) -> dict[str, Any]:
        """The saved configuration; raises ``DataError`` with the first part that this call would change."""
        saved = self.read_config(function=function)
        for part in ("task", "data", "options"):
            if saved.get(part) != config[part]:
                got = _difference(part, saved.get(part), config[part])
                must, then = (
                    "be resumed with the same task, data and options",
                    "Repeat the first command with --resume.",
                )
                raise DataError.about(function, str(self.path), must=must, got=got, then=then)
        return saved

    def read_config(self, *, function: str) -> dict[str, Any]:
        """``config.json`` as a dictionary; raises ``DataError`` if it is absent or damaged."""
        config = read_json(self.config, function=function)
        if not isinstance(config, dict) or not isinstance(config.get("task"), str):
            must, then = "describe a run", "The run is damaged; train it again."
            raise DataError.about(function, str(self.config), must=must, got="something else", then=then)
        return config

    def _finished(self, *, function: str) -> dict[str, Any] | None:
        """The final metrics of a finished run, else None."""
        if not self.metrics.exists():
            return None
        metrics = read_json(self.metrics, function=function)
        if not isinstance(metrics, dict) or not all(
            type(metrics.get(name)) in kinds for name, kinds in _METRICS.items()
        ):
            must, then = f"have {', '.join(_METRICS)}", "The run is damaged; remove the file and add --resume."
            raise DataError.about(function, str(self.metrics), must=must, got="something else", then=then)
        return metrics

    def load_best(self, model: nn.Module, *, function: str) -> None:
        """Load the best weights into ``model``."""
        weights, _ = read_tensors(self.weights, function=function)
        load_weights(model, weights, path=self.weights, function=function)


@contextmanager
def entered(
    folder: RunFolder,
    config: dict[str, Any],
    ranks: Ranks,
    *,
    resume: bool,
    watcher: ProgressReporter,
    function: str,
) -> Iterator[tuple[bool, dict[str, Any] | None]]:
    """Hold a run folder for one training, with ``RunFolder.entered``'s answer, in all of its processes.

    The first process holds the folder. Every process raises what that raises.
    """
    with ExitStack() as stack:

        def enter() -> tuple[bool, dict[str, Any] | None]:
            stack.enter_context(folder.locked(watcher=watcher, function=function))
            resumes = resume or folder.is_of_job(config["job"])
            return folder.entered(config, resume=resumes, watcher=watcher, function=function)

        yield ranks.agreed(enter)


def _difference(part: str, saved: Any, given: Any) -> str:
    if not isinstance(saved, dict) or not isinstance(given, dict):
        return f"{part} {given!r} instead of {saved!r}"
    names = sorted(saved.keys() | given.keys())
    name = next(name for name in names if saved.get(name) != given.get(name))
    return f"{part} {name} = {given.get(name)!r} instead of {saved.get(name)!r}"
