"""Every function against its formula in NumPy, and its forms and splits against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.linear import LinearState, linear_attention
from clearhead.linear.forms import FORMS
from tests.linear import oracle
from tests.linear.members import MEMBERS, SHAPE, Inputs, Member

#: What float64 leaves of sums of some tens of terms, decays multiplied up.
CLOSE = 1e-10
every_member = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
every_form = pytest.mark.parametrize("form", FORMS)


def near(one: Tensor, other: Tensor, size: float = 1.0) -> None:
    one, other = one.detach(), other.detach()
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= CLOSE * max(size, float(other.abs().max()))


def gradients(member: Member, inputs: Inputs, start: LinearState | None = None, **options: Any) -> list[Tensor]:
    """The gradients of a sum over outputs and state, with respect to every input and the first state."""
    given_ = inputs.mapped(lambda part: part.detach().clone().requires_grad_())
    begin = None if start is None else start.mapped(lambda part: part.detach().clone().requires_grad_())
    output, state = member.run(given_, state=begin, **options)
    parts = [part for part in (state.matrix, state.normalizer) if part is not None]
    loss = output.cos().sum() + sum(part.sin().sum() for part in parts)
    asked = given_.tensors()
    if begin is not None:
        asked += [part for part in (begin.matrix, begin.normalizer) if part is not None]
    return list(torch.autograd.grad(loss, asked))


@every_member
@every_form
def test_the_forms_are_the_formula(member: Member, form: str) -> None:
    inputs = member.draw()
    output, _ = member.run(inputs, form=form, chunk_size=8)
    near(output, member.meaning(inputs, lambda b, i: list(range(i + 1))))


@every_member
def test_the_forms_agree_in_state_and_gradients(member: Member) -> None:
    inputs = member.draw()
    _, start = member.run(member.draw(seed=1))
    outputs, states, grads = {}, {}, {}
    for form in FORMS:
        outputs[form], states[form] = member.run(inputs, state=start, form=form, chunk_size=4)
        grads[form] = gradients(member, inputs, start, form=form, chunk_size=4)
    for form in ("chunked", "parallel"):
        near(outputs[form], outputs["recurrent"])
        near(states[form].matrix, states["recurrent"].matrix)
        if start.normalizer is not None:
            near(states[form].normalizer, states["recurrent"].normalizer)
        for one, other in zip(grads[form], grads["recurrent"], strict=True):
            near(one, other)


@every_member
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64])
def test_the_size_of_chunks_changes_nothing(member: Member, chunk_size: int) -> None:
    inputs = member.draw()
    near(
        member.run(inputs, form="chunked", chunk_size=chunk_size)[0],
        member.run(inputs, form="chunked", chunk_size=8)[0],
    )


@every_member
@settings(max_examples=12, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, SHAPE[2]), max_size=4), forms=st.lists(st.sampled_from([*FORMS]), min_size=5))
def test_split_sequence_equals_the_whole(member: Member, cuts: list[int], forms: list[str]) -> None:
    inputs = member.draw((1, 3, SHAPE[2], SHAPE[3]))
    whole, last = member.run(inputs)
    edges = [0, *sorted(cuts), SHAPE[2]]
    outputs, state = [], None
    for start, stop, form in zip(edges, edges[1:], forms, strict=False):
        output, state = member.run(inputs.cut(start, stop), state=state, form=form, chunk_size=4)
        outputs.append(output)
    near(torch.cat(outputs, dim=2), whole)
    assert state is not None
    near(state.matrix, last.matrix)


@every_member
def test_gradients_flow_through_the_state(member: Member) -> None:
    inputs = member.draw().mapped(lambda part: part.requires_grad_())
    whole = torch.autograd.grad(member.run(inputs)[0].sin().sum(), inputs.tensors())
    first, state = member.run(inputs.cut(0, 9), chunk_size=4)
    second, _ = member.run(inputs.cut(9, SHAPE[2]), state=state, chunk_size=4)
    for one, other in zip(
        torch.autograd.grad(first.sin().sum() + second.sin().sum(), inputs.tensors()), whole, strict=True
    ):
        near(one, other)


@every_member
def test_decoding_equals_prefill_with_constant_memory(member: Member) -> None:
    inputs = member.draw()
    prefill, last = member.run(inputs, form="chunked", chunk_size=8)
    state, sizes = None, set()
    for place in range(SHAPE[2]):
        output, state = member.run(inputs.cut(place, place + 1), state=state)
        near(output, prefill[:, :, place : place + 1])
        sizes.add(sum(part.numel() for part in (state.matrix, state.normalizer) if part is not None))
    assert len(sizes) == 1
    near(state.matrix, last.matrix)


@every_member
@every_form
def test_nothing_leaks_from_the_future(member: Member, form: str) -> None:
    inputs, place = member.draw(), 9
    before = member.run(inputs, form=form, chunk_size=8)[0]
    changed = inputs.mapped(lambda part: part.clone())
    for part in changed.tensors():
        part[:, :, place:] = part[:, :, place:] * 2.0 - 0.25 * part[:, :, place:].abs()
    output_after = member.run(changed, form=form, chunk_size=8)[0]
    near(output_after[:, :, :place], before[:, :, :place])
    assert float((output_after[:, :, place] - before[:, :, place]).abs().max()) > 1e-3
    tracked = inputs.mapped(lambda part: part.requires_grad_())
    prefix_sum = member.run(tracked, form=form, chunk_size=8)[0][:, :, :place].sum()
    for gradient in torch.autograd.grad(prefix_sum, tracked.tensors()):
        assert float(gradient[:, :, place:].abs().max()) == 0.0


@every_member
def test_gradients_pass_gradcheck_and_gradgradcheck(member: Member) -> None:
    inputs = member.draw((1, 3, 5, SHAPE[3])).mapped(lambda part: part.requires_grad_())
    _, start = member.run(member.draw((1, 3, 4, SHAPE[3]), seed=1))
    names = list(inputs.extra)

    def call(query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Tensor:
        given = Inputs(query, key, value, dict(zip(names, extra, strict=True)))
        output: Tensor = member.run(given, state=start, form="chunked", chunk_size=2)[0]
        return output[:, :, :, :2]

    if "log_gate" in names:
        # Differences may not push a gate above 1.
        inputs.extra["log_gate"] = (inputs.extra["log_gate"].detach() - 0.5).requires_grad_()
    assert torch.autograd.gradcheck(call, inputs.tensors(), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs.tensors(), fast_mode=True)


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("name", ["elu", "relu", "identity", "performer"])
def test_noncausal_query_reads_every_key(name: str, form: str) -> None:
    member = MEMBERS[name]
    inputs = member.draw()
    fewer = Inputs(inputs.query[:, :, :4], inputs.key, inputs.value, {})
    output, state = member.run(fewer, causal=False, form=form)
    near(output, member.meaning(fewer, lambda b, i: list(range(SHAPE[2]))))
    near(state.matrix, member.run(inputs)[1].matrix)
    earlier = member.run(inputs.cut(0, 8), causal=False)[1]
    near(member.run(Inputs(fewer.query, *_keys(inputs, 8), {}), causal=False, state=earlier, form=form)[0], output)


def _keys(inputs: Inputs, start: int) -> tuple[Tensor, Tensor]:
    return inputs.key[:, :, start:], inputs.value[:, :, start:]


@every_member
@every_form
def test_absent_keys_are_not_read_and_do_not_decay(member: Member, form: str) -> None:
    inputs, lengths = member.draw(), [13, 21]
    padded = inputs.mapped(lambda part: part.clone())
    for part in padded.tensors()[1:]:
        part[0, :, 13:] = torch.nan
    output, state = member.run(padded, mask=ch.Padding(lengths), form=form, chunk_size=8)
    for row, length in enumerate(lengths):
        short = inputs.mapped(lambda part, row=row, length=length: part[row : row + 1, :, :length])
        alone, end = member.run(short)
        near(output[row : row + 1, :, :length], alone)
        near(state.matrix[row : row + 1], end.matrix)
    given_ = padded.mapped(lambda part: part.requires_grad_())
    real = member.run(given_, mask=ch.Padding(lengths), form=form, chunk_size=8)[0]
    for gradient in torch.autograd.grad(real[0, :, :13].sum() + real[1].sum(), given_.tensors()[1:]):
        assert bool(gradient.isfinite().all())
        assert float(gradient[0, :, 13:].abs().max()) == 0.0


@every_member
@pytest.mark.parametrize("padding", [False, True])
def test_documents_are_a_batch_of_their_own(member: Member, padding: bool) -> None:
    inputs = member.draw((1, 3, 21, SHAPE[3]))
    lengths = [2, 11, 1, 7]
    ids = torch.repeat_interleave(torch.tensor([4, 0, 9, 7]), torch.tensor(lengths))
    if padding:
        ids[14:] = -1
        lengths = lengths[:3]
    mask = ch.Documents(ids=ids)
    output, state = member.run(inputs, mask=mask, chunk_size=4)
    continued, _ = member.run(inputs, mask=mask, state=state, chunk_size=4)
    first = 0
    for number, length in enumerate(lengths):
        document = inputs.cut(first, first + length)
        alone, end = member.run(document)
        near(output[:, :, first : first + length], alone)
        near(state.matrix[number : number + 1], end.matrix)
        near(continued[:, :, first : first + length], member.run(document, state=end)[0])
        first += length
    assert state.matrix.shape[0] == len(lengths)
    assert float(output[:, :, first:].abs().sum()) == 0.0
    tracked = inputs.mapped(lambda part: part.requires_grad_())
    second = member.run(tracked, mask=mask, chunk_size=4)[0][:, :, 2:13].sum()
    for gradient in torch.autograd.grad(second, tracked.tensors()):
        assert float(gradient[:, :, :2].abs().sum() + gradient[:, :, 13:].abs().sum()) == 0.0


def test_a_document_without_tokens_has_no_entry_in_the_state() -> None:
    inputs = MEMBERS["elu"].draw((1, 3, 5, SHAPE[3]))
    _, state = MEMBERS["elu"].run(inputs, mask=ch.Documents(lengths=[3, 0, 2]))
    _, full = MEMBERS["elu"].run(inputs, mask=ch.Documents(lengths=[3, 2]))
    near(state.matrix, full.matrix)


def test_noncausal_documents_are_separate() -> None:
    member = MEMBERS["elu"]
    inputs = member.draw((1, 3, 21, SHAPE[3]))
    owner = [0] * 9 + [1] * 12
    output, _ = member.run(inputs, causal=False, mask=ch.Documents(lengths=[9, 12]))
    near(output, member.meaning(inputs, lambda b, i: [j for j in range(21) if owner[j] == owner[i]]))
    both = ch.Documents(lengths=[9, 12]) & ch.Padding([15]) & ch.Causal()
    near(
        member.run(inputs, causal=False, mask=both)[0],
        member.meaning(inputs, lambda b, i: [j for j in range(min(i + 1, 15)) if owner[j] == owner[i]]),
    )


def test_a_row_without_weight_is_0_with_gradient_0() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    key = torch.tensor([[0.0, 2.0], [1.0, 3.0], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    value = torch.tensor([[3.0], [5.0], [7.0]], dtype=torch.float64, requires_grad=True)
    for form in FORMS:
        output, _ = linear_attention(query, key, value, feature_map="relu", causal=True, form=form)
        near(output, torch.tensor([[0.0], [(2 * 3 + 3 * 5) / 5], [(2 * 3 + 4 * 5) / 6]], dtype=torch.float64))
        for gradient in torch.autograd.grad(output[0].sum(), (query, key, value)):
            assert float(gradient.abs().sum()) == 0.0
    for form in FORMS:
        empty, state = linear_attention(query, key, value, causal=True, mask=ch.Padding([0]), form=form)
        assert float((empty.abs().sum() + state.matrix.abs().sum()).detach()) == 0.0


@every_member
def test_calls_without_tokens_return_zeros(member: Member) -> None:
    inputs = member.draw()
    none = inputs.cut(0, 0)
    output, state = member.run(none)
    assert output.shape == (*SHAPE[:2], 0, 5)
    assert float(state.matrix.abs().sum()) == 0.0
    _, start = member.run(inputs)
    near(member.run(none, state=start)[1].matrix, start.matrix)


@every_member
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_is_float32_and_the_output_as_exact_as_its_dtype(member: Member, dtype: torch.dtype) -> None:
    shape = (1, 3, 130, SHAPE[3])
    inputs = member.draw(shape, dtype=dtype)
    output, state = member.run(inputs)
    exact, _ = member.run(inputs.mapped(lambda part: part.double()), form="recurrent")
    serial, _ = member.run(inputs.mapped(lambda part: part.float()), form="recurrent")
    assert output.dtype == dtype
    assert state.matrix.dtype == torch.float32
    # Twice what the recurrence in float32 is off, and the rounding of the output itself.
    size = float(exact.abs().max())
    error = float((serial.double() - exact).abs().max())
    floor = 8 * torch.finfo(torch.float32).eps * 130**0.5 + torch.finfo(dtype).eps
    assert float((output.double() - exact).abs().max()) <= 2 * error + floor * size


def test_weight_sum_without_reciprocal_counts_as_0() -> None:
    x = torch.full((1, 1, 6, 4), -46.0, requires_grad=True)
    for form in FORMS:
        output, _ = linear_attention(x, x, x, causal=True, form=form)
        assert float(output.detach().abs().sum()) == 0.0
        assert float(torch.autograd.grad(output.sum(), x)[0].abs().sum()) == 0.0


def test_missing_axes_and_views() -> None:
    inputs = MEMBERS["elu"].draw((1, 1, 21, SHAPE[3]))
    full, _ = MEMBERS["elu"].run(inputs)
    flat, state = MEMBERS["elu"].run(inputs.mapped(lambda part: part[0, 0]))
    near(flat, full[0, 0])
    assert state.matrix.shape == (1, 1, SHAPE[3], 5)
    member = MEMBERS["elu"]
    inputs = member.draw()
    views = inputs.mapped(lambda part: part.transpose(1, 2).contiguous().transpose(1, 2))
    near(member.run(views, chunk_size=4)[0], member.run(inputs)[0])


def test_grouping_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.linear import chunks

    for name in ("elu", "identity"):
        member = MEMBERS[name]
        inputs = member.draw((2, 3, 50, SHAPE[3]))
        _, start = member.run(member.draw(seed=1))
        expected = member.run(inputs, state=start, chunk_size=4)[0]
        whole = gradients(member, inputs, start, form="chunked", chunk_size=4)
        for numbers in (1, 4 * 6 * 3, 4 * 6 * 13, 4 * 6 * 30):
            monkeypatch.setattr(chunks, "GROUP", numbers)
            assert torch.equal(member.run(inputs, state=start, chunk_size=4)[0], expected)
            for one, other in zip(gradients(member, inputs, start, form="chunked", chunk_size=4), whole, strict=True):
                near(one, other)
        monkeypatch.undo()


def test_custom_feature_map() -> None:
    square = ch.linear.FeatureMap(name="square", query=torch.square, key=torch.square, nonnegative=True)
    member = Member(linear_attention, {"causal": True, "feature_map": square}, phi=lambda x: x * x, normalized=True)
    inputs = member.draw()
    for form in FORMS:
        near(member.run(inputs, form=form)[0], member.meaning(inputs, lambda b, i: list(range(i + 1))))


def test_the_oracle_can_fail() -> None:
    member = MEMBERS["elu"]
    inputs = member.draw()
    wrong = Member(linear_attention, {"causal": True}, phi=oracle.relu, normalized=True)
    with pytest.raises(AssertionError):
        near(member.run(inputs)[0], wrong.meaning(inputs, lambda b, i: list(range(i + 1))))


@every_member
def test_training_memory_is_linear_in_the_tokens(member: Member) -> None:
    def saved_bytes(length: int) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = member.draw((1, 3, length, SHAPE[3])).mapped(lambda part: part.requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = member.run(inputs, form="chunked", chunk_size=8)[0]
        assert output.requires_grad
        return sum(sizes.values())

    assert 1.8 * saved_bytes(256) < saved_bytes(512) < 2.2 * saved_bytes(256)
    if member.fixed.get("feature_map", "elu") in ("elu", "relu", "identity") and "causal" in member.fixed:
        # Queries, keys, values, the output, and 6 x 5 + 6 + 8 numbers of state and divisors for each chunk of 8.
        assert saved_bytes(512) <= 8 * 3 * (512 * (6 + 6 + 5 + 5) + 64 * (30 + 6 + 8) + 6 * 6)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["elu", "gate per channel", "delta"])
def test_compiled_call_equals_eager(name: str) -> None:
    member = MEMBERS[name]
    inputs = member.draw()
    torch.compiler.reset()
    compiled = torch.compile(member.run, backend="eager")
    near(compiled(inputs, chunk_size=8)[0], member.run(inputs, chunk_size=8)[0])


@every_member
@every_form
def test_autocast_does_not_round_sums(member: Member, form: str) -> None:
    inputs = member.draw(dtype=torch.float32)
    expected, state = member.run(inputs, form=form)
    wanted = gradients(member, inputs, form=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, last = member.run(inputs, form=form)
        grads = gradients(member, inputs, form=form)
    assert torch.equal(output, expected)
    assert torch.equal(last.matrix, state.matrix)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
