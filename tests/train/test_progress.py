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


def test_a_moment_in_words() -> None:
    assert MOMENT.words() == "step 3/9  loss 0.500  accuracy 0.750  12,346 tokens/s  1:05 left"


def test_lines_are_few_where_there_is_no_terminal() -> None:
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


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    stream = _Terminal()
    watcher = watcher_for(stream)
    assert isinstance(watcher, Bar)
    watcher.stepped(MOMENT)
    watcher.said("measured [bold]")
    watcher.closed()
    assert "measured [bold]" in stream.getvalue()


def test_a_log_is_cut_to_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, keep_bytes=0)
    log.write({"step": 1})
    known = log.size()
    log.write({"step": 2})
    log.close()
    log = LineLog(path, keep_bytes=known)
    log.write({"step": 3})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_bar_that_never_began_leaves_the_terminal_alone() -> None:
    stream = _Terminal()
    watcher = watcher_for(stream)
    watcher.said(":cat: measured")
    assert stream.getvalue() == ":cat: measured\n"
