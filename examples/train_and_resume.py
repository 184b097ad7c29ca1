"""Train a classifier and a language model, kill both runs, resume them, and compare with runs that were never killed.

    pip install "clearhead[train]"
    python examples/train_and_resume.py

The script writes its own data, trains at the command line and by the Python API, and sends SIGKILL to running
processes. It needs no network.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUBJECTS = ("film", "story", "song", "meal", "walk", "game")
WORDS = {"good": ("warm", "clever", "fine", "bright"), "poor": ("cold", "dull", "silly", "grey")}
FIGURES = ("held_out", "best_step", "steps")


def write_table(path: Path, rows: int = 120) -> None:
    """A table with the columns ``label`` and ``text``."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["label", "text"])
        for row in range(rows):
            label = ("good", "poor")[row % 2]
            table.writerow([label, f"a {draw.choice(WORDS[label])} {draw.choice(SUBJECTS)} ."])


def write_text(path: Path, lines: int = 120) -> None:
    """A text for the language model."""
    draw = random.Random(0)
    moods = [mood for words in WORDS.values() for mood in words]
    sentences = (f"The {draw.choice(SUBJECTS)} was {draw.choice(moods)}.\n" for _ in range(lines))
    path.write_text("".join(sentences), encoding="utf-8")


def command(task: str, data: Path, out: Path, *more: str) -> list[str]:
    """The command line of a small run."""
    words = [sys.executable, "-m", "clearhead", "train", task, "--data", str(data), "--out", str(out)]
    words += ["--embed-dim", "32", "--num-heads", "2", "--num-layers", "1", "--checkpoint-every", "5"]
    if task == "classify":
        return [*words, "--epochs", "6", "--batch-size", "4", "--patience", "99", *more]
    return [*words, "--steps", "300", "--context", "16", "--eval-every", "50", *more]


def train(task: str, data: Path, out: Path, *more: str) -> None:
    """Train to the end."""
    subprocess.run(command(task, data, out, *more), check=True, capture_output=True)


def kill_after_a_checkpoint(task: str, data: Path, out: Path) -> int:
    """Start a run, and kill it with SIGKILL when it has written a checkpoint; the step of that checkpoint."""
    from safetensors import safe_open

    checkpoint = out / "checkpoint" / "last.safetensors"
    process = subprocess.Popen(command(task, data, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (out / "metrics.json").exists(), "the run ended before it was killed"
    with safe_open(checkpoint, framework="pt") as file:
        return int(json.loads(file.metadata()["place"])["step"])


def compare(task: str, folder: Path, data: Path) -> None:
    """One run to its end, another one killed and resumed: the same figures and the same bytes of weights."""
    whole, killed = folder / f"{task}-whole", folder / f"{task}-killed"
    train(task, data, whole)
    step = kill_after_a_checkpoint(task, data, killed)
    train(task, data, killed, "--resume")

    figures = [json.loads((run / "metrics.json").read_text()) for run in (whole, killed)]
    assert all(figures[0][name] == figures[1][name] for name in FIGURES)
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    held_out = ", ".join(f"{name} {value:.4g}" for name, value in figures[0]["held_out"].items())
    print(f"{task}: killed after the checkpoint of step {step}, of {figures[0]['steps']}, and resumed")
    print(f"  {held_out}; the weights are equal in every byte")


class Stop(Exception):
    """Ends a training from outside."""


class StopAfter:
    """A watcher of training that raises ``Stop`` at a step, as an interrupt would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, shown: Any) -> None:
        if shown.step == self.step:
            raise Stop

    def said(self, line: str) -> None:
        """Called with each evaluation; prints nothing."""

    def closed(self) -> None:
        """Called when training ends."""


def compare_by_api(folder: Path, data: Path) -> None:
    """The same by the Python API: ``resume=True`` continues a run folder."""
    from clearhead.train import ClassifierOptions, load_run, train_text_classifier

    options = ClassifierOptions(
        embed_dim=32, num_heads=2, num_layers=1, epochs=4, batch_size=8, patience=99, checkpoint_every=5
    )
    whole = train_text_classifier(data, out=folder / "api-whole", options=options)
    with suppress(Stop):
        train_text_classifier(data, out=folder / "api-stopped", options=options, watcher=StopAfter(17))
    resumed = train_text_classifier(data, out=folder / "api-stopped", options=options, resume=True)
    assert all(resumed[name] == whole[name] for name in FIGURES)

    run = load_run(folder / "api-stopped")
    (label, chances), *_ = run.predict(["a clever walk ."])
    print(f"Python API: stopped at step 17 of {whole['steps']}, resumed: the same held-out figures")
    print(f"  predict: {label}, {dict(zip(run.labels, (round(chance, 3) for chance in chances), strict=True))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and resume two trainings.")
    parser.add_argument("--quick", action="store_true", help="stop and resume by the Python API alone")
    quick = parser.parse_args().quick
    missing = [name for name in ("tokenizers", "safetensors", "tensorboard") if find_spec(name) is None]
    if missing:
        print(f"skipped: needs the extra 'train' ({', '.join(missing)}): pip install 'clearhead[train]'")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "table.csv")
        if not quick:
            compare("classify", folder, folder / "table.csv")
            write_text(folder / "text.txt")
            compare("lm", folder, folder / "text.txt")
        compare_by_api(folder, folder / "table.csv")


if __name__ == "__main__":
    main()
