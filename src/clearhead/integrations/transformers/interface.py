"""Hugging Face transformers: its models, computing with clearhead's attention.

``enable()`` makes ``"clearhead"`` an attention implementation like ``"sdpa"``. ``clearhead.swap(model)`` selects it and
fuses the layers that a trial accepts. Masks stay symbolic on their way through a model, so nothing of
``q_len * k_len`` is made.

A row that may attend to nothing, as at left padding, gives 0, where transformers' eager attention gives an average;
real tokens are the same. Dropout draws other random numbers.

``output_attentions=True`` returns the weights that eager attention returns, with gradients; layers run unfused then.
``clearhead.observe`` has statistics and single rows of the weights, in memory that grows with the length.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from clearhead.integrations.recast import class_of, original_of
from clearhead.integrations.transformers.attention import NAME, attend_for
from clearhead.integrations.transformers.masks import make_mask
from clearhead.torch_private import (
    implementation_of,
    set_implementation,
    takes_implementation,
)
from clearhead.watch import recognise

__all__ = ["NAME", "attends", "configs_in", "enable", "hand_over", "is_marked", "models", "passes_by", "take_back"]

#: Where a module that has a config keeps the attention implementations from before ``swap``, by path in the config.
_BEFORE: Final = "_implementations_before_clearhead"
#: Calls that find the attention function of an implementation, in transformers 4 and 5.
_INTERFACE: Final = ("get_interface(", "ALL_ATTENTION_FUNCTIONS")
_ITSELF: Final = r"[sS]oftmax\(|scaled_dot_product_attention\("
_NAMED: Final = r"Attention|Attn|MHA"
_WAYS: Final[WeakKeyDictionary[type[nn.Module], str]] = WeakKeyDictionary()


def enable() -> None:
    """Make ``"clearhead"`` an attention implementation of transformers, masks included.

    Afterwards ``model.set_attn_implementation("clearhead")`` and ``from_pretrained(..., attn_implementation=
    "clearhead")`` work as with transformers' own, and ``output_attentions=True`` returns eager's weights in a call.
    Calling it twice changes nothing. transformers only warns where a model does not follow its attention interface;
    ``swap`` leaves such a model as it is.

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
    """The models of transformers in ``model``, by path: itself, or those that are part of no other."""
    if isinstance(model, PreTrainedModel):
        yield "", model
        return
    for name, part in model.named_children():
        for path, inner in models(part):
            yield f"{name}.{path}".rstrip("."), inner


def hand_over(model: PreTrainedModel) -> str | None:
    """Make ``"clearhead"`` the attention implementation throughout a model.

    Returns:
        None, or why the model's attention stays as it is.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if any(attends(type(part)) == "itself" for part in model.modules()):
        return "computes attention by itself, without transformers' attention interface"
    if not all(takes_implementation(part) for part in parts):
        return "does not take another attention implementation"
    enable()
    marked = {part: _implementations(part) for part in model.modules() if _has_config(part)}
    if all(name == NAME for names in marked.values() for name in names.values()):
        return None
    model.set_attn_implementation(NAME)
    for part, names in marked.items():
        vars(part).setdefault(_BEFORE, names)
    others = {name for part in parts for name in _implementations(part).values()} - {NAME}
    if others:
        take_back(model)
        return f"has parts that stay with the attention implementation {', '.join(map(str, others))}"
    return None


def take_back(model: nn.Module) -> None:
    """Restore the attention implementations from before ``hand_over`` of all configs in ``model``."""
    for part in model.modules():
        names = vars(part).pop(_BEFORE, {})
        now = [(path, config, implementation_of(config)) for path, config in configs_in(part.config)] if names else []
        # Outer configs first: each sets those within it.
        for path, config, name in now:
            set_implementation(config, names.get(path, name) if name == NAME else name)


def attends(kind: type[nn.Module]) -> str:
    """How modules of a class attend: ``"by interface"``, ``"itself"``, or not at all, ``""``."""
    if kind not in _WAYS:
        _WAYS[kind] = _way(kind)
    return _WAYS[kind]


def is_marked(module: nn.Module) -> bool:
    """Whether ``hand_over`` selected the attention implementation of a module."""
    return _BEFORE in vars(module)


def _has_config(module: nn.Module) -> bool:
    return implementation_of(vars(module).get("config")) is not None


def _implementations(module: Any) -> dict[str, str | None]:
    return {path: implementation_of(config) for path, config in configs_in(module.config)}


def configs_in(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config and those within it, by path."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from configs_in(inner, f"{path}.{name}")


def _way(kind: type[nn.Module]) -> str:
    """``attends``, by the class's source: transformers has no list, and reads it too."""
    kind = original_of(kind) or kind
    named = re.search(_NAMED, kind.__name__) is not None
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.", "clearhead.")) or "forward" not in vars(base):
            continue
        source = _source(base)
        if any(name in source for name in _INTERFACE):
            return "by interface"
        if named and re.search(_ITSELF, source):
            return "itself"
        if "super().forward(" not in source:
            break
    return ""


def passes_by(module: nn.Module) -> bool:
    """Whether a module's attention is ours now, and can be observed."""
    implementation = implementation_of(getattr(module, "config", None))
    return implementation == NAME and attends(class_of(module)) == "by interface"


recognise(passes_by)


def _source(kind: type) -> str:
    """The source of a class's functions: for that of the class itself Python before 3.13 parses its whole file."""
    sources = []
    for function in filter(inspect.isfunction, vars(kind).values()):
        with suppress(OSError, TypeError):
            sources.append(inspect.getsource(function))
    return "\n".join(sources)
