"""Loading of the compiled kernels: found, refused with a reason, and compared with the C header."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from clearhead import choices
from clearhead.errors import UnsupportedError
from clearhead.ops import binary
from clearhead.ops import library as native_library
from clearhead.ops.dropout import LEVELS
from clearhead.ops.kinds import DTYPES, MAX_HEAD_DIM, MAX_RULES, Activation, Feature, Gate, NormKind
from tests.processes import reported, with_torch_alone

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "include" / "clearhead_native.h"
BUILT = binary.PATH.exists()

needs_library = pytest.mark.skipif(not BUILT, reason="the CPU kernels are not built (make native)")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was loaded is forgotten before and after, and nothing around is set."""
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
    monkeypatch.delenv("CLEARHEAD_NATIVE", raising=False)
    binary.load.cache_clear()
    native_library.loaded_library.cache_clear()
    yield
    binary.load.cache_clear()
    native_library.loaded_library.cache_clear()


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)


def in_a_new_process(code: str, **environment: str) -> str:
    cleared = {"CLEARHEAD_NATIVE": "", "CLEARHEAD_ISA": ""}
    done = reported(
        f"from clearhead.ops import library as n\n{code}",
        environment=cleared | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def a_library(folder: Path, source: str) -> Path:
    """Compile a few lines of C into a library that replaces the kernels'."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "fake.c").write_text(source, encoding="utf-8")
    path = folder / "fake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "fake.c"], check=True)
    return path


FAKE = """
int ch_abi(void) { return %d; }
const char* ch_isa_name(int index) { return index == 0 ? "modern" : index == 1 ? "plain" : 0; }
int ch_isa_usable(int index) { return index == 1; }
int ch_isa_best(void) { return 1; }
const char* ch_operators_problem(void) { return "%s"; }
const char* ch_operator_schema(int place) { return 0; }
void ch_use_isa(int isa) {}
double ch_product_rate(int dtype, int isa, int threads) { return 1e9; }
long long ch_kept_memory(void) { return 0; }
long long ch_keep_memory(long long bytes) { return 0; }
void ch_set_invariant(int invariant) {}
"""
GOOD = FAKE % (binary.ABI, "")

# Large enough a call that two threads share it.
FORK = """
import os, torch, clearhead as ch
torch.set_num_threads(2)
inputs = [torch.randn(1, 8, 256, 64) for _ in range(3)]
def bits():
    return ch.attention(*inputs, backend="native").numpy().tobytes()
first = bits()
child = os.fork()
if child == 0:
    os._exit(0 if bits() == first else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class TestHeader:
    """Numbers and limits of ``clearhead.ops.kinds`` are those of the C header."""

    @pytest.mark.parametrize(
        ("prefix", "kinds"),
        [("CH_FEATURE_", Feature), ("CH_", Activation), ("CH_GATE_", Gate), ("CH_NORM_", NormKind)],
    )
    def test_numbers(self, prefix: str, kinds: type[IntEnum]) -> None:
        declared = dict(re.findall(r"(CH_\w+) = (\d+)", header()))
        assert {prefix + one.name: str(one.value) for one in kinds}.items() <= declared.items()

    def test_dtypes(self) -> None:
        match = re.search(r"enum ch_dtype \{(.*?)\}", header(), flags=re.DOTALL)
        assert match
        names = [name.lower() for name in re.findall(r"CH_(\w+) =", match[1])]
        assert names == [str(dtype).removeprefix("torch.") for dtype in DTYPES]

    @pytest.mark.parametrize(
        ("name", "number"),
        [("ABI", binary.ABI), ("LEVELS", LEVELS), ("MAX_HEAD_DIM", MAX_HEAD_DIM), ("MAX_RULES", MAX_RULES)],
    )
    def test_limits(self, name: str, number: int) -> None:
        match = re.search(rf"#define CH_{name} (\d+)", header())
        assert match
        assert int(match[1]) == number


@needs_library
class TestLoaded:
    def test_it_loads(self, fresh: None) -> None:
        assert native_library.reason() is None
        assert native_library.library() is not None

    def test_intel_widens_bfloat16(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """The widest set, except bf16 dot-product instructions on Intel's processors."""
        monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
        library, names = native_library.library(), native_library.isa_names()
        assert library is not None
        intel, other = (library.ch_isa_name(library.ch_isa_for(vendor)).decode() for vendor in (1, 0))
        assert other == names[0]
        assert intel == names[1 if names[0] == "avx512bf16" else 0]
        is_intel = choices.processor().vendor == choices.INTEL
        assert native_library.isa_name() == (intel if is_intel else other)

    @pytest.mark.slow
    def test_every_process_takes_the_same_set(self, fresh: None) -> None:
        printed = {in_a_new_process("print(n.isa_name())").strip() for _ in range(5)}
        assert printed == {native_library.isa_name()}

    @pytest.mark.parametrize("switch", ["", "0"])
    def test_import_loads_it_unless_it_is_switched_off(self, switch: str) -> None:
        code = "import clearhead; print('clearhead_native' in open('/proc/self/maps').read())"
        if not Path("/proc/self/maps").exists():
            pytest.skip("this system does not list what is loaded")
        done = with_torch_alone(code, environment={"CLEARHEAD_NATIVE": switch})
        assert done.stdout.strip() == str(not switch)

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_forked_child_computes(self) -> None:
        """GNU's OpenMP waits for ever for the threads that the parent had."""
        assert in_a_new_process(FORK) == "0"

    def test_library_links_no_openmp(self) -> None:
        """torch's is the only one; the C++ library and libtorch are those that torch has loaded."""
        readelf = shutil.which("readelf")
        if readelf is None:
            pytest.skip("readelf is not here")
        listing = subprocess.run([readelf, "-d", binary.PATH], capture_output=True, text=True, check=True)
        needed = set(re.findall(r"NEEDED.*\[(\w+)", listing.stdout))
        assert needed <= {"libc", "libm", "ld", "libstdc", "libgcc_s", "libtorch_cpu"}


@needs_library
class TestChoice:
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_set_is_forced(self, place: int, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        forced = native_library.isa_names()[place]
        native_library.loaded_library.cache_clear()
        monkeypatch.setenv("CLEARHEAD_ISA", forced)
        assert native_library.isa_name() == forced

    def test_unknown_instruction_set_is_refused(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CLEARHEAD_ISA", "avx9")
        for call in (native_library.reason, native_library.library, native_library.isa_index):
            with pytest.raises(UnsupportedError, match=r"^clearhead: CLEARHEAD_ISA must be one of .*; got 'avx9'"):
                call()

    def test_switched_off(self) -> None:
        printed = in_a_new_process("print(n.reason(), n.library(), n.isa_name(), n.isa_names())", CLEARHEAD_NATIVE="0")
        assert printed == "is switched off by CLEARHEAD_NATIVE=0 None None []"


@pytest.mark.usefixtures("fresh")
class TestRefused:
    def test_reason_without_a_build(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binary, "PATH", tmp_path / "absent.so")
        assert native_library.library() is None
        assert (native_library.reason() or "").startswith("is not built")

    def test_reason_for_a_file_that_is_no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "text.so").write_text("text", encoding="utf-8")
        monkeypatch.setattr(binary, "PATH", tmp_path / "text.so")
        said = native_library.reason() or ""
        assert said.startswith("is damaged (the file is no library")
        assert "\n" not in said

    def test_reason_for_missing_functions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = a_library(tmp_path, f"int ch_abi(void) {{ return {binary.ABI}; }}")
        monkeypatch.setattr(binary, "PATH", path)
        assert "ch_isa_best" in (native_library.reason() or "")

    def test_reason_for_another_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        abi = binary.ABI + 1
        monkeypatch.setattr(binary, "PATH", a_library(tmp_path, f"int ch_abi(void) {{ return {abi}; }}"))
        assert native_library.library() is None
        expected = f"is of another version of clearhead ({abi} instead of {binary.ABI}): install again"
        assert native_library.reason() == expected

    def test_reason_when_torch_refuses_the_operators(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binary, "PATH", a_library(tmp_path, FAKE % (binary.ABI, "no such symbol")))
        assert native_library.library() is None
        assert native_library.reason() == "was built for another torch (no such symbol)"

    def test_missing_instruction_set_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binary, "PATH", a_library(tmp_path, GOOD))
        monkeypatch.setenv("CLEARHEAD_ISA", "baseline")
        with pytest.raises(UnsupportedError, match=r"CLEARHEAD_ISA must be a set that was built .* has, plain; got"):
            native_library.reason()

    def test_indices_are_those_of_the_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binary, "PATH", a_library(tmp_path, GOOD))
        assert native_library.isa_names() == ["plain"]
        assert (native_library.isa_index(), native_library.isa_name()) == (1, "plain")
