"""The output of a model: the next token, a masked token, a class, or without a head its last hidden states."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.nn import LanguageModel, SequenceClassifier
from clearhead.readers import Reader

__all__ = ["Outlook", "outlook_of", "read_out"]

_TOP: Final = 10
_MOST_CLASSES: Final = 50
#: The kind of head by the suffix of a class name in transformers.
_HEADS: Final[Mapping[str, str]] = {
    "LMHeadModel": "next",
    "ForCausalLM": "next",
    "ForMaskedLM": "mask",
    "ForSequenceClassification": "class",
}


@dataclass(frozen=True)
class Outlook:
    """A model with the way its output is read.

    Attributes:
        reader: the model with its head, and its tokenizer.
        kind: ``"next"``, ``"mask"``, ``"class"`` or ``"states"``.
        labels: names of classes.
        mask: id of the mask token of a masked language model, or None.
        mask_text: text of the mask token.
        sparing: whether the model can compute the logits of chosen tokens only.
    """

    reader: Reader
    kind: str
    labels: tuple[str, ...] = ()
    mask: int | None = None
    mask_text: str = ""
    sparing: bool = False

    def place(self, ids: Sequence[int], wanted: int | None) -> int:
        """The token whose prediction is shown: ``wanted`` if given, else the mask token, else the last token."""
        if wanted is not None and 0 <= wanted < len(ids):
            return wanted
        masks = [place for place, each in enumerate(ids) if each == self.mask]
        if masks:
            return masks[0]
        # The last token of an encoder's input is its end marker.
        return len(ids) // 2 if self.kind == "mask" else len(ids) - 1

    def run(self, ids: Tensor, place: int) -> Tensor:
        """Run the model on ids ``[1, len]``: probabilities ``[n]``, or states ``[len, dim]`` without a head."""
        options = {"logits_to_keep": torch.tensor([place])} if self.sparing else {}
        output = self.reader.model(ids, **options)
        if self.kind == "states":
            return _states(output)[0].double()
        logits = output if isinstance(output, Tensor) else output["logits"]
        row = logits[0] if self.kind == "class" else logits[0, 0 if self.sparing else place]
        return row.double().softmax(-1)


def outlook_of(reader: Reader, folder: Path | None) -> Outlook:
    """The outlook of a model in a folder, with its head if its settings name one that transformers has."""
    settings = _settings(folder)
    if isinstance(reader.model, LanguageModel):
        return Outlook(reader, "next")
    if isinstance(reader.model, SequenceClassifier):
        return Outlook(reader, "class", labels=tuple(map(str, settings.get("labels", ()))))
    with_head = None if folder is None or settings.get("is_encoder_decoder") else _with_head(reader, folder, settings)
    if with_head is None:
        return Outlook(reader, "states")
    kind, model = with_head
    reader = replace(reader, model=model, run=model)
    if kind == "class":
        named = model.config.id2label
        return Outlook(reader, kind, labels=tuple(str(named[place]) for place in sorted(named)))
    sparing = "logits_to_keep" in inspect.signature(model.forward).parameters
    if kind == "next":
        return Outlook(reader, kind, sparing=sparing)
    text = _mask_text(folder) if folder is not None else ""
    ids = reader.encode(text) if text else []
    return Outlook(reader, kind, mask=ids[0] if len(ids) == 1 else None, mask_text=text if len(ids) == 1 else "")


def _settings(folder: Path | None, name: str = "config.json") -> dict[str, Any]:
    try:
        read = json.loads((folder / name).read_text("utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _with_head(reader: Reader, folder: Path, settings: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The model with its head: the class that the settings name, from the base model's module, with its weights."""
    from clearhead.bridges import swap

    named = settings.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    kind = next((kind for end, kind in _HEADS.items() if name.endswith(end)), None)
    made: Any = getattr(sys.modules[type(reader.model).__module__], name, None)
    if kind is None or not isinstance(made, type) or not issubclass(made, nn.Module):
        return None
    load: Callable[..., Any] = made.from_pretrained  # type: ignore[attr-defined]
    try:
        model = load(str(folder), use_safetensors=True, local_files_only=True).eval()
        swap(model)
    except ClearheadError:
        raise
    except Exception:
        # Without a readable head, the base model is used.
        return None
    return kind, model


def _mask_text(folder: Path) -> str:
    """The text of the mask token, from the tokenizer's settings."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _settings(folder, name).get("mask_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return ""


def _states(output: Any) -> Tensor:
    first = output if isinstance(output, Tensor) else output[0]
    assert isinstance(first, Tensor)
    return first


def read_out(
    outlook: Outlook,
    words: Callable[[list[int]], list[str]],
    ids: Sequence[int],
    place: int,
    before: Tensor,
    edited: Tensor | None,
) -> dict[str, Any]:
    """The outputs of two runs side by side, for the page; ``edited`` is None for a single run."""
    texts = words(list(ids))
    if outlook.kind == "states":
        return {"kind": "states", **_moved_states(texts, before, edited)}
    moved = None if edited is None else float((edited - before).abs().sum() / 2)
    if outlook.kind == "class":
        shown = list(range(min(len(before), _MOST_CLASSES)))
        names = [outlook.labels[each] if each < len(outlook.labels) else str(each) for each in shown]
    else:
        runs = [before] if edited is None else [before, edited]
        shown = list(dict.fromkeys(each for run in runs for each in run.topk(min(_TOP, len(run))).indices.tolist()))
        names = words(shown)
    rows = [
        {"text": name, "before": float(before[each]), "after": None if edited is None else float(edited[each])}
        for name, each in zip(names, shown, strict=True)
    ]
    facts = {"kind": outlook.kind, "moved": moved, "rows": rows}
    return facts if outlook.kind == "class" else facts | {"place": place, "at": texts[place]}


def _moved_states(texts: Sequence[str], before: Tensor, edited: Tensor | None) -> dict[str, Any]:
    """The relative change of each token's last hidden state."""
    if edited is None:
        return {"moved": None, "rows": []}
    far = (edited - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)
    whole = float((edited - before).norm() / before.norm().clamp(min=1e-30))
    most = far.topk(min(_TOP, len(far))).indices.tolist()
    return {"moved": whole, "rows": [{"text": texts[each], "place": each, "moved": float(far[each])} for each in most]}
