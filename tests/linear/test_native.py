"""The CPU kernels of linear attention: float32 against float64, both schedules of work, and containment of NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import linear
from clearhead.linear import LinearState, forms, native
from clearhead.masks import Padding
from clearhead.ops import library as native_library
from clearhead.ops.library import library, reason
from tests.instruction_sets import use_set
from tests.linear.members import MEMBERS, Inputs, Member

pytestmark = pytest.mark.skipif(library() is None, reason=f"the CPU kernels {reason()}")

EPS = torch.finfo(torch.float32).eps
#: Batch, heads of queries and of keys, tokens, head_dim, value_dim, tokens of a chunk: at, below and above what is
#: padded or unrolled.
SHAPES = (
    (1, 1, 1, 130, 16, 16, 64),
    (2, 3, 3, 37, 5, 7, 16),
    (1, 4, 2, 257, 20, 33, 32),
    (1, 2, 2, 70, 80, 96, 128),
    (2, 6, 2, 64, 64, 64, 64),
    (2, 1, 1, 5, 3, 3, 64),
    (1, 1, 1, 9, 128, 130, 4),
    (1, 5, 1, 65, 17, 1, 1),
)
#: Random features are torch's products, whose bits depend on threads and strides.
own_features = pytest.mark.parametrize("name", [name for name in MEMBERS if name != "performer"])
every_member = pytest.mark.parametrize("name", MEMBERS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Member, Inputs, LinearState, dict[str, Any]]:
    """A call in float32: inputs, a first state, and further arguments."""
    member = MEMBERS[name]
    batch, heads, kv_heads, length, head_dim, value_dim, _ = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    tokens = (batch, kv_heads, length)
    extra, fixed = {}, dict(member.fixed)
    if member.gates:
        extra["log_gate"] = -0.5 * normal(*tokens, 1 if member.gates == 1 else head_dim).square()
    if member.corrects:
        extra["rate"] = torch.sigmoid(normal(*tokens))
    if member.decay is not None:
        fixed["decay"] = [1.0 - 0.5**place for place in range(1, kv_heads + 1)]
    features = head_dim
    if name == "performer":
        fixed["feature_map"] = linear.PositiveRandomFeatures.draw(head_dim, 24, seed=1)
        features = 24
    query = normal(batch, heads, length, head_dim)
    if name == "relu":
        # A query with hardly a feature divides by next to nothing: what is left of its gradient is rounding.
        query = query.abs() + 0.1
    inputs = Inputs(query, normal(*tokens, head_dim), normal(*tokens, value_dim), extra)
    state = LinearState(
        matrix=normal(batch, kv_heads, features, value_dim),
        normalizer=normal(batch, kv_heads, features).abs() + 0.5 if member.normalized else None,
    )
    return member, inputs, state, fixed


def results(
    member: Member, inputs: Inputs, state: LinearState, fixed: dict[str, Any], dtype: torch.dtype, chunk: int
) -> list[Tensor]:
    """Output, last state, and the gradients of everything, from random upstream gradients."""

    def moved(part: Tensor) -> Tensor:
        return part.detach().to(dtype).requires_grad_()

    drawn = fixed.get("feature_map")
    if isinstance(drawn, linear.PositiveRandomFeatures):
        fixed = {
            **fixed,
            "feature_map": linear.PositiveRandomFeatures(weights=drawn.weights.to(dtype), scale=drawn.scale),
        }
    leaves, begin = inputs.mapped(moved), state.mapped(moved)
    output, last = member.verb(
        leaves.query, leaves.key, leaves.value, **leaves.extra, **fixed, state=begin, form="chunked", chunk_size=chunk
    )
    outputs = [output, *(part for part in (last.matrix, last.normalizer) if part is not None)]
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(part.shape, generator=generator).to(dtype) for part in outputs]
    asked = leaves.tensors() + [part for part in (begin.matrix, begin.normalizer) if part is not None]
    return outputs + list(torch.autograd.grad(outputs, asked, upstream))


def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call that the kernels compute."""
    calls: list[int] = []
    whole = native.native_chunks

    def counted(*given: Any) -> Any:
        calls.append(1)
        return whole(*given)

    monkeypatch.setattr(native, "native_chunks", counted)
    return calls


@pytest.fixture(params=native_library.isa_names())
def instruction_set(request: pytest.FixtureRequest) -> None:
    """Every set that this processor has."""
    use_set(request.param)


@pytest.mark.covering(1)
@every_member
@every_shape
@pytest.mark.usefixtures("instruction_set")
def test_outputs_states_and_gradients_are_those_of_float64(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = used(monkeypatch)
    member, inputs, state, fixed = draw(name, shape)
    exact = results(member, inputs, state, fixed, torch.float64, shape[-1])
    assert not calls
    ours = results(member, inputs, state, fixed, torch.float32, shape[-1])
    assert calls
    monkeypatch.setattr(native, "takes", lambda *given: False)
    # The textbook formula sums decays in float32; torch's operations and the kernels keep the rounding errors.
    monkeypatch.setattr(forms.Decays, "of", lambda given, **_: forms.Decays(given.cumsum(dim=-2), None))
    plain = results(member, inputs, state, fixed, torch.float32, shape[-1])
    for actual, textbook, true in zip(ours, plain, exact, strict=True):
        size = float(true.detach().abs().max())
        # Twice the error of torch's operations in the same precision, and the rounding of a sum of some tens of terms.
        allowed = 2 * float((textbook.detach().double() - true.detach()).abs().max()) + 8 * EPS * size
        assert float((actual.detach().double() - true.detach()).abs().max()) <= allowed


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["elu", "relu", "identity", "performer"])
@every_shape
@pytest.mark.usefixtures("instruction_set")
def test_noncausal_results_are_those_of_float64(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "WORTH_KERNELS", 1)
    calls = used(monkeypatch)
    member, inputs, state, fixed = draw(name, shape)
    fixed["causal"] = False
    # Fewer queries than keys, as in cross-attention.
    fewer = Inputs(inputs.query[:, :, : max(1, shape[3] // 2)], inputs.key, inputs.value, inputs.extra)
    for some_inputs in (inputs, fewer):
        exact = results(member, some_inputs, state, fixed, torch.float64, shape[-1])
        assert not calls
        ours = results(member, some_inputs, state, fixed, torch.float32, shape[-1])
        assert len(calls) == 2
        with monkeypatch.context() as without_kernels:
            without_kernels.setattr(native, "takes", lambda *given: False)
            plain = results(member, some_inputs, state, fixed, torch.float32, shape[-1])
        calls.clear()
        for got, textbook, true in zip(ours, plain, exact, strict=True):
            size = float(true.detach().abs().max())
            allowed = 2 * float((textbook.detach().double() - true.detach()).abs().max()) + 16 * EPS * size
            assert float((got.detach().double() - true.detach()).abs().max()) <= allowed


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_noncausal_nan_query_affects_its_row_only(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "WORTH_KERNELS", 1)
    member, inputs, _, fixed = draw("elu", (1, 2, 1, 60, 16, 16, 32))
    fixed["causal"] = False
    clean, _ = member.verb(inputs.query, inputs.key, inputs.value, **fixed)
    inputs.query[..., 21, 3] = number
    output, _ = member.verb(inputs.query, inputs.key, inputs.value, **fixed)
    others = [place for place in range(60) if place != 21]
    assert float((output[:, :, others] - clean[:, :, others]).abs().max()) <= 8 * EPS * float(clean.abs().max())
    assert not output[:, :, 21].isfinite().all()


def test_noncausal_padding_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "WORTH_KERNELS", 1)
    member, inputs, _, fixed = draw("elu", (2, 2, 2, 40, 16, 16, 32))
    fixed["causal"] = False
    padded, _ = member.verb(inputs.query, inputs.key, inputs.value, **fixed, mask=Padding(torch.tensor([40, 0])))
    alone, _ = member.verb(inputs.query[:1], inputs.key[:1], inputs.value[:1], **fixed)
    assert float((padded[:1] - alone).abs().max()) <= 8 * EPS * float(alone.abs().max())
    assert torch.equal(padded[1], torch.zeros_like(padded[1]))


@own_features
@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("heads", [1, 3])
def test_results_are_bitwise_equal_at_any_thread_count(name: str, heads: int) -> None:
    """With two threads the chunks of one head are distributed, with one thread they are not."""
    shape = (1, 2 * heads, heads, 203, 20, 33, 16)
    runs = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        runs.append(results(*draw(name, shape), torch.float32, 16))
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert torch.equal(one, two)


@every_member
def test_saving_states_for_backward_changes_no_bit(name: str) -> None:
    member, inputs, state, fixed = draw(name, (1, 4, 2, 90, 16, 16, 32))
    options: dict[str, Any] = {**fixed, "state": state, "form": "chunked", "chunk_size": 32}
    tracked = inputs.mapped(lambda part: part.clone().requires_grad_())
    plain, last_plain = member.verb(inputs.query, inputs.key, inputs.value, **inputs.extra, **options)
    recorded, last = member.verb(tracked.query, tracked.key, tracked.value, **tracked.extra, **options)
    assert torch.equal(plain, recorded)
    assert torch.equal(last_plain.matrix, last.matrix)


@every_member
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_reaches_no_earlier_token(name: str, spoiled: str, number: float) -> None:
    """Also within a chunk, whose GEMMs consist of blocks of rows."""
    place = 21
    member, inputs, _, fixed = draw(name, (1, 2, 1, 60, 16, 16, 32))
    clean, _ = member.verb(
        inputs.query, inputs.key, inputs.value, **inputs.extra, **fixed, form="chunked", chunk_size=32
    )
    getattr(inputs, spoiled)[..., place, 3] = number
    output, _ = member.verb(
        inputs.query, inputs.key, inputs.value, **inputs.extra, **fixed, form="chunked", chunk_size=32
    )
    scale = float(clean.abs().max())
    assert float((output[:, :, :place] - clean[:, :, :place]).abs().max()) <= 8 * EPS * scale
    if spoiled == "query":
        assert output[:, :, place + 1 :].isfinite().all()
    else:
        assert not output[:, :, place:].isfinite().all()


@every_member
def test_nan_gradient_reaches_no_later_token(name: str) -> None:
    member, inputs, _, fixed = draw(name, (1, 2, 1, 60, 16, 16, 32))
    leaves = inputs.mapped(lambda part: part.clone().requires_grad_())
    output, _ = member.verb(
        leaves.query, leaves.key, leaves.value, **leaves.extra, **fixed, form="chunked", chunk_size=32
    )
    upstream = torch.ones_like(output)
    upstream[:, :, 21] = float("nan")
    for gradient in torch.autograd.grad(output, leaves.tensors(), upstream):
        assert gradient[:, :, 22:].isfinite().all()
        assert not gradient[:, :, :22].isfinite().all()


@own_features
def test_strided_tensors_equal_contiguous_ones(name: str) -> None:
    """Heads within a token, as projections leave them, and a last axis that is not contiguous."""
    member, inputs, state, fixed = draw(name, (2, 4, 2, 50, 8, 8, 16))
    plain = results(member, inputs, state, fixed, torch.float32, 16)

    def in_turn(part: Tensor) -> Tensor:
        if part.ndim != 4 or part.shape[-1] == 1:
            return part
        return part.transpose(1, 2).contiguous().transpose(1, 2)

    def backwards(part: Tensor) -> Tensor:
        return part.mT.contiguous().mT if part.ndim == 4 else part

    for change in (in_turn, backwards):
        strided = results(member, inputs.mapped(change), state, fixed, torch.float32, 16)
        for one, other in zip(plain, strided, strict=True):
            assert torch.equal(one, other)


@every_member
def test_second_derivatives_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member, inputs, state, fixed = draw(name, (1, 2, 1, 11, 4, 3, 4))

    def twice() -> list[Tensor]:
        leaves = inputs.mapped(lambda part: part.clone().requires_grad_())
        output, _ = member.verb(
            leaves.query, leaves.key, leaves.value, **leaves.extra, **fixed, state=state, form="chunked", chunk_size=4
        )
        first = torch.autograd.grad(output.sin().sum(), leaves.tensors(), create_graph=True)
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), leaves.tensors()))

    ours = twice()
    monkeypatch.setattr(native, "takes", lambda *given: False)
    for one, other in zip(ours, twice(), strict=True):
        # Both are float32, and squares of gradients are sums of products of many.
        assert float((one - other).abs().max()) <= 2e-4 * float(other.abs().max())


@every_member
@pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_heads_are_repeated_keys(name: str, form: str, dtype: torch.dtype) -> None:
    member, inputs, state, fixed = draw(name, (2, 6, 2, 19, 8, 5, 8))
    if name == "performer" and dtype is torch.float64:
        drawn = fixed["feature_map"]
        fixed["feature_map"] = linear.PositiveRandomFeatures(weights=drawn.weights.double(), scale=drawn.scale)
    inputs, state = inputs.mapped(lambda part: part.to(dtype)), state.mapped(lambda part: part.to(dtype))
    options: dict[str, Any] = {**fixed, "form": form, "chunk_size": 8}
    output, final = member.verb(inputs.query, inputs.key, inputs.value, **inputs.extra, **options, state=state)

    def repeated(part: Tensor) -> Tensor:
        return part.repeat_interleave(3, dim=1)

    if "decay" in options:
        options["decay"] = [number for number in fixed["decay"] for _ in range(3)]
    whole, last = member.verb(
        inputs.query,
        repeated(inputs.key),
        repeated(inputs.value),
        **{name: repeated(part) for name, part in inputs.extra.items()},
        **options,
        state=state.mapped(repeated),
    )
    eps = torch.finfo(dtype).eps
    assert float((output - whole).abs().max()) <= 32 * eps * float(whole.abs().max())
    assert float((final.matrix - last.matrix[:, ::3]).abs().max()) <= 32 * eps * float(last.matrix.abs().max())


def test_noncausal_grouped_heads() -> None:
    member, inputs, _, _ = draw("elu", (2, 6, 2, 19, 8, 5, 8))
    for form in ("recurrent", "chunked", "parallel"):
        output, _ = member.verb(inputs.query, inputs.key, inputs.value, form=form)
        whole, _ = member.verb(
            inputs.query, inputs.key.repeat_interleave(3, 1), inputs.value.repeat_interleave(3, 1), form=form
        )
        assert float((output - whole).abs().max()) <= 32 * EPS * float(whole.abs().max())


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [part.double() for part in parts],
        lambda parts: [torch.cat([part] * 40, dim=-1) for part in parts],
    ],
    ids=["float64", "320 channels"],
)
def test_unsupported_calls_run_by_torch(
    change: Callable[[list[Tensor]], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = used(monkeypatch)
    _, inputs, _, _ = draw("elu", (1, 1, 1, 12, 8, 8, 8))
    output, _ = linear.linear_attention(*change(inputs.tensors()), causal=True, form="chunked", chunk_size=8)
    assert output.isfinite().all()
    assert not calls


def test_concurrent_callers_get_equal_results() -> None:
    """Members, shapes and gradients mixed; each thread starts elsewhere."""
    calls = [draw(name, shape) for name, shape in itertools.product(("elu", "retention", "delta"), SHAPES[1:4])]
    expected = [results(*call, torch.float32, 16) for call in calls]

    def run(first: int) -> list[bool]:
        order = [(first + step) % len(calls) for step in range(2 * len(calls))]
        return [all(map(torch.equal, results(*calls[place], torch.float32, 16), expected[place])) for place in order]

    with ThreadPoolExecutor(8) as pool:
        assert all(itertools.chain.from_iterable(pool.map(run, range(8))))


def test_transforms_and_forward_mode_run_by_torch() -> None:
    _, inputs, _, _ = draw("elu", (1, 1, 1, 12, 8, 8, 8))

    def call(query: Tensor) -> Tensor:
        return linear.linear_attention(query, inputs.key, inputs.value, causal=True, form="chunked", chunk_size=8)[0]

    single = torch.func.vmap(lambda part: call(part))(inputs.query[None].repeat(2, 1, 1, 1, 1))
    assert float((single[0] - call(inputs.query)).abs().max()) <= 32 * EPS
    step = torch.randn(inputs.query.shape, generator=torch.Generator().manual_seed(3))
    _, slope = torch.func.jvp(call, (inputs.query,), (step,))
    query = inputs.query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(query).sum(), query)
    assert float((slope.sum() - (gradient * step).sum()).abs()) <= 1e-4 * float(slope.abs().sum())
