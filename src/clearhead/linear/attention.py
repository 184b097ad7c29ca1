"""The public functions of linear attention: each defines a ``Member``, which ``run`` computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import flag, whole
from clearhead.errors import UnsupportedError
from clearhead.linear.check import check_decay, check_gate, check_rate, check_tensors, learns_faint_decays
from clearhead.linear.feature_maps import FeatureMap, PositiveRandomFeatures, as_feature_map
from clearhead.linear.run import Member, run
from clearhead.linear.state import LinearState
from clearhead.masks import Mask
from clearhead.problem import scale_of
from clearhead.shapes import Float

__all__ = [
    "CHUNK",
    "default_decay",
    "delta_attention",
    "gated_linear_attention",
    "linear_attention",
    "retention",
]

#: Default number of tokens per chunk: with 64 channels the GEMMs within chunks and with the state have equal sizes.
CHUNK: Final = 64


def linear_attention(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    feature_map: str | FeatureMap | PositiveRandomFeatures = "elu",
    causal: bool = False,
    state: LinearState | None = None,
    mask: Mask | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
    form: str = "auto",
    chunk_size: int = CHUNK,
) -> tuple[Float[Tensor, "*leading q_len value_dim"], LinearState]:
    """Linear attention: weights are inner products of features, so keys and values are summed once, for any length.

    ``output_i = scale * phi(q_i) S_i / (scale * phi(q_i) z_i)``, where ``S_i`` is the sum of ``phi(k_j)^T v_j`` and
    ``z_i`` the sum of ``phi(k_j)`` over all keys, or with ``causal`` over the keys up to ``i``, and over the keys of
    ``state``.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, k_len, head_dim]``; causal calls have ``k_len == q_len``. ``kv_heads`` divides
            ``heads``: query head ``h`` reads key head ``h // (heads // kv_heads)``, and states have ``kv_heads``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        feature_map: ``"elu"``, ``"relu"``, ``"identity"``, ``"unit"``, ``"performer"``, a ``FeatureMap`` or
            ``PositiveRandomFeatures``. ``"performer"`` needs keys of moderate norm: with ``head_dim`` 64, the features
            of float32 keys ten times as large as a standard normal underflow to 0.
        causal: whether a query attends only to keys up to its own position.
        state: the state that an earlier call returned, whose tokens precede this call's; by default an empty one.
        mask: ``Padding`` excludes keys; ``Documents`` makes a packed call a batch of documents, which the state's first
            axis then counts, without documents of no tokens; ``Causal()`` is equal to ``causal=True``; or a combination
            of these by ``&``.
        normalize: whether to divide by ``phi(q) z``; by default if the map's features are nonnegative.
        scale: factor on ``phi(q) . phi(k)``; a normaliser cancels it.
        form: ``"chunked"``, ``"recurrent"``, ``"parallel"``, or ``"auto"`` for the faster of the first two.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        The output ``[batch, heads, q_len, value_dim]`` in query's dtype, and the state after the last key. A query
        without keys, or whose weights are all 0, has an output of 0 and a gradient of 0.

    Raises:
        ShapeError: shapes or numbers do not fit.
        MaskError: a state of fixed size cannot represent the mask.
        UnsupportedError: dtypes or devices differ; there is no such map or form; on a CPU, the random features of all
            keys of a head underflow.

    Cost: ``4 * features * value_dim`` operations per token, and ``2 * chunk_size * (features + value_dim)`` more with
    ``causal``; memory of ``features * value_dim`` per chunk.

    Paper: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3; ``"performer"``: Choromanski et
    al. 2021, "Rethinking attention with Performers".

    >>> import torch, clearhead as ch
    >>> x = torch.eye(2)
    >>> output, state = ch.linear_attention(x, x, x, feature_map="relu", causal=True)
    >>> output, state
    (tensor([[1., 0.],
            [0., 1.]]), LinearState(matrix=[1, 1, 2, 2], normalized=True))
    """
    name = "linear_attention"
    check_tensors(name, query, key, value)
    chosen = as_feature_map(name, feature_map, query.shape[-1])
    causal = flag(name, "causal", causal)
    normalized = chosen.nonnegative if normalize is None else flag(name, "normalize", normalize)
    scale = scale_of(name, scale, query.dtype)
    if chosen.only_normalized and not normalized:
        raise UnsupportedError.about(
            name,
            "normalize",
            must=f"be True with {chosen.name}",
            got="False",
            then="Its queries are divided by their largest feature, which only normalisation cancels.",
        )
    member = Member(function=name, feature_map=chosen, normalized=normalized, scale=1.0 if normalized else scale)
    return run(member, query, key, value, causal, state, mask, form, chunk_size)


def retention(
    query: Float[Tensor, "*leading len head_dim"],
    key: Float[Tensor, "*kv_leading len head_dim"],
    value: Float[Tensor, "*kv_leading len value_dim"],
    *,
    decay: Sequence[float] | Float[Tensor, " heads"] | None = None,
    state: LinearState | None = None,
    mask: Mask | None = None,
    feature_map: str | FeatureMap = "identity",
    scale: float | None = None,
    form: str = "auto",
    chunk_size: int = CHUNK,
) -> tuple[Float[Tensor, "*leading len value_dim"], LinearState]:
    """Causal linear attention whose state decays by a constant factor per token, one for each head.

    ``S_i = decay * S_(i-1) + phi(k_i)^T v_i``, ``output_i = scale * phi(q_i) S_i``

    Args:
        query: ``[batch, heads, len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, len, value_dim]``.
        decay: ``[kv_heads]``, above 0 and at most 1; by default ``1 - 2^(-5 - head)``. If a decay below 1/4 requires a
            gradient, a training step takes about three times as long, for an exact gradient.
        state: the state that an earlier call returned, whose tokens precede this call's; by default an empty one.
        mask: None, ``Causal()``, ``Padding``, ``Documents`` or a combination of these by ``&``; an excluded key does
            not decay the state.
        feature_map: a name, a ``FeatureMap`` or ``PositiveRandomFeatures``; by default ``"identity"``.
        scale: factor on ``phi(q) . phi(k)``; by default ``1 / sqrt(head_dim)``.
        form: ``"chunked"``, ``"recurrent"``, ``"parallel"``, or ``"auto"`` for the faster of the first two.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        The output ``[batch, heads, len, value_dim]`` in query's dtype, and the state after the last key.

    Raises:
        ShapeError: shapes or numbers do not fit, or a decay is out of range.
        MaskError: a state of fixed size cannot represent the mask.
        UnsupportedError: dtypes or devices differ, or there is no such map or form.

    Cost: ``4 * features * value_dim + 2 * chunk_size * (features + value_dim)`` operations per token; memory of
    ``features * value_dim`` per chunk.

    Paper: Sun et al. 2023, "Retentive network", section 2.1, without its rotation and its norm, which the caller adds.

    >>> import torch
    >>> one = torch.ones(3, 1)
    >>> retention(one, one, one, decay=[0.5])[0].flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    name = "retention"
    check_tensors(name, query, key, value)
    heads = key.shape[-3] if key.ndim > 2 else 1
    decays = check_decay(name, _decays(heads) if decay is None else decay, heads)
    member = Member(
        function=name,
        feature_map=as_feature_map(name, feature_map, query.shape[-1]),
        normalized=False,
        scale=_scale(name, scale, query),
        log_decay=_logarithms(decays, key)[:, None, None].expand(heads, key.shape[-2], 1),
        faint=learns_faint_decays(decays),
    )
    return run(member, query, key, value, True, state, mask, form, chunk_size)


def gated_linear_attention(
    query: Float[Tensor, "*leading len head_dim"],
    key: Float[Tensor, "*kv_leading len head_dim"],
    value: Float[Tensor, "*kv_leading len value_dim"],
    *,
    log_gate: Float[Tensor, "*kv_leading len gates"],
    state: LinearState | None = None,
    mask: Mask | None = None,
    feature_map: str | FeatureMap = "identity",
    scale: float | None = None,
    form: str = "auto",
    chunk_size: int = CHUNK,
) -> tuple[Float[Tensor, "*leading len value_dim"], LinearState]:
    """Causal linear attention whose state decays by a gate of each token, one per feature or one for all.

    ``S_i = diag(exp(log_gate_i)) S_(i-1) + phi(k_i)^T v_i``, ``output_i = scale * phi(q_i) S_i``

    Args:
        query: ``[batch, heads, len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, len, value_dim]``.
        log_gate: logarithms of the gates, ``[batch, kv_heads, len, features | 1]``, finite and at most 0. The error of
            its gradient is relative to the largest gradient in a chunk. If gates below 1e-3 are parameters, as in
            ``log_gate=gates.log()``, their gradient divides that error by the gate: use ``form="recurrent"`` then.
        state: the state that an earlier call returned, whose tokens precede this call's; by default an empty one.
        mask: None, ``Causal()``, ``Padding``, ``Documents`` or a combination of these by ``&``; an excluded key does
            not decay the state.
        feature_map: a name, a ``FeatureMap`` or ``PositiveRandomFeatures``; by default ``"identity"``.
        scale: factor on ``phi(q) . phi(k)``; by default ``1 / sqrt(head_dim)``.
        form: ``"chunked"``, ``"recurrent"``, ``"parallel"``, or ``"auto"`` for the faster of the first two.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        The output ``[batch, heads, len, value_dim]`` in query's dtype, and the state after the last key.

    Raises:
        ShapeError: shapes or numbers do not fit, or a gate is out of range.
        MaskError: a state of fixed size cannot represent the mask.
        UnsupportedError: dtypes or devices differ, or there is no such map or form.

    Cost: ``4 * features * value_dim + 2 * chunk_size * (features + value_dim)`` operations per token; memory of
    ``features * value_dim`` per chunk.

    Paper: Yang et al. 2024, "Gated linear attention transformers", sections 3 and 4.

    >>> import torch
    >>> one = torch.ones(3, 1)
    >>> gated_linear_attention(one, one, one, log_gate=torch.tensor([[0.0], [-100.0], [0.0]]))[0].flatten()
    tensor([1., 1., 2.])
    """
    name = "gated_linear_attention"
    check_tensors(name, query, key, value)
    chosen = as_feature_map(name, feature_map, query.shape[-1])
    check_gate(name, log_gate, key, chosen.features(key.shape[-1]))
    member = Member(
        function=name,
        feature_map=chosen,
        normalized=False,
        scale=_scale(name, scale, query),
        log_decay=log_gate,
        gated=True,
    )
    return run(member, query, key, value, True, state, mask, form, chunk_size)


def delta_attention(
    query: Float[Tensor, "*leading len head_dim"],
    key: Float[Tensor, "*kv_leading len head_dim"],
    value: Float[Tensor, "*kv_leading len value_dim"],
    *,
    rate: Float[Tensor, "*kv_leading len"],
    log_gate: Float[Tensor, "*kv_leading len gates"] | None = None,
    state: LinearState | None = None,
    mask: Mask | None = None,
    feature_map: str | FeatureMap = "unit",
    scale: float | None = None,
    form: str = "auto",
    chunk_size: int = CHUNK,
) -> tuple[Float[Tensor, "*leading len value_dim"], LinearState]:
    """Causal linear attention by the delta rule: a token replaces the value that the state has for its key.

    ``S_i = S + rate_i * phi(k_i)^T (v_i - phi(k_i) S)`` with ``S = exp(log_gate_i) S_(i-1)``,
    ``output_i = scale * phi(q_i) S_i``

    Args:
        query: ``[batch, heads, len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, len, value_dim]``.
        rate: step of each token, ``[batch, kv_heads, len]``; with unit keys, 1 replaces the state's value by the new
            one, and 0 does not change it.
        log_gate: logarithms of gates, ``[batch, kv_heads, len, features | 1]``, finite and at most 0; None for no
            decay.
        state: the state that an earlier call returned, whose tokens precede this call's; by default an empty one.
        mask: None, ``Causal()``, ``Padding``, ``Documents`` or a combination of these by ``&``; an excluded key does
            not change the state.
        feature_map: a name, a ``FeatureMap`` or ``PositiveRandomFeatures``; the default ``"unit"`` makes queries and
            keys unit vectors.
        scale: factor on ``phi(q) . phi(k)``; by default ``1 / sqrt(head_dim)``.
        form: ``"chunked"``, ``"recurrent"``, ``"parallel"``, or ``"auto"`` for the faster of the first two.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        The output ``[batch, heads, len, value_dim]`` in query's dtype, and the state after the last key.

    Raises:
        ShapeError: shapes or numbers do not fit, or a gate is out of range.
        MaskError: a state of fixed size cannot represent the mask.
        UnsupportedError: dtypes or devices differ, or there is no such map or form.

    Cost: ``4 * features * value_dim + 2 * chunk_size * (features + value_dim)`` operations per token, and a triangular
    system of size ``chunk_size`` per chunk.

    Paper: Schlag et al. 2021, "Linear transformers are secretly fast weight programmers", section 4.2; in chunks: Yang
    et al. 2024, "Parallelizing linear transformers with the delta rule", section 3; with gates: Yang et al. 2024,
    "Gated delta networks", section 3.1.

    >>> import torch
    >>> key, value = torch.ones(2, 1), torch.tensor([[3.0], [5.0]])
    >>> delta_attention(key, key, value, rate=torch.ones(2))[0].flatten()
    tensor([3., 5.])
    """
    name = "delta_attention"
    check_tensors(name, query, key, value)
    chosen = as_feature_map(name, feature_map, query.shape[-1])
    check_rate(name, rate, key)
    if log_gate is not None:
        check_gate(name, log_gate, key, chosen.features(key.shape[-1]))
    member = Member(
        function=name,
        feature_map=chosen,
        normalized=False,
        scale=_scale(name, scale, query),
        log_decay=log_gate,
        rate=rate[..., None],
        gated=True,
    )
    return run(member, query, key, value, True, state, mask, form, chunk_size)


def default_decay(heads: int) -> Float[Tensor, " heads"]:
    """RetNet's decays: ``1 - 2^(-5 - head)`` (Sun et al. 2023, section 2.1).

    Raises:
        ShapeError: no number of heads.

    >>> default_decay(2)
    tensor([0.9688, 0.9844], dtype=torch.float64)
    """
    return _decays(whole("default_decay", "heads", heads, low=0, high=2**20))


def _decays(heads: int) -> Tensor:
    return 1.0 - torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64, device="cpu"))


def _logarithms(decay: Tensor, key: Tensor) -> Tensor:
    """Logarithms in the precision of decays and keys, on the decays' device: the keys' may not support float64."""
    sums = torch.promote_types(key.dtype, torch.float32)
    return decay.to(torch.promote_types(decay.dtype, sums)).log().to(sums).to(key.device)


def _scale(function: str, scale: float | None, query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale_of(function, scale, query.dtype)
