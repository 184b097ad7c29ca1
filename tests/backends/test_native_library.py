"""Loading the compiled kernels: found, refused with a reason, and held against the C header."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead import choices
from clearhead.backends import native_header, native_library
from tests.processes import told

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "include" / "clearhead_native.h"
BUILT = native_library.PATH.exists()

needs_library = pytest.mark.skipif(not BUILT, reason="the CPU kernels are not built (make native)")

C_TYPES: dict[str, Any] = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "ch_tensor": native_header.TensorView,
    "ch_table": native_header.Table,
    "ch_rule": native_header.Rule,
    "ch_term": native_header.Term,
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was loaded is forgotten before and after, and nothing around is set."""
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
    monkeypatch.delenv("CLEARHEAD_NATIVE", raising=False)
    native_library._loaded.cache_clear()
    yield
    native_library._loaded.cache_clear()


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)


def fields_of(struct: str) -> list[tuple[str, Any]]:
    """Names and ctypes of a struct's fields, as the header declares them."""
    found = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", header(), flags=re.DOTALL)
    assert found, f"the header has no {struct}"
    fields: list[tuple[str, Any]] = []
    for declaration in filter(None, (part.strip() for part in found[1].split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+\*?)\s+(.+)", declaration, flags=re.DOTALL).groups()  # type: ignore[union-attr]
        base = ctypes.c_void_p if kind.endswith("*") else C_TYPES[kind]
        for name in (part.strip() for part in names.split(",")):
            name, _, limit = name.rstrip("]").partition("[CH_")
            fields.append((name, base * getattr(native_header, limit) if limit else base))
    return fields


def in_a_new_process(code: str, **environment: str) -> str:
    cleared = {"CLEARHEAD_NATIVE": "", "CLEARHEAD_ISA": ""}
    done = told(
        f"from clearhead.backends import native_header as h, native_library as n\n{code}",
        environment=cleared | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def a_library(folder: Path, source: str) -> Path:
    """Compile a few lines of C into a library that stands in for ours."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "fake.c").write_text(source, encoding="utf-8")
    path = folder / "fake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "fake.c"], check=True)
    return path


FAKE = """
int ch_abi(void) { return %d; }
long long ch_description_size(void) { return %d; }
long long ch_linear_description_size(void) { return %d; }
long long ch_projection_description_size(void) { return %d; }
long long ch_dropout_description_size(void) { return %d; }
long long ch_norm_description_size(void) { return %d; }
long long ch_append_description_size(void) { return %d; }
long long ch_rotation_description_size(void) { return %d; }
const char* ch_isa_name(int index) { return index == 0 ? "modern" : index == 1 ? "plain" : 0; }
int ch_isa_usable(int index) { return index == 1; }
int ch_isa_best(void) { return 1; }
const char* ch_operators_problem(void) { return ""; }
void ch_use_isa(int isa) {}
double ch_product_rate(int dtype, int isa, int threads) { return 1e9; }
int ch_forward(void* work) { return 0; }
int ch_backward(void* work) { return 0; }
int ch_linear_forward(void* work) { return 0; }
int ch_linear_backward(void* work) { return 0; }
int ch_project(void* work) { return 0; }
int ch_drop(void* work) { return 0; }
int ch_norm_forward(void* work) { return 0; }
int ch_norm_backward(void* work) { return 0; }
int ch_append_rows(void* work) { return 0; }
int ch_rotate(void* work) { return 0; }
int ch_run(void* calls, int count, int* done) { return 0; }
void* ch_new_tensor(int dtype, int axes, const long long* shape, const long long* strides) { return 0; }
long long ch_kept_memory(void) { return 0; }
long long ch_keep_memory(long long bytes) { return 0; }
const char* ch_message(int code) { return "words"; }
"""
SIZE = ctypes.sizeof(native_header.Description)
OTHERS = (
    native_header.LinearDescription, native_header.ProjectionDescription, native_header.DropoutDescription,
    native_header.NormDescription, native_header.AppendDescription, native_header.RotationDescription,
)  # fmt: skip
SIZES = (SIZE, *map(ctypes.sizeof, OTHERS))
GOOD = FAKE % (native_header.ABI, *SIZES)

# Large enough a call that two threads share it.
FORK = """
import os, torch
def call():
    d, tensors = n.new_description(h.Description), [torch.randn(1, 8, 256, 64) for _ in range(4)]
    d.batch, d.heads, d.kv_heads, d.q_len, d.k_len, d.head_dim, d.value_dim = 1, 8, 8, 256, 256, 64, 64
    d.threads, d.scale = 2, 0.125
    for name, tensor in zip(("query", "key", "value", "output"), tensors):
        setattr(d, name, h.TensorView(tensor.data_ptr(), *tensor.stride()[:3]))
    return n.library().ch_forward(d)
first = call()
child = os.fork()
if child == 0:
    os._exit(call())
print(first, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class TestMirror:
    """The Python structures are those of the C header, field by field."""

    @pytest.mark.parametrize(
        ("struct", "mirror"),
        [
            ("ch_tensor", native_header.TensorView),
            ("ch_table", native_header.Table),
            ("ch_rule", native_header.Rule),
            ("ch_attention", native_header.Description),
            ("ch_linear", native_header.LinearDescription),
            ("ch_term", native_header.Term),
            ("ch_projection", native_header.ProjectionDescription),
            ("ch_dropout", native_header.DropoutDescription),
            ("ch_norm", native_header.NormDescription),
            ("ch_append", native_header.AppendDescription),
            ("ch_rotation", native_header.RotationDescription),
            ("ch_call", native_header.Call),
        ],
    )
    def test_fields(self, struct: str, mirror: type[ctypes.Structure]) -> None:
        kinds = [kind for kind in reversed(mirror.__mro__) if "_fields_" in vars(kind)]
        assert [field for kind in kinds for field in vars(kind)["_fields_"]] == fields_of(struct)

    @pytest.mark.parametrize(
        ("prefix", "mirror"),
        [
            ("CH_RULE_", native_header.RuleKind),
            ("CH_FEATURE_", native_header.Feature),
            ("CH_", native_header.Verb),
            ("CH_", native_header.Activation),
            ("CH_GATE_", native_header.Gate),
            ("CH_NORM_", native_header.NormKind),
            ("CH_", native_header.Code),
            ("CH_", native_header.Dtype),
        ],
    )
    def test_numbers(self, prefix: str, mirror: Any) -> None:
        declared = dict(re.findall(r"(CH_\w+) = (\d+)", header()))
        assert {prefix + one.name: str(one.value) for one in mirror}.items() <= declared.items()

    def test_every_number_is_mirrored(self) -> None:
        mirrors = [
            *native_header.RuleKind, *native_header.Code, *native_header.Dtype, *native_header.Feature,
            *native_header.Verb, *native_header.Activation, *native_header.Gate, *native_header.NormKind,
        ]  # fmt: skip
        assert len(re.findall(r"CH_\w+ = \d+", header())) == len(mirrors)

    @pytest.mark.parametrize(
        "name", ["ABI", "LEVELS", "MAX_AXES", "MAX_HEAD_DIM", "MAX_RULES", "MAX_RUNS", "MAX_TERMS", "TILE"]
    )
    def test_limits(self, name: str) -> None:
        found = re.search(rf"#define CH_{name} (\d+)", header())
        assert found
        assert int(found[1]) == getattr(native_header, name)


@needs_library
class TestLoaded:
    def test_it_loads(self, fresh: None) -> None:
        assert native_library.reason() is None
        assert native_library.library() is not None

    def test_intel_widens_bfloat16(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """The widest set, but for dot products of bfloat16 on Intel's processors."""
        monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
        library, names = native_library.library(), native_library.isa_names()
        assert library is not None
        intel, other = (library.ch_isa_name(library.ch_isa_for(vendor)).decode() for vendor in (1, 0))
        assert other == names[0]
        assert intel == names[1 if names[0] == "avx512bf16" else 0]
        is_intel = choices.processor().vendor == choices.INTEL
        assert native_library.isa_name() == (intel if is_intel else other)

    def test_every_process_takes_the_same_set(self, fresh: None) -> None:
        seen = {in_a_new_process("print(n.isa_name())").strip() for _ in range(5)}
        assert seen == {native_library.isa_name()}

    def test_the_size_is_that_of_the_header(self, fresh: None) -> None:
        found = native_library.library()
        assert found is not None
        assert found.ch_description_size() == SIZE

    def test_every_code_has_words(self, fresh: None) -> None:
        words = {native_library.message(code) for code in native_header.Code}
        assert len(words) == len(native_header.Code)
        assert native_library.message(999) == "no such code"
        assert "no such code" not in words

    def test_a_bad_description_is_refused_in_words(self, fresh: None) -> None:
        found, description = native_library.library(), native_library.new_description(native_header.Description)
        description.head_dim = 999
        assert found is not None
        said = native_library.message(found.ch_forward(description))
        assert said == "a count is negative, too large, or does not divide"

    def test_an_empty_call_is_done(self, fresh: None) -> None:
        found, description = native_library.library(), native_library.new_description(native_header.Description)
        description.head_dim = description.value_dim = 8
        assert found is not None
        assert (found.ch_forward(description), found.ch_backward(description)) == (0, 0)

    def test_nothing_is_loaded_before_it_is_asked_for(self) -> None:
        code = "from pathlib import Path; print('clearhead_native' in Path('/proc/self/maps').read_text())"
        if not Path("/proc/self/maps").exists():
            pytest.skip("this system does not list what is loaded")
        assert in_a_new_process(code) == "False"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_child_that_was_forked_after_use_still_answers(self) -> None:
        """GNU's OpenMP waits for ever for the threads that the parent had."""
        assert in_a_new_process(FORK) == "0 0"

    def test_it_brings_no_openmp_of_its_own(self) -> None:
        """torch's is the only one; the C++ library and libtorch are those that torch has loaded."""
        readelf = shutil.which("readelf")
        if readelf is None:
            pytest.skip("readelf is not here")
        listing = subprocess.run([readelf, "-d", native_library.PATH], capture_output=True, text=True, check=True)
        needed = set(re.findall(r"NEEDED.*\[(\w+)", listing.stdout))
        assert needed <= {"libc", "libm", "ld", "libstdc", "libgcc_s", "libtorch_cpu"}


@needs_library
class TestChoice:
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_set_is_forced(self, place: int, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        forced = native_library.isa_names()[place]
        native_library._loaded.cache_clear()
        monkeypatch.setenv("CLEARHEAD_ISA", forced)
        assert native_library.isa_name() == forced

    def test_a_set_that_is_none(self, fresh: None) -> None:
        seen = in_a_new_process("print(n.reason(), n.library(), n.isa_index(), sep='\\n')", CLEARHEAD_ISA="avx9")
        said, library, index = seen.splitlines()
        names = ", ".join(native_library.isa_names())
        assert said == f"cannot run: CLEARHEAD_ISA='avx9' names no instruction set; here there are {names}"
        assert (library, index) == ("None", "-1")

    def test_switched_off(self) -> None:
        seen = in_a_new_process("print(n.reason(), n.library(), n.isa_name(), n.isa_names())", CLEARHEAD_NATIVE="0")
        assert seen == "is switched off by CLEARHEAD_NATIVE=0 None None []"


@pytest.mark.usefixtures("fresh")
class TestRefused:
    def test_not_built(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_library, "PATH", tmp_path / "absent.so")
        assert native_library.library() is None
        assert (native_library.reason() or "").startswith("is not built")
        assert native_library.message(3) == "code 3"

    def test_not_a_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "text.so").write_text("text", encoding="utf-8")
        monkeypatch.setattr(native_library, "PATH", tmp_path / "text.so")
        said = native_library.reason() or ""
        assert said.startswith("was built for another machine")
        assert "\n" not in said

    def test_functions_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = a_library(tmp_path, f"int ch_abi(void) {{ return {native_header.ABI}; }}")
        monkeypatch.setattr(native_library, "PATH", path)
        assert "ch_description_size" in (native_library.reason() or "")

    def test_another_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        abi = native_header.ABI + 1
        monkeypatch.setattr(native_library, "PATH", a_library(tmp_path, f"int ch_abi(void) {{ return {abi}; }}"))
        assert native_library.library() is None
        expected = f"is of another version of clearhead ({abi} instead of {native_header.ABI}): install again"
        assert native_library.reason() == expected

    @pytest.mark.parametrize("place", range(len(SIZES)))
    def test_descriptions_of_another_size(self, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = tuple(size + 8 * (place == other) for other, size in enumerate(SIZES))
        monkeypatch.setattr(native_library, "PATH", a_library(tmp_path, FAKE % (native_header.ABI, *sizes)))
        assert native_library.library() is None
        expected = f"is of another version of clearhead ({sizes} instead of {SIZES}): install again"
        assert native_library.reason() == expected

    def test_a_processor_that_lacks_a_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_library, "PATH", a_library(tmp_path, GOOD))
        monkeypatch.setenv("CLEARHEAD_ISA", "modern")
        assert native_library.reason() == (
            "cannot run: CLEARHEAD_ISA='modern' names a set that this processor lacks; here there are plain"
        )

    def test_indices_are_those_of_the_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_library, "PATH", a_library(tmp_path, GOOD))
        assert native_library.isa_names() == ["plain"]
        assert (native_library.isa_index(), native_library.isa_name()) == (1, "plain")
        assert native_library.new_description(native_header.Description).isa == 1


def test_a_new_description_bounds_nothing() -> None:
    made = native_library.new_description(native_header.Description)
    assert (made.size, made.abi, made.threads) == (SIZE, native_header.ABI, 1)
    assert (made.before, made.after) == (2**63 - 1, 2**63 - 1)
    assert (made.runs, made.num_rules, made.block_size, made.sink, made.output32) == (0, 0, 0, None, None)
