"""Hugging Face transformers: its models, computing with our attention.

``enable()`` makes ``"clearhead"`` an attention implementation like ``"sdpa"``; ``swap(model)`` hands a model over,
linear layers, feedforwards and dropout included. Masks stay symbols on their way through a model, so nothing of
``q_len * k_len`` is made.

Where a row may attend to nothing, as at padding to the left, transformers' eager attention averages over what it may
not see. Here the row is 0, and real tokens are the same. Dropout draws other random numbers. Weights are never made:
``output_attentions=True`` raises, and ``clearhead.observe`` shows what is wanted of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from clearhead.bridges.transformers_attention import NAME, attend_for
from clearhead.bridges.transformers_masks import make_mask
from clearhead.errors import UnsupportedError
from clearhead.watch import recognise

__all__ = ["NAME", "attentions", "check", "enable", "hand_over", "models", "take_back"]

#: Where a model remembers what it computed with before, by the path of each config within its own.
_BEFORE: Final = "_implementations_before_clearhead"
_SHOWN: Final = 4
#: Code that weights are made by.
_OWN: Final = r"[sS]oftmax\(|scaled_dot_product_attention\("
_WAYS: Final[WeakKeyDictionary[type[nn.Module], str]] = WeakKeyDictionary()


def enable() -> None:
    """Make ``"clearhead"`` an attention implementation of transformers, masks included.

    Afterwards ``model.set_attn_implementation("clearhead")`` and ``from_pretrained(..., attn_implementation=
    "clearhead")`` work as with transformers' own. Calling it again changes nothing. transformers only warns where a
    model does not follow its attention interface; ``swap`` refuses it.

    >>> from transformers import BertConfig, BertModel
    >>> enable()
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = BertModel(config)
    >>> model.set_attn_implementation("clearhead")
    >>> model.config._attn_implementation
    'clearhead'
    """
    AttentionInterface.register(NAME, attend_for)
    AttentionMaskInterface.register(NAME, make_mask)


def models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """The models of transformers in ``model``, by path: itself, or those that stand in no other."""
    if isinstance(model, PreTrainedModel):
        yield "", model
        return
    for name, part in model.named_children():
        for path, found in models(part):
            yield f"{name}.{path}".rstrip("."), found


def check(function: str, model: PreTrainedModel) -> None:
    """Raise unless all attention of the model goes through transformers' attention interface.

    Raises:
        UnsupportedError: it does not; names the modules.
    """
    own = [
        f"{name or 'the model itself'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if _attends(type(part)) == "itself"
    ]
    closed = [
        f"{name or 'the model itself'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation()
    ]
    if own or closed:
        names = own or closed
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UnsupportedError.about(
            function, "model", must="use transformers' attention interface throughout",
            got=f"attention of its own in {', '.join(names[:_SHOWN])}{more}",
            then="Nothing was changed; leave this model as it is.",
        )  # fmt: skip


def attentions(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that attend through the interface, by path."""
    for name, module in model.named_modules():
        if _attends(type(module)) == "by interface":
            yield name, module


def hand_over(model: PreTrainedModel) -> bool:
    """Make ``"clearhead"`` the implementation throughout a model that ``check`` let pass; whether that changed it."""
    enable()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [{path: config._attn_implementation for path, config in _configs(part.config)} for part in parts]
    if all(name == NAME for names in before for name in names.values()):
        return False
    model.set_attn_implementation(NAME)
    for part, names in zip(parts, before, strict=True):
        if any(name != NAME for name in names.values()):
            setattr(part, _BEFORE, names)
    others = {
        name for part in parts for _, each in _configs(part.config) if (name := each._attn_implementation) != NAME
    }
    if others:
        take_back(model)
        raise UnsupportedError.about(
            "swap", "model", must="take another attention implementation in all its parts",
            got=f"parts that stay with {', '.join(map(str, others))}", then="Nothing was changed; leave it as it is.",
        )  # fmt: skip
    return True


def take_back(model: nn.Module) -> list[PreTrainedModel]:
    """Give every model in ``model`` the implementation that it had before ``hand_over``; those that had one."""
    restored = [part for part in model.modules() if isinstance(part, PreTrainedModel) and _BEFORE in vars(part)]
    for part in restored:
        names = vars(part).pop(_BEFORE)
        for path, config in _configs(part.config):
            if config._attn_implementation == NAME and path in names:
                config._attn_implementation_internal = names[path]
    return restored


def _configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config and those within it, by path."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner, f"{path}.{name}")


def _attends(kind: type[nn.Module]) -> str:
    """How a module of a class attends: ``"by interface"``, ``"itself"``, or not at all, ``""``."""
    if kind not in _WAYS:
        _WAYS[kind] = _way(kind)
    return _WAYS[kind]


def _way(kind: type[nn.Module]) -> str:
    """``_attends``, found out: transformers keeps no list, so the class's source is read, as transformers does."""
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.", "clearhead.")) or "forward" not in vars(base):
            continue
        source = _source(base)
        if "get_interface(" in source:
            return "by interface"
        if re.search(r"Attention|Attn", kind.__name__) and re.search(_OWN, source):
            return "itself"
        if "super().forward(" not in source:
            break
    return ""


def _passes_by(module: nn.Module) -> bool:
    """Whether a module's attention is ours now, and so can be watched."""
    own = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return own == NAME and _attends(type(module)) == "by interface"


recognise(_passes_by)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
