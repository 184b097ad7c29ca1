"""Texts per second of ``observe_corpus``: one process of several threads against as many processes of one thread.

``python benchmarks/corpus.py --ranks 2`` makes a language model and texts of mixed lengths, and times both in turn,
without the start of the processes. It checks that both give the same bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from clearhead.corpus import observe_corpus
from clearhead.distributed.launch import run_ranks
from clearhead.train import LanguageOptions, Silent, train_text_language_model

TEXT = "the key opens the door . the door hides the lamp . the lamp shows the key . "


def timed(model: Path, data: Path) -> tuple[float, dict[str, Any]]:
    """Seconds of one call on this rank, and the summary."""
    begin = time.perf_counter()
    summary = observe_corpus(model, data)
    return time.perf_counter() - begin, summary.to_dict()


def main() -> None:
    """Print the medians and their ratio."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--texts", type=int, default=2000)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(0)
        (folder / "tale.txt").write_text(TEXT * 40)
        sizes = LanguageOptions(steps=1, embed_dim=given.width, num_heads=4, num_layers=4, context=128)
        train_text_language_model(folder / "tale.txt", out=folder / "run", options=sizes, watcher=Silent())
        rows = [json.dumps({"text": (TEXT * 4)[: draw.randrange(1, 257)]}) + "\n" for _ in range(given.texts)]
        (folder / "texts.jsonl").write_text("".join(rows))
        seconds: dict[int, list[float]] = {1: [], given.ranks: []}
        summaries = []
        for _ in range(given.repeats):
            for ranks, times in seconds.items():
                files = (folder / "run", folder / "texts.jsonl")
                # One process is this one: after a fork the kernels compute with one thread.
                torch.set_num_threads(given.ranks)
                results = [timed(*files)] if ranks == 1 else run_ranks(timed, ranks, *files, timeout=3600)
                times.append(max(spent for spent, _ in results))
                summaries += [summary for _, summary in results]
    assert all(summary == summaries[0] for summary in summaries)
    print(f"torch {torch.__version__}, {platform.machine()}, {given.texts} texts, width {given.width}")
    rates = {ranks: given.texts / statistics.median(times) for ranks, times in seconds.items()}
    for ranks, rate in rates.items():
        print(f"{ranks} x {given.ranks // ranks} threads: {rate:.1f} texts/s")
    print(f"ratio {rates[given.ranks] / rates[1]:.2f}")


if __name__ == "__main__":
    main()
