"""The signature of ``torch.nn.attention.flex_attention``, computed by clearhead's backends, with gradients on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from clearhead.arguments import dense, flag, repr_of
from clearhead.at_places import SCALARS, OfScalars
from clearhead.dispatch import run
from clearhead.errors import MaskError, ShapeError, UnsupportedError
from clearhead.masks import from_block_mask
from clearhead.masks.function import UserFunction, call_user_function, function_name, tile_text
from clearhead.onnx_graph import exporting, output_of
from clearhead.problem import Problem
from clearhead.scores import ScoreFunction
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want
from clearhead.torch_private import constant_when_compiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

__all__ = ["ScoreMod", "flex_attention"]

_NAME: Final = "flex_attention"
#: The output; with ``return_lse=True`` or ``return_aux`` a pair.
Attended: TypeAlias = "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]"
#: Blocks of this side or a larger one serve calls of any lengths, as in torch.
_EVERYTHING: Final = 2**30


class ScoreMod(OfScalars, ScoreFunction):
    """FlexAttention's ``score_mod(score, b, h, q_idx, kv_idx)``, which takes and returns scalars."""

    subject: ClassVar[UserFunction] = UserFunction(function=_NAME, argument="score_mod", **SCALARS)

    def _evaluated(self, *arguments: Tensor) -> Tensor:
        result = call_user_function(self.subject, self.fn, ShapeError, *arguments, run=self.at_places)
        score = arguments[0]
        if result.is_complex() or result.ndim != score.ndim:
            raise ShapeError.about(
                self.subject.function,
                self.subject.argument,
                must="return a real scalar",
                got=f"{repr_of(result)} from {function_name(self.fn)} on {tile_text(*arguments[1:])}",
                then="It takes one score and the indices of its place.",
            )
        return result.to(score.dtype).expand(score.shape)


def flex_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch kv_heads k_len head_dim"],
    value: Float[Tensor, "batch kv_heads k_len value_dim"],
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Attended:
    """``torch.nn.attention.flex_attention``, on CPUs without a compiler, forward and backward.

    ``softmax(score_mod(scale * query @ key^T) where block_mask allows) @ value``. A row without keys gives 0.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, k_len, head_dim]``; a batch of 1 serves every batch entry if ``block_mask`` has query's
            batch size.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx) -> score`` of scalar tensors; ``None`` changes nothing.
            Scores are float32 (float64 for float64 queries); indices are int64 and count from 0. Tensors that it
            closes over receive gradients.
        block_mask: a ``BlockMask`` of ``create_block_mask`` for these lengths; ``None`` allows everything. Full blocks
            are allowed, and in partial blocks what its ``mask_mod`` allows.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        enable_gqa: whether ``kv_heads`` may be a divisor of ``heads``; query head ``h`` reads key head
            ``h // (heads // kv_heads)``.
        return_lse: whether to return the log-sum-exp of each row too; torch prefers ``return_aux``.
        kernel_options: ignored. torch's options choose block sizes and kernels for GPUs, and never a result.
        return_aux: an ``AuxRequest`` of what to return besides the output; ``lse`` and ``max_scores`` both work.

    Returns:
        The output, ``[batch, heads, q_len, value_dim]`` in query's dtype (in the dtype of autocast where that is on).
        With ``return_lse=True`` a pair of it and the log-sum-exp ``[batch, heads, q_len]``, natural logarithm, -inf for
        a row without keys; with ``return_aux`` a pair of it and an ``AuxOutput``.

    Raises:
        ShapeError: shapes do not fit, or ``score_mod`` raises or returns something else than a real scalar.
        MaskError: ``block_mask`` is made for other lengths, batch or heads, or ``mask_mod`` returns no boolean.
        UnsupportedError: a dtype is not supported, or a function writes into its arguments or draws random numbers.

    Cost: that of ``ch.attention``. The functions are traced once per call: biases of the distance, of the key or of
    blocks of up to 2**24 places, soft caps and ``torch.where(allowed, score, -inf)`` run in the kernels; other
    functions are evaluated on tiles, with memory of a few tiles. Under ``torch.compile`` the call breaks the graph.

    Paper: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".

    >>> import torch
    >>> from clearhead.functional import flex_attention
    >>> x = torch.eye(2)[None, None]
    >>> flex_attention(x, x, x, lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs(), scale=1.0)
    tensor([[[[0.8808, 0.1192],
              [0.1192, 0.8808]]]])
    """
    breaks = torch.compiler.is_compiling() and not exporting()
    if breaks:
        _prepare()
    attend = _OUTSIDE_GRAPHS[0] if breaks else _attend
    return attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)


#: ``_attend`` as a function that breaks a graph, once a graph calls it.
_OUTSIDE_GRAPHS: Final[list[Callable[..., Attended]]] = []


@constant_when_compiled
def _prepare() -> None:
    """Fill ``_OUTSIDE_GRAPHS`` while a graph is traced: ``torch.compiler.disable`` imports torch's whole compiler."""
    if not _OUTSIDE_GRAPHS:
        reason = "flex_attention reads block masks and functions as values"
        _OUTSIDE_GRAPHS.append(torch.compiler.disable(_attend, reason=reason))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: BlockMask | None,
    scale: float | None, enable_gqa: bool, return_lse: bool, kernel_options: Mapping[str, Any] | None,
    return_aux: AuxRequest | None,
) -> Attended:  # fmt: skip
    _check_options(return_lse, kernel_options, return_aux)
    _check_tensors(query, key, value, enable_gqa=flag(_NAME, "enable_gqa", enable_gqa))
    if block_mask is not None:
        _check_sizes(block_mask, query, key)
    query, key, value = (_in_autocast_dtype(tensor) for tensor in (query, key, value))
    to_onnx = torch.compiler.is_exporting() and exporting()
    if to_onnx:
        _check_output_alone(return_lse, return_aux)
    problem = (Problem.traced if to_onnx else Problem.of)(
        _NAME,
        query,
        *_of_query_batch(query, key, value, block_mask),
        mask=None if block_mask is None else from_block_mask(block_mask),
        scores=() if score_mod is None else (_score_mod(score_mod),),
        scale=scale,
        query_offset=0,
    )
    if to_onnx:
        return output_of(problem)
    want = Want(
        lse=bool(return_lse) or (return_aux is not None and return_aux.lse),
        max_score=return_aux is not None and return_aux.max_scores,
    )
    return _results(run(_NAME, problem, want), return_lse, return_aux)


def _score_mod(function: Callable[..., Tensor]) -> ScoreMod:
    if not callable(function):
        raise ShapeError.about(
            _NAME, "score_mod", must="be callable", got=repr_of(function), then="Pass a function of five scalars."
        )
    return ScoreMod(function)


def _check_options(return_lse: bool, kernel_options: object, return_aux: object) -> None:
    if return_lse and return_aux is not None:
        raise UnsupportedError.about(
            _NAME,
            "return_lse",
            must="be left out where return_aux is given",
            got="both",
            then="Use return_aux=AuxRequest(lse=True).",
        )
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise ShapeError.about(
            _NAME,
            "return_aux",
            must="be an AuxRequest of torch.nn.attention.flex_attention",
            got=repr_of(return_aux),
            then="Use return_aux=AuxRequest(lse=True).",
        )
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise ShapeError.about(
            _NAME,
            "kernel_options",
            must="be a dict",
            got=repr_of(kernel_options),
            then="Its options tune kernels of GPUs and are ignored here; leave it out.",
        )


def _check_output_alone(return_lse: bool, return_aux: AuxRequest | None) -> None:
    if return_lse or (return_aux is not None and (return_aux.lse or return_aux.max_scores)):
        raise UnsupportedError.about(
            _NAME,
            "return_aux" if return_aux is not None else "return_lse",
            must="be left out under torch.onnx.export",
            got=repr_of(return_aux if return_aux is not None else return_lse),
            then="ONNX's Attention returns the output alone.",
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ShapeError.about(
                _NAME, name, must="be a tensor", got=type(tensor).__name__, then="Use torch.as_tensor."
            )
        dense(_NAME, name, tensor)
        if tensor.ndim != 4:
            raise ShapeError.about(
                _NAME,
                name,
                must="have the axes [batch, heads, len, head_dim]",
                got=f"shape {tuple(tensor.shape)}",
                then="Add axes of 1: tensor[None].",
            )
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise ShapeError.about(
            _NAME,
            "key",
            must=f"have query's {query.shape[1]} heads unless enable_gqa=True",
            got=f"{key.shape[1]} heads",
            then="Pass enable_gqa=True for grouped queries.",
        )


def _check_sizes(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Raise ``MaskError`` unless a block mask is made for the lengths of the call, as torch does."""
    size, lengths = getattr(block_mask, "BLOCK_SIZE", None), getattr(block_mask, "seq_lengths", None)
    # Anything but a block mask is refused by from_block_mask.
    if size is None or lengths is None or min(size) >= _EVERYTHING:
        return
    if tuple(lengths) != (query.shape[2], key.shape[2]):
        raise MaskError.about(
            _NAME,
            "block_mask",
            must=f"be made for {query.shape[2]} queries and {key.shape[2]} keys",
            got=f"one for {lengths[0]} and {lengths[1]}",
            then="Make another one with create_block_mask for these lengths.",
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise MaskError.about(
            _NAME,
            "block_mask",
            must=f"be on query's device {query.device}",
            got=block_mask.kv_num_blocks.device,
            then="Move it with .to(device).",
        )


def _of_query_batch(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None) -> tuple[Tensor, Tensor]:
    """Key and value expanded to query's batch size, where the block mask has that size too."""
    batch = query.shape[0]
    if batch == 1 or not key.shape[0] == value.shape[0] == 1 or block_mask is None:
        return key, value
    if block_mask.kv_num_blocks.shape[0] != batch:
        raise MaskError.about(
            _NAME,
            "block_mask",
            must=f"have query's batch size {batch} where key has a batch size of 1",
            got=block_mask.kv_num_blocks.shape[0],
            then=f"Pass B={batch} to create_block_mask, or expand key and value.",
        )
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _in_autocast_dtype(tensor: Tensor) -> Tensor:
    """The tensor as autocast passes it to torch's function: in autocast's dtype, if it is not float64."""
    device = tensor.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensor
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if casts else tensor


def _results(observation: Observation, return_lse: bool, return_aux: AuxRequest | None) -> Attended:
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return observation.output, AuxOutput(lse=observation.lse, max_scores=observation.max_score)
    if return_lse:
        assert observation.lse is not None
        return observation.output, observation.lse
    return observation.output
