"""What training shows while it runs: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol, TextIO

__all__ = ["Bar", "Lines", "Shown", "Silent", "Watcher", "watcher_for"]


@dataclass(frozen=True)
class Shown:
    """One moment of training: step of steps, the recent loss and accuracy, speed and time left in seconds."""

    step: int
    steps: int
    loss: float
    accuracy: float
    tokens_per_second: float
    seconds_left: float

    def words(self) -> str:
        """The moment as one line."""
        left = int(self.seconds_left + 0.5)
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  accuracy {self.accuracy:.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"
        )


class Watcher(Protocol):
    """Someone who is told how training goes."""

    def stepped(self, shown: Shown) -> None:
        """After each step."""

    def said(self, line: str) -> None:
        """A line worth keeping: an evaluation, a warning."""

    def closed(self) -> None:
        """Training ended, well or not."""


class Silent:
    """Shows nothing."""

    def stepped(self, shown: Shown) -> None:
        """Nothing."""

    def said(self, line: str) -> None:
        """Nothing."""

    def closed(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, at most one every ``every`` seconds besides what is said."""

    def __init__(self, stream: TextIO, every: float = 10.0) -> None:
        self._stream, self._every, self._last = stream, every, time.monotonic()

    def stepped(self, shown: Shown) -> None:
        """A line, where the last one is old enough."""
        if time.monotonic() - self._last >= self._every:
            self.said(shown.words())
            self._last = time.monotonic()

    def said(self, line: str) -> None:
        """The line, at once."""
        print(line, file=self._stream, flush=True)

    def closed(self) -> None:
        """Nothing is open."""


class Bar:
    """A live bar drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        console = Console(file=stream, emoji=False)
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)

    def stepped(self, shown: Shown) -> None:
        """Move the bar; it is there from the first step on, so that whatever ends before leaves no trace of it."""
        self._progress.start()
        self._progress.update(self._task, total=shown.steps, completed=shown.step, description=shown.words())

    def said(self, line: str) -> None:
        """The line, above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def closed(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def watcher_for(stream: TextIO | None = None) -> Watcher:
    """A bar where ``stream`` (standard error by default) is a terminal, else plain lines."""
    chosen = sys.stderr if stream is None else stream
    return Bar(chosen) if chosen.isatty() else Lines(chosen)
