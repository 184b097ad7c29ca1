"""flash-attention's signatures, against the formula that its documentation states, in float64."""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import functional as flash
from tests.budget import within_budget

HEADS, WIDTH = 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.3], dtype=torch.float64)
LENGTHS = [(5, 5), (2, 7), (7, 3), (1, 9)]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 2)},
    "causal window": {"causal": True, "window_size": (2, -1)},
    "causal beats right": {"causal": True, "window_size": (-1, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "scale": {"softmax_scale": 0.3},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of each": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES]), "causal": True},
    "all": {"alibi_slopes": SLOPES, "causal": True, "window_size": (3, -1), "softcap": 3.0, "softmax_scale": 0.5},
}


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of ``[batch, len, heads, head_dim]``."""
    q_len, k_len, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    beside, keys = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype).expand(q.shape[0], -1)
        scores = scores - slopes[:, :, None, None] * (beside - keys).abs()
    before, after = (10**6 if side == -1 else side for side in window_size)
    near = (keys >= beside - before) & (keys <= beside + (0 if causal else after))
    scores = scores.masked_fill(~near, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def drawn(q_len: int, k_len: int, dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(q_len)
    shapes = [(2, q_len, HEADS, WIDTH), *[(2, k_len, kv_heads, WIDTH)] * 2]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def same_gradients(mine: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    upstream = torch.randn_like(theirs)
    grads = (torch.autograd.grad(output, inputs, upstream) for output in (mine, theirs))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_batch_equals_the_formula(name: str, lengths: tuple[int, int]) -> None:
    inputs, options = drawn(*lengths), OPTIONS[name]
    output, lse, weights = flash.flash_attn_func(*inputs, **options, return_attn_probs=True)
    expected, sums = formula(*inputs, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, sums)
    assert weights is None
    same_gradients(output, expected, inputs)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_equals_the_formula(name: str) -> None:
    """Sequences of other lengths than each other, with other numbers of queries than of keys."""
    options, each = OPTIONS[name], [drawn(5, 5), drawn(2, 9)]
    parts = [[tensor[n, :] for tensor in inputs] for n, inputs in enumerate(each)]
    packed = [torch.cat(list(tensors)).detach().requires_grad_() for tensors in zip(*parts, strict=True)]
    q_bounds, k_bounds = bounds([5, 2]), bounds([5, 9])
    output, lse, _ = flash.flash_attn_varlen_func(*packed, q_bounds, k_bounds, 5, 9, **options, return_attn_probs=True)
    slopes = options.get("alibi_slopes")
    expected, sums = [], []
    for n, (q_size, k_size) in enumerate(((5, 5), (2, 9))):
        row = None if slopes is None else slopes if slopes.ndim == 1 else slopes[n]
        split = [packed[0].split([5, 2])[n], *(tensor.split([5, 9])[n] for tensor in packed[1:])]
        assert (len(split[0]), len(split[1])) == (q_size, k_size)
        one, its_sums = formula(*(tensor[None] for tensor in split), **(options | {"alibi_slopes": row}))
        expected.append(one[0])
        sums.append(its_sums[0])
    torch.testing.assert_close(output, torch.cat(expected))
    torch.testing.assert_close(lse, torch.cat(sums, 1))
    same_gradients(output, torch.cat(expected), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["full", "causal window", "all"])
def test_results_are_within_budget(name: str, dtype: torch.dtype) -> None:
    inputs, options = drawn(40, 70, dtype), OPTIONS[name]
    mine = flash.flash_attn_func(*inputs, **options)
    exact = formula(*(tensor.detach().double() for tensor in inputs), **options)[0]
    within_budget(name, mine, formula(*inputs, **options)[0], exact, terms=70, size=4.0, dtype=dtype)


def test_empty_row_gives_zero() -> None:
    inputs = drawn(5, 2, torch.float32)
    output, lse, _ = flash.flash_attn_func(*inputs, causal=True, return_attn_probs=True)
    assert output[:, :3].eq(0).all()
    assert lse[:, :, :3].eq(-torch.inf).all()
    assert torch.autograd.grad(output.sum(), inputs)[0][:, :3].eq(0).all()


def test_packed_tensors_are_their_parts() -> None:
    qkv = torch.randn(2, 5, 3, HEADS, WIDTH).requires_grad_()
    expected = flash.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), expected)
    flat, ends = qkv.flatten(0, 1), bounds([5, 5])
    by_length = flash.flash_attn_varlen_qkvpacked_func(flat, ends, 5, causal=True)
    torch.testing.assert_close(by_length, expected.flatten(0, 1))
    kv = flash.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], ends, ends, 5, 5, causal=True)
    assert torch.equal(kv, by_length)
    assert torch.autograd.grad(by_length.sum(), qkv)[0].shape == qkv.shape


def test_dropout_follows_torchs_generator() -> None:
    q, k, v = (tensor.detach() for tensor in drawn(64, 64, torch.float32))
    torch.manual_seed(3)
    first = flash.flash_attn_func(q, k, torch.ones_like(v), dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, flash.flash_attn_func(q, k, torch.ones_like(v), dropout_p=0.5))
    assert not torch.equal(first, flash.flash_attn_func(q, k, torch.ones_like(v), dropout_p=0.5))
    assert abs(float(first.mean()) - 1.0) < 0.1


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 2])
def test_cache_is_appended_to_and_read(new: int, paged: bool) -> None:
    torch.manual_seed(0)
    filled = [3, 7]
    q = torch.randn(2, 2, HEADS, WIDTH, dtype=torch.float64)
    shape = (9, 4, 2, WIDTH) if paged else (2, 12, 2, WIDTH)
    caches = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    table = torch.tensor([[4, 1, 6], [8, 0, 3]], dtype=torch.int32) if paged else None
    added = [torch.randn(2, new, 2, WIDTH, dtype=torch.float64) for _ in range(2)] if new else [None, None]

    def entry(cache: Tensor, n: int, length: int) -> Tensor:
        whole = cache[n] if table is None else cache[table[n].long()].flatten(0, 1)
        return whole[:length].clone()

    wanted = [
        [
            torch.cat([entry(cache, n, filled[n]), *([] if part is None else [part[n]])])[None]
            for cache, part in zip(caches, added, strict=True)
        ]
        for n in range(2)
    ]
    output, lse = flash.flash_attn_with_kvcache(
        q, *caches, *added, cache_seqlens=torch.tensor(filled, dtype=torch.int32), block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for n in range(2):
        expected, sums = formula(q[n : n + 1], *wanted[n], causal=True)
        torch.testing.assert_close(output[n : n + 1], expected)
        torch.testing.assert_close(lse[n : n + 1], sums)
        for cache, tokens in zip(caches, wanted[n], strict=True):
            assert torch.equal(entry(cache, n, filled[n] + new), tokens[0])


#: Names and defaults of flash-attn 2.8.
SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attention(name: str) -> None:
    parameters = inspect.signature(getattr(flash, name)).parameters.values()
    written = [
        each.name if each.default is inspect.Parameter.empty else f"{each.name}={each.default}" for each in parameters
    ]
    assert " ".join(written) == SIGNATURES[name]


Q = torch.randn(2, 5, HEADS, WIDTH)
CACHE = torch.randn(2, 8, HEADS, WIDTH)
NEW = torch.randn(2, 3, HEADS, WIDTH)
POOL = torch.randn(6, 4, HEADS, WIDTH)
FLAT = Q.flatten(0, 1)
WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "axes": ("flash_attn_func", (Q[0], Q, Q), {}, r"q must have axes \[batch, len, heads, head_dim\]"),
    "batch": ("flash_attn_func", (Q, Q[:1], Q[:1]), {}, r"k must have q's batch size 2"),
    "window": ("flash_attn_func", (Q, Q, Q), {"window_size": (1,)}, r"window_size must be two whole numbers"),
    "softcap": ("flash_attn_func", (Q, Q, Q), {"softcap": -1.0}, r"softcap must be a number of at least 0; got -1\.0"),
    "dropout": ("flash_attn_func", (Q, Q, Q), {"dropout_p": 1.5}, r"dropout must be a probability"),
    "causal": ("flash_attn_func", (Q, Q, Q), {"causal": "yes"}, r"causal must be True or False"),
    "weights": (
        "flash_attn_func",
        (Q, Q, Q),
        {"dropout_p": 0.1, "return_attn_probs": True},
        r"return_attn_probs must be False with dropout",
    ),
    "slopes": ("flash_attn_func", (Q, Q, Q), {"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be .* \[4\]"),
    "slopes of batch": (
        "flash_attn_func",
        (Q, Q, Q),
        {"alibi_slopes": torch.ones(3, 4)},
        r"alibi_slopes must have a row for each of 2 sequences",
    ),
    "falls": (
        "flash_attn_varlen_func",
        (FLAT, FLAT, FLAT, torch.tensor([0, 6, 5]), bounds([5, 5]), 9, 9),
        {},
        r"cu_seqlens_q must never fall; got 6 and then 5",
    ),
    "beyond": (
        "flash_attn_varlen_func",
        (FLAT, FLAT, FLAT, bounds([5, 5]), bounds([5, 6]), 9, 9),
        {},
        r"cu_seqlens_k must end within the 10 tokens; got 11",
    ),
    "longest": (
        "flash_attn_varlen_func",
        (FLAT, FLAT, FLAT, bounds([5, 5]), bounds([5, 5]), 4, 5),
        {},
        r"max_seqlen_q must be at least the longest sequence; got 4 for a sequence of 5 tokens",
    ),
    "packed": ("flash_attn_qkvpacked_func", (Q,), {}, r"qkv must have axes \[batch, len, 3, heads, head_dim\]"),
    "packed parts": ("flash_attn_kvpacked_func", (Q, torch.randn(2, 5, 3, 4, 8)), {}, r"kv must have axes"),
    "packed falls": (
        "flash_attn_varlen_qkvpacked_func",
        (torch.randn(5, 3, 2, 8), torch.tensor([0, 4, 2]), 5),
        {},
        r"cu_seqlens must never fall",
    ),
    "cache full": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE, NEW, NEW),
        {"cache_seqlens": torch.tensor([1, 6])},
        r"cache_seqlens must lie from 0 to 5, so that 3 new keys fit into 8; got 6",
    ),
    "cache negative": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE, NEW, NEW),
        {"cache_seqlens": torch.tensor([-1, 2])},
        r"cache_seqlens must lie from 0 .*; got -1",
    ),
    "cache length": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE),
        {"cache_seqlens": torch.tensor([1, 9])},
        r"cache_seqlens must lie from 0 to .*; got 9",
    ),
    "cache dtype": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE),
        {"cache_seqlens": torch.tensor([1.0, 2.0])},
        r"cache_seqlens must be int32 or int64 of shape \[2\]",
    ),
    "one of two": ("flash_attn_with_kvcache", (Q, CACHE, CACHE, NEW), {}, r"v must be given with k"),
    "new heads": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE, NEW[:, :, :2], NEW),
        {"cache_seqlens": 0},
        r"k must be float32 of shape \(2, new_len, 4, 8\)",
    ),
    "rotary": (
        "flash_attn_with_kvcache",
        (Q, CACHE, CACHE),
        {"rotary_cos": torch.ones(8, 4)},
        r"rotary_cos must be None",
    ),
    "page": (
        "flash_attn_with_kvcache",
        (Q, POOL, POOL),
        {"cache_seqlens": 5, "block_table": torch.tensor([[0, 6], [1, 2]])},
        r"block_table must name pages .*; got 6",
    ),
    "page to write": (
        "flash_attn_with_kvcache",
        (Q, POOL, POOL, NEW, NEW),
        {"cache_seqlens": 2, "block_table": torch.tensor([[0, 1], [1, -2]])},
        r"block_table must name pages .*; got -2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_one_line_and_writes_nothing(name: str) -> None:
    function, arguments, options, text = WRONG[name]
    before = CACHE.clone(), POOL.clone()
    with pytest.raises(ch.ClearheadError, match=rf"^{function}: {text}") as raised:
        getattr(flash, function)(*arguments, **options)
    assert "\n" not in str(raised.value)
    assert torch.equal(CACHE, before[0])
    assert torch.equal(POOL, before[1])
