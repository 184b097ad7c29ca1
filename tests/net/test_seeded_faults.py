"""The table of seeded faults matches the code: each fault can be inserted and compiles, and its tests exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.seeded_faults import SETS, Fault, complaint, faults, judged, sets_left_out

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "seeded_faults.py"
FAULTS = faults()
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_inserted_and_has_tests(fault: Fault) -> None:
    fault.check(ROOT)
    assert fault.tests
    assert {*fault.sets} <= {name for name, _, _ in SETS}
    assert [line for line in fault.tests if not (ROOT / shlex.split(line)[0]).exists()] == []


@pytest.mark.parametrize("fault", [each for each in FAULTS if not each.compiled], ids=lambda fault: fault.name)
def test_fault_in_python_compiles(fault: Fault) -> None:
    assert complaint(fault) == ""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("fault", [each for each in FAULTS if each.compiled], ids=lambda fault: fault.name)
def test_fault_in_the_kernels_compiles(fault: Fault) -> None:
    assert complaint(fault) == ""


@needs_compiler
@pytest.mark.parametrize("file", ["src/clearhead/cache.py", "native/torch/pages.cpp"])
def test_fault_that_does_not_compile_is_found(file: str) -> None:
    wrong = Fault("wrong", file, (ROOT / file).read_text()[-80:], "(", (), "")
    assert complaint(wrong) != ""


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("cpuinfo", "built"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f avx512_vnni avx512_bf16", {"avx512bf16"}),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f avx512_vnni avx512_bf16", {"avx512vnni", "avx512"}),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", {"avx512"}),
        ("vendor_id : GenuineIntel\nflags : avx2 avx_vnni", {"avxvnni", "avx2"}),
        ("vendor_id : GenuineIntel\nflags : avx2", {"avx2"}),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16", {"amx"}),
    ],
)
def test_kernels_are_built_for_the_set_that_the_processor_uses(cpuinfo: str, built: set[str]) -> None:
    assert {name for name, _, _ in SETS} - {*sets_left_out(cpuinfo)} == built


def test_kernels_are_built_for_every_set_where_the_processor_has_none_of_them() -> None:
    assert sets_left_out("CPU implementer : 0x41") == []


@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([(0, "3 passed in 1 s"), (1, "FAILED tests/a.py::test_b")], "caught"),
        ([(-11, "the tests ended by signal 11")], "caught"),
        ([(None, "no end after 600 s")], "caught"),
        ([(0, "3 passed in 1 s"), (0, "1 passed in 1 s")], "missed"),
        ([(0, "2 passed, 1 skipped in 1 s"), (0, "1 skipped in 1 s")], "missed"),
        ([(0, "1 skipped, 5 deselected in 1 s"), (0, "1 skipped in 1 s")], "not tried"),
        ([(4, "ERROR: not found: tests/a.py")], "not tried"),
    ],
)
def test_fault_is_missed_where_a_test_ran_and_all_passed(runs: list[tuple[int | None, str]], result: str) -> None:
    assert judged(runs)[0] == result


def test_tool_lists_the_faults_and_names_an_unknown_one() -> None:
    listed = subprocess.run([sys.executable, TOOL, "--list"], capture_output=True, text=True, check=True)
    assert all(fault.name in listed.stdout for fault in FAULTS)
    wrong = subprocess.run([sys.executable, TOOL, "--only", "no such fault"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "--only must name faults of the table; got no such fault. Run with --list." in wrong.stderr
