"""Outputs go where they were told to: through links, into pipes, with the mode that the system gives new files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.threads import on_threads

from clearhead.errors import DataError
from clearhead.train.files import check_writable, write_bytes


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_bytes(tmp_path / "pipe", b"content")
    reader.join()
    assert read == [b"content"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_new_file_has_the_mode_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_check_writable_leaves_no_files(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b.csv", function="predict", argument="--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"predict: --out must be writable; got .*/file/x: Not a directory"):
        check_writable(tmp_path / "file" / "x", function="predict", argument="--out")


def test_many_writers_of_one_file_leave_one_of_their_texts(tmp_path: Path) -> None:
    """Also where its folder is missing: a check does not remove what another writer has just made."""
    path, texts, odd = tmp_path / "a" / "b" / "page", [bytes([65 + n]) * 100_000 for n in range(4)], list[Exception]()

    def write(place: int) -> None:
        try:
            for _ in range(20):
                check_writable(path, function="view", argument="--out")
                write_bytes(path, texts[place])
                assert path.read_bytes() in texts
        except Exception as failure:
            odd.append(failure)

    on_threads(len(texts), write)
    assert odd == []
    assert [item.name for item in path.parent.iterdir()] == ["page"]
