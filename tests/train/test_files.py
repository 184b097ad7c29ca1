"""Outputs go where they were told to: through links, into pipes, with the mode that the system gives new files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

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
    check_writable(tmp_path / "a" / "b", function="train", argument="--out", folder=True)
    check_writable(tmp_path / "a" / "b.csv", function="predict", argument="--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder in (True, False):
        with pytest.raises(DataError, match=r"predict: --out must be writable; got .*/file/x: Not a directory"):
            check_writable(tmp_path / "file" / "x", function="predict", argument="--out", folder=folder)
