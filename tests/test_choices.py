"""The table of choices: each row with a processor that it applies to, and the functions that read the table."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import choices
from clearhead.choices import TABLE, Processor, row_for
from clearhead.errors import UnsupportedError
from clearhead.nn import MultiHeadAttention
from clearhead.ops.library import isa_names
from clearhead.projection import KINDS, choice, gemm_path
from clearhead.projection.paths import PATHS
from clearhead.testing import choices as named
from clearhead.testing import processor
from tests.agreement import draw, needs_native
from tests.budget import within_budget
from tests.gemms import name_gemm
from tests.processes import reported

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
needs_onednn = pytest.mark.skipif(PATHS["onednn"].absent(BF16) is not None, reason=f"{PATHS['onednn'].absent(BF16)}")
AVX2 = "fma avx2 f16c bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"
#: What /proc/cpuinfo says on processors that were measured, and on some that were not.
CPUINFO = {
    "Zen 3": f"vendor_id\t: AuthenticAMD\nflags\t\t: {AVX2}",
    "Zen 5": f"vendor_id\t: AuthenticAMD\nflags\t\t: {AVX512} avx512_bf16",
    "Emerald Rapids without AMX": f"vendor_id\t: GenuineIntel\nflags\t\t: {AVX512} avx512_bf16",
    "Xeon with AMX": f"vendor_id\t: GenuineIntel\nflags\t\t: {AVX512} avx512_bf16 amx_tile amx_bf16",
    "Xeon with half-precision AMX": f"vendor_id\t: GenuineIntel\nflags\t\t: {AVX512} amx_tile amx_bf16 amx_fp16",
    "x86 of 2008": "vendor_id\t: GenuineIntel\nflags\t\t: sse4_2",
    "Neoverse V1": "CPU implementer\t: 0x41\nFeatures\t: asimd bf16 sve",
    "nothing": "",
}
#: Path of forward, input gradient and weight gradient, of narrow weights and few rows; where torch's attention starts.
EXPECTED = {
    ("Zen 3", F32): ("native", "native", "native", "onednn", "native", None),
    ("Zen 3", BF16): ("native", "native", "native", "native", "native", None),
    ("Zen 3", F16): (None, None, None, None, None, None),
    ("Zen 5", F32): ("native", "native", "native", "onednn", "native", None),
    ("Zen 5", BF16): ("native", "native", "native", "onednn", "native", None),
    ("Emerald Rapids without AMX", F32): ("native", "native", "native", "torch", "native", None),
    ("Emerald Rapids without AMX", BF16): ("native", "native", "native", "onednn", "native", None),
    ("Xeon with AMX", F32): ("native", "native", "native", "torch", "native", None),
    ("Xeon with AMX", BF16): ("onednn", "torch", "torch", "onednn", "native", (128, 512)),
    ("Xeon with AMX and kernels for it", BF16): ("native", "native", "native", "native", "native", None),
    ("Xeon with AMX", F16): (None, None, None, None, None, None),
    ("Xeon with half-precision AMX", F16): (None, None, None, None, None, (128, 512)),
    ("x86 of 2008", F32): ("torch", "torch", "torch", "torch", "torch", (64, 64)),
    ("x86 of 2008", BF16): ("torch", "torch", "torch", "torch", "torch", (64, 64)),
    ("Neoverse V1", BF16): ("torch", "torch", "torch", "torch", "torch", (64, 64)),
    ("nothing", F32): ("torch", "torch", "torch", "torch", "torch", (64, 64)),
}


def _described(name: str) -> Processor:
    """The processor of a name; whether the kernels can run their set for AMX is no flag of it."""
    kernels = " and kernels for it"
    here = Processor.from_cpuinfo(CPUINFO[name.removesuffix(kernels)])
    return replace(here, features=here.features | {"amx_kernels"}) if name.endswith(kernels) else here


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch)
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)


@needs_native
@needs_onednn
@pytest.mark.parametrize(("name", "dtype"), EXPECTED, ids=str)
def test_each_processor_takes_its_row(name: str, dtype: torch.dtype) -> None:
    here = _described(name)
    *paths, sdpa_from = EXPECTED[name, dtype]
    with processor(here.vendor, here.features):
        assert row_for(dtype).sdpa_from == sdpa_from
        if dtype == F16:
            assert gemm_path(dtype, 4096, 4096, 4096).name == "torch"
            return
        chosen = [choice(kind, dtype) for kind in KINDS]
    assert [each.path for each in chosen] == paths[:3]
    assert (chosen[0].narrow, chosen[0].few_rows) == tuple(paths[3:])


def test_every_row_applies_to_a_processor() -> None:
    """A row that no case above reaches would be a row without a test."""
    reached = set()
    for name, dtype in EXPECTED:
        here = _described(name)
        with processor(here.vendor, here.features):
            reached.add(row_for(dtype))
    assert reached == set(TABLE)


def test_kernels_in_tiles_are_a_feature_where_they_can_run() -> None:
    here = choices.processor().features
    assert ("amx_kernels" in here) == ("amx_bf16" in here and "amx" in isa_names())


def test_a_feature_needs_all_its_flags() -> None:
    for flags in ("avx2 fma bmi2", "avx512f avx512_bf16 amx_bf16 amx_tile"):
        assert Processor.from_cpuinfo(f"flags : {flags}").features == frozenset()


@needs_native
@needs_onednn
def test_sizes_of_a_gemm() -> None:
    """Small, narrow, few rows, and rows that do not recur where a path prepares each shape."""
    with processor("GenuineIntel", ["avx2", "avx512", "amx_bf16"]):
        sizes = {
            (BF16, 512, 1024, 1024): "onednn",
            (BF16, 4, 1024, 1024): "native",
            (BF16, 5, 1024, 1024): "onednn",
            (BF16, 65, 256, 256): "torch",
            (BF16, 257, 256, 256): "onednn",
            (BF16, 64, 128, 128): "torch",
            (F32, 512, 1024, 1024): "native",
            (F32, 1024, 64, 64): "torch",
            (F32, 64, 128, 128): "torch",
        }
        for (dtype, rows, columns, steps), path in sizes.items():
            assert gemm_path(dtype, rows, columns, steps).name == path, (dtype, rows, columns, steps)
        assert gemm_path(F32, 1, 512, 512, training=False).name == "native"
        assert gemm_path(F32, 1, 512, 512, training=True).name == "torch"
        assert gemm_path(BF16, 16, 128, 128, training=False).name == "native"
        assert gemm_path(BF16, 17, 128, 128, training=False).name == "torch"
        assert gemm_path(F32, 0, 512, 512, training=False).name == "torch"
        assert gemm_path(torch.float64, 512, 1024, 1024).name == "torch"


def _choice(*inputs: Tensor, **options: object) -> str | None:
    return ch.explain_dispatch(*inputs, **options).choice  # type: ignore[arg-type]


def _inputs(length: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [draw(1, 2, length, 16, seed=seed, dtype=dtype, grad=False) for seed in (1, 2, 3)]


@needs_native
class TestAttention:
    @pytest.fixture(autouse=True)
    def _amx(self) -> object:
        with processor("GenuineIntel", ["avx2", "avx512", "amx_bf16"]):
            yield

    @pytest.mark.parametrize(("mask", "least"), [(None, 128), (ch.Causal(), 512)], ids=repr)
    def test_large_calls_use_sdpa(self, mask: ch.Mask | None, least: int) -> None:
        inputs = _inputs(least)
        assert _choice(*(part[:, :, 1:] for part in inputs), mask=mask) == "native"
        assert _choice(inputs[0][:, :, 1:], *inputs[1:]) == ("native" if least == 128 else "sdpa")
        assert _choice(*inputs, mask=mask) == "sdpa"
        assert _choice(*inputs, mask=mask, backend="native") == "native"
        output = ch.attention(*inputs, mask=mask)
        assert torch.equal(output, ch.attention(*inputs, mask=mask, backend="sdpa"))
        exact = ch.attention(*(tensor.double() for tensor in inputs), mask=mask, backend="reference")
        within_budget("output", output, ch.attention(*inputs, mask=mask, backend="native"), exact, terms=least)

    def test_calls_with_other_semantics_use_the_kernels(self) -> None:
        inputs = _inputs(512)
        for options in (
            {"dropout": 0.1},
            {"mask": ch.Window(9)},
            {"scores": ch.SoftCap(3.0)},
            {"scores": ch.Sink(0.0)},
            {"want": ch.Want(lse=True)},
            {"mask": ch.Causal(), "query_offset": 3},
        ):
            assert _choice(*inputs, **options) == "native", options
        assert _choice(*_inputs(512, F32)) == "native"
        assert _choice(*_inputs(512, torch.float64)) == "sdpa"
        assert _choice(inputs[0].requires_grad_(), *inputs[1:]) == "native"

    def test_with_gradients_in_float32(self) -> None:
        inputs = [tensor.requires_grad_() for tensor in _inputs(100, F32)]
        with processor("", []):
            assert _choice(*inputs) == "sdpa"
            grads = torch.autograd.grad(ch.attention(*inputs).square().sum(), inputs)
        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        right = torch.autograd.grad(ch.attention(*doubles, backend="reference").square().sum(), doubles)
        for one, other in zip(grads, right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)

    def test_a_named_instruction_set_runs_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CLEARHEAD_ISA", "baseline")
        with processor("GenuineIntel", ["amx_bf16"]):
            assert row_for(BF16).sdpa_from is not None
        before = choices.set_overrides(choices.Overrides())
        try:
            assert row_for(BF16).sdpa_from is None
            assert row_for(BF16).basis == "CLEARHEAD_ISA=baseline"
        finally:
            choices.set_overrides(before)

    def test_a_module_agrees_with_itself(self) -> None:
        torch.manual_seed(0)
        module = MultiHeadAttention(32, 2).to(BF16).eval()
        tokens = draw(2, 130, 32, dtype=BF16, grad=False)
        with torch.no_grad():
            output = module(tokens)
            with processor("AuthenticAMD", ["avx2", "avx512", "avx512_bf16"]):
                other = module(tokens)
        torch.testing.assert_close(output.float(), other.float(), rtol=0.05, atol=0.02)


@needs_native
def test_override_selects_the_backend() -> None:
    query = draw(1, 1, 8, 8, grad=False)
    for _ in range(3):
        ch.attention(query, query, query)
    for backend in ("sdpa", "tiled", "reference", "native"):
        with named(attention=backend):
            assert _choice(query, query, query) == backend
            output = ch.attention(query, query, query)
        assert torch.equal(output, ch.attention(query, query, query, backend=backend))
    for path in ("torch", "native"):
        with named(gemm=path):
            assert {choice(kind).path for kind in KINDS} == {path}
            assert choice("forward").reason == "named by clearhead.testing"


def test_override_takes_precedence_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, "native")
    with named(gemm="torch"):
        assert gemm_path(F32, 512, 512, 512) is PATHS["torch"]


def test_contexts_nest_and_end_on_errors() -> None:
    before = choices.overrides()

    def fail() -> None:
        with processor("AuthenticAMD", ["avx2"]) as fake, named(gemm="torch"):
            assert (choices.processor(), choices.overrides().gemm) == (fake, "torch")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert choices.overrides() is before


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (lambda: named(gemm="fast"), "choices: gemm must be one of 'torch', 'onednn', 'native'; got 'fast'. "),
        (lambda: named(attention="fast"), "choices: attention must be one of 'native', 'sdpa', "),
        (lambda: processor("", ["sse"]), "processor: features must be one of 'avx2', 'avx512', "),
    ],
    ids=["gemm", "attention", "features"],
)
def test_unknown_name_raises_one_line(context: object, said: str) -> None:
    with pytest.raises(UnsupportedError) as refused, context():  # type: ignore[operator]
        pass
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


CHOSEN = """
import hashlib, json, time, torch
def refuse(*_):
    raise AssertionError("a choice is timed")
time.perf_counter = time.perf_counter_ns = time.monotonic = time.process_time = refuse
import clearhead as ch
from clearhead.ops.library import isa_name
from clearhead.projection import KINDS, choice
found = [isa_name()]
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    block = ch.nn.EncoderBlock(128, 4).to(dtype)
    output = block(torch.randn(4, 96, 128).to(dtype))
    output.float().square().sum().backward()
    query = torch.linspace(-2.0, 2.0, 8 * 256 * 64).sin().view(1, 8, 256, 64).to(dtype)
    attended = ch.attention(query, query, query)
    results = [output, attended, *(own.grad for own in block.parameters())]
    found += [hashlib.sha256(each.detach().float().numpy().tobytes()).hexdigest() for each in results]
    found += [[own.path, own.narrow, own.few_rows] for own in (choice(kind, dtype) for kind in KINDS)]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_compute_the_same_bits_and_time_nothing() -> None:
    environment = {"CLEARHEAD_ISA": "", "CLEARHEAD_PROJECTION": "", "CLEARHEAD_NATIVE": ""}
    done = [reported(CHOSEN, environment=environment) for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert json.loads(done[0].stdout) == json.loads(done[1].stdout)


def test_table_lookup_measures_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for clock in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: pytest.fail("a choice is timed"))
    with processor("AuthenticAMD", ["avx2"]):
        assert gemm_path(F32, 512, 512, 512) in PATHS.values()
        query = draw(1, 1, 128, 8, grad=False)
        assert ch.attention(query, query, query).shape == query.shape
