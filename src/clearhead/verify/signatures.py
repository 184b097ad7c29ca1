"""Calling conventions: how a function is called, and which arguments it supports.

An ``AttentionCall`` describes one call independently of a convention; a ``CallingConvention`` passes it to a function
and reads the result.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.masks import Dense
from clearhead.scores import DenseBias, ScoreRule
from clearhead.verify.masks import Spoken

__all__ = ["CARRIED", "SIGNATURES", "Answer", "AttentionCall", "CallingConvention", "signature_of"]

CARRIED: Final = {
    "mask": "a mask of any pattern",
    "causal flag": "a flag that means causal",
    "score rules": "score rules",
    "scale": "a factor of scores",
    "grouped heads": "fewer key heads than query heads",
    "value width": "values of another width than keys",
    "dropout": "a probability of dropping weights",
}
"""What a function may support, by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall:
    """One call, independent of a convention; tensors are ``[batch, heads, len, dim]``.

    Attributes:
        mask: which keys may be attended to; None for all.
        form: the form of the mask argument.
        bias: values of a mask in the form "float" where a query may attend; 0 by default.
        rules: score rules.
        offset: absolute position of the first query.
        scale: factor of scores; None for the default.
        dropout: probability of dropping a weight; effective only if ``training``.
        training: whether a module is in training mode.
        returned: whether to request weights, if the convention can.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Spoken | None = None
    form: str = "none"
    bias: Tensor | None = None
    rules: tuple[ScoreRule, ...] = ()
    offset: int = 0
    scale: float | None = None
    dropout: float = 0.0
    training: bool = False
    returned: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """The result of a call: the output, and the statistics that the function returned, per query head."""

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None


class CallingConvention(ABC):
    """A convention of calling attention."""

    name: str
    #: Names of the arguments after the tensors.
    options: tuple[str, ...] = ()

    @abstractmethod
    def carries(self, fn: Callable[..., Any]) -> frozenset[str]:
        """What ``fn`` supports, keys of ``CARRIED``, according to its parameters if Python can inspect them."""

    def refused(self, fn: Callable[..., Any]) -> str | None:
        """The required call if inspection shows that ``fn`` does not accept it; else None."""
        return None if _takes(fn, 3) else "fn(query, key, value)"

    def unheard(self, fn: Callable[..., Any]) -> tuple[str, ...]:
        """Parameters of ``fn`` that look like arguments of the convention under another name."""
        signature = _signature(fn)
        parameters = () if signature is None else tuple(signature.parameters.values())[3:]
        never = (one.name for one in parameters if one.name not in self.options or one.kind is one.POSITIONAL_ONLY)
        return tuple(name for name in never if any(sound in name for sound in _SOUNDS))

    @abstractmethod
    def forms(self, mask: str, carried: frozenset[str]) -> tuple[str, ...]:
        """The forms in which a mask of this name can be passed to a function, the simplest first; may be empty.

        ``carried`` is the result of ``carries`` for the function.
        """

    def made(self, fn: Callable[..., Any], call: AttentionCall) -> Callable[..., Any]:
        """The callable to test: ``fn`` itself, or the module that it makes, which may draw random initial weights."""
        return fn

    @abstractmethod
    def call(self, made: Callable[..., Any], call: AttentionCall) -> Answer:
        """Call ``made`` and read what it returns."""


class Sdpa(CallingConvention):
    """The convention of ``torch.nn.functional.scaled_dot_product_attention``.

    Bool masks in which True may attend, float masks that are added, ``is_causal`` from the upper left corner. The
    function may return ``(output, lse)`` or ``(output, weights)``.
    """

    name = "sdpa"
    options = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

    def carries(self, fn: Callable[..., Any]) -> frozenset[str]:
        parameters = _parameters(fn)
        words = {
            "mask": "attn_mask",
            "causal flag": "is_causal",
            "scale": "scale",
            "grouped heads": "enable_gqa",
            "dropout": "dropout_p",
        }
        return frozenset(
            {"value width"} | {word for word, name in words.items() if parameters is None or name in parameters}
        )

    def forms(self, mask: str, carried: frozenset[str]) -> tuple[str, ...]:
        flag = ("flag",) if mask == "causal" and "causal flag" in carried else ()
        return (*flag, *(("bool", "float") if "mask" in carried else ()))

    def call(self, made: Callable[..., Any], call: AttentionCall) -> Answer:
        options: dict[str, Any] = {}
        if call.form == "flag":
            options["is_causal"] = True
        elif call.mask is not None:
            options["attn_mask"] = call.mask.allowed if call.form == "bool" else _added(call)
        if call.scale is not None:
            options["scale"] = call.scale
        if call.query.shape[1] != call.key.shape[1]:
            options["enable_gqa"] = True
        if call.dropout and call.training:
            options["dropout_p"] = call.dropout
        # Torch's function has a default for each argument; pass that default if the function has none.
        for name, parameter in (_parameters(made) or {}).items():
            if name in _DEFAULTS and parameter.default is inspect.Parameter.empty:
                options.setdefault(name, _DEFAULTS[name])
        return read(made(call.query, call.key, call.value, **options), call)


class Clearhead(CallingConvention):
    """The convention of ``clearhead.attention``: mask objects, score rules, absolute positions.

    The function may return an ``Observation``.
    """

    name = "clearhead"
    options = ("mask", "scores", "query_offset", "scale", "dropout")

    def carries(self, fn: Callable[..., Any]) -> frozenset[str]:
        parameters = _parameters(fn)
        words = {"mask": "mask", "score rules": "scores", "scale": "scale", "dropout": "dropout"}
        carried = {word for word, name in words.items() if parameters is None or name in parameters}
        return frozenset({"grouped heads", "value width"} | carried)

    def forms(self, mask: str, carried: frozenset[str]) -> tuple[str, ...]:
        if "mask" not in carried:
            return ()
        return ("object", "bool", *(("float",) if "score rules" in carried else ()))

    def call(self, made: Callable[..., Any], call: AttentionCall) -> Answer:
        options: dict[str, Any] = {"scores": call.rules} if call.rules else {}
        if call.mask is not None or call.rules:
            parameters = _parameters(made)
            if parameters is None or "query_offset" in parameters:
                options["query_offset"] = call.offset
            elif call.offset or call.query.shape[2] != call.key.shape[2]:
                raise NotImplementedError("it has no query_offset")
        if call.mask is not None:
            if call.form == "float":
                options["scores"] = (*call.rules, DenseBias(_added(call)))
            else:
                options["mask"] = Dense(call.mask.allowed) if call.form == "bool" else call.mask.ours
        if call.scale is not None:
            options["scale"] = call.scale
        if call.dropout and call.training:
            options["dropout"] = call.dropout
        return read(made(call.query, call.key, call.value, **options), call)


class Mha(CallingConvention):
    """The convention of ``torch.nn.MultiheadAttention``: ``fn(embed_dim, num_heads, dropout=, batch_first=)``.

    Inputs and outputs are batch first: a ``fn`` without ``batch_first`` must make such modules. One without ``dropout``
    makes modules without dropout. Forward returns the output, alone or with weights. Projections are set to different
    permutations, which are exact, so that heads can be compared. In masks True forbids.
    """

    name = "mha"

    def carries(self, fn: Callable[..., Any]) -> frozenset[str]:
        parameters = _parameters(fn)
        return frozenset({"mask", "dropout"} if parameters is None or "dropout" in parameters else {"mask"})

    def refused(self, fn: Callable[..., Any]) -> str | None:
        return None if _takes(fn, 2) else "fn(embed_dim, num_heads)"

    def unheard(self, fn: Callable[..., Any]) -> tuple[str, ...]:
        return ()

    def forms(self, mask: str, carried: frozenset[str]) -> tuple[str, ...]:
        if mask in ("padding", "padding to nothing"):
            return ("bool", "float", "padding")
        return ("bool", "flag", "float") if mask == "causal" else ("bool", "float")

    def made(self, fn: Callable[..., Any], call: AttentionCall) -> Callable[..., Any]:
        _, heads, _, head_dim = call.query.shape
        module: nn.Module = fn(heads * head_dim, heads, **_accepted(fn, {"dropout": call.dropout, "batch_first": True}))
        module.to(device=call.query.device, dtype=call.query.dtype).train(call.training)
        _permute(module, _orders(call))
        return module

    def call(self, made: Callable[..., Any], call: AttentionCall) -> Answer:
        batch, heads, _, head_dim = call.query.shape
        orders = _orders(call)
        given = zip((call.query, call.key, call.value), orders[:3], strict=True)
        inputs = [tensor.transpose(1, 2).flatten(2)[..., order.argsort()] for tensor, order in given]
        options: dict[str, Any] = {"need_weights": call.returned}
        if call.returned:
            options["average_attn_weights"] = False
        if call.mask is not None:
            options |= self._masks(call, batch, heads)
        hints = _accepted(made, {name: options[name] for name in options if name not in _MASKS})
        masks = {name: options[name] for name in options if name in _MASKS}
        for name in masks:
            if name not in _accepted(made, masks):
                raise NotImplementedError(f"its forward takes no {name}")
        answer = made(*inputs, **masks, **hints)
        output, weights = (*answer, None)[:2] if isinstance(answer, (tuple, list)) else (answer, None)
        if not isinstance(output, Tensor):
            raise TypeError(f"returned {type(output).__name__}, not a tensor or a tuple that begins with one")
        weights = weights if call.returned and "need_weights" in hints else None
        output = output[..., orders[3].argsort()].unflatten(-1, (heads, head_dim)).transpose(1, 2)
        return Answer(output=output, weights=weights)

    def _masks(self, call: AttentionCall, batch: int, heads: int) -> dict[str, Any]:
        assert call.mask is not None
        allowed = call.mask.allowed
        lengths = (call.query.shape[2], call.key.shape[2])
        forbidden = ~allowed[(None,) * (4 - allowed.ndim)]
        if call.form == "padding":
            return {"key_padding_mask": forbidden[:, 0, 0].expand(batch, -1)}
        if call.form == "float":
            forbidden = _added(call)
            forbidden = forbidden[(None,) * (4 - forbidden.ndim)]
        forbidden = forbidden.expand(*forbidden.shape[:-2], *lengths)
        whole = forbidden.expand(batch, heads, *lengths)
        square = forbidden[0, 0] if forbidden.shape[:2] == (1, 1) else whole.flatten(0, 1)
        return {"attn_mask": square, **({"is_causal": True} if call.form == "flag" else {})}


def _orders(call: AttentionCall) -> list[Tensor]:
    """A different permutation of channels for each projection, so that exchanged projections are detected."""
    width, device = call.query.shape[1] * call.query.shape[3], call.query.device
    seeds = (torch.Generator().manual_seed(100 + turn) for turn in range(4))
    return [torch.randperm(width, generator=seed).to(device) for seed in seeds]


def _permute(module: nn.Module, orders: list[Tensor]) -> None:
    """Set each projection so that channel ``c`` of its result is channel ``order[c]`` of its input."""
    width = orders[0].shape[0]
    packed, last = getattr(module, "in_proj_weight", None), getattr(module, "out_proj", None)
    if not isinstance(packed, Tensor) or tuple(packed.shape) != (3 * width, width) or not isinstance(last, nn.Linear):
        raise UnsupportedError.about(
            "verify",
            "fn",
            must="make a module with in_proj_weight [3 * embed_dim, embed_dim] and out_proj",
            got=type(module).__name__,
            then="Wrap its heads in a function and use signature='sdpa'.",
        )
    with torch.no_grad():
        eye = torch.eye(width, dtype=packed.dtype, device=packed.device)
        packed.copy_(torch.cat([eye[order] for order in orders[:3]]))
        last.weight.copy_(eye[orders[3]])
        for bias in (getattr(module, "in_proj_bias", None), last.bias):
            if bias is not None:
                bias.zero_()


def _added(call: AttentionCall) -> Tensor:
    """The mask as an additive float mask: the bias, or 0, where a query may attend, -inf elsewhere."""
    assert call.mask is not None
    allowed = call.mask.allowed
    if call.bias is not None:
        return call.bias if bool(allowed.all()) else torch.where(allowed, call.bias, -torch.inf)
    return torch.zeros(allowed.shape, dtype=call.query.dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)


_MASKS: Final = ("attn_mask", "key_padding_mask")

_DEFAULTS: Final[dict[str, Any]] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}

#: Parts of a parameter's name that suggest an argument of a convention.
_SOUNDS: Final = ("mask", "causal", "dropout", "scale", "bias")


#: A cache of ``_parameters`` for functions that are alive, as inspection takes longer than most calls.
_READ: Final[WeakKeyDictionary[Any, dict[str, inspect.Parameter] | None]] = WeakKeyDictionary()


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """A function's signature; None if Python cannot inspect it."""
    # A module's __call__ has the signature (*args, **kwargs) and passes them to forward.
    plain = isinstance(fn, nn.Module) and type(fn).__call__ is nn.Module.__call__
    try:
        return inspect.signature(fn.forward if plain else fn)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None


def _parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Parameters that a function accepts by name; None if they are unknown or it has ``**kwargs``."""
    try:
        return _READ[fn]
    except KeyError:
        _READ[fn] = parameters = _given_by_name(fn)
        return parameters
    except TypeError:
        # The function is not hashable, or does not support weak references.
        return _given_by_name(fn)


def _given_by_name(fn: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    signature = _signature(fn)
    if signature is None or any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        return None
    return {
        name: one
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def _accepted(fn: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that a function accepts."""
    parameters = _parameters(fn)
    return options if parameters is None else {name: one for name, one in options.items() if name in parameters}


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether a function accepts ``count`` positional arguments and options by name; True if that is unknown."""
    signature = _signature(fn)
    if signature is None:
        return True
    parameters = list(signature.parameters.values())
    given = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [
        one
        for one in parameters
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one not in given[:count]
    ]
    return (len(given) >= count or any(one.kind is one.VAR_POSITIONAL for one in parameters)) and all(
        one.name in _DEFAULTS and one.kind is not one.POSITIONAL_ONLY for one in needed
    )


def read(result: Any, call: AttentionCall) -> Answer:
    """An ``Answer`` from a function's result: a tensor, an ``Observation``, or a tuple whose items shapes identify."""
    if isinstance(result, Tensor):
        return Answer(output=result)
    if hasattr(result, "output"):
        rows = getattr(result, "rows", None)
        return Answer(
            output=result.output,
            lse=getattr(result, "lse", None),
            weights=rows if rows is not None and rows.shape[-2] == call.query.shape[2] else None,
            entropy=getattr(result, "entropy", None),
            received=getattr(result, "received", None),
        )
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        extras = [extra for extra in result[1:] if isinstance(extra, Tensor)]
        weights = next((extra for extra in extras if extra.ndim == 4), None)
        return Answer(output=result[0], lse=_lse(extras, call), weights=weights)
    raise TypeError(f"returned {type(result).__name__}, not a tensor, an Observation or a tuple that begins with one")


def _lse(extras: list[Tensor], call: AttentionCall) -> Tensor | None:
    """The first tensor of shape ``[batch, heads, q_len]``.

    None if weights averaged over heads, ``[batch, q_len, k_len]``, would have the same shape.
    """
    batch, heads, q_len, _ = call.query.shape
    if (heads, q_len) == (q_len, call.key.shape[2]):
        return None
    return next((extra for extra in extras if tuple(extra.shape) == (batch, heads, q_len)), None)


#: The calling conventions by name: ``"sdpa"`` as ``torch.nn.functional.scaled_dot_product_attention``, ``"clearhead"``
#: as ``clearhead.attention``, ``"mha"`` as ``torch.nn.MultiheadAttention``.
SIGNATURES: Final[dict[str, CallingConvention]] = {
    convention.name: convention for convention in (Sdpa(), Clearhead(), Mha())
}


def signature_of(name: str) -> CallingConvention:
    """The calling convention with this name.

    Raises:
        UnsupportedError: there is no such convention.
    """
    if name not in SIGNATURES:
        raise UnsupportedError.about(
            "verify",
            "signature",
            must=f"be one of {', '.join(map(repr, SIGNATURES))}",
            got=repr(name)[:80],
            then="Wrap the function to have one of these.",
        )
    return SIGNATURES[name]
