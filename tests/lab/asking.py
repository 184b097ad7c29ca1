"""Small model folders, and the jobs of the tab "Your model" run without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from clearhead.lab import works
from clearhead.lab.limits import Limits
from clearhead.lab.views import Views
from tests.lab.folders import bert, classifier_run, gpt2, language_run
from tests.lab.running import Ticketless

PLAY, FILMS, BERT, GPT2, BARE, CLASSES = range(1, 7)
TEXT = {
    PLAY: "Speak, sp",
    FILMS: "a fine film",
    BERT: "a [MASK] film and it",
    GPT2: "a fine film",
    BARE: "a dull play",
    CLASSES: "a dull play",
}


def model_folders(home: Path) -> list[Path]:
    """One folder of each kind, in the order of their numbers."""
    return [
        language_run(home),
        classifier_run(home),
        bert(home),
        gpt2(home),
        bert(home, "BertModel"),
        bert(home, "BertForSequenceClassification", num_labels=3, id2label={0: "good", 1: "bad", 2: "odd"}),
    ]


class Asking:
    """The jobs of all tabs, requested as by the page but without a server."""

    def __init__(self, folders: list[Path], limits: Limits | None = None) -> None:
        limits = limits or Limits(models=8)
        self.views = Views(limits)
        self.works = {work.name: work for work in works.works_of(folders, self.views, limits)}

    def __call__(self, name: str, **params: Any) -> Any:
        result = self.works[name].run(params, Ticketless())
        return json.loads(json.dumps(result, allow_nan=False))

    def page(self, name: str) -> Any:
        html = self.views.get(name)
        assert html is not None
        match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html.decode())
        assert match is not None
        return json.loads(match[1])
