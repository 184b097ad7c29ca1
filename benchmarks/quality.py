"""Train the models whose quality benchmarks/RESULTS.md states, with default options and three seeds.

    make quality                        every model
    make quality ARGS="--only trec"     one of trec, mr, shakespeare
    make quality ARGS="--write"         and put the section into benchmarks/RESULTS.md

The data are not part of the project: they are looked for in ../shared/data beside the checkout, or in the
folder that CLEARHEAD_DATA names. Finished runs in --runs are kept and not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
START, END = "<!-- quality: begin -->", "<!-- quality: end -->"


@dataclass(frozen=True)
class Trial:
    """One model: its training command, the key of its figure in metrics.json, and the required figure."""

    title: str
    command: tuple[str, ...]
    part: str
    number: str
    wanted: float
    larger_is_better: bool
    compared: str


TRIALS = {
    "trec": Trial(
        "TREC questions, 6 classes, test accuracy",
        ("train", "classify", "--data", "trec-train.csv", "--test", "trec-test.csv"),
        "test",
        "accuracy",
        0.885,
        True,
        "0.912 (Kim 2014, CNN-rand)",
    ),
    "mr": Trial(
        "Movie reviews, 2 classes, test accuracy",
        ("train", "classify", "--data", "mr-train.csv", "--test", "mr-test.csv"),
        "test",
        "accuracy",
        0.765,
        True,
        "0.761 (Kim 2014, CNN-rand, cross-validated)",
    ),
    "shakespeare": Trial(
        "tinyshakespeare by characters, loss on the last tenth",
        (
            *("train", "lm", "--data", "tinyshakespeare.txt", "--num-layers", "4", "--num-heads", "4"),
            *("--embed-dim", "128", "--context", "64", "--batch-size", "12", "--steps", "2000", "--dropout", "0"),
        ),
        "held_out",
        "loss",
        1.88,
        False,
        "1.88 (nanoGPT's README, same setting)",
    ),
}


def data_folder() -> Path:
    """The folder of the data."""
    named = os.environ.get("CLEARHEAD_DATA")
    folder = Path(named) if named else HERE.parent.parent / "shared" / "data"
    if not folder.is_dir():
        sys.exit(f"quality: {folder} must hold the data; got no such folder. Set CLEARHEAD_DATA.")
    return folder


def trained(trial: Trial, name: str, seed: int, runs: Path, data: Path) -> tuple[float, float]:
    """The figure and the seconds of one run, which is trained unless its folder exists."""
    out = runs.resolve() / f"{name}-{seed}"
    program = "import sys; from clearhead.cli.app import main; sys.argv[0] = 'clearhead'; main()"
    words = [*trial.command, "--seed", str(seed), "--out", str(out), "--resume"]
    subprocess.run([sys.executable, "-c", program, *words], cwd=data, check=True)
    metrics = json.loads((out / "metrics.json").read_text())
    return metrics[trial.part][trial.number], metrics["seconds"]


def row(trial: Trial, results: list[tuple[float, float]]) -> str:
    """One line of the table."""
    figures = [figure for figure, _ in results]
    middle = statistics.median(figures)
    met = middle >= trial.wanted if trial.larger_is_better else middle <= trial.wanted
    relation = "at least" if trial.larger_is_better else "at most"
    seconds = statistics.median(seconds for _, seconds in results)
    each = ", ".join(f"{figure:.4f}" for figure in figures)
    wanted = f"{relation} {trial.wanted}: {'met' if met else 'not met'}"
    spread = max(figures) - min(figures)
    return (
        f"| {trial.title} | **{middle:.4f}** | {each} | {spread:.4f} | {seconds:.0f} s | {wanted} | {trial.compared} |"
    )


def section(rows: list[str], names: list[str], seeds: list[int]) -> str:
    """The Markdown section."""
    cores = os.cpu_count()
    lines = [
        START,
        "## Quality of models trained from scratch",
        "",
        "No pretrained vectors, one model, the same default options for every table. Options were chosen by",
        "cross-validation within the training files. The test files were read for the figures below, and TREC's once",
        "before, for an earlier default whose early stop came too soon (median 0.872).",
        f"Seeds {', '.join(map(str, seeds))}; torch {torch.__version__}, {torch.get_num_threads()} of {cores}",
        f"{platform.machine()} cores used. Time is that of training and evaluating one model.",
        "",
        "| data and figure | median | each seed | spread | time | wanted | for comparison |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Made by `make quality ARGS=--write`, which runs for each seed:",
        "",
        "```sh",
        *(f"clearhead {' '.join(TRIALS[name].command)} --seed N --out {name}-N" for name in names),
        "```",
        END,
    ]
    return "\n".join(lines)


def write_section(path: Path, text: str) -> None:
    """Write the section into RESULTS.md, in place of the old one."""
    old = path.read_text() if path.exists() else "# Results\n"
    before, marker, rest = old.partition(START)
    tail = rest.partition(END)[2] if marker else ""
    path.write_text(before.rstrip("\n") + "\n\n" + text + (tail or "\n"))


def main() -> None:
    """Train, print the section, and write it if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=TRIALS, action="append", help="train only this model; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "quality", help="folder of the runs")
    parser.add_argument("--write", action="store_true", help="put the section into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    names = arguments.only or list(TRIALS)
    data = data_folder()
    rows = [
        row(TRIALS[name], [trained(TRIALS[name], name, seed, arguments.runs, data) for seed in arguments.seeds])
        for name in names
    ]
    text = section(rows, names, arguments.seeds)
    print(text)
    if arguments.write:
        write_section(HERE / "RESULTS.md", text)


if __name__ == "__main__":
    main()
