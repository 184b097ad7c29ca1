"""clearhead lab from outside: its address, what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="needs the extra 'lab'")
pytest.importorskip("uvicorn", reason="needs the extra 'lab'")

from tests.commands import lines_of

# A shell that starts the tests in the background leaves them a Ctrl-C that is ignored.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from clearhead.cli.app import main
main()
"""


@contextmanager
def started(*words: object, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The lab as a process of its own, and the address that it printed."""
    run = [sys.executable, "-c", COMMAND, "lab", *map(str, words)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(run, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def get(url: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    finally:
        connection.close()


def begin(url: str, name: str, params: object) -> http.client.HTTPConnection:
    """Ask for a work, and wait for the first line of its answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    body = json.dumps(params)
    connection.request("POST", f"{parts.path}works/{name}", body, {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b'{"progress"')
    return connection


def listens(url: str) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("working", [False, True])
def test_requested_port_is_used_and_control_c_leaves_no_files(tmp_path: Path, working: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started("--port", port, folder=tmp_path) as (process, url):
        assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/[\w-]{{32,}}/", url)
        code, _, err = called("--port", port)
        assert code == 2
        assert err == [f"lab: --port must be free; got {port} (Address already in use). Name another, or 0 for any."]
        assert get(url) == 200
        # The first look trains the example, which takes some seconds.
        work = begin(url, "look", {"model": 0, "text": "the dogs"}) if working else None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert time.monotonic() - began < 6
        if work is not None:
            work.close()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "clearhead: interrupted."
    assert "Traceback" not in said
    assert not listens(url)
    assert list(tmp_path.iterdir()) == []


def called(*words: object) -> tuple[int, list[str], list[str]]:
    return lines_of("lab", *words)


def test_help_shows_examples() -> None:
    code, out, _ = called("--help")
    said = " ".join(" ".join(out).split())
    assert code == 0
    for part in ("clearhead lab runs/plays", "Only this machine can reach it", "--port", "--open", "MODEL_FOLDER"):
        assert part in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "70000"], "lab: --port must be from 0 to 65535; got 70000."),
        (["--port", "-1"], "lab: --port must be from 0 to 65535; got -1."),
        (["none"], "lab: none must be a model folder; got no such folder."),
    ],
)
def test_wrong_use_is_one_line(words: list[str], says: str) -> None:
    code, out, err = called(*words)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(says)


def test_file_instead_of_a_model_folder_raises(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    code, _, err = called(file)
    assert (code, len(err)) == (2, 1)
    assert "must be a model folder; got a file." in err[0]


def test_folder_with_outside_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder / "config.json").symlink_to(secret)
    code, _, err = called(folder)
    assert (code, len(err)) == (2, 1)
    assert "must contain all its files; got config.json, which is outside." in err[0]
