"""``ch.functional.flex_attention`` has torch's signature and meaning, with gradients on CPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import clearhead as ch
from clearhead.backends import flex as flex_backend
from clearhead.functional import flex_attention
from clearhead.functional.flex import ScoreMod
from clearhead.masks import from_block_mask
from clearhead.problem import Problem
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.flex_variants import (
    BATCH,
    HEADS,
    LENGTH,
    VARIANTS,
    Variant,
    by_intervals,
    causal,
    dense_mask,
    each_place,
    learned,
)

CHANNELS = 16
pytestmark = pytest.mark.filterwarnings("ignore:return_lse is deprecated")


@pytest.fixture(autouse=True)
def _torch_by_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function without a compiler, to compare with."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def inputs_of(*, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, HEADS, length, CHANNELS), *[(BATCH, kv_heads, length, CHANNELS)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def block_mask_of(variant: Variant, **options: Any) -> BlockMask | None:
    if variant.mask is None:
        return None
    return create_block_mask(variant.mask, BATCH, HEADS, LENGTH, LENGTH, device="cpu", **{"BLOCK_SIZE": 16, **options})


def formula(variant: Variant, inputs: list[Tensor], given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, written out in the dtype of the inputs."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.mT / CHANNELS**0.5
    score_mod = variant.score_of_places or variant.score
    if score_mod is not None:
        scores = each_place(score_mod(given), scores)
    allowed = dense_mask(variant) & (scores != -torch.inf)
    masked = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(masked, dim=-1)
    weights = torch.where(allowed, torch.exp(masked - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]), 0.0)
    return weights @ value, lse


def with_gradients(output: Tensor, lse: Tensor, inputs: list[Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).to(output.dtype).view_as(output)
    loss = (output * slope).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    tensors = {**dict(zip(("query", "key", "value"), inputs, strict=True)), **given}
    grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    arrived = {name: grad for (name, _), grad in zip(tensors.items(), grads, strict=True) if grad is not None}
    return {"output": output.detach(), "lse": lse.detach(), **arrived}


def compare(variant: Variant, call: Callable[..., Any], *, kv_heads: int = HEADS) -> None:
    """Output, log-sum-exp and every gradient on the error budget."""

    def exact_in(dtype: torch.dtype) -> dict[str, Tensor]:
        inputs, given = inputs_of(kv_heads=kv_heads, dtype=dtype), learned(dtype)
        return with_gradients(*formula(variant, inputs, given), inputs, given)

    inputs, given = inputs_of(kv_heads=kv_heads), learned()
    score_mod = None if variant.score is None else variant.score(given)
    results = with_gradients(*call(inputs, score_mod), inputs, given)
    exact, textbook = exact_in(torch.float64), exact_in(torch.float32)
    assert results.keys() == exact.keys()
    for name, result in results.items():
        # A learned tensor's gradient is a sum over all places.
        terms = LENGTH if name in ("output", "lse", "query", "key", "value") else BATCH * LENGTH * LENGTH
        size = float(exact[name].detach().abs().nan_to_num(posinf=0.0).max())
        within_budget(name, result, textbook[name], exact[name], terms=terms, size=size)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_formula_with_every_gradient(name: str) -> None:
    variant = VARIANTS[name]
    mask = block_mask_of(variant)
    compare(variant, lambda inputs, mod: flex_attention(*inputs, score_mod=mod, block_mask=mask, return_lse=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_torch(name: str) -> None:
    variant = VARIANTS[name]
    inputs, mask = [tensor.detach() for tensor in inputs_of()], block_mask_of(variant)
    given = {name: tensor.detach() for name, tensor in learned().items()}
    score_mod = None if variant.score is None else variant.score(given)
    right, right_lse = torchs.flex_attention(*inputs, score_mod, mask, return_lse=True)
    output, lse = flex_attention(*inputs, score_mod, mask, return_lse=True)
    torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, right_lse, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_run_where_the_guide_says(name: str) -> None:
    variant = VARIANTS[name]
    inputs, block_mask = inputs_of(), block_mask_of(variant)
    mask = None if block_mask is None else from_block_mask(block_mask)
    scores = () if variant.score is None else (ScoreMod(variant.score(learned())),)
    report = ch.explain_dispatch(*inputs, mask=mask, scores=scores, query_offset=0)
    assert (report.choice == "native") is variant.native
    if mask is not None:
        parts = Problem.of("flex_attention", *inputs, mask=mask, query_offset=0).mask_parts
        assert (parts.intervals is not None) is (not parts.rest) is by_intervals(variant.mask)


@pytest.mark.parametrize("name", ["causal documents", "T5", "temperature", "2-D neighborhood"])
def test_grouped_heads(name: str) -> None:
    variant = VARIANTS[name]
    mask = block_mask_of(variant)
    compare(
        variant,
        lambda inputs, mod: flex_attention(*inputs, mod, mask, enable_gqa=True, return_lse=True),
        kv_heads=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [(16, 8), (8, 32), 48, 128])
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.mask is not None])
def test_every_size_of_blocks(name: str, block_size: Any) -> None:
    variant = VARIANTS[name]
    mask = block_mask_of(variant, BLOCK_SIZE=block_size)
    compare(variant, lambda inputs, mod: flex_attention(*inputs, mod, mask, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs, mask = [tensor.detach() for tensor in inputs_of(dtype=dtype)], block_mask_of(VARIANTS["causal"])
    dtypes = []

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtypes.append(score.dtype)
        return score * 0.5

    output, lse = flex_attention(*inputs, score_mod, mask, return_lse=True)
    right, right_lse = torchs.flex_attention(*inputs, score_mod, mask, return_lse=True)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    assert (output.dtype, lse.dtype, {*dtypes}) == (dtype, work, {work})
    tolerance = {torch.float64: 1e-9}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(output, right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, right_lse.to(work), rtol=1e-4, atol=1e-4)


def test_autocast_gives_its_dtype_as_in_torch() -> None:
    inputs, mask = [tensor.detach() for tensor in inputs_of()], block_mask_of(VARIANTS["causal"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, right = (function(*inputs, None, mask) for function in (flex_attention, torchs.flex_attention))
    assert output.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(output, right, rtol=2e-2, atol=2e-2)
    doubles = [tensor.double() for tensor in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(*doubles).dtype == torch.float64


def test_auxiliary_results() -> None:
    variant = VARIANTS["rows without keys"]
    inputs, mask = inputs_of(), block_mask_of(variant)
    output, aux = flex_attention(*inputs, None, mask, return_aux=AuxRequest(lse=True, max_scores=True))
    scores = (inputs[0] @ inputs[1].mT / CHANNELS**0.5).masked_fill(~dense_mask(variant), -torch.inf)
    empty = ~dense_mask(variant).any(dim=-1)
    assert empty.any()
    assert (output[empty] == 0.0).all()
    torch.testing.assert_close(aux.lse, torch.logsumexp(scores, dim=-1))
    torch.testing.assert_close(aux.max_scores, scores.amax(dim=-1))
    assert flex_attention(*inputs, return_aux=AuxRequest())[1] == (None, None)


def test_options_and_positional_arguments_are_torchs() -> None:
    inputs, mask = inputs_of(), block_mask_of(VARIANTS["causal"])
    plain = flex_attention(*inputs, None, mask, 0.3)
    options = {"BLOCK_M": 64, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    tuned = flex_attention(*inputs, None, mask, 0.3, False, False, options)
    assert torch.equal(plain, tuned)
    torch.testing.assert_close(plain, torchs.flex_attention(*[one.detach() for one in inputs], None, mask, 0.3))


def test_one_batch_of_keys_serves_the_batch() -> None:
    query, key, value = (tensor.detach() for tensor in inputs_of())
    mask = block_mask_of(VARIANTS["padding"])
    output = flex_attention(query, key[:1], value[:1], block_mask=mask)
    right = torchs.flex_attention(query, key[:1], value[:1], block_mask=mask)
    torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 33), (33, 5), (1, 48), (0, 8)])
def test_lengths_that_differ_count_from_0(q_len: int, k_len: int) -> None:
    query = torch.randn(BATCH, HEADS, q_len, CHANNELS)
    key, value = torch.randn(2, BATCH, HEADS, k_len, CHANNELS)
    score_mod = VARIANTS["alibi"].score
    assert score_mod is not None
    mod = score_mod({name: tensor.detach() for name, tensor in learned().items()})
    mask = create_block_mask(causal, None, None, q_len, k_len, device="cpu", BLOCK_SIZE=16) if q_len else None
    output = flex_attention(query, key, value, mod, mask)
    if q_len == 0:
        assert output.shape == query.shape
        return
    torch.testing.assert_close(output, torchs.flex_attention(query, key, value, mod, mask), rtol=1e-4, atol=1e-5)


def test_second_derivatives_pass_through_functions_of_scalars() -> None:
    (query, key, value), table = inputs_of(dtype=torch.float64), learned(torch.float64)["distances"]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[h][q_idx - kv_idx + LENGTH - 1]

    def dense() -> Tensor:
        place = torch.arange(LENGTH)
        scores = query @ key.mT / CHANNELS**0.5 * table[:, place[:, None] - place + LENGTH - 1]
        return torch.softmax(scores, dim=-1) @ value

    second = []
    for output in (flex_attention(query, key, value, score_mod), dense()):
        assert isinstance(output, Tensor)
        (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), [query, table]))
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)


def test_nan_under_the_mask_reaches_nothing() -> None:
    variant = VARIANTS["causal"]
    query, key, value = inputs_of()
    with torch.no_grad():
        key[:, :, 40:], value[:, :, 40:] = torch.nan, torch.nan
    output = flex_attention(query, key, value, block_mask=block_mask_of(variant))
    assert torch.isfinite(output[:, :, :40]).all()
    output[:, :, :40].sum().backward()
    assert query.grad is not None
    assert torch.isfinite(query.grad[:, :, :40]).all()


# ---- block masks -----------------------------------------------------------------------------------------------------


def test_table_of_blocks_counts() -> None:
    """Full blocks do not ask mask_mod, skipped ones neither: as torch's kernels, whatever mask_mod says."""
    counts = torch.tensor([[[1, 1, 2]]], dtype=torch.int32)
    partial = torch.tensor([[[[0, 9, 9], [1, 9, 9], [0, 2, 9]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[1, 0, 0]]], dtype=torch.int32)
    full = torch.tensor([[[[2, 0, 0], [0, 0, 0], [0, 0, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        counts, partial, full_counts, full, BLOCK_SIZE=16, mask_mod=causal, compute_q_blocks=False
    )
    causal_block, everything, nothing = torch.ones(16, 16).tril().bool(), torch.ones(16, 16), torch.zeros(16, 16)
    rows = [[causal_block, nothing, everything], [nothing, causal_block, nothing], [everything, nothing, causal_block]]
    expected = torch.cat([torch.cat([block.bool() for block in row], dim=1) for row in rows])
    assert torch.equal(from_block_mask(mask).dense(48, 48), expected)
    inputs = inputs_of()
    output = flex_attention(*inputs, block_mask=mask)
    torch.testing.assert_close(output, ch.attention(*inputs, mask=ch.Dense(expected)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [16, (8, 16)])
def test_blocks_without_mask_mod_are_blocks(block_size: Any) -> None:
    rows = 48 // (16 if block_size == 16 else 8)
    counts = torch.ones(1, 1, rows, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, torch.ones(1, 1, rows, 3, dtype=torch.int32), BLOCK_SIZE=block_size)
    assert type(from_block_mask(mask)) is ch.Blocks
    expected = torch.zeros(48, 48, dtype=torch.bool)
    expected[:, 16:32] = True
    assert torch.equal(from_block_mask(mask).dense(48, 48), expected)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.mask is not None])
def test_mask_of_a_block_mask_is_dense_as_its_function(name: str) -> None:
    mask = from_block_mask(block_mask_of(VARIANTS[name]))  # type: ignore[arg-type]
    dense = mask.dense(LENGTH, LENGTH, batch=BATCH, num_heads=HEADS)
    assert torch.equal(dense.expand(BATCH, HEADS, LENGTH, LENGTH), dense_mask(VARIANTS[name]))


@pytest.mark.parametrize("name", ["causal", "2-D neighborhood", "nested look-ups"])
def test_block_masks_combine_with_masks_of_ours(name: str) -> None:
    inputs = inputs_of()
    mask = from_block_mask(block_mask_of(VARIANTS[name])) & ~ch.Padding([0, 3])  # type: ignore[arg-type]
    expected = dense_mask(VARIANTS[name]).clone()
    expected[1, ..., :3] = False
    outputs = [ch.attention(*inputs, mask=one) for one in (mask, ch.Dense(expected))]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert ch.attention(*inputs, mask=mask, backend="tiled").isfinite().all()


def test_positions_in_a_cache_are_absolute() -> None:
    """One block mask serves the steps of a generation."""
    query, key, value = inputs_of()
    mask = from_block_mask(block_mask_of(VARIANTS["causal documents"]))  # type: ignore[arg-type]
    whole = ch.attention(query, key, value, mask=mask)
    step = ch.attention(query[:, :, 30:31], key, value, mask=mask, query_offset=30)
    torch.testing.assert_close(step, whole[:, :, 30:31], rtol=1e-4, atol=1e-5)
    with pytest.raises(ch.MaskError, match="cover queries 48 to 48"):
        ch.attention(query[:, :, :1], key, value, mask=mask, query_offset=48)


@pytest.mark.parametrize("name", ["causal documents", "2-D neighborhood", "nested look-ups"])
def test_no_queries_have_an_empty_mask(name: str) -> None:
    mask = from_block_mask(block_mask_of(VARIANTS[name]))  # type: ignore[arg-type]
    assert mask.dense(0, LENGTH, query_offset=0).numel() == 0


@pytest.mark.parametrize(
    "name", ["causal documents", "nested look-ups", "2-D relative", "relative table, axis by axis"]
)
def test_they_translate_back_for_the_kernels_of_gpus(name: str) -> None:
    variant, inputs = VARIANTS[name], [tensor.detach() for tensor in inputs_of()]
    given = {name: tensor.detach() for name, tensor in learned().items()}
    mask, score_mod = block_mask_of(variant), None if variant.score is None else variant.score(given)
    problem = Problem.of(
        "flex_attention",
        *inputs,
        mask=None if mask is None else from_block_mask(mask),
        scores=() if score_mod is None else (ScoreMod(score_mod),),
        query_offset=0,
    )
    output = flex_backend.run(problem, ch.Want(), call=torchs.flex_attention).output
    torch.testing.assert_close(output, flex_attention(*inputs, score_mod, mask), rtol=1e-4, atol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------------------------


SLOPES = learned()["slopes"]


def _branches(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s if q > 3 else -s


def _writes(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    s += 1.0
    return s


@pytest.mark.parametrize(
    ("score_mod", "text"),
    [
        (3, "score_mod must be callable; got 3"),
        (_branches, "score_mod must run on scalar tensors.*data-dependent control flow.*_branches"),
        (_writes, "score_mod must leave its arguments as they are.*_writes"),
        (lambda s, b, h, q, k: 1.0, "score_mod must run on .*it returns float and no tensor"),
        (lambda s, b, h, q, k: torch.stack([s, s]), "score_mod must return a real scalar; got"),
        (lambda s, b, h, q, k: s + torch.zeros(3), "score_mod must return a real scalar; got"),
        (lambda s, b, h, q, k: s + SLOPES[:, None, None], "score_mod must return a real scalar; got"),
        (lambda s, b, h, q, k: torch.complex(s, s), "score_mod must return a real scalar; got complex"),
        (lambda s, b, h, q: s, "score_mod must run on .*positional argument"),
        (lambda s, b, h, q, k: s + SLOPES[q], "score_mod must run on .*index"),
        (lambda s, b, h, q, k: s + torch.rand(()), "score_mod must draw no random numbers"),
    ],
)
def test_functions_of_something_else_are_refused_in_one_line(score_mod: Any, text: str) -> None:
    with pytest.raises(ch.ClearheadError) as caught:
        flex_attention(*inputs_of(), score_mod)
    message = str(caught.value)
    assert message.startswith("flex_attention: ")
    assert "\n" not in message
    assert re.search(text, message), message


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (lambda b, h, q, k: q - k, "mask_mod must return bool"),
        (lambda b, h, q, k: torch.stack([q, k]) > 0, "mask_mod must return bool"),
        (lambda b, h, q, k: q >= k if q > 2 else q < k, "mask_mod must run on .*data-dependent"),
    ],
)
def test_mask_mods_of_something_else_are_refused_in_one_line(mask_mod: Any, text: str) -> None:
    mask = block_mask_of(VARIANTS["causal"])
    assert mask is not None
    mask.mask_mod = mask_mod
    with pytest.raises(ch.ClearheadError, match=f"^flex_attention: {text}") as caught:
        flex_attention(*inputs_of(), block_mask=mask)
    assert "\n" not in str(caught.value)


def _call(**changes: Any) -> Callable[[], object]:
    query, key, value = inputs_of()
    options = {"query": query, "key": key, "value": value, **changes}
    return lambda: flex_attention(**options)


def _mask(*sizes: Any) -> BlockMask:
    return create_block_mask(causal, *sizes, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            _call(block_mask=_mask(None, None, 64, 48)),
            "block_mask must be made for 48 queries and 48 keys; got one for 64",
        ),
        (_call(block_mask=_mask(None, None, 48, 32)), "block_mask must be made for 48 queries and 48 keys; got .* 32"),
        (_call(block_mask=_mask(3, None, 48, 48)), "mask must have batch 1 or 2; got batch 3"),
        (_call(block_mask=_mask(None, 2, 48, 48)), "mask must have heads 1 or 4; got heads 2"),
        (_call(block_mask=_mask(2, None, 48, 48)[:1]), "mask_mod must run on .*sliced BlockMask"),
        (_call(block_mask=torch.ones(48, 48)), "from_block_mask: block_mask must be a BlockMask"),
        (_call(block_mask=causal), "from_block_mask: block_mask must be a BlockMask"),
        (_call(query=torch.ones(4, 48, CHANNELS)), "query must have the axes"),
        (_call(key=inputs_of(kv_heads=2)[1], value=inputs_of(kv_heads=2)[2]), "key must have query's 4 heads unless"),
        (_call(key=torch.ones(2, 3, 48, CHANNELS), enable_gqa=True), "key must have a number of heads|value must"),
        (_call(key=inputs_of()[1][:1], value=inputs_of()[2][:1]), "key must have query's batch size 2"),
        (_call(kernel_options=3), "kernel_options must be a dict"),
        (_call(return_lse=True, return_aux=AuxRequest(lse=True)), "return_lse must be left out"),
        (_call(return_aux=True), "return_aux must be an AuxRequest"),
        (_call(scale="no"), "scale must be a finite number"),
        (_call(query=[1.0]), "query must be a tensor"),
    ],
)
def test_other_arguments_are_refused_in_one_line(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ch.ClearheadError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_keys_of_one_batch_need_a_block_mask_of_the_whole() -> None:
    query, key, value = inputs_of()
    with pytest.raises(ch.MaskError, match="have query's batch size 2 where key has a batch size of 1"):
        flex_attention(query, key[:1], value[:1], block_mask=_mask(None, None, 48, 48))


@pytest.mark.parametrize(
    ("counts", "column", "text"),
    [
        (4, 0, "kv_num_blocks from 0 to 3"),
        (-1, 0, "kv_num_blocks"),
        (1, 3, "kv_indices from 0 to 2"),
        (1, -1, "kv_indices"),
    ],
)
def test_tables_that_point_outside_are_refused(counts: int, column: int, text: str) -> None:
    mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, 3), counts), torch.full((1, 1, 3, 3), column), BLOCK_SIZE=16, compute_q_blocks=False
    )
    with pytest.raises(ch.MaskError, match=text):
        flex_attention(*inputs_of(), block_mask=mask)


# ---- compiled callers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_caller_runs_it_between_graphs() -> None:
    given, mask = learned(), block_mask_of(VARIANTS["causal"])

    def caller(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + given["slopes"][h] * (q_idx - kv_idx)

        output = flex_attention(query * 2.0, key, value, score_mod, mask)
        assert isinstance(output, Tensor)
        return output.relu() * 3.0

    compiled = torch.compile(caller, backend="aot_eager")
    for _ in range(2):
        inputs = inputs_of()
        wanted = [*inputs, given["slopes"]]
        outputs = [function(*inputs) for function in (caller, compiled)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(output.sum(), wanted) for output in outputs))
        with torch.no_grad():
            given["slopes"].mul_(2.0)


@pytest.mark.slow
def test_torchs_compiled_function_gives_the_same() -> None:
    compiled = torch.compile(torchs.flex_attention)
    with torch.no_grad():
        for name in ("causal", "causal documents", "soft cap", "T5"):
            variant = VARIANTS[name]
            score_mod = None if variant.score is None else variant.score(learned())
            inputs, mask = [torch.randn(1, HEADS, LENGTH, CHANNELS) for _ in range(3)], None
            if variant.mask is not None:
                mask = create_block_mask(variant.mask, 1, HEADS, LENGTH, LENGTH, device="cpu")
            output, right = (function(*inputs, score_mod, mask) for function in (flex_attention, compiled))
            torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-4)
