"""Attention that reads keys and values from the pages of a paged KV cache, through a table of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from clearhead.arguments import one_of
from clearhead.choices import covers
from clearhead.errors import ClearheadError, MaskError, ShapeError, UnsupportedError
from clearhead.functional.exact import attention, observe_attention
from clearhead.int8_rows import channels_of, is_quantized
from clearhead.masks import Mask
from clearhead.masks.parts import band_of
from clearhead.ops.attention import rule_options
from clearhead.ops.kinds import DTYPES, MAX_HEAD_DIM
from clearhead.ops.library import in_memory, library
from clearhead.problem import scale_of
from clearhead.scores import Alibi, RelativeBias, ScoreRule, Sink, SoftCap, as_rules
from clearhead.shapes import Float, Int
from clearhead.statistics import Want

__all__ = ["PageTable", "attend_to_pages", "paged_attention", "pages_of", "reads_pages"]

_NAME: Final = "paged_attention"
_BACKENDS: Final = ("auto", "native", "tiled", "reference", "sdpa")
_RULES: Final = (Alibi, RelativeBias, SoftCap, Sink)


class PageTable(NamedTuple):
    """Which pages each sequence reads.

    Attributes:
        block_table: int32 ``[sequences, max_blocks]``: block ``i`` of a row holds keys ``i * block_size`` onwards.
        lengths: int32 ``[sequences]``, the number of keys of each.
        query_start: int32 ``[sequences + 1]``, where the queries of each sequence start in a batch of 1; None where
            each sequence is an entry of the batch.
    """

    block_table: Int[Tensor, "sequences max_blocks"]
    lengths: Int[Tensor, " sequences"]
    query_start: Int[Tensor, " starts"] | None = None


def paged_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "num_blocks block_size kv_heads head_dim"],
    value: Float[Tensor, "num_blocks block_size kv_heads value_dim"],
    block_table: Int[Tensor, "sequences max_blocks"],
    lengths: Int[Tensor, " sequences"],
    *,
    query_start: Int[Tensor, " starts"] | None = None,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] = (),
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Exact attention of sequences whose keys and values are in pages, read where they are.

    ``attention(query[s], keys[s], values[s])`` for every sequence ``s``, where ``keys[s]`` are the first ``lengths[s]``
    rows of the pages ``block_table[s]``. The last query of a sequence is beside its last key.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, one batch entry for each sequence; or, with ``query_start``,
            ``[1, heads, total, head_dim]``, the queries of all sequences one after the other.
        key: pages ``[num_blocks, block_size, kv_heads, head_dim]``, in any memory order whose channels are contiguous;
            ``kv_heads`` divides ``heads``.
        value: pages ``[num_blocks, block_size, kv_heads, value_dim]``. Both may be in int8, in rows as an int8
            ``KVCache`` has them, ``head_dim + 4`` and ``value_dim + 4`` bytes each.
        block_table: int32 ``[sequences, max_blocks]``: entry ``i`` of a row names the page of keys ``i * block_size``
            to ``(i + 1) * block_size - 1``. Entries beyond a sequence's length are not read.
        lengths: int32 ``[sequences]``, number of keys of each sequence; 0 gives an output of 0.
        query_start: int32 ``[sequences + 1]``, the cumulative sum of the sequences' numbers of queries; by default
            every batch entry is a sequence.
        mask: ``None``, ``Causal()``, ``Window(...)`` or their ``&``.
        scores: score rules: ``Alibi``, ``RelativeBias``, ``SoftCap`` and ``Sink``.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        backend: ``"auto"``, or the name of a backend. All but ``"native"`` gather the pages and call ``attention``; so
            does ``"auto"`` with gradients, on other devices, and for dtypes that the CPU kernels do not take.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in query's dtype. With pages of a multiple of 16 keys, the bits of a
        sequence are those of ``attention`` on it alone, whatever else is in the batch.

    Raises:
        ShapeError: shapes do not fit, a length exceeds its row of the table, or the table names a page that is not
            there. Nothing is read then.
        MaskError: the mask is no band.
        UnsupportedError: a dtype, a score rule or the backend is not supported.

    Cost: ``4 * heads * q_len * length * head_dim`` operations for each sequence. Nothing is copied with pages of a
    multiple of 16 keys and up to 12 queries per key head; otherwise one tile of keys at a time is.

    Paper: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    section 4.

    >>> import torch, clearhead as ch
    >>> pages = torch.randn(8, 16, 2, 4)
    >>> table, lengths = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([20, 7], dtype=torch.int32)
    >>> query = torch.randn(2, 2, 1, 4)
    >>> output = ch.functional.paged_attention(query, pages, pages, table, lengths)
    >>> keys = pages[5, :7].transpose(0, 1)[None]
    >>> torch.allclose(output[1:], ch.attention(query[1:], keys, keys), atol=1e-6)
    True
    """
    scores = as_rules(_NAME, scores)
    one_of(_NAME, "backend", backend, _BACKENDS, "The usual one is 'auto'.")
    table = PageTable(block_table, lengths, query_start)
    return attend_to_pages(_NAME, (query, key, value), table, mask=mask, scores=scores, scale=scale, backend=backend)[0]


def attend_to_pages(
    function: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    table: PageTable,
    *,
    mask: Mask | None = None,
    scores: tuple[ScoreRule, ...] = (),
    scale: float | None = None,
    lse: bool = False,
    backend: str = "auto",
) -> list[Tensor]:
    """The output of ``paged_attention`` with query, key pages and value pages, and the log-sum-exp where it is wanted.

    Args:
        function: the public name that was called, for errors.
        tensors: query ``[batch, heads, q_len, head_dim]``, key pages and value pages.
        table: which pages each sequence reads.
        mask: a band, or None.
        scores: score rules.
        scale: factor on ``query @ key^T``.
        lse: whether to return ``[batch, heads, q_len]`` too.
        backend: as ``paged_attention`` takes it.
    """
    band = (None, None) if mask is None else band_of(mask)
    if band is None:
        raise MaskError.about(
            function, "mask", must="be None, Causal, Window or their &", got=repr(mask),
            then="Gather the pages and call attention for other masks.",
        )  # fmt: skip
    unknown = [rule for rule in scores if not isinstance(rule, _RULES)] if scores else None
    if unknown:
        raise UnsupportedError.about(
            function, "scores", must="be Alibi, RelativeBias, SoftCap or Sink", got=type(unknown[0]).__name__,
            then="Gather the pages and call attention for other rules.",
        )  # fmt: skip
    gradient = torch.is_grad_enabled() and _needs_gradient(tensors, scores)
    runs = backend in ("auto", "native") and not gradient and _is_native(tensors, table)
    if not runs:
        _check(function, tensors, table)
        if backend == "native":
            why = "gradients" if gradient else f"{tensors[0].dtype} on {tensors[0].device}"
            raise UnsupportedError.about(
                function, "backend", must="be 'auto' where the CPU kernels do not run", got=f"'native' with {why}",
                then="They read pages of float32, bfloat16 and float16 on the CPU, without gradients.",
            )  # fmt: skip
        return _gathered(tensors, table, mask, scores, scale, lse, backend)
    query = tensors[0]
    factor = query.shape[-1] ** -0.5 if scale is None else scale_of(function, scale, query.dtype)
    options: dict[str, Any] = {}
    if scores:
        for rule in scores:
            rule.check(function, query.shape[0], query.shape[1], query.shape[2], 1)
        sink = next((rule for rule in scores if isinstance(rule, Sink)), None)
        options = rule_options([rule for rule in scores if not isinstance(rule, Sink)], sink)
    block_table, lengths, start = table
    try:
        results: list[Tensor] = torch.ops.clearhead.attention_paged.default(
            *tensors, block_table, lengths, factor, lse, *band, start, **options
        )
    except RuntimeError as error:
        _check(function, tensors, table)
        raise UnsupportedError.from_operator(error) from None
    return results


def reads_pages(
    tensors: tuple[Tensor, Tensor, Tensor], table: PageTable, longest: tuple[int | None, int | None]
) -> bool:
    """Whether the CPU kernels read the pages where they are: everything fits, and no gradient is wanted.

    Args:
        tensors: query ``[1, heads, total, head_dim]``, key pages and value pages.
        table: which pages each sequence reads, with starts of queries.
        longest: the longest numbers of queries and of keys that are allowed.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return False
    if not _is_native(tensors, table) or table.query_start is None:
        return False
    try:
        _check("varlen_attn", tensors, table)
    except ClearheadError:
        return False
    most = (int(table.query_start.diff().max()), int(table.lengths.max()))
    return all(limit is not None and 0 <= count <= limit for count, limit in zip(most, longest, strict=True))


def pages_of(pages: Tensor, row: Int[Tensor, " max_blocks"], length: int) -> Float[Tensor, "1 kv_heads length dim"]:
    """The keys or values of one sequence, ``[1, kv_heads, length, dim]``, copied from the pages that a row names."""
    blocks = -(-length // pages.shape[1])
    return pages.index_select(0, row[:blocks].to(torch.int64)).flatten(0, 1)[:length].transpose(0, 1)[None]


def _is_native(tensors: tuple[Tensor, Tensor, Tensor], table: PageTable) -> bool:
    """Whether the CPU kernels can read the tensors."""
    block_table, lengths, start = table
    given = (*tensors, block_table, lengths) if start is None else (*tensors, block_table, lengths, start)
    if library() is None or not in_memory(*given):
        return False
    for part in given:
        if not part.is_cpu:
            return False
    query = tensors[0]
    return query.dtype in DTYPES and covers(query.dtype) and query.dim() == 4 and query.shape[3] <= MAX_HEAD_DIM


def _needs_gradient(tensors: tuple[Tensor, Tensor, Tensor], scores: tuple[ScoreRule, ...]) -> bool:
    """Whether a tensor of the call or of a score rule requires a gradient."""
    for part in tensors:
        if isinstance(part, Tensor) and part.requires_grad:
            return True
    return bool(scores) and any(part.requires_grad for rule in scores for part in rule.parameters())


def _gathered(
    tensors: tuple[Tensor, Tensor, Tensor],
    table: PageTable,
    mask: Mask | None,
    scores: tuple[ScoreRule, ...],
    scale: float | None,
    lse: bool,
    backend: str,
) -> list[Tensor]:
    """What the kernels compute, sequence by sequence on copies of the pages."""
    query, key, value = tensors
    lengths = table.lengths.tolist()
    starts = None if table.query_start is None else table.query_start.tolist()
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for place, length in enumerate(lengths):
        rows = query[place, None] if starts is None else query[:, :, starts[place] : starts[place + 1]]
        row = table.block_table[place]
        keys, values = (pages_of(pages, row, length) for pages in (key, value))
        options: dict[str, Any] = {"mask": mask, "scores": scores, "scale": scale, "backend": backend}
        options["query_offset"] = length - rows.shape[2]
        if lse:
            observed = observe_attention(rows, keys, values, want=Want(lse=True), **options)
            assert observed.lse is not None
            outputs.append(observed.output)
            sums.append(observed.lse)
        else:
            outputs.append(attention(rows, keys, values, **options))
    axis = 0 if starts is None else 2
    if not outputs:
        outputs, sums = [query.new_empty((*query.shape[:3], channels_of(value)))], [query.new_empty(query.shape[:3])]
    results = [torch.cat(outputs, dim=axis)]
    return [*results, torch.cat(sums, dim=axis)] if lse else results


def _check(function: str, tensors: tuple[Tensor, Tensor, Tensor], table: PageTable) -> None:
    """Raise for shapes that do not fit, and for a table that names pages that are not there."""
    query, key, value = tensors
    axes = (
        ("query", query, 4, "[batch, heads, q_len, head_dim]"),
        ("key", key, 4, "[num_blocks, block_size, kv_heads, head_dim]"),
        ("value", value, 4, "[num_blocks, block_size, kv_heads, value_dim]"),
        ("block_table", table.block_table, 2, "[sequences, max_blocks]"),
        ("lengths", table.lengths, 1, "[sequences]"),
    )
    for name, tensor, dim, shape in axes:
        if not isinstance(tensor, Tensor) or tensor.dim() != dim:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError.about(function, name, must=f"have axes {shape}", got=got, then="See ch.PagedKVCache.")
    quantized = is_quantized(key) and is_quantized(value)
    if not query.is_floating_point() or not (quantized or key.dtype == value.dtype == query.dtype):
        raise UnsupportedError.about(
            function, "key and value", must=f"have query's dtype {query.dtype}, or both be int8 rows",
            got=f"{key.dtype} and {value.dtype}", then="Convert with .to(dtype).",
        )  # fmt: skip
    heads, kv_heads = query.shape[1], key.shape[2]
    fits = kv_heads > 0 and heads % kv_heads == 0 and channels_of(key) == query.shape[3] and key.shape[1] > 0
    if not fits or value.shape[:3] != key.shape[:3]:
        raise ShapeError.about(
            function, "key and value",
            must=f"be pages of query's head_dim {query.shape[3]} with heads that divide its {heads}, alike in all but "
            "their channels", got=f"shapes {tuple(key.shape)} and {tuple(value.shape)}", then="See ch.PagedKVCache.",
        )  # fmt: skip
    _check_table(function, query, key, table)


def _check_table(function: str, query: Tensor, key: Tensor, table: PageTable) -> None:
    block_table, lengths, start = table
    for name, tensor in (("block_table", block_table), ("lengths", lengths), ("query_start", start)):
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dtype != torch.int32):
            got = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError.about(function, name, must="be int32", got=got, then="Convert with .to(torch.int32).")
    sequences, columns = block_table.shape
    expected = query.shape[0] if start is None else sequences
    if sequences != expected or lengths.shape[0] != sequences:
        raise ShapeError.about(
            function, "block_table", must=f"have a row for each of the {expected} sequences, and lengths an entry",
            got=f"{sequences} rows and {lengths.shape[0]} lengths", then="Give query_start for packed sequences.",
        )  # fmt: skip
    if start is not None:
        starts = start.tolist()
        rises = start.dim() == 1 and len(starts) == sequences + 1 and starts == sorted(starts)
        if not rises or query.shape[0] != 1 or starts[0] != 0 or starts[-1] != query.shape[2]:
            raise ShapeError.about(
                function,
                "query_start",
                must=f"rise from 0 to the {query.shape[2]} queries of a batch of 1, with {sequences + 1} entries",
                got=f"{starts[:8]} for query of shape {tuple(query.shape)}",
                then="It is the cumulative sum of the sequences' numbers of queries.",
            )
    capacity = columns * key.shape[1]
    for place, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity:
            raise ShapeError.about(
                function, "lengths", must=f"lie from 0 to {capacity}, what a row of block_table holds",
                got=f"{length} for sequence {place}", then="Add blocks to the table.",
            )  # fmt: skip
        named = block_table[place, : -(-length // key.shape[1])]
        outside = named[(named < 0) | (named >= key.shape[0])]
        if outside.numel():
            raise ShapeError.about(
                function, "block_table", must=f"name blocks from 0 to {key.shape[0] - 1}",
                got=f"{int(outside[0])} in row {place}", then="Entries beyond a sequence's length are not read.",
            )  # fmt: skip
