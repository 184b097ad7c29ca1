"""The GPU kernels of ``backends/triton``: one pass for output and row statistics, three sweeps for the others.

The pass is the online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1) with further sums.
It stores each row's maximum ``base`` and the reciprocal of its sum ``share``; a sweep recomputes scores and gets the
same weights as ``exp(score - base) * share``. Each element is written by one program that adds in a fixed order, so
results are bitwise reproducible.

Only ``backends/triton`` imports this file, and only when it runs: triton reads its environment at import.
"""

# triton's decorators and builtins carry no types, and a kernel's arguments are whatever the launch passes.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["columns", "forward", "non_finite", "some_rows", "top"]

_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
_SLOPE = tl.constexpr(0)
_RELATIVE = tl.constexpr(1)
_DENSE = tl.constexpr(2)
_SOFTCAP = tl.constexpr(3)
#: Below every candidate of a top-k.
_NONE = tl.constexpr(-(2**62))
_LOW = tl.constexpr(2**31 - 1)


@triton.jit
def _load(base, rows, stride, limit, width, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a head as ``[rows, BLOCK]``, 0 past the last row and the last channel."""
    channels = tl.arange(0, BLOCK)
    inside = (rows < limit)[:, None]
    if PADDED:
        inside = inside & (channels < width)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _finite(values):
    return tl.abs(values.to(tl.float32)) < _INF


@triton.jit
def _has_bad(values):
    """1 if an element is NaN or infinite, else 0."""
    return tl.max(tl.max(tl.where(_finite(values), 0, 1), 1), 0)


@triton.jit
def _tanh(x):
    """tanh: Lambert's continued fraction to five terms near 0, where the quotient of exponentials would cancel."""
    size = tl.abs(x)
    square = x * x
    near = size * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + 15.0 * square))
    shrunk = tl.exp2(size * (-2.0 * _LOG2E))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    value = tl.where(size < 0.5, near, far)
    return tl.where(x < 0.0, -value, value)


@triton.jit
def _allowed(rows, cols, batch, head, sizes, mask, INTERVALS: tl.constexpr):
    """Which places of a tile may be attended to."""
    allowed = (rows < sizes.q_len)[:, None] & (cols < sizes.k_len)[None, :]
    distance = (rows + sizes.offset)[:, None] - cols[None, :]
    if mask.keys_before is not None:
        allowed = allowed & (distance <= mask.keys_before)
    if mask.keys_after is not None:
        allowed = allowed & (distance >= -mask.keys_after)
    if INTERVALS > 0:
        first_bound = (
            batch * mask.interval_strides[0]
            + head * mask.interval_strides[1]
            + rows.to(tl.int64) * mask.interval_strides[2]
        )
        inside = allowed & (cols < 0)[None, :]
        for column in tl.static_range(INTERVALS):
            start = tl.load(mask.start + first_bound + column, mask=rows < sizes.q_len, other=0)
            stop = tl.load(mask.stop + first_bound + column, mask=rows < sizes.q_len, other=0)
            inside = inside | ((cols[None, :] >= start[:, None]) & (cols[None, :] < stop[:, None]))
        allowed = allowed & inside
    if mask.table is not None:
        head_of_table = mask.table + batch * mask.table_strides[0] + head * mask.table_strides[1]
        place = rows.to(tl.int64)[:, None] * mask.table_strides[2] + cols.to(tl.int64)[None, :] * mask.table_strides[3]
        allowed = allowed & (tl.load(head_of_table + place, mask=allowed, other=0) != 0)
    if mask.blocks is not None:
        head_of_blocks = mask.blocks + batch * mask.block_strides[0] + head * mask.block_strides[1]
        across = ((rows + sizes.offset) // mask.block_size)[:, None] * mask.block_strides[2]
        along = (cols // mask.block_size)[None, :] * mask.block_strides[3]
        allowed = allowed & (tl.load(head_of_blocks + across + along, mask=allowed, other=0) != 0)
    return allowed


@triton.jit
def _ruled(scores, rows, cols, batch, head, sizes, rules, KINDS: tl.constexpr):
    """The score rules, in order."""
    distance = (rows + sizes.offset)[:, None] - cols[None, :]
    for place in tl.static_range(len(KINDS)):
        table, strides, value = rules[place]
        if KINDS[place] == _SLOPE:
            scores = scores - tl.load(table + head * strides[1]) * tl.abs(distance).to(tl.float32)
        elif KINDS[place] == _RELATIVE:
            column = tl.minimum(tl.maximum(distance, -value), value) + value
            scores = scores + tl.load(table + head * strides[1] + column)
        elif KINDS[place] == _DENSE:
            inside = (rows < sizes.q_len)[:, None] & (cols < sizes.k_len)[None, :]
            at = rows.to(tl.int64)[:, None] * strides[2] + cols.to(tl.int64)[None, :] * strides[3]
            scores = scores + tl.load(table + batch * strides[0] + head * strides[1] + at, mask=inside, other=0.0).to(
                tl.float32
            )
        else:
            scores = value * _tanh(scores / value)
    return scores


@triton.jit
def _reach(first, last, sizes, mask, batch, head, INTERVALS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The keys ``[low, high)`` that a row of ``[first, last)`` may attend to, and the keys that all of them may."""
    low, high = 0, sizes.k_len
    full_low, full_high = 0, sizes.k_len
    if mask.keys_before is not None:
        low = tl.maximum(low, first + sizes.offset - mask.keys_before)
        full_low = tl.maximum(full_low, last - 1 + sizes.offset - mask.keys_before)
    if mask.keys_after is not None:
        high = tl.minimum(high, last + sizes.offset + mask.keys_after)
        full_high = tl.minimum(full_high, first + sizes.offset + mask.keys_after + 1)
    if INTERVALS > 0:
        rows = first + tl.arange(0, ROWS)
        first_bound = (
            batch * mask.interval_strides[0]
            + head * mask.interval_strides[1]
            + rows.to(tl.int64) * mask.interval_strides[2]
        )
        least, most = sizes.k_len, 0
        for column in tl.static_range(INTERVALS):
            start = tl.load(mask.start + first_bound + column, mask=rows < last, other=0)
            stop = tl.load(mask.stop + first_bound + column, mask=rows < last, other=0)
            filled = stop > start
            least = tl.minimum(least, tl.min(tl.where(filled, start, sizes.k_len), 0))
            most = tl.maximum(most, tl.max(tl.where(filled, stop, 0), 0))
        low, high = tl.maximum(low, least), tl.minimum(high, most)
    if INTERVALS > 0 or mask.table is not None or mask.blocks is not None:
        full_low, full_high = high, low
    low = low // BLOCK * BLOCK
    full_low = tl.cdiv(full_low, BLOCK) * BLOCK
    full_high = tl.maximum(full_high // BLOCK * BLOCK, full_low)
    return low, high, full_low, full_high


@triton.jit
def _count(count, places, elements, PRECISION: tl.constexpr, TYPE: tl.constexpr):
    """``count`` and for each row and column the number of elements at the row's places; both are booleans."""
    left, right = tl.where(places, 1.0, 0.0), tl.where(elements, 1.0, 0.0)
    return tl.dot(left.to(TYPE), right.to(TYPE), count, input_precision=PRECISION)


@triton.jit
def _add_not_finite(output, every, above, below):
    """The output with what values that are not finite add to it: infinity with a positive weight, else NaN."""
    output = tl.where(above > 0.0, _INF, tl.where(below > 0.0, -_INF, output))
    undefined = (every != above + below) | ((above > 0.0) & (below > 0.0))
    return tl.where(undefined, float("nan"), output)


@triton.jit
def _attend(
    state, query, key, value, low, high, rows, batch, head, strides, sizes, mask, rules, first,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, KINDS: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAD: tl.constexpr, PAD_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, CHECK: tl.constexpr, DIRTY: tl.constexpr,
):  # fmt: skip
    """Iterate over the keys ``[low, high)``: the sums of the softmax and of statistics.

    With ``DIRTY``, values that are not finite count as 0 in the output. For each row and channel ``every`` counts those
    that the row may attend to, ``above`` and ``below`` those of plus and of minus infinity with a positive weight.
    """
    base, total, output, log_sum, sink_sum, distance_sum, every, above, below = state
    for start in range(low, high, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # A tile without a check is within the keys.
        limit = sizes.k_len
        keys = _load(key, cols, strides.key[2], limit, sizes.head_dim, WIDTH, PAD)
        values = _load(value, cols, strides.value[2], limit, sizes.value_dim, VALUE_WIDTH, PAD_VALUE)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * sizes.scale
        scores = _ruled(scores, rows, cols, batch, head, sizes, rules, KINDS)
        if DIRTY:
            # As the anchor infinity would make sums 0 or NaN whether their keys are forbidden or not.
            scores = tl.where(scores == _INF, float("nan"), scores)
        if CHECK:
            allowed = _allowed(rows, cols, batch, head, sizes, mask, INTERVALS)
            scores = tl.where(allowed, scores, -_INF)
        higher = tl.maximum(base, tl.max(scores, 1))
        anchor = tl.where(higher == -_INF, 0.0, higher)
        depth = scores - anchor[:, None]
        weights = tl.exp2(depth * _LOG2E)
        # The change of the anchor; 0 for a row without keys so far.
        moved = tl.where(base == -_INF, 0.0, base - anchor)
        shrink = tl.exp2(moved * _LOG2E)
        if ENTROPY:
            depth = tl.where(weights > 0.0, depth, 0.0)
            log_sum = shrink * (log_sum + total * moved) + tl.sum(weights * depth, 1)
        if first is not None:
            sink_sum = sink_sum * shrink
            if start < first:
                sink_sum += tl.sum(tl.where((cols < first)[None, :], weights, 0.0), 1)
        if DISTANCE:
            # Whole numbers, whose difference is exact below 2**24.
            distance = (rows + (sizes.offset - start)).to(tl.float32)[:, None] - (cols - start).to(tl.float32)[None, :]
            distance_sum = distance_sum * shrink + tl.sum(weights * tl.abs(distance), 1)
        if DIRTY:
            # Weights that become 0 beside a larger score count no more.
            above = tl.where(shrink[:, None] > 0.0, above, 0.0)
            below = tl.where(shrink[:, None] > 0.0, below, 0.0)
            every = _count(every, allowed, ~_finite(values), PRECISION, values.dtype)
            above = _count(above, weights > 0.0, values == _INF, PRECISION, values.dtype)
            below = _count(below, weights > 0.0, values == -_INF, PRECISION, values.dtype)
            values = tl.where(_finite(values), values, 0.0).to(values.dtype)
        total = total * shrink + tl.sum(weights, 1)
        output = tl.dot(weights.to(values.dtype), values, output * shrink[:, None], input_precision=PRECISION)
        base = higher
    return base, total, output, log_sum, sink_sum, distance_sum, every, above, below


@triton.jit
def _is_dirty(dirty, chunks):
    """Whether a key or value of this head contains NaN or infinity."""
    flag = 0
    for start in range(0, chunks, 128):
        at = start + tl.arange(0, 128)
        flag = tl.maximum(flag, tl.max(tl.load(dirty + at, mask=at < chunks, other=0), 0))
    return flag


@triton.jit
def non_finite(
    key, value, dirty, strides, sizes, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """For each chunk of keys of a key head, 1 if a key or value in it contains NaN or infinity."""
    chunk, pair = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    batch, head = (pair // sizes.kv_heads).to(tl.int64), (pair % sizes.kv_heads).to(tl.int64)
    key += batch * strides.key[0] + head * strides.key[1]
    value += batch * strides.value[0] + head * strides.value[1]
    flag = 0
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, sizes.k_len), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keys = _load(key, cols, strides.key[2], sizes.k_len, sizes.head_dim, WIDTH, True)
        values = _load(value, cols, strides.value[2], sizes.k_len, sizes.value_dim, VALUE_WIDTH, True)
        flag = tl.maximum(flag, tl.maximum(_has_bad(keys), _has_bad(values)))
    tl.store(dirty + tl.program_id(0), flag)


@triton.jit
def forward(
    query, key, value, output, lse, max_score, entropy, sink_mass, distance, bases, shares, dirty, sinks, sink_stride,
    strides, sizes, mask, rules, first, chunks,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PAD: tl.constexpr, PAD_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    DIRTY: tl.constexpr,
):  # fmt: skip
    """Output and row statistics of a block of queries of one head.

    It is launched twice: with ``DIRTY`` for blocks of queries that contain NaN or infinity, or whose head has some in a
    key or value, which must reach only the rows that may attend to them; and for all others.
    """
    blocks = tl.cdiv(sizes.q_len, ROWS)
    pair = tl.program_id(0) // blocks
    # Under a causal mask the last queries have the most keys, so they start first.
    row_start = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // sizes.heads).to(tl.int64), (pair % sizes.heads).to(tl.int64)
    kv_head = head // sizes.group
    query += batch * strides.query[0] + head * strides.query[1]
    key += batch * strides.key[0] + kv_head * strides.key[1]
    value += batch * strides.value[0] + kv_head * strides.value[1]
    rows = row_start + tl.arange(0, ROWS)
    queries = _load(query, rows, strides.query[2], sizes.q_len, sizes.head_dim, WIDTH, PAD)
    bad_keys = _is_dirty(dirty + (batch * sizes.kv_heads + kv_head) * chunks, chunks)
    if ((bad_keys != 0) | (_has_bad(queries) != 0)) != DIRTY:
        return
    last = tl.minimum(row_start + ROWS, sizes.q_len)
    low, high, full_low, full_high = _reach(row_start, last, sizes, mask, batch, head, INTERVALS, BLOCK, ROWS)

    nothing = tl.zeros([ROWS], dtype=tl.float32)
    empty = tl.zeros([ROWS, VALUE_WIDTH], dtype=tl.float32)
    ENTROPY: tl.constexpr = entropy is not None
    DISTANCE: tl.constexpr = distance is not None
    BANDED: tl.constexpr = INTERVALS == 0 and mask.table is None and mask.blocks is None
    sums = (nothing - _INF, nothing, empty, nothing, nothing, nothing, nothing, nothing, nothing)
    if DIRTY:
        base, total, result, log_sum, sink_sum, distance_sum, every, above, below = _attend(
            (nothing - _INF, nothing, empty, nothing, nothing, nothing, empty, empty, empty),
            queries, key, value, low, high, rows, batch, head, strides, sizes, mask, rules, first, ENTROPY, DISTANCE,
            KINDS, INTERVALS, BLOCK, WIDTH, VALUE_WIDTH, PAD, PAD_VALUE, PRECISION, CHECK=True, DIRTY=True,
        )  # fmt: skip
        result = _add_not_finite(result, every, above, below)
    else:
        if BANDED:
            if mask.keys_before is not None:
                sums = _attend(
                    sums, queries, key, value, low, tl.minimum(full_low, high), rows, batch, head, strides, sizes, mask,
                    rules, first, ENTROPY, DISTANCE, KINDS, INTERVALS, BLOCK, WIDTH, VALUE_WIDTH, PAD, PAD_VALUE,
                    PRECISION, CHECK=True, DIRTY=False,
                )  # fmt: skip
            sums = _attend(
                sums, queries, key, value, full_low, full_high, rows, batch, head, strides, sizes, mask, rules, first,
                ENTROPY, DISTANCE, KINDS, INTERVALS, BLOCK, WIDTH, VALUE_WIDTH, PAD, PAD_VALUE, PRECISION,
                CHECK=False, DIRTY=False,
            )  # fmt: skip
            low = full_high
        base, total, result, log_sum, sink_sum, distance_sum, _, _, _ = _attend(
            sums, queries, key, value, low, high, rows, batch, head, strides, sizes, mask, rules, first, ENTROPY,
            DISTANCE, KINDS, INTERVALS, BLOCK, WIDTH, VALUE_WIDTH, PAD, PAD_VALUE, PRECISION, CHECK=True, DIRTY=False,
        )  # fmt: skip

    real = rows < sizes.q_len
    place = (batch * sizes.heads + head) * sizes.q_len + rows
    if max_score is not None:
        tl.store(max_score + place, tl.where(total == total, base, float("nan")), mask=real)
    anchor = tl.where(base == -_INF, 0.0, base)
    whole = total
    moved = nothing
    if sinks is not None:
        # The sum includes the sink's logit; if it is the largest, it becomes the anchor.
        logit = tl.load(sinks + head * sink_stride)
        higher = tl.maximum(base, logit)
        higher = tl.where(higher == -_INF, 0.0, higher)
        moved = tl.where(base == -_INF, 0.0, base - higher)
        whole = total * tl.exp2(moved * _LOG2E) + tl.exp2((logit - higher) * _LOG2E)
        anchor = higher
    shrink = tl.exp2(moved * _LOG2E)
    no_key = whole == 0.0
    share = 1.0 / tl.where(no_key, 1.0, whole)
    logarithm = tl.log(tl.where(no_key, 1.0, whole))
    share = tl.where(no_key, 0.0, share)
    if lse is not None:
        tl.store(lse + place, tl.where(no_key, -_INF, anchor + logarithm), mask=real)
    if entropy is not None:
        # -sum p log p, with log p = (score - anchor) - logarithm
        spread = share * shrink * (total * (logarithm - moved) - log_sum)
        tl.store(entropy + place, tl.where(spread < 0.0, 0.0, spread), mask=real)
    if sink_mass is not None:
        # A row of NaN has a weight of 0 on first keys that it may not attend to.
        tl.store(sink_mass + place, tl.where(sink_sum == 0.0, 0.0, sink_sum * shrink * share), mask=real)
    if distance is not None:
        tl.store(distance + place, distance_sum * shrink * share, mask=real)
    if bases is not None:
        tl.store(bases + place, anchor, mask=real)
        tl.store(shares + place, share, mask=real)
    result = result * (shrink * share)[:, None]
    channels = tl.arange(0, VALUE_WIDTH)
    output += batch * strides.output[0] + head * strides.output[1]
    tl.store(
        output + rows.to(tl.int64)[:, None] * strides.output[2] + channels[None, :],
        result.to(output.dtype.element_ty),
        mask=real[:, None] & (channels < sizes.value_dim)[None, :],
    )


@triton.jit
def _weights(
    query, keys, rows, cols, batch, head, sizes, mask, rules, bases, shares,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, from the pass's ``bases`` and ``shares``; 0 at forbidden places, also in rows of NaN."""
    place = (batch * sizes.heads + head) * sizes.q_len + rows
    base = tl.load(bases + place, mask=rows < sizes.q_len, other=0.0)
    share = tl.load(shares + place, mask=rows < sizes.q_len, other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * sizes.scale
    scores = _ruled(scores, rows, cols, batch, head, sizes, rules, KINDS)
    weights = tl.exp2((scores - base[:, None]) * _LOG2E) * share[:, None]
    return tl.where(_allowed(rows, cols, batch, head, sizes, mask, INTERVALS), weights, 0.0)


@triton.jit
def columns(
    query, key, bases, shares, received, summed, mixing, mixing_strides, mixers, heat_max, heat_sum,
    strides, sizes, mask, rules, step, per_step, q_blocks, k_blocks,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr, MIX: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of keys receives from all queries: its sum, weighted sums, and the pooled tiles of the weights.

    Blocks never cross a multiple of ``step``: block ``i`` begins at ``i // per_step * step + i % per_step * BLOCK``.
    """
    block = tl.program_id(0) % k_blocks
    rest = tl.program_id(0) // k_blocks
    mixes = tl.cdiv(mixers, MIX)
    part, pair = rest % mixes, rest // mixes
    batch, head = (pair // sizes.heads).to(tl.int64), (pair % sizes.heads).to(tl.int64)
    query += batch * strides.query[0] + head * strides.query[1]
    key += batch * strides.key[0] + head // sizes.group * strides.key[1]
    k_start = block // per_step * step + block % per_step * BLOCK
    k_stop = tl.minimum(tl.minimum(k_start + BLOCK, (block // per_step + 1) * step), sizes.k_len)
    cols = k_start + tl.arange(0, BLOCK)
    keys = _load(key, cols, strides.key[2], sizes.k_len, sizes.head_dim, WIDTH, PAD)

    low, high = 0, q_blocks
    if mask.keys_after is not None:
        reach = tl.maximum(k_start - mask.keys_after - sizes.offset, 0)
        low = tl.minimum(reach // step * per_step, q_blocks)
    if mask.keys_before is not None:
        reach = k_stop + mask.keys_before - sizes.offset
        high = tl.minimum(tl.maximum(tl.cdiv(reach, step), 0) * per_step, q_blocks)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    mixed = tl.zeros([MIX, BLOCK], dtype=tl.float32)
    lines = part * MIX + tl.arange(0, MIX)
    if mixing is not None:
        mixing += batch * mixing_strides[0] + head * mixing_strides[1]
    TILES: tl.constexpr = BLOCK // SIDE
    for at in range(low, high):
        start = at // per_step * step + at % per_step * BLOCK
        stop = tl.minimum(tl.minimum(start + BLOCK, (at // per_step + 1) * step), sizes.q_len)
        touched = start < stop
        if INTERVALS > 0:
            near, far, _, _ = _reach(start, stop, sizes, mask, batch, head, INTERVALS, BLOCK, BLOCK)
            touched = touched & (near < k_stop) & (far > k_start)
        if touched:
            rows = start + tl.arange(0, BLOCK)
            queries = _load(query, rows, strides.query[2], sizes.q_len, sizes.head_dim, WIDTH, PAD)
            weights = _weights(
                queries, keys, rows, cols, batch, head, sizes, mask, rules, bases, shares, KINDS, INTERVALS, PRECISION
            )
            weights = tl.where((rows < stop)[:, None] & (cols < k_stop)[None, :], weights, 0.0)
            if received is not None:
                sums += tl.sum(weights, 0)
            if mixing is not None:
                down, across = lines.to(tl.int64) * mixing_strides[2], rows.to(tl.int64) * mixing_strides[3]
                real = (lines < mixers)[:, None] & (rows < stop)[None, :]
                factors = tl.load(mixing + down[:, None] + across[None, :], mask=real, other=0.0)
                mixed = tl.dot(factors, weights, mixed, input_precision="ieee")
            if heat_max is not None:
                tiles = tl.reshape(weights, (TILES, SIDE, TILES, SIDE))
                total = tl.sum(tl.sum(tiles, 3), 1)
                largest = tl.max(tl.max(tiles, 3), 1)
                # tl.max ignores NaN, tl.sum does not.
                largest = tl.where(total == total, largest, total)
                tile_row, tile_column = at * TILES + tl.arange(0, TILES), block * TILES + tl.arange(0, TILES)
                place = (pair.to(tl.int64) * q_blocks * TILES + tile_row)[:, None] * (k_blocks * TILES)
                place = place + tile_column[None, :]
                tl.store(heat_max + place, largest)
                tl.store(heat_sum + place, total)
    inside = cols < k_stop
    # The first condition is known at compile time, the second at run time.
    if received is not None:  # noqa: SIM102
        if part == 0:
            tl.store(received + pair.to(tl.int64) * sizes.k_len + cols, sums, mask=inside)
    if mixing is not None:
        place = (pair.to(tl.int64) * mixers + lines)[:, None] * sizes.k_len + cols[None, :]
        tl.store(summed + place, mixed, mask=(lines < mixers)[:, None] & inside[None, :])


@triton.jit
def some_rows(
    query, key, bases, shares, index, count, weights, strides, sizes, mask, rules,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All weights of chosen queries, one tile per program."""
    k_blocks = tl.cdiv(sizes.k_len, BLOCK)
    block = tl.program_id(0) % k_blocks
    rest = tl.program_id(0) // k_blocks
    blocks = tl.cdiv(count, BLOCK)
    pair = rest // blocks
    at = rest % blocks * BLOCK + tl.arange(0, BLOCK)
    batch, head = (pair // sizes.heads).to(tl.int64), (pair % sizes.heads).to(tl.int64)
    query += batch * strides.query[0] + head * strides.query[1]
    key += batch * strides.key[0] + head // sizes.group * strides.key[1]
    rows = tl.load(index + at, mask=at < count, other=sizes.q_len)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    queries = _load(query, rows, strides.query[2], sizes.q_len, sizes.head_dim, WIDTH, PAD)
    keys = _load(key, cols, strides.key[2], sizes.k_len, sizes.head_dim, WIDTH, PAD)
    tile_weights = _weights(
        queries, keys, rows, cols, batch, head, sizes, mask, rules, bases, shares, KINDS, INTERVALS, PRECISION
    )
    place = (pair.to(tl.int64) * count + at)[:, None] * sizes.k_len + cols[None, :]
    tl.store(weights + place, tile_weights, mask=(at < count)[:, None] & (cols < sizes.k_len)[None, :])


@triton.jit
def _better(
    best, query, key, bases, shares, low, high, rows, batch, head, strides, sizes, mask, rules,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest of ``best`` and keys ``[low, high)``; each is the weight's bits above the key counted downward."""
    for start in range(low, high, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keys = _load(key, cols, strides.key[2], sizes.k_len, sizes.head_dim, WIDTH, PAD)
        weights = _weights(
            query, keys, rows, cols, batch, head, sizes, mask, rules, bases, shares, KINDS, INTERVALS, PRECISION
        )
        # The bits of nonnegative floats are in the order of the floats; NaN without its sign comes first.
        bits = (weights.to(tl.int32, bitcast=True) & _LOW).to(tl.int64)
        ranked = (bits << 32) | (-cols + _LOW).to(tl.int64)[None, :]
        ranked = tl.where((cols < sizes.k_len)[None, :], ranked, _NONE)
        most, least = tl.max(ranked, 1), tl.min(best, 1)
        while tl.max(tl.where(most > least, 1, 0), 0) > 0:
            worst = (best == least[:, None]) & (most > least)[:, None]
            best = tl.where(worst, most[:, None], best)
            ranked = tl.where(ranked == most[:, None], _NONE, ranked)
            most, least = tl.max(ranked, 1), tl.min(best, 1)
    return best


@triton.jit
def top(
    query, key, bases, shares, indices, weights, count, strides, sizes, mask, rules,
    KINDS: tl.constexpr, INTERVALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The ``count`` largest weights of each row of a block of queries; equal ones in the order of their keys."""
    blocks = tl.cdiv(sizes.q_len, ROWS)
    pair = tl.program_id(0) // blocks
    row_start = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // sizes.heads).to(tl.int64), (pair % sizes.heads).to(tl.int64)
    query += batch * strides.query[0] + head * strides.query[1]
    key += batch * strides.key[0] + head // sizes.group * strides.key[1]
    rows = row_start + tl.arange(0, ROWS)
    queries = _load(query, rows, strides.query[2], sizes.q_len, sizes.head_dim, WIDTH, PAD)
    last = tl.minimum(row_start + ROWS, sizes.q_len)
    low, high, _, _ = _reach(row_start, last, sizes, mask, batch, head, INTERVALS, BLOCK, ROWS)
    # If fewer than count weights are positive, weights of 0 fill up, from the first 2 * count keys.
    zeros = tl.minimum(tl.cdiv(2 * count, BLOCK) * BLOCK, sizes.k_len)
    best = (-1 - tl.arange(0, PLACES)).to(tl.int64)[None, :] + tl.zeros([ROWS, 1], dtype=tl.int64)
    best = _better(
        best, queries, key, bases, shares, 0, zeros, rows, batch, head, strides, sizes, mask, rules,
        KINDS, INTERVALS, BLOCK, WIDTH, PAD, PRECISION,
    )  # fmt: skip
    best = _better(
        best, queries, key, bases, shares, tl.maximum(low, tl.cdiv(zeros, BLOCK) * BLOCK), high, rows, batch, head,
        strides, sizes, mask, rules, KINDS, INTERVALS, BLOCK, WIDTH, PAD, PRECISION,
    )  # fmt: skip
    place = ((batch * sizes.heads + head) * sizes.q_len + rows) * count
    for rank in range(0, count):
        most = tl.max(best, 1)
        best = tl.where(best == most[:, None], _NONE, best)
        weight = (most >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(weights + place + rank, weight, mask=rows < sizes.q_len)
        tl.store(indices + place + rank, -(most & _LOW) + _LOW, mask=rows < sizes.q_len)
