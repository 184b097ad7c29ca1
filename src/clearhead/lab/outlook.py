"""What a model says of a text: the next token, a masked one, a class; or, without a head, its last states."""

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
#: What the last part of a class's name in transformers says of its head.
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
        reader: the model, its head included, with the way a text goes into it.
        kind: ``"next"``, ``"mask"``, ``"class"`` or ``"states"``.
        labels: names of classes.
        mask: id of the token that a masked language model fills in, and ``mask_text`` how it is written.
        sparing: whether the model computes only those scores that it is asked for.
    """

    reader: Reader
    kind: str
    labels: tuple[str, ...] = ()
    mask: int | None = None
    mask_text: str = ""
    sparing: bool = False

    def place(self, ids: Sequence[int], wanted: int | None) -> int:
        """The token whose prediction is shown: the one wanted, else the mask's, else the last."""
        if wanted is not None and 0 <= wanted < len(ids):
            return wanted
        masks = [place for place, each in enumerate(ids) if each == self.mask]
        if masks:
            return masks[0]
        # The last token of an encoder is its own mark of the end.
        return len(ids) // 2 if self.kind == "mask" else len(ids) - 1

    def run(self, ids: Tensor, place: int) -> Tensor:
        """Run the model on ``[1, len]``: probabilities ``[n]``, or states ``[len, dim]`` where it has no head."""
        options = {"logits_to_keep": torch.tensor([place])} if self.sparing else {}
        output = self.reader.model(ids, **options)
        if self.kind == "states":
            return _states(output)[0].double()
        logits = output if isinstance(output, Tensor) else output["logits"]
        row = logits[0] if self.kind == "class" else logits[0, 0 if self.sparing else place]
        return row.double().softmax(-1)


def outlook_of(reader: Reader, folder: Path | None) -> Outlook:
    """How the model in a folder is read; with its head, where its settings name one that transformers has."""
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
    """The class that the settings name, from the module that the bare model's class is of, and its weights."""
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
        # A head that cannot be read leaves the model, which can.
        return None
    return kind, model


def _mask_text(folder: Path) -> str:
    """How the mask's token is written, by the tokenizer's settings."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        found = _settings(folder, name).get("mask_token")
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
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
    after: Tensor | None,
) -> dict[str, Any]:
    """What two runs said, side by side, as the page shows it; ``after`` None where there was but one."""
    texts = words(list(ids))
    if outlook.kind == "states":
        return {"kind": "states", **_moved_states(texts, before, after)}
    moved = None if after is None else float((after - before).abs().sum() / 2)
    if outlook.kind == "class":
        shown = list(range(min(len(before), _MOST_CLASSES)))
        names = [outlook.labels[each] if each < len(outlook.labels) else str(each) for each in shown]
    else:
        runs = [before] if after is None else [before, after]
        shown = list(dict.fromkeys(each for run in runs for each in run.topk(min(_TOP, len(run))).indices.tolist()))
        names = words(shown)
    rows = [
        {"text": name, "before": float(before[each]), "after": None if after is None else float(after[each])}
        for name, each in zip(names, shown, strict=True)
    ]
    found = {"kind": outlook.kind, "moved": moved, "rows": rows}
    return found if outlook.kind == "class" else found | {"place": place, "at": texts[place]}


def _moved_states(texts: Sequence[str], before: Tensor, after: Tensor | None) -> dict[str, Any]:
    """How far each token's last state has moved, as a part of its length."""
    if after is None:
        return {"moved": None, "rows": []}
    far = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)
    whole = float((after - before).norm() / before.norm().clamp(min=1e-30))
    most = far.topk(min(_TOP, len(far))).indices.tolist()
    return {"moved": whole, "rows": [{"text": texts[each], "place": each, "moved": float(far[each])} for each in most]}
