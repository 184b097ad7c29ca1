"""The folder of a corpus: what was asked, what is finished, and the results.

``corpus.json`` says what was asked. ``state/`` has the totals of finished blocks: ``rank-*.json`` of each rank, and
``base.json``, to which a later run adds them. ``texts/`` has the figures of the texts of each block, if they were asked
for. At the end ``summary.json``, ``summary.txt`` and ``texts.jsonl`` replace both.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clearhead.corpus.figures import BlockFigures
from clearhead.corpus.summary import CorpusSummary
from clearhead.corpus.totals import PAIRS, Totals
from clearhead.errors import DataError
from clearhead.observe.head_sums import FIGURES
from clearhead.train.files import check_writable, clear_leftovers, read_json, replacing, write_bytes, write_json
from clearhead.train.lock import one_writer
from clearhead.train.run import versions

__all__ = ["CorpusFolder", "fingerprint"]

#: Files of a model's folder that decide its outputs: weights, configuration, tokenizer.
_MODEL_FILES: Final = frozenset({".safetensors", ".json", ".txt", ".model"})


def fingerprint(folder: Path) -> str:
    """The SHA-256 of the files of a model that decide its outputs."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class CorpusFolder:
    """The paths of one corpus, and what is read from and written to them."""

    path: Path
    function: str

    @property
    def _asked(self) -> Path:
        return self.path / "corpus.json"

    @property
    def summary(self) -> Path:
        """The figures as JSON; exists after the end."""
        return self.path / "summary.json"

    @property
    def texts(self) -> Path:
        """Each text's figures, one JSON object per line; exists after the end if they were asked for."""
        return self.path / "texts.jsonl"

    @contextmanager
    def opened(self, asked: Mapping[str, Any], *, say: Callable[[str], object]) -> Iterator[None]:
        """Hold the folder for one job; raises ``DataError`` if it belongs to another one."""
        check_writable(self.path / "summary.json", function=self.function, argument="--out")
        with one_writer(self.path, function=self.function, say=say):
            if not self._asked.exists():
                self._require_empty()
                write_json(self._asked, {**asked, "versions": versions()})
            if self._same(asked).get("versions") != versions():
                say("versions differ from those at the start, so rounding may differ")
            clear_leftovers(self.path)
            yield

    def _require_empty(self) -> None:
        if any(item.name[0] != "." for item in self.path.iterdir()):
            must, got = "be a new or empty folder", "a folder with other files"
            raise DataError.about(self.function, str(self.path), must=must, got=got, then="Choose another --out.")

    def _same(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked first; raises ``DataError`` if it is not ``asked``."""
        saved = read_json(self._asked, function=self.function)
        if not isinstance(saved, dict):
            saved = {}
        for name, value in asked.items():
            if saved.get(name) != value:
                got = f"{name} {_short(value)} instead of {_short(saved.get(name))}"
                must = "be continued with the same model, data and options"
                then = "Repeat the first command, or choose another --out."
                raise DataError.about(self.function, str(self.path), must=must, got=got, then=then)
        return saved

    def finished(self) -> CorpusSummary | None:
        """The summary if the job has finished, else None."""
        if not self.summary.exists():
            return None
        # A job that was killed at its end leaves this.
        self._clear()
        try:
            return CorpusSummary.from_dict(read_json(self.summary, function=self.function))
        except (TypeError, KeyError, AttributeError) as error:
            raise self._damaged(self.summary) from error

    def resumed(self) -> Totals:
        """The totals of all finished blocks; those of the ranks of an earlier run are added to one file.

        A run that is killed between the two steps leaves ranks' files whose blocks the base has already.
        """
        base_path = self.path / "state" / "base.json"
        base = self._totals(base_path) if base_path.exists() else Totals()
        others = sorted((self.path / "state").glob("rank-*.json"))
        for path in others:
            totals = self._totals(path)
            if set(totals.blocks).isdisjoint(base.blocks):
                base.add(totals)
            elif not set(totals.blocks) <= set(base.blocks):
                raise self._damaged(path)
        if others:
            write_json(base_path, base.to_dict())
            for path in others:
                path.unlink()
        return base

    def _totals(self, path: Path) -> Totals:
        try:
            return Totals.from_dict(read_json(path, function=self.function))
        except (TypeError, KeyError, AttributeError) as error:
            raise self._damaged(path) from error

    def _damaged(self, path: Path) -> DataError:
        must, then = "be what this command wrote", "Remove the folder, and start again."
        return DataError.about(self.function, str(path), must=must, got="something else", then=then)

    def save(self, rank: int, totals: Totals) -> None:
        """Write the totals of the blocks that a rank has finished in this run."""
        write_bytes(self.path / "state" / f"rank-{rank}.json", json.dumps(totals.to_dict()).encode())

    def save_texts(self, index: int, block: BlockFigures) -> None:
        """Write the figures of the texts of a block."""
        lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in _of_texts(block)]
        write_bytes(self._block_texts(index), "".join(lines).encode())

    def _block_texts(self, index: int) -> Path:
        return self.path / "texts" / f"{index:08d}.jsonl"

    def finish(self, summary: CorpusSummary, blocks: Iterable[int], *, per_text: bool) -> None:
        """Write the results; ``summary.json`` comes last, and what was needed to resume is then removed."""
        if per_text:
            with replacing(self.texts) as file:
                for index in blocks:
                    file.write(self._block_texts(index).read_bytes())
        write_bytes(self.path / "summary.txt", f"{summary}\n".encode())
        write_json(self.summary, summary.to_dict())
        self._clear()

    def _clear(self) -> None:
        for name in ("state", "texts"):
            shutil.rmtree(self.path / name, ignore_errors=True)


def _of_texts(block: BlockFigures) -> Iterator[dict[str, Any]]:
    """The means of every text, ready for JSON."""
    for place, text in enumerate(block.texts):
        queries = {name: text.queries - len(text.parts) * (name in PAIRS) for name in FIGURES}
        layers = {
            layer: {
                name: (sums[place, :, index] / max(1, queries[name])).tolist() for index, name in enumerate(FIGURES)
            }
            for layer, sums in block.layers.items()
        }
        yield {"line": text.line, "tokens": text.tokens, "parts": len(text.parts), "layers": layers}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
