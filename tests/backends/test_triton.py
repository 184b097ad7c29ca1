"""The GPU kernels: run by triton's interpreter on the CPU, compiled for a GPU that need not be there, and on one.

Triton reads ``TRITON_INTERPRET`` when it is imported, so kernels are interpreted in a process of their own: this
file run as a program, which runs every case and prints what went wrong with each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import dispatch
from clearhead.backends import triton
from clearhead.backends.capability import Backend
from clearhead.dispatch import loaded
from clearhead.verify import law_names
from tests.problems import BLOCK_TABLE, DENSE, HEADS, MASKS, RULES, tensors

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


def _check(inputs: tuple[Tensor, ...], want: dict[str, Any] | None = None, **options: Any) -> None:
    """All statistics, or the requested ones, and the output of the kernels against the specification."""
    from tests.statistics_agreement import check_statistics, everything

    inputs = tuple(tensor.detach() for tensor in inputs)
    asked = everything(inputs) if want is None else ch.Want(**want)
    check_statistics("triton", inputs, asked, **options)
    _check_output(inputs, **options)


def _check_output(inputs: tuple[Tensor, ...], **options: Any) -> None:
    from tests.budget import within_budget

    exact, textbook, actual = (
        ch.attention(*(tensor.to(kind) for tensor in inputs), backend=name, **options)
        for kind, name in ((torch.float64, "reference"), (inputs[0].dtype, "reference"), (inputs[0].dtype, "triton"))
    )
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(actual), test(exact)), f"{test.__name__} elsewhere"
    if inputs[0].dtype != torch.float32:
        # Weights are rounded to 16 bits before they meet the values.
        textbook = textbook + torch.finfo(inputs[0].dtype).eps * inputs[2].abs().max().item()
    size = inputs[2][torch.isfinite(inputs[2])].double().square().mean().sqrt().item() if inputs[2].numel() else 1.0
    within_budget(
        "triton output",
        *(each.nan_to_num(0.0, 0.0, 0.0) for each in (actual, textbook, exact)),
        size=size,
        terms=max(1, inputs[1].shape[2]),
    )


def _mask_and_rule(mask: str, rule: str) -> Callable[[], None]:
    # As few as the mask and the rule were made for: the interpreter takes its time.
    batch = 2 if mask in ("padding to nothing", "dense") else 1
    heads = 2 if rule == "none" else HEADS
    return lambda: _check(tensors(batch=batch, heads=heads), mask=MASKS[mask].mask, scores=RULES[rule].rules)


def _blocks_of_both(mask: ch.Mask | None, dtype: torch.dtype = torch.float32, offset: int = 4) -> Callable[[], None]:
    """Several blocks of queries and of keys, the last ones partial; grouped heads; padded channels."""

    def run() -> None:
        inputs = tensors(
            dtype=dtype,
            batch=1,
            heads=2,
            kv_heads=1,
            q_len=66 if dtype == torch.float32 else 34,
            k_len=70,
            head_dim=20,
            value_dim=40,
            seed=3,
        )
        _check(inputs, mask=mask, query_offset=offset, scores=(ch.SoftCap(3.0), ch.Sink(0.5)))

    return run


def _heatmap(side: int) -> Callable[[], None]:
    inputs = tensors(batch=1, heads=1, kv_heads=1, q_len=75, k_len=90)
    return lambda: _check(inputs, {"heatmap": side}, mask=ch.Window(30), query_offset=10)


def _poisoned(
    *places: tuple[int, int, float], mask: ch.Mask | None, dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[], None]:
    """Elements of the first head's third channel. A place: 0 for query, 1 for key, 2 for value; row; element."""

    def run() -> None:
        inputs = tuple(tensor.detach().clone() for tensor in tensors(batch=1, heads=2, kv_heads=1, dtype=dtype))
        for which, row, element in places:
            inputs[which][0, 0, row, 2] = element
        _check(inputs, mask=mask, **options)

    return run


def _rescaled_to_zero() -> None:
    """An infinite value whose weight is positive in its tile, and 0 beside a score of a later one."""
    query, key, value = (torch.ones(1, 1, rows, 8) for rows in (2, 70, 70))
    key[0, 0, 69], value[0, 0, 3, 1], value[0, 0, 69, 2] = 400.0, torch.inf, -torch.inf
    _check((query, key, value), {"lse": True}, mask=ch.Dense(torch.ones(2, 70).tril(68) > 0))


def _top_of_whole_rows() -> None:
    inputs = tensors(batch=1, heads=1, kv_heads=1, q_len=5, k_len=70)
    _check(inputs, {"top_k": 33}, mask=ch.Window(9, 9), query_offset=40)


def _no_queries_or_no_keys() -> None:
    for q_len, k_len in ((0, 5), (5, 0)):
        _check(tensors(batch=1, q_len=q_len, k_len=k_len), scores=ch.Sink(0.0))


def _equal_weights_and_zeros() -> None:
    """Ties go to the lower key; keys without weight follow in order, forbidden ones too."""
    key = torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0]).repeat(20)[None, None, :, None]
    query = torch.ones(1, 1, 2, 1)
    observation = ch.observe_attention(query, key, key, want=ch.Want(top_k=4), backend="triton")
    assert observation.top_indices.tolist() == [[[[1, 3, 6, 8]] * 2]]
    late = ch.Dense((torch.arange(100) >= 98)[None])
    observation = ch.observe_attention(query, key * 0, key, want=ch.Want(top_k=5), mask=late, backend="triton")
    assert observation.top_indices.tolist() == [[[[98, 99, 0, 1, 2]] * 2]]


def _one_changes_no_other() -> None:
    from tests.statistics_agreement import everything

    inputs = tuple(tensor.detach() for tensor in tensors(batch=1, heads=1, kv_heads=1, q_len=40, k_len=40))
    want = everything(inputs)
    whole = ch.observe_attention(*inputs, want=want, mask=ch.Causal(), backend="triton")
    for name in ("entropy", "top_k", "received"):
        observation = ch.observe_attention(
            *inputs, want=everything(inputs, only=[name]), mask=ch.Causal(), backend="triton"
        )
        for field, value in vars(observation).items():
            assert value is None or torch.equal(value, getattr(whole, field)), f"{name}: {field}"


#: Laws that take the interpreter minutes.
SLOW_LAWS = {"many heads and sequences", "memory"}

CASES: dict[str, Callable[[], None]] = {
    **{
        f"{mask}, {rule}": _mask_and_rule(mask, rule)
        for mask, rule in (
            ("none", "relative, then cap"), ("causal", "none"), ("window", "alibi"), ("causal window", "sink"),
            ("prefix", "cap, then dense bias"), ("padding to nothing", "sink"), ("causal documents", "none"),
            ("global", "none"), ("strided", "alibi"), ("blocks", "none"), ("dense", "cap, then dense bias"),
            ("function", "none"), ("nothing", "none"),
        )
    },
    "blocks of both, banded": _blocks_of_both(ch.Causal() & ch.Window(20)),
    "blocks of both, behind": _blocks_of_both(ch.Causal(), offset=-20),
    "blocks of both, runs": _blocks_of_both(ch.Global(3) | ch.Window(5)),
    "float16": _blocks_of_both(None, torch.float16),
    "bfloat16": _blocks_of_both(ch.Causal(), torch.bfloat16),
    "heatmap within blocks": _heatmap(8),
    "heatmap of odd tiles": _heatmap(21),
    "heatmap of several blocks": _heatmap(70),
    "NaN in a query": _poisoned((0, 6, torch.nan), mask=ch.Window(2), scores=(ch.SoftCap(2.0),)),
    "NaN in a value": _poisoned((2, 6, torch.nan), mask=ch.Window(2)),
    "inf in a query": _poisoned((0, 6, torch.inf), mask=None),
    "capped inf in a query": _poisoned((0, 6, torch.inf), mask=ch.Causal(), scores=(ch.SoftCap(2.0),)),
    "inf in keys": _poisoned((1, 6, torch.inf), (1, 3, -torch.inf), mask=ch.Causal()),
    "inf in a key alone": _poisoned((1, 0, torch.inf), mask=ch.Causal(), scores=(ch.Sink(0.5),)),
    "capped inf in a key": _poisoned((1, 6, -torch.inf), mask=ch.Window(2), scores=(ch.SoftCap(2.0),)),
    "inf in a value": _poisoned((2, 6, torch.inf), mask=ch.Window(2)),
    "inf of both signs in values": _poisoned((2, 6, torch.inf), (2, 4, -torch.inf), mask=ch.Causal()),
    "inf in a value of weight 0": _poisoned((2, 6, torch.inf), (1, 6, -torch.inf), mask=ch.Causal()),
    "inf in a value whose weight becomes 0": _rescaled_to_zero,
    "inf in bfloat16": _poisoned((1, 6, torch.inf), (2, 3, torch.inf), mask=ch.Causal(), dtype=torch.bfloat16),
    "NaN in float16": _poisoned((0, 6, torch.nan), (2, 3, torch.nan), mask=ch.Causal(), dtype=torch.float16),
    "NaN in a forbidden key": _poisoned((1, 6, torch.nan), mask=ch.Dense((torch.arange(13) != 6)[None])),
    "top-k of whole rows": _top_of_whole_rows,
    "no queries or no keys": _no_queries_or_no_keys,
    "equal weights and zeros": _equal_weights_and_zeros,
    "one changes no other": _one_changes_no_other,
}  # fmt: skip


def _on_this_cpu(name: str) -> Backend:
    """A backend; triton's takes CPU tensors, as its interpreter does."""
    backend = loaded(name)
    if name != "triton":
        return backend
    here = replace(backend.capability, devices=frozenset({"cpu"}), requires=lambda: None)
    return replace(backend, capability=here)


def _multiply_bfloat16() -> None:
    """Triton 3.9's interpreter multiplies the bits of bfloat16 values; make it multiply the values."""
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def product(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        numbers = (
            self.cast_impl(each, language.float32) if each.dtype.scalar == language.bfloat16 else each
            for each in (left, right)
        )
        return plain(self, *numbers, *rest)

    InterpreterBuilder.create_dot = product


def _hold_laws() -> None:
    """Check the laws of attention; print as JSON the status of each, and what broke it."""
    dispatch.loaded = _on_this_cpu
    attention = partial(ch.attention, backend="triton")
    laws = [law for law in law_names() if law not in SLOW_LAWS]
    report = ch.verify(attention, signature="clearhead", examples=1, laws=laws)
    print(json.dumps({law: [report[law].status, report[law].detail] for law in laws}))


def _interpret() -> None:
    """Run every case; print as JSON what went wrong with each."""
    dispatch.loaded = _on_this_cpu
    _multiply_bfloat16()
    said = {}
    for name, run in CASES.items():
        try:
            run()
            said[name] = ""
        except BaseException:  # A skip is no pass either.
            said[name] = traceback.format_exc()
    print(json.dumps(said))


class _Hopper:
    """The methods of a driver that triton calls before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile() -> None:
    """Compile every kernel for compute capability 9.0, no GPU needed; print its name and the bytes of its program."""
    from triton.runtime import driver

    from clearhead.backends import triton_kernels
    from clearhead.problem import Problem

    driver.set_active(_Hopper())

    def launch(call: Any, name: str, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
        # Of the pass's two forms each problem compiles one.
        if constants.get("DIRTY", dirty) != dirty:
            return
        kernel = getattr(triton_kernels, name)
        done = kernel.warmup(*arguments, **constants, num_warps=warps, enable_fp_fusion=True, grid=(programs,))
        print(name, len(done.asm["cubin"]))

    triton.KernelCall.launch = launch  # type: ignore[method-assign]
    query = torch.zeros(1, 2, 256, 64, dtype=torch.float16)
    want = ch.Want(
        lse=True, max_score=True, entropy=True, top_k=8, received=True, heatmap=16, sink=4, distance=True, rows=[0],
        row_weights=torch.ones(1, 1, 3, 256),
    )  # fmt: skip
    mask = ch.Causal() & ch.Window(100) & ch.Blocks(torch.ones(16, 16, dtype=torch.bool), 16) & ch.Padding([200])
    rules = (ch.Alibi(2), ch.RelativeBias(torch.zeros(2, 7)), ch.SoftCap(3.0), ch.DenseBias(query[0, 0, :, :1]))
    problem = Problem.of("test", query, query, query, mask=mask, scores=(*rules, ch.Sink(0.0)))
    dirty = True
    triton.run_kernels(problem, want)
    dirty = False
    triton.run_kernels(Problem.of("test", query, query, query, mask=ch.Causal() & ch.Window(100)), ch.Want())
    # Each kind of mask alone: a branch that a kernel leaves out changes the types of the others.
    small = tuple(tensor.detach() for tensor in tensors())
    for part in (ch.Blocks(BLOCK_TABLE, 4), ch.Dense(DENSE), ch.Padding([13, 5]), ch.Prefix(4) | ch.Causal()):
        triton.run_kernels(Problem.of("test", *small, mask=part), want)


def _own_process(what: str, place: Path, **environment: str) -> str:
    """What this file, run as a program, prints."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(place), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.test_triton", what],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For each case what went wrong, or nothing."""
    said: dict[str, str] = json.loads(_own_process("interpret", tmp_path_factory.mktemp("cache"), TRITON_INTERPRET="1"))
    if all("only 0-dimensional arrays can be converted" in each for each in said.values()):
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    return said


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_equal_the_specification(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == "", interpreted[name]


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_break_no_law(interpreted: dict[str, str], tmp_path: Path) -> None:
    assert set(interpreted) == set(CASES)
    said = json.loads(_own_process("laws", tmp_path, TRITON_INTERPRET="1"))
    assert {law: each for law, each in said.items() if each[0] == "fails"} == {}
    # A backend that refused every call would break no law either.
    assert {said[law][0] for law in ("output", "masks", "empty rows", "infinity", "containment")} == {"holds"}


@needs_triton
def test_kernels_compile_where_there_is_no_gpu(tmp_path: Path) -> None:
    """What the interpreter forgives, a compiler does not."""
    lines = _own_process("compile", tmp_path, TRITON_INTERPRET="0").splitlines()
    compiled = {name: int(size) for name, size in (line.split() for line in lines)}
    assert set(compiled) == {"non_finite", "forward", "columns", "some_rows", "top"}
    assert all(compiled.values())


def test_reasons_without_a_gpu() -> None:
    inputs = tensors()
    if not torch.cuda.is_available():
        reasons = ch.explain_dispatch(*inputs, want=ch.Want(lse=True)).reasons["triton"]
        assert reasons == ("needs a CUDA device, and torch finds none",)
        with pytest.raises(ch.UnsupportedError, match="triton: needs a CUDA device"):
            ch.attention(*inputs, backend="triton")
    else:
        assert ch.explain_dispatch(*inputs).reasons["triton"] == ("runs on cuda, not cpu", "has no gradient")


def test_auto_chooses_triton_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """For statistics, and for calls that torch's attention does not take."""
    monkeypatch.setattr(dispatch, "BACKENDS", ("sdpa", "triton", "tiled", "reference"))
    monkeypatch.setattr(dispatch, "loaded", _on_this_cpu)
    inputs = tensors(value_dim=8)
    want = ch.Want(entropy=True)
    with torch.no_grad():
        assert ch.explain_dispatch(*inputs).choice == "sdpa"
        assert ch.explain_dispatch(*inputs, scores=ch.SoftCap(2.0)).choice == "triton"
        assert ch.explain_dispatch(*inputs, want=want).choice == "triton"
        assert ch.explain_dispatch(*inputs, want=want, dropout=0.5).choice == "tiled"
    assert ch.explain_dispatch(*inputs, want=want).choice == "tiled"
    learned = ch.Want(row_weights=torch.ones(1, 1, 1, 13, requires_grad=True))
    plain = tuple(tensor.detach() for tensor in inputs)
    report = ch.explain_dispatch(*plain, want=learned)
    assert report.choice == "tiled"
    assert report.reasons["triton"] == ("has no gradient for row_weights",)


def test_tables_of_masks_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "loaded", _on_this_cpu)
    query = torch.zeros(1, 1, 2**14 + 1, 1)
    reasons = ch.explain_dispatch(query, query, query, mask=ch.Strided(3), want=ch.Want(lse=True)).reasons["triton"]
    assert reasons == ("would need a table of 268,468,225 entries (limit 268,435,456)",)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_the_device(dtype: torch.dtype) -> None:
    inputs = tuple(tensor.detach().cuda() for tensor in tensors(dtype=dtype, q_len=300, k_len=300, head_dim=64))
    want = ch.Want(lse=True, entropy=True, top_k=1, received=True, rows=[0, 299])
    observation, right = (
        ch.observe_attention(*inputs, want=want, mask=ch.Causal(), backend=name) for name in ("triton", "reference")
    )
    for name in ("lse", "entropy", "top_weights", "received", "rows"):
        torch.testing.assert_close(getattr(observation, name), getattr(right, name), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(observation.output, right.output, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    {"interpret": _interpret, "laws": _hold_laws, "compile": _compile}[sys.argv[1]]()
