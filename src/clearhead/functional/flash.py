"""flash-attention's functions with their signatures, layouts and semantics, for packages that import them.

Tensors are ``[batch, len, heads, head_dim]``, or ``[total, heads, head_dim]`` for packed sequences, and the last query
of a sequence stands beside its last key.
"""

from __future__ import annotations

from torch import Tensor

from clearhead.functional.flash_call import FlashOptions, Returned, batched, packed, unpacked
from clearhead.functional.varlen import VarlenLayout
from clearhead.shapes import Float, Int

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q: Float[Tensor, "batch q_len heads head_dim"],
    k: Float[Tensor, "batch k_len kv_heads head_dim"],
    v: Float[Tensor, "batch k_len kv_heads value_dim"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Attention with the arguments of ``flash_attn.flash_attn_func``, on a CPU too.

    ``softmax(softcap(scale * q @ k^T) - slopes * |i + k_len - q_len - j| where the window allows) @ v``

    Args:
        q: ``[batch, q_len, heads, head_dim]``.
        k: ``[batch, k_len, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, k_len, kv_heads, value_dim]``.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key; the last query stands beside the last key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.

    Returns:
        ``[batch, q_len, heads, value_dim]``; with ``return_attn_probs`` also ``softmax_lse``
        ``[batch, heads, q_len]``, and None in place of the weights, which are never stored. A query without a key
        gives 0, and ``-inf`` in ``softmax_lse``.

    Raises:
        ShapeError: shapes or numbers do not fit.
        UnsupportedError: dtypes or devices do not fit, or ``return_attn_probs`` together with dropout.

    Cost: ``4 * batch * heads * q_len * k_len * head_dim`` operations, less what the window forbids. Slopes for each
    batch entry run in Python tiles.

    Papers: Dao 2023, "FlashAttention-2"; ALiBi: Press et al. 2022.

    >>> import torch, clearhead as ch
    >>> q, k, v = torch.randn(3, 1, 6, 4, 8)  # [batch, len, heads, head_dim]
    >>> ch.functional.flash_attn_func(q[:, -2:], k, v, causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return batched("flash_attn_func", q, k, v, options)


def flash_attn_varlen_func(
    q: Float[Tensor, "total_q heads head_dim"],
    k: Float[Tensor, "*total_k kv_heads head_dim"],
    v: Float[Tensor, "*total_k kv_heads value_dim"],
    cu_seqlens_q: Int[Tensor, " boundaries"],
    cu_seqlens_k: Int[Tensor, " boundaries"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Int[Tensor, "sequences pages"] | None = None,
) -> Returned:
    """Attention within packed sequences, with the arguments of ``flash_attn.flash_attn_varlen_func``, on a CPU too.

    ``softmax(softcap(scale * q_s @ k_s^T) - slopes * distance where the window allows) @ v_s`` for each sequence ``s``.

    Args:
        q: ``[total_q, heads, head_dim]``, the sequences one after the other.
        k: ``[total_k, kv_heads, head_dim]``; with ``block_table`` a pool ``[pages, page_size, kv_heads, head_dim]``.
        v: ``[total_k, kv_heads, value_dim]``, or a pool as ``k``.
        cu_seqlens_q: int32 or int64 ``[sequences + 1]``: 0, and the cumulative sum of the sequences' query lengths.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: the longest query length, or more.
        max_seqlen_k: the longest key length, or more.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key; the last query of a sequence stands beside its last key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.
        block_table: int ``[sequences, pages per sequence]``, which pages of the pool hold a sequence's keys, in order.

    Returns:
        ``[total_q, heads, value_dim]``; with ``return_attn_probs`` also ``softmax_lse`` ``[heads, total_q]``, and None
        in place of the weights, which are never stored. A query without a key gives 0, and ``-inf`` in
        ``softmax_lse``.

    Raises:
        ShapeError: shapes or lengths do not fit, boundaries fall or end beyond the tokens, or a page does not exist.
        UnsupportedError: dtypes or devices do not fit, or ``return_attn_probs`` together with dropout.

    Cost: ``4 * heads * head_dim * sum_s(q_len_s * k_len_s)`` operations, less what the window forbids. ALiBi runs in
    Python tiles where slopes differ between sequences, or a sequence has fewer queries than keys.

    Papers: Dao 2023, "FlashAttention-2"; ALiBi: Press et al. 2022.

    >>> import torch, clearhead as ch
    >>> q, k, v = torch.randn(3, 5, 2, 8)  # sequences of 3 and 2 tokens
    >>> bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> ch.functional.flash_attn_varlen_func(q, k, v, bounds, bounds, 3, 3, causal=True).shape
    torch.Size([5, 2, 8])
    """
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    layout = VarlenLayout(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k, block_table)
    return packed("flash_attn_varlen_func", q, k, v, layout, options)


def flash_attn_qkvpacked_func(
    qkv: Float[Tensor, "batch len 3 heads head_dim"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """``flash_attn_func`` of query, key and value in one tensor.

    Args:
        qkv: ``[batch, len, 3, heads, head_dim]``.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.

    Returns:
        ``[batch, len, heads, head_dim]``, and the log-sum-exp as ``flash_attn_func``.

    Raises:
        ShapeError: ``qkv`` has other axes, or numbers do not fit.

    >>> import torch, clearhead as ch
    >>> ch.functional.flash_attn_qkvpacked_func(torch.randn(1, 6, 3, 4, 8), causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    name = "flash_attn_qkvpacked_func"
    q, k, v = unpacked(name, "qkv", qkv, ("batch", "len", "3", "heads", "head_dim"))
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return batched(name, q, k, v, options)


def flash_attn_kvpacked_func(
    q: Float[Tensor, "batch q_len heads head_dim"],
    kv: Float[Tensor, "batch k_len 2 kv_heads head_dim"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """``flash_attn_func`` of key and value in one tensor.

    Args:
        q: ``[batch, q_len, heads, head_dim]``.
        kv: ``[batch, k_len, 2, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key; the last query stands beside the last key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.

    Returns:
        ``[batch, q_len, heads, head_dim]``, and the log-sum-exp as ``flash_attn_func``.

    Raises:
        ShapeError: ``kv`` has other axes, or numbers do not fit.

    >>> import torch, clearhead as ch
    >>> ch.functional.flash_attn_kvpacked_func(torch.randn(1, 2, 4, 8), torch.randn(1, 6, 2, 4, 8)).shape
    torch.Size([1, 2, 4, 8])
    """
    name = "flash_attn_kvpacked_func"
    k, v = unpacked(name, "kv", kv, ("batch", "k_len", "2", "kv_heads", "head_dim"))
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return batched(name, q, k, v, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Float[Tensor, "total 3 heads head_dim"],
    cu_seqlens: Int[Tensor, " boundaries"],
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """``flash_attn_varlen_func`` of query, key and value in one tensor.

    Args:
        qkv: ``[total, 3, heads, head_dim]``, the sequences one after the other.
        cu_seqlens: int32 or int64 ``[sequences + 1]``: 0, and the cumulative sum of the sequences' lengths.
        max_seqlen: the longest length, or more.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.

    Returns:
        ``[total, heads, head_dim]``, and the log-sum-exp as ``flash_attn_varlen_func``.

    Raises:
        ShapeError: shapes or lengths do not fit, or boundaries fall or end beyond the tokens.

    >>> import torch, clearhead as ch
    >>> qkv, bounds = torch.randn(5, 3, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> ch.functional.flash_attn_varlen_qkvpacked_func(qkv, bounds, 3, causal=True).shape
    torch.Size([5, 2, 8])
    """
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = unpacked(name, "qkv", qkv, ("total", "3", "heads", "head_dim"))
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    layout = VarlenLayout(cu_seqlens, cu_seqlens, None, max_seqlen, max_seqlen)
    return packed(name, q, k, v, layout, options)


def flash_attn_varlen_kvpacked_func(
    q: Float[Tensor, "total_q heads head_dim"],
    kv: Float[Tensor, "total_k 2 kv_heads head_dim"],
    cu_seqlens_q: Int[Tensor, " boundaries"],
    cu_seqlens_k: Int[Tensor, " boundaries"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """``flash_attn_varlen_func`` of key and value in one tensor.

    Args:
        q: ``[total_q, heads, head_dim]``, the sequences one after the other.
        kv: ``[total_k, 2, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        cu_seqlens_q: int32 or int64 ``[sequences + 1]``: 0, and the cumulative sum of the sequences' query lengths.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: the longest query length, or more.
        max_seqlen_k: the longest key length, or more.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key; the last query of a sequence stands beside its last key.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]``, slopes of ALiBi's bias.
        deterministic: taken for compatibility; gradients always have the same bits.
        return_attn_probs: whether the log-sum-exp is returned too.

    Returns:
        ``[total_q, heads, head_dim]``, and the log-sum-exp as ``flash_attn_varlen_func``.

    Raises:
        ShapeError: shapes or lengths do not fit, or boundaries fall or end beyond the tokens.

    >>> import torch, clearhead as ch
    >>> q, kv, bounds = torch.randn(5, 2, 8), torch.randn(5, 2, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> ch.functional.flash_attn_varlen_kvpacked_func(q, kv, bounds, bounds, 3, 3).shape
    torch.Size([5, 2, 8])
    """
    name = "flash_attn_varlen_kvpacked_func"
    k, v = unpacked(name, "kv", kv, ("total_k", "2", "kv_heads", "head_dim"))
    options = FlashOptions(
        softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    layout = VarlenLayout(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    return packed(name, q, k, v, layout, options)
