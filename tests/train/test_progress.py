"""What training shows and writes down."""

from __future__ import annotations

import io
import json
from pathlib import Path

from clearhead.train.logs import LineLog
from clearhead.train.progress import Bar, Lines, Shown, watcher_for

MOMENT = Shown(step=3, steps=9, loss=0.5, accuracy=0.75, tokens_per_second=12345.6, seconds_left=64.6)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line() -> None:
    assert MOMENT.words() == "step 3/9  loss 0.500  accuracy 0.750  12,346 tokens/s  1:05 left"


def test_progress_is_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    watcher = watcher_for(stream)
    assert isinstance(watcher, Lines)
    for _ in range(100):
        watcher.stepped(MOMENT)
    watcher.said("measured")
    watcher.closed()
    assert stream.getvalue() == "measured\n"
    eager = Lines(stream, every=0.0)
    eager.stepped(MOMENT)
    assert MOMENT.words() in stream.getvalue()


def test_terminal_shows_a_bar_that_is_removed() -> None:
    stream = _Terminal()
    watcher = watcher_for(stream)
    assert isinstance(watcher, Bar)
    watcher.stepped(MOMENT)
    watcher.said("measured [bold]")
    watcher.closed()
    assert "measured [bold]" in stream.getvalue()


def test_log_is_truncated_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, keep_bytes=0)
    log.write({"step": 1})
    size = log.size()
    log.write({"step": 2})
    log.close()
    log = LineLog(path, keep_bytes=size)
    log.write({"step": 3})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_bar_without_steps_writes_no_control_codes() -> None:
    stream = _Terminal()
    watcher = watcher_for(stream)
    watcher.said(":cat: measured")
    assert stream.getvalue() == ":cat: measured\n"
