"""Run the operator and bridge tests over pairs of torch and transformers releases: ``make matrix``.

Each release is installed into a folder of ``build/matrix`` that its pairs share, and each pair has a virtual
environment that lists its folders. All pairs load the same compiled kernels, as one wheel must serve them all.
A pair that passed or failed on the same files is not run twice. Exits with 1 if a pair failed, and with 2 if one could
not be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "matrix"
RESULTS = FOLDER / "results.json"
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRANSFORMERS = ("4.57.6", "5.20.0", "5.23.0", "5.24.0")
#: Further requirements of every pair: the dependencies of clearhead and of the tests.
SHARED = ("numpy", "typer", "rich", "hypothesis", "pytest", "pytest-xdist")
#: The tests of a pair; those that are missing from this checkout are left out.
TESTS = (
    "tests/ops",
    "tests/test_torch_op.py",
    "tests/bridges",
    "tests/net",
    "tests/test_import.py",
    # Builds of torch for CUDA bring the Triton that interprets the kernels.
    "tests/backends/test_triton.py",
)
PASSED, FAILED, NOT_INSTALLED = "passed", "failed", "not installed"
#: Exit codes.
TESTS_FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130


class InstallError(Exception):
    """A release or an environment that could not be installed; the message is one line."""


@dataclass(frozen=True)
class Pair:
    """A release of torch and one of transformers."""

    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-transformers-{self.transformers}"

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"


@dataclass(frozen=True)
class Result:
    """How the tests of a pair ended.

    Attributes:
        outcome: "passed", "failed" or "not installed".
        summary: pytest's last line, or why the pair could not be installed.
        state: a digest of the files, with the tests that ran on them.
    """

    outcome: str
    summary: str
    state: str


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    try:
        pairs = [pair for pair in all_pairs() if _wanted(pair, options.only)]
        results = run_pairs(pairs, options)
    except ValueError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        _stop(
            "matrix: interrupted. The outcomes so far are recorded; the same command goes on from there.", INTERRUPTED
        )
    outcomes = {result.outcome for result in results.values()}
    if not options.list and outcomes & {FAILED, NOT_INSTALLED}:
        sys.exit(TESTS_FAILED if FAILED in outcomes else CANNOT_RUN)


def run_pairs(pairs: Sequence[Pair], options: argparse.Namespace) -> dict[str, Result]:
    """Run the pairs without a current result, record each and print the table; the results of ``pairs``."""
    tests = options.tests or [name for name in TESTS if (ROOT / name).exists()]
    state = " ".join((fingerprint(), *tests, options.marked))
    results = _read_results()
    for pair in pairs if not options.list else ():
        recorded = results.get(pair.name)
        if options.rerun or recorded is None or recorded.state != state or recorded.outcome == NOT_INSTALLED:
            results[pair.name] = try_pair(pair, tests, options.marked, state)
            _write_results(results)
    print(table({pair: results.get(pair.name) for pair in pairs}, state))
    return {pair.name: results[pair.name] for pair in pairs if pair.name in results}


def all_pairs() -> list[Pair]:
    """Every pair, oldest first.

    >>> len(all_pairs()), all_pairs()[0].name
    (20, 'torch-2.11.0-transformers-4.57.6')
    """
    return [Pair(*releases) for releases in product(TORCH, TRANSFORMERS)]


def try_pair(pair: Pair, tests: Sequence[str], marked: str, state: str) -> Result:
    """Install what is missing for a pair and run its tests."""
    try:
        make_environment(pair)
    except InstallError as error:
        return Result(NOT_INSTALLED, str(error), state)
    _say(f"{pair.name}: running {' '.join(tests)}")
    command = [str(pair.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "-m", marked, *tests]
    with pair.log.open("w", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=log, stderr=subprocess.STDOUT)
    summary = _last_line(pair.log).strip("= ")
    if done.returncode == 0:
        return Result(PASSED, summary, state)
    return Result(FAILED, f"{summary}; see {pair.log.relative_to(ROOT)}", state)


def make_environment(pair: Pair) -> None:
    """Make the environment of a pair unless it is there, and check that it imports the pair's releases."""
    folders = [
        install("shared", [SHARED], "--constraint", str(ROOT / "constraints.txt")),
        install(f"transformers-{pair.transformers}", [(f"transformers=={pair.transformers}",)]),
        # The CPU build where the index has one; the ordinary wheel on Linux brings several GB of CUDA libraries.
        install(f"torch-{pair.torch}", [(f"torch=={pair.torch}+cpu",), (f"torch=={pair.torch}",)]),
        ROOT / "src",
    ]
    environment = FOLDER / pair.name
    if not pair.python.exists():
        _run(f"making the environment {pair.name}", sys.executable, "-m", "venv", "--without-pip", str(environment))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "matrix.pth").write_text("\n".join(map(str, folders)) + "\n", encoding="utf-8")
    check = "import clearhead, torch, transformers as t; print(torch.__version__.partition('+')[0], t.__version__)"
    output = _run(f"importing {pair.name}", str(pair.python), "-c", check).strip().rpartition("\n")[2]
    if output != f"{pair.torch} {pair.transformers}":
        raise InstallError(f"{pair.name}: the environment must import these releases; got {output}")


def install(name: str, choices: Sequence[Sequence[str]], *options: str) -> Path:
    """The folder of some requirements, after installing the first of ``choices`` that the index has."""
    folder = FOLDER / name
    ready = folder / ".ready"
    if ready.exists():
        return folder
    for attempt, requirements in enumerate(choices, 1):
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--target", str(folder), *options]
        try:
            _run(f"installing {' '.join(requirements)}", *pip, *requirements)
            break
        except InstallError:
            if attempt == len(choices):
                raise
    ready.touch()
    return folder


def fingerprint() -> str:
    """A digest of the files that a result depends on: those of the checkout and the compiled kernels."""
    digest = hashlib.sha256()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src", "tests", "tools/matrix.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    for path in sorted([*paths, *(ROOT / "src" / "clearhead" / "_native").glob("*.so")]):
        if path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def table(results: dict[Pair, Result | None], state: str) -> str:
    """The outcomes, one line per pair.

    >>> print(table({Pair("2.11.0", "5.24.0"): Result("passed", "9 passed", "x"), Pair("2.12.1", "5.24.0"): None}, "x"))
    torch   transformers  outcome
    2.11.0  5.24.0        passed   9 passed
    2.12.1  5.24.0        not run
    """
    lines = ["torch   transformers  outcome"]
    for pair, result in results.items():
        text = "not run" if result is None else f"{result.outcome:<8} {result.summary}"
        stale = " (before the last change)" if result is not None and result.state != state else ""
        lines.append(f"{pair.torch:<7} {pair.transformers:<13} {text}{stale}")
    return "\n".join(lines)


def _wanted(pair: Pair, only: str | None) -> bool:
    """Whether ``only``, such as ``torch=2.11.0,transformers=4.57.6``, names the pair.

    >>> _wanted(Pair("2.11.0", "5.24.0"), "torch=2.11.0"), _wanted(Pair("2.11.0", "5.24.0"), "transformers=4.57.6")
    (True, False)
    """
    releases = {"torch": TORCH, "transformers": TRANSFORMERS}
    for part in only.split(",") if only else []:
        package, _, release = part.partition("=")
        if release not in releases.get(package, ()):
            listed = "; ".join(f"{name}={', '.join(have)}" for name, have in releases.items())
            raise ValueError(f"matrix: --only must name releases of the matrix; got {part!r}. It has {listed}.")
        if getattr(pair, package) != release:
            return False
    return True


def _read_results() -> dict[str, Result]:
    try:
        read = json.loads(RESULTS.read_text(encoding="utf-8"))
        return {name: Result(**result) for name, result in read.items()}
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _write_results(results: dict[str, Result]) -> None:
    text = json.dumps({name: asdict(result) for name, result in results.items()}, indent=1)
    with _replacing(RESULTS) as path:
        path.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces ``path`` at the end: an interrupted run leaves the results of the last."""
    written = path.with_suffix(".new")
    yield written
    written.replace(path)


def _run(title: str, *command: str) -> str:
    started = time.monotonic()
    done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "ERROR" in line or "Error" in line]
        raise InstallError(f"{title} failed: {(errors or lines or ['no output'])[-1].strip()}")
    _say(f"{title}: {time.monotonic() - started:.0f} s")
    return done.stdout


def _environment() -> dict[str, str]:
    """This process's variables without those that would add to an environment's path."""
    left_out = ("PYTHONPATH", "PYTHONHOME")
    quiet = {"PYTHONNOUSERSITE": "1", "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | quiet


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the operator and bridge tests over torch and transformers.")
    parser.add_argument("tests", nargs="*", help=f"what pytest runs (default: {' '.join(TESTS)})")
    parser.add_argument("--only", metavar="torch=A,transformers=B", help="run the pairs of one release or of two")
    parser.add_argument("--list", action="store_true", help="print the recorded outcomes and run nothing")
    parser.add_argument("--rerun", action="store_true", help="run pairs whose outcome is recorded for these files, too")
    parser.add_argument("--marked", default="not slow", help="pytest's -m (default: %(default)s)")
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    print(f"matrix: {line}", flush=True)


def _stop(line: str, code: int = CANNOT_RUN) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
