"""The switch ``ch.set_invariant``: its scope, and that nothing leaves the promise silently."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.choices import is_invariant, overrides
from clearhead.dispatch import BACKENDS, loaded
from clearhead.errors import UnsupportedError
from clearhead.integrations.report import OUTSIDE, OUTSIDE_IN_TRAINING
from clearhead.nn.linear import Linear
from clearhead.ops.library import library
from clearhead.projection import project
from clearhead.sparse import routed, top_k_attention
from tests.agreement import needs_native
from tests.gemms import name_gemm

pytestmark = needs_native


@pytest.fixture(autouse=True)
def setting() -> Iterator[None]:
    before = overrides().invariant
    yield
    assert overrides().invariant == before


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, *(shape or (2, 2, 7, 8)), generator=torch.Generator().manual_seed(0)).to(dtype)
    return query, key, value


# ---- scope ----------------------------------------------------------------------------------------------------------


def test_contexts_nest_and_restore_after_an_error() -> None:
    before = is_invariant()
    with ch.invariant():
        assert is_invariant()
        with ch.invariant(False):
            assert not is_invariant()
            with pytest.raises(ZeroDivisionError), ch.invariant():
                _ = 1 / 0
            assert not is_invariant()
        assert is_invariant()
    assert is_invariant() == before


def test_setting_is_of_the_process_and_not_of_the_thread() -> None:
    settings = []
    with ch.invariant():
        thread = threading.Thread(target=lambda: settings.append(is_invariant()))
        thread.start()
        thread.join()
    assert settings == [True]


def test_kernels_know_the_setting() -> None:
    """The last row of a call is computed as a row among many: a kernel for one row would add otherwise."""
    binary = library()
    assert binary is not None
    calls = []
    original = binary.ch_set_invariant
    try:
        binary.ch_set_invariant = calls.append
        with ch.invariant(), ch.invariant(False):
            pass
    finally:
        binary.ch_set_invariant = original
    assert calls == [True, False, True, False]


@pytest.mark.parametrize("wrong", ["Portable", "yes", 1, None, 0.0])
def test_wrong_setting_is_one_line_and_changes_nothing(wrong: object) -> None:
    line = r"^set_invariant: invariant must be True, False or \"portable\"; got [^\n]*$"
    with pytest.raises(UnsupportedError, match=line):
        ch.set_invariant(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", "True"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("0", "False"), ("", "False")))],
)
def test_variable_decides_at_the_start(text: str, expected: str) -> None:
    code = "import clearhead as ch; from clearhead.choices import is_invariant; print(is_invariant())"
    environment = {**os.environ, "CLEARHEAD_INVARIANT": text}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert expected in done.stdout + done.stderr


# ---- compiled code --------------------------------------------------------------------------------------------------


def _compiled(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(function, backend="aot_eager", **options)  # type: ignore[call-overload]
    return compiled


@pytest.mark.covering(0)
@pytest.mark.parametrize("first", [True, False], ids=["compiled inside", "compiled outside"])
def test_compiled_module_follows_the_setting_of_the_call(first: bool) -> None:
    torch.manual_seed(0)
    block, x = ch.nn.EncoderBlock(16, 2).eval(), torch.randn(2, 5, 16)
    compiled = _compiled(lambda x: block(x) * 2.0)
    for setting in (first, not first, first):
        with ch.invariant(setting), torch.no_grad():
            output, eager = compiled(x), block(x) * 2.0
            assert torch.equal(output, eager) if setting else torch.allclose(output, eager, atol=1e-5)


@pytest.mark.parametrize("first", [True, False], ids=["compiled inside", "compiled outside"])
def test_compiled_attention_follows_the_setting_of_the_call(first: bool) -> None:
    inputs = tensors()
    compiled = _compiled(lambda *inputs: ch.attention(*inputs, mask=ch.Causal()), fullgraph=True)
    for setting in (first, not first, first):
        with ch.invariant(setting):
            assert torch.equal(compiled(*inputs), ch.attention(*inputs, mask=ch.Causal()))


def test_compiled_attention_without_the_promise_raises() -> None:
    inputs = tensors(dtype=torch.float64)
    compiled = _compiled(lambda *inputs: ch.attention(*inputs))
    compiled(*inputs)
    with ch.invariant(), pytest.raises(Exception, match="tiled: does not have one order of sums"):
        compiled(*inputs)


def test_export_in_invariant_mode_raises() -> None:
    block, x = ch.nn.EncoderBlock(16, 2).eval(), torch.randn(2, 5, 16)
    with ch.invariant(), pytest.raises(Exception, match=r"one order of sums under ch\.set_invariant"):
        torch.export.export(block, (x,), strict=False)


# ---- what has no one order of sums raises ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "native"])
def test_backend_without_the_promise_raises_and_is_named(backend: str) -> None:
    if loaded(backend).capability.requires() is not None:
        pytest.skip("it does not run here")
    inputs = tensors()
    with ch.invariant():
        assert "one order of sums" in " ".join(ch.explain_dispatch(*inputs).reasons[backend])
        assert "one order of sums" in str(ch.explain_dispatch(*inputs))
        with pytest.raises(UnsupportedError, match=f"got {backend}: does not have one order of sums"):
            ch.attention(*inputs, backend=backend)
    ch.attention(*inputs, backend=backend)


def test_auto_takes_only_what_keeps_the_promise() -> None:
    inputs, wave = tensors(), ch.ScoreFunction(lambda score, b, h, i, j: score * torch.sin(score))
    with ch.invariant():
        assert ch.explain_dispatch(*inputs).choice == "native"
        assert ch.explain_dispatch(*inputs, scores=wave).choice is None
    assert ch.explain_dispatch(*inputs, scores=wave).choice


def _linear(dtype: torch.dtype) -> None:
    project(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype))


def _second_derivative(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    torch.autograd.grad(function(x).sum(), x, create_graph=True)


def _autocast() -> None:
    with torch.autocast("cpu"):
        project(torch.ones(2, 3, requires_grad=True), torch.ones(64, 3)).float().sum().backward()


REFUSED: dict[str, Callable[[], object]] = {
    "float64": lambda: ch.attention(*tensors(dtype=torch.float64)),
    "float64 linear": partial(_linear, torch.float64),
    "backward under autocast": _autocast,
    "torch.func": lambda: torch.vmap(lambda x: project(x, torch.ones(4, 3)))(torch.ones(5, 2, 3)),
    "second derivative": partial(_second_derivative, lambda x: ch.attention(x, x, x)),
    "second derivative of a linear layer": partial(_second_derivative, lambda x: project(x, torch.ones(64, 8))),
    "linear attention": lambda: ch.linear_attention(*tensors()),
    "top-k": lambda: top_k_attention(*tensors(), k=2),
    "router": lambda: routed(*tensors()[:2], keep=1, size=2, causal=True),
    "accelerate": lambda: ch.accelerate(),
    "weights with a gradient": lambda: _weights(),
}


def _weights() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    ch.swap(layer)
    x = torch.randn(1, 5, 8, requires_grad=True)
    layer(x, x, x)


@pytest.mark.parametrize("name", REFUSED)
def test_call_without_the_promise_raises_one_line(name: str) -> None:
    with ch.invariant(), pytest.raises(UnsupportedError, match=r"^[^\n]*(one order of sums|set_invariant)[^\n]*$"):
        REFUSED[name]()


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "accelerate"])
def test_refused_call_runs_without_the_setting(name: str) -> None:
    with ch.invariant(False):
        REFUSED[name]()


def test_named_gemm_without_the_promise_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, "torch")
    with ch.invariant(), pytest.raises(UnsupportedError, match=r"must be native in invariant mode; got torch"):
        project(torch.ones(2, 3), torch.ones(4, 3))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_layer_of_any_size_takes_the_kernels(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 5).to(dtype), torch.randn(3, 5).to(dtype)
    with ch.invariant():
        output = project(x, weight)
    if rows:
        assert torch.equal(output, torch.ops.clearhead.linear.default(x, weight, None))
    torch.testing.assert_close(output, F.linear(x, weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("training", [False, True])
def test_layers_under_autocast_have_the_bits_of_a_sequence_alone(training: bool) -> None:
    torch.manual_seed(0)
    block, x = ch.nn.EncoderBlock(48, 4, dropout=0.0).train(training), torch.randn(5, 77, 48)
    with ch.invariant(), torch.set_grad_enabled(training):
        exact = block(x)
        with torch.autocast("cpu", torch.bfloat16):
            whole = block(x)
            for place in range(5):
                assert torch.equal(block(x[place : place + 1])[0], whole[place])
    assert not torch.equal(whole, exact)
    torch.testing.assert_close(whole, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("module", ["linear", "feedforward", "gated"])
def test_autocast_casts_what_torch_casts(module: str) -> None:
    """The same values and gradients as a layer in bfloat16, in the dtype of the parameters."""
    torch.manual_seed(0)
    gated = {"linear": None, "feedforward": False, "gated": True}[module]
    layer = Linear(48, 32) if gated is None else ch.nn.FeedForward(48, gated=gated)
    x = torch.randn(3, 20, 48, requires_grad=True)
    rounded, x16 = copy.deepcopy(layer).bfloat16(), x.detach().bfloat16().requires_grad_()
    with ch.invariant():
        expected = rounded(x16)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x)
        grad = torch.randn_like(expected)
        output.backward(grad)
        expected.backward(grad)
    assert torch.equal(output, expected)
    for one, other in zip((x, *layer.parameters()), (x16, *rounded.parameters()), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype is torch.float32
        assert torch.equal(one.grad, other.grad.float())


# ---- swap -----------------------------------------------------------------------------------------------------------


def test_swap_names_what_torch_computes() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(6, 8), nn.GELU(), nn.ReLU(), nn.LayerNorm(8))
    with ch.invariant():
        report = ch.swap(model)
    assert [row.path for row in report.outside] == ["0", "2"]
    assert all(row.reason.startswith(OUTSIDE) for row in report.outside)
    assert [row.path for row in report.rows if row.reason == OUTSIDE_IN_TRAINING] == ["4"]
    assert [row.path for row in report.replaced] == ["1"]
    assert OUTSIDE in str(report)


def test_swap_without_the_setting_names_nothing() -> None:
    with ch.invariant(False):
        assert not ch.swap(nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(6, 8))).outside


def test_swapped_small_linear_computes_by_the_kernels_in_training_too() -> None:
    layer, x = nn.Linear(6, 8), torch.randn(3, 6, requires_grad=True)
    with ch.invariant():
        ch.swap(layer)
        output = layer(x)
        assert torch.equal(output, torch.ops.clearhead.linear.default(x.detach(), layer.weight, layer.bias))
        output.sum().backward()
    assert x.grad is not None


def test_pooled_mean_does_not_depend_on_padding() -> None:
    x = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([40, 33, 7])
    x = x.masked_fill(torch.arange(40)[None, :, None] >= lengths[:, None, None], 0.0)
    from clearhead.nn.pooling import pool

    with ch.invariant():
        padded = pool(x, lengths, "mean")
        for row, length in enumerate(lengths.tolist()):
            assert torch.equal(pool(x[row : row + 1, :length], None, "mean"), padded[row : row + 1])
    torch.testing.assert_close(padded, x.sum(1) / lengths[:, None])


def test_small_attention_of_transformers_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the setting torch's function costs less for so few tokens."""
    interface = pytest.importorskip("clearhead.integrations.transformers.attention")
    query, key, value = tensors()
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    original, calls = F.scaled_dot_product_attention, list[int]()

    def counting(*args: Tensor, **kwargs: object) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counting)
    with ch.invariant(False):
        interface.attend_for(module, query, key, value, None)
    assert calls == [1]
    with ch.invariant():
        output, _ = interface.attend_for(module, query, key, value, None)
        exact = ch.attention(query, key, value, mask=ch.Causal()).transpose(1, 2)
    assert torch.equal(output, exact)
    assert calls == [1]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_of_transformers_behind_left_padding_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """More keys than a tile, so that where a sequence starts decides what is added first."""
    interface = pytest.importorskip("clearhead.integrations.transformers.attention")
    masks = pytest.importorskip("clearhead.integrations.transformers.masks")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 1, 16, generator=generator, dtype=dtype)
    # Larger and larger scores: the row maximum grows in every tile.
    key = query[:, ::2].expand(2, 2, 1100, 16) * torch.linspace(0.0, 1.0, 1100)[:, None].to(dtype)
    value = torch.randn(2, 2, 1100, 16, generator=generator, dtype=dtype)
    starts, module = (0, 333), nn.Module()
    real = torch.stack([torch.arange(1100) >= start for start in starts])
    with ch.invariant():
        given = masks.mask_of_tensor(real[:, None, None], 1099)
        padded, _ = interface.attend_for(module, query, key, value, real[:, None, None])
        for row, start in enumerate(starts):
            tokens = (tensor[row : row + 1, :, start:] for tensor in (key, value))
            alone, _ = interface.attend_for(module, query[row : row + 1], *tokens, None)
            assert torch.equal(padded[row : row + 1], alone), f"sequence {row}"
    assert not isinstance(given, ch.Dense)
    with ch.invariant(False):
        assert isinstance(masks.mask_of_tensor(real[:, None, None].clone(), 1099), ch.Dense)


@pytest.mark.slow
def test_modules_of_many_kinds_can_be_compiled_in_one_process() -> None:
    """torch.compile bounds the recompilations of a code object, which decorated forwards must not share."""
    torch.compiler.reset()
    for width in (2, 4, 6, 8):
        for module in (ch.nn.FeedForward(width), ch.nn.MultiHeadAttention(width, 2), ch.nn.EncoderBlock(width, 2)):
            compiled = torch.compile(module.eval(), backend="eager", fullgraph=True)
            x = torch.randn(1, 3, width)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), module(x))
