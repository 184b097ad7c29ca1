"""The lab's example: a small language model that learns subject-verb agreement in seconds.

It trains on generated sentences with a noun between subject and verb ("the dogs near the cat sleep"), so the model has
to attend past the nearer noun. The task is that of Linzen et al. 2016, "Assessing the ability of LSTMs to learn
syntax-sensitive dependencies", section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from clearhead.errors import DataError
from clearhead.lab.work import Ticket
from clearhead.readers import Reader
from clearhead.train.language import train_language_model
from clearhead.train.options import LanguageOptions
from clearhead.train.progress import Shown

__all__ = ["ABOUT", "NAME", "TEXT", "VOCABULARY", "made", "sentences"]

NAME: Final = "Small example"
ABOUT: Final = "2 layers of 4 heads, trained in seconds on subject-verb agreement"
#: The initial text of the page.
TEXT: Final = "the old birds behind the fox beside the cat"

_NOUNS: Final = (
    ("dog", "dogs"),
    ("cat", "cats"),
    ("bird", "birds"),
    ("child", "children"),
    ("sailor", "sailors"),
    ("fox", "foxes"),
)
_VERBS: Final = (("sleeps", "sleep"), ("sings", "sing"), ("waits", "wait"), ("runs", "run"))
_ADJECTIVES: Final = ("old", "young", "quiet", "red")
_PREPOSITIONS: Final = ("near", "behind", "beside")
_PRONOUNS: Final = ("it", "they")
VOCABULARY: Final = tuple(
    sorted(
        {
            ".",
            "the",
            "and",
            *_PRONOUNS,
            *_PREPOSITIONS,
            *_ADJECTIVES,
            *(word for pair in (*_NOUNS, *_VERBS) for word in pair),
        }
    )
)
_PLACES: Final = {word: place for place, word in enumerate(VOCABULARY)}
_SENTENCES, _HELD_OUT, _SEED = 3000, 200, 3
_OPTIONS: Final = LanguageOptions(
    embed_dim=48, num_heads=4, num_layers=2, context=24, steps=320, batch_size=32, eval_every=320, lr=6e-3,
    device="cpu", seed=_SEED,
)  # fmt: skip


def sentences(count: int, seed: int) -> list[str]:
    """``count`` random sentences from ``seed``."""
    random = np.random.default_rng(seed)

    def noun(number: int) -> str:
        adjective = f"{random.choice(_ADJECTIVES)} " if random.random() < 0.4 else ""
        return f"the {adjective}{_NOUNS[random.integers(len(_NOUNS))][number]}"

    made = []
    for _ in range(count):
        number = int(random.integers(2))
        words = [noun(number)]
        words += [f"{random.choice(_PREPOSITIONS)} {noun(int(random.integers(2)))}" for _ in range(random.integers(3))]
        words.append(_VERBS[random.integers(len(_VERBS))][number])
        if random.random() < 0.4:
            words.append(f"and {_PRONOUNS[number]} {_VERBS[random.integers(len(_VERBS))][number]}")
        made.append(" ".join([*words, "."]))
    return made


class _TicketReporter:
    """Reports the progress of training to a ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def stepped(self, shown: Shown) -> None:
        self._ticket.step(shown.step / shown.steps, f"training the small example, step {shown.step} of {shown.steps}")

    def said(self, line: str) -> None:
        """Do nothing."""

    def closed(self) -> None:
        """Do nothing."""


def made(ticket: Ticket) -> Reader:
    """The trained example.

    Cost: a few seconds on one core.
    """
    parts = (sentences(_SENTENCES, _SEED), sentences(_HELD_OUT, _SEED + 1))
    train, held_out = (torch.tensor(_encode(" ".join(part))) for part in parts)
    trained = train_language_model(
        train, held_out, vocab_size=len(VOCABULARY), options=_OPTIONS, watcher=_TicketReporter(ticket), function="lab"
    )
    model = trained.model
    return Reader(NAME, model, _encode, lambda ids: ids, _words, _OPTIONS.context, model)


def _encode(text: str) -> list[int]:
    words = text.lower().replace(".", " . ").split()
    unknown = sorted({word for word in words if word not in _PLACES})
    if unknown:
        vocabulary = ", ".join(VOCABULARY)
        raise DataError.about(
            "lab",
            "text",
            must=f"have only words in the vocabulary of the small example ({vocabulary})",
            got=", ".join(map(repr, unknown[:5])),
            then="Use those words, or start the lab with a model folder.",
        )
    return [_PLACES[word] for word in words]


def _words(ids: Sequence[int]) -> list[str]:
    return [VOCABULARY[identity] for identity in ids]
