"""Progress of training: a live bar on a terminal, else plain lines at intervals."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol, TextIO

__all__ = ["Bar", "Lines", "ProgressReporter", "Shown", "Silent", "watcher_for"]


@dataclass(frozen=True)
class Shown:
    """The progress at one step: recent loss and accuracy, speed, and remaining time in seconds."""

    step: int
    steps: int
    loss: float
    accuracy: float
    tokens_per_second: float
    seconds_left: float

    def words(self) -> str:
        """The progress as one line."""
        left = int(self.seconds_left + 0.5)
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  accuracy {self.accuracy:.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"
        )


class Progress(Protocol):
    """The progress of a job with a known number of steps; ``Shown`` is that of training."""

    @property
    def step(self) -> int:
        """The number of finished steps."""

    @property
    def steps(self) -> int:
        """The number of steps."""

    def words(self) -> str:
        """The progress as one line."""


class ProgressReporter(Protocol):
    """Receives the progress of training."""

    def stepped(self, shown: Shown) -> None:
        """Called after each step."""

    def said(self, line: str) -> None:
        """Called with a permanent line, such as an evaluation or a warning."""

    def closed(self) -> None:
        """Called when training ends, also with an exception."""


class Silent:
    """A progress reporter that shows nothing."""

    def stepped(self, shown: Progress) -> None:
        """Do nothing."""

    def said(self, line: str) -> None:
        """Do nothing."""

    def closed(self) -> None:
        """Do nothing."""


class Lines:
    """Plain lines: progress at most once every ``every`` seconds, and permanent lines."""

    def __init__(self, stream: TextIO, every: float = 10.0) -> None:
        self._stream, self._every, self._last = stream, every, time.monotonic()

    def stepped(self, shown: Progress) -> None:
        """Print the progress if the last line is at least ``every`` seconds old."""
        if time.monotonic() - self._last >= self._every:
            self.said(shown.words())
            self._last = time.monotonic()

    def said(self, line: str) -> None:
        """Print the line."""
        print(line, file=self._stream, flush=True)

    def closed(self) -> None:
        """Do nothing."""


class Bar:
    """A live progress bar, drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        console = Console(file=stream, emoji=False)
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)

    def stepped(self, shown: Progress) -> None:
        """Update the bar; it starts at the first step, so a run that ends earlier shows none."""
        self._progress.start()
        self._progress.update(self._task, total=shown.steps, completed=shown.step, description=shown.words())

    def said(self, line: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def closed(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def watcher_for(stream: TextIO | None = None) -> Silent | Lines | Bar:
    """The progress reporter for a stream: a bar on a terminal, otherwise plain lines; silent without a stream.

    Args:
        stream: the output stream; by default standard error.
    """
    chosen = sys.stderr if stream is None else stream
    if chosen is None:
        # Python has no standard error where it was closed, and in programs without a console.
        return Silent()
    return Bar(chosen) if chosen.isatty() else Lines(chosen)
