"""A damaged file of the kernels leaves them out with one line, and never ends the process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clearhead.ops import binary, elf
from tests.agreement import needs_native
from tests.processes import with_torch_alone

pytestmark = [
    needs_native,
    pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="only ELF systems are checked"),
]

#: Loads the file that is named, as `import clearhead` does, and prints the reason against it.
PROGRAM = """
import json, os, sys
from pathlib import Path
from clearhead.ops import binary
del os.environ["CLEARHEAD_NATIVE"]
binary.PATH = Path(sys.argv[1])
binary.load.cache_clear()
handle, reason = binary.load()
print(json.dumps([handle is not None, reason]))
"""


def _loaded(path: Path) -> tuple[bool, str]:
    """Whether another process loads the library, and its reason."""
    # The process has loaded none before: a library of the same name would be found again.
    done = with_torch_alone(PROGRAM, [str(path)], {"CLEARHEAD_NATIVE": "0"})
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    loaded, reason = json.loads(done.stdout)
    return loaded, reason


def _cut(path: Path, length: int) -> Path:
    """The library's first bytes."""
    with binary.PATH.open("rb") as whole:
        path.write_bytes(whole.read(length))
    return path


def test_whole_file_has_no_damage() -> None:
    assert elf.damage_of(binary.PATH) is None


@pytest.mark.parametrize("length", [0, 1, 3, 4, 19, 63, 64, 500, 4096, 65_537])
def test_start_of_the_file_is_damaged(tmp_path: Path, length: int) -> None:
    damage = elf.damage_of(_cut(tmp_path / "short.so", length))
    assert damage is not None
    assert damage.startswith("is damaged (the file ")
    assert "\n" not in damage


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
def test_file_cut_short_is_damaged(tmp_path: Path, part: float) -> None:
    size = binary.PATH.stat().st_size
    damage = elf.damage_of(_cut(tmp_path / "short.so", int(size * part)))
    assert damage is not None
    assert damage.startswith(f"is damaged (the file has {int(size * part):,} of at least ")


def test_one_missing_byte_is_damage(tmp_path: Path) -> None:
    assert elf.damage_of(_cut(tmp_path / "short.so", binary.PATH.stat().st_size - 1)) is not None


@pytest.mark.parametrize("content", [b"hello\n", b"#!/bin/sh\nexit 0\n" * 999, b"\0" * 9999, b"MZ" + b"\0" * 99])
def test_other_file_is_no_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(content)
    assert elf.damage_of(path) == "is damaged (the file is no library: it has no ELF header)"


@pytest.mark.parametrize(("place", "value"), [(18, b"\xf3\x00"), (4, b"\x01"), (5, b"\x02")])
def test_library_of_another_machine_is_named(tmp_path: Path, place: int, value: bytes) -> None:
    """The machine RISC-V, a file of 32 bits, and one of the other byte order."""
    path = tmp_path / "foreign.so"
    content = bytearray(binary.PATH.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(content)
    damage = elf.damage_of(path)
    assert damage is not None
    assert damage.startswith("was built for another machine (ELF machine ")


def test_file_that_cannot_be_read_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "PATH", tmp_path)
    handle, reason = binary.load.__wrapped__()
    assert handle is None
    assert "Is a directory" in reason


@pytest.mark.slow
def test_process_survives_a_file_cut_short(tmp_path: Path) -> None:
    # Beyond its headers, where the loader reads pages that the file no longer has.
    loaded, reason = _loaded(_cut(tmp_path / "short.so", binary.PATH.stat().st_size // 2))
    assert not loaded
    assert reason.endswith("bytes): install again")
    assert reason.startswith("is damaged (the file has ")


@pytest.mark.slow
def test_process_survives_a_file_cut_anywhere(tmp_path: Path) -> None:
    size = binary.PATH.stat().st_size
    for length in (0, 64, size * 9 // 10):
        loaded, reason = _loaded(_cut(tmp_path / "short.so", length))
        assert not loaded, length
        assert reason.startswith("is damaged (the file ")
    whole = shutil.copy(binary.PATH, tmp_path / "whole.so")
    assert _loaded(Path(whole)) == (True, "")
