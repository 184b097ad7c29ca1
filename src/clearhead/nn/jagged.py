"""Jagged nested tensors in modules: a call with them runs on packed or padded tokens, and its result is jagged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.functional.jagged import (
    JaggedLayout,
    check_offset,
    check_sequences,
    confined,
    is_jagged,
    may_pack,
    refuse_tables,
)
from clearhead.masks import Documents
from clearhead.masks.base import conjuncts
from clearhead.watch import laid_out

__all__ = ["JaggedCall", "laid_out_arguments", "takes_jagged"]

_Module = TypeVar("_Module", bound=nn.Module)
_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")
#: Arguments that a call with jagged tensors has no use for.
_REFUSED: Final = {
    "cache": "Decode padded sequences of one length.",
    "memory_cache": "Decode padded sequences of one length.",
    "lengths": "A jagged tensor has the lengths of its sequences.",
    "memory_lengths": "A jagged tensor has the lengths of its sequences.",
}


@runtime_checkable
class JaggedAttender(Protocol):
    """The rules and the rotary positions of an attention."""

    scores: Any
    rotary: Any


@dataclass(frozen=True, kw_only=True)
class JaggedCall:
    """How a module's ``forward`` reads sequences.

    Attributes:
        masks: for each mask argument, the arguments of its queries and of its keys.
        lengths: for each argument of lengths, the argument that is padded where it is given.
        attentions: the attentions under ``mask``.
        by_state: whether the module attends by a state, which reads packed sequences in self-attention alone.
    """

    masks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    attentions: Callable[[Any], Sequence[JaggedAttender]] = lambda module: ()
    by_state: bool = False


def takes_jagged(
    call: JaggedCall,
) -> Callable[[Callable[Concatenate[_Module, _Options], _Result]], Callable[Concatenate[_Module, _Options], _Result]]:
    """Let a ``forward`` whose first argument is tokens take jagged ones, ``[batch, jagged len, width]``."""

    def decorate(
        forward: Callable[Concatenate[_Module, _Options], _Result],
    ) -> Callable[Concatenate[_Module, _Options], _Result]:
        signature = inspect.signature(forward)
        _, tokens, *_ = signature.parameters

        @wraps(forward)
        def taking(self: _Module, /, *args: _Options.args, **kwargs: _Options.kwargs) -> _Result:
            first = args[0] if args else kwargs.get(tokens)
            if type(first) is Tensor or not is_jagged(first):
                return forward(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs).arguments
            del given["self"]
            attentions = call.attentions(self)
            _refuse_parts(type(self).__name__, tokens, attentions)
            laid, layout, packed = laid_out_arguments(type(self).__name__, call, given, attentions)
            run: Callable[..., Any] = forward
            restored: Any = layout.restored(run(self, **laid), packed=packed)
            return restored  # type: ignore[no-any-return]

        return taking

    return decorate


def _refuse_parts(name: str, tokens: str, attentions: Sequence[object]) -> None:
    """Raise where other processes have other tokens of each sequence: a jagged tensor has whole sequences."""
    parts = (getattr(attention, "part", None) for attention in attentions)
    if any(part is not None and part.sequence is not None for part in parts):
        raise UnsupportedError.about(
            name, tokens, must="be padded where a sequence is sharded over ranks", got="a jagged tensor",
            then="Pass lengths=, or a Padding as mask.",
        )  # fmt: skip


def laid_out_arguments(
    name: str,
    call: JaggedCall,
    given: Mapping[str, Any],
    attentions: Sequence[JaggedAttender] = (),
    *,
    allow_packed: bool = True,
) -> tuple[dict[str, Any], JaggedLayout, bool]:
    """The arguments of a call with packed or padded tokens, and masks that confine attention to each sequence.

    Args:
        name: the public name in errors.
        call: which arguments are masks and lengths; all tensors in ``given`` are tokens.
        given: the arguments that were given, the queries first.
        attentions: the attentions under the argument ``mask``.
        allow_packed: False for padded tokens, which have weights of each sequence.

    Returns:
        The arguments; the layout of the first tokens, which the result has; and whether the tokens are packed.
    """
    for argument, then in _REFUSED.items():
        if given.get(argument) is not None:
            raise UnsupportedError.about(
                name, argument, must="be None where tokens are jagged", got=type(given[argument]).__name__, then=then
            )
    layouts = {argument: JaggedLayout.of(name, argument, x) for argument, x in given.items() if isinstance(x, Tensor)}
    first = next(iter(layouts))
    pairs = {
        mask: (layouts[queries], layouts.get(keys, layouts[first]))
        for mask, (queries, keys) in call.masks.items()
        if keys in layouts or keys in (first, "key")
    }
    packed = allow_packed and not any(source in layouts for source in call.lengths.values())
    for argument, (queries, keys) in pairs.items():
        mask, offset = given.get(argument), given.get("query_offset")
        # A module's rules and rotary positions are those of the attention that its first mask is for.
        under = attentions if argument == "mask" else ()
        rules = [rule for attention in under for rule in attention.scores.rules()]
        rotary = [attention.rotary for attention in under if attention.rotary is not None]
        check_sequences(name, call.masks[argument][1], queries, keys, layouts.get("value", keys))
        refuse_tables(name, mask, rules)
        if not queries.equals(keys):
            check_offset(name, [mask, *rules], offset, placed=bool(rotary))
        may = may_pack(mask, rules, queries, keys, offset)
        packed = packed and may and (queries.equals(keys) or not (rotary or call.by_state))
    # One tensor in several arguments is one afterwards, too: self-attention is known by that.
    laid: dict[int, Tensor] = {}
    for argument, layout in layouts.items():
        x = given[argument]
        if id(x) not in laid:
            laid[id(x)] = layout.laid_out(x, packed=packed)
    arguments = {argument: laid.get(id(x), x) for argument, x in given.items()}
    for argument, (queries, keys) in pairs.items():
        arguments[argument] = mask = confined(given.get(argument), queries, keys, packed=packed)
        for part in conjuncts(mask):
            if isinstance(part, Documents):
                laid_out(part, queries.lengths.shape[0], queries.longest)
    for argument, source in call.lengths.items():
        if source in layouts:
            arguments[argument] = layouts[source].lengths
    return arguments, layouts[first], packed
