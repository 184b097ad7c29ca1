"""Insert faults into a copy of the library, one at a time, and check that the tests catch each.

The faults are records in ``tools/seeded_faults.toml``: a name, a file, the exact text, its replacement, and the tests
that must fail. The checkout is not touched. Exits with 1 if a fault is missed, with 2 if one could not be tried.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
LIBRARY = Path("src", "clearhead", "_native")
MISSED, NOT_TRIED, INTERRUPTED = 1, 2, 130
#: Time limit in seconds for the tests of one fault; a fault that hangs counts as caught.
LONGEST = 600
#: Instruction sets, widest first, as in native/src/entry.cpp: the name, its word in /proc/cpuinfo, and the vendor whose
#: processors use the next one.
SETS = (
    ("amx", "amx_bf16", None),
    ("avx512bf16", "avx512_bf16", "GenuineIntel"),
    ("avx512vnni", "avx512_vnni", None),
    ("avx512", "avx512f", None),
    ("avxvnni", "avx_vnni", None),
    ("avx2", "avx2", None),
)
#: Sets with linear layers on integers alone, and the one whose other kernels they share.
SHARING = {"avx512vnni": "avx512", "avxvnni": "avx2"}
#: pytest's exit codes.
PASSED, FAILED = 0, 1
#: An editable install puts its finder before the path in every new process.
SITE = """
import sys
from importlib.machinery import PathFinder

class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "clearhead":
            return PathFinder.find_spec(name, [{source!r}] if path is None else path)

sys.meta_path.insert(0, Copy)
"""


@dataclass(frozen=True)
class Fault:
    """A record of the table.

    Attributes:
        name: its name in the table.
        file: its path, relative to the root.
        text: the original text, which occurs exactly once.
        replacement: the faulty text.
        tests: pytest arguments, one run per line; at least one of the tests must fail.
        why: the effect on a user.
        sets: instruction sets to build besides this processor's, for tests that compare several.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    why: str
    sets: tuple[str, ...] = ()

    @property
    def compiled(self) -> bool:
        return self.file.startswith("native/")

    def check(self, root: Path) -> None:
        """Raise unless the text occurs in the file exactly once."""
        path = root / self.file
        count = path.read_text().count(self.text) if path.exists() else 0
        if count != 1 or self.text == self.replacement:
            where = f"{count} times in {self.file}" if path.exists() else f"no file {self.file}"
            raise ValueError(f"{self.name}: text must stand once and differ from its replacement; got {where}.")

    def applied(self, root: Path) -> str:
        """The file's text with the fault."""
        return (root / self.file).read_text().replace(self.text, self.replacement)


def complaint(fault: Fault, root: Path = ROOT) -> str:
    """Why the faulty file does not compile; empty if it does, or if it is C++ and no compiler is here.

    Cost: up to half a minute for a header of the kernels.
    """
    if not fault.compiled:
        try:
            compile(fault.applied(root), fault.file, "exec")
        except SyntaxError as error:
            return str(error)
        return ""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return ""
    with TemporaryDirectory(prefix="clearhead-fault-") as folder:
        for part in ("include", "src", "torch"):
            shutil.copytree(root / "native" / part, Path(folder, "native", part))
        Path(folder, fault.file).write_text(fault.applied(root))
        source = fault.file if fault.file.endswith(".cpp") else "native/src/kernels.cpp"
        options = ["-std=gnu++17", "-fsyntax-only", "-DCH_NS=baseline", "-Inative/include", "-Inative/src"]
        done = subprocess.run([compiler, *options, source], cwd=folder, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode != 0 else ""


def faults(table: Path = TABLE) -> list[Fault]:
    """The records of a table."""
    records = tomllib.loads(table.read_text())["fault"]
    lists = ("tests", "sets")
    return [Fault(**record | {name: tuple(record.get(name, ())) for name in lists}) for record in records]


class Copy:
    """A copy of the checkout's files in which faults are tried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        for name in _files():
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE.format(source=str(self.root / "src")))
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), str(self.root / "src"))),
            "OMP_WAIT_POLICY": "passive",
        }
        self._clean = folder / "library"
        self._passes_without_fault: dict[str, bool] = {}
        self._left_out: Sequence[str] | None = None
        if (ROOT / LIBRARY).exists():
            shutil.copytree(ROOT / LIBRARY, self.root / LIBRARY, dirs_exist_ok=True)
        self._check_imported()

    def build(self, sets: Sequence[str] = ()) -> None:
        """Build the copy's kernels for the baseline, this processor's best instruction set and ``sets``; only changed
        files."""
        build, script = self.root / "build" / "native", self.root / "native" / "CMakeLists.txt"
        left_out = [name for name in sets_left_out(_cpuinfo()) if name not in sets]
        if left_out != self._left_out:
            # A fault is also wrong without the later optimizations, which take two thirds of the build time.
            script.write_text(script.read_text().replace(" -O3 ", " -O1 "))
            # A set that was left out before is looked for again.
            options = ["-UCLEARHEAD_HAS_*", *(f"-DCLEARHEAD_HAS_{name}=OFF" for name in left_out)]
            self._run("cmake", "-S", self.root / "native", "-B", build, "-DCLEARHEAD_IN_PLACE=ON", *options)
            self._left_out = left_out
        self._run("cmake", "--build", build, "--parallel", str(os.cpu_count() or 1))

    def keep_library(self) -> None:
        """Save the library without a fault."""
        shutil.rmtree(self._clean, ignore_errors=True)
        shutil.copytree(self.root / LIBRARY, self._clean)

    def restore_library(self) -> None:
        shutil.copytree(self._clean, self.root / LIBRARY, dirs_exist_ok=True)

    def tested(self, line: str) -> tuple[int | None, str]:
        """pytest's exit code on a line of a fault's tests, None past ``LONGEST`` seconds, and what failed."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "not slow")
        command = [sys.executable, "-m", "pytest", *options, *shlex.split(line)]
        try:
            done = self._started(command, LONGEST)
        except subprocess.TimeoutExpired:
            return None, f"no end after {LONGEST} s"
        if done.returncode < 0:
            return done.returncode, f"the tests ended by signal {-done.returncode}"
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return done.returncode, failed[0] if failed else (done.stdout + done.stderr).strip().rpartition("\n")[2]

    def passes(self, line: str) -> bool:
        """Whether a line of tests passes without a fault."""
        if line not in self._passes_without_fault:
            self._passes_without_fault[line] = self.tested(line)[0] == PASSED
        return self._passes_without_fault[line]

    def _check_imported(self) -> None:
        command = [sys.executable, "-c", "import clearhead; print(clearhead.__file__)"]
        path = self._started(command, LONGEST).stdout.strip()
        if not path.startswith(str(self.root)):
            raise ValueError(f"the tests must import the copy in {self.root}; got {path or 'no clearhead'}.")

    def _run(self, *command: str | Path) -> None:
        try:
            done = self._started([str(part) for part in command], LONGEST)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{command[0]} must end within {LONGEST} s.") from None
        if done.returncode != 0:
            raise ValueError(f"{command[0]} failed: {(done.stdout + done.stderr).strip()[-800:]}")

    def _started(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy, in a new process group, which ends with it."""
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return subprocess.CompletedProcess(list(command), process.returncode, said, errors)


def _files() -> list[str]:
    """The checkout's files, including uncommitted ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def sets_left_out(cpuinfo: str) -> list[str]:
    """The instruction sets that this processor does not use: a fault in a header would rebuild them all."""
    words = set(cpuinfo.split())
    used = next((name for name, word, vendor in SETS if word in words and vendor not in words), None)
    return [name for name, _, _ in SETS if used is not None and name not in (used, SHARING.get(used))]


@contextmanager
def _with_fault(copy: Copy, fault: Fault) -> Iterator[None]:
    path = copy.root / fault.file
    before = path.read_text()
    path.write_text(fault.applied(copy.root))
    try:
        if fault.compiled:
            copy.build(fault.sets)
        yield
    finally:
        path.write_text(before)
        if fault.compiled:
            copy.restore_library()


def judged(runs: Sequence[tuple[int | None, str]]) -> tuple[str, str]:
    """``caught``, ``missed`` or ``not tried``, with the reason.

    Args:
        runs: of each run of a fault's tests, pytest's exit code and what it said; all but the last passed.
    """
    code, said = runs[-1]
    if code == PASSED:
        said = "; ".join(said for _, said in runs)
        # Where this processor skips all of the tests, none could have caught it.
        return ("missed" if " passed" in said else "not tried"), said
    if code is not None and code > FAILED:
        return "not tried", f"pytest ended with {code}: {said}"
    return "caught", said


def _tried(copy: Copy, fault: Fault) -> tuple[str, str]:
    """As ``judged``, of one fault."""
    runs = list[tuple[int | None, str]]()
    try:
        with _with_fault(copy, fault):
            for line in fault.tests:
                runs.append(copy.tested(line))
                if runs[-1][0] != PASSED:
                    break
    except ValueError as failure:
        return "not tried", str(failure)
    result, said = judged(runs)
    # Tests that fail without the fault do not catch it.
    if result == "caught" and not copy.passes(line):
        return "not tried", f"without the fault {line} fails too"
    return result, said


def _try_all(chosen: Sequence[Fault]) -> list[str]:
    """Try each fault, and print the result."""
    with TemporaryDirectory(prefix="clearhead-faults-") as folder:
        copy = Copy(Path(folder))
        if any(fault.compiled for fault in chosen):
            _say("building the kernels without a fault")
            copy.build()
        if (copy.root / LIBRARY).exists():
            copy.keep_library()
        results = []
        for place, fault in enumerate(chosen, 1):
            start = time.monotonic()
            result, line = _tried(copy, fault)
            results.append(result)
            _say(f"[{place}/{len(chosen)}] {result}: {fault.name} ({time.monotonic() - start:.0f} s) {line[:200]}")
    return results


def main() -> None:
    options = _options()
    table = faults()
    chosen = [fault for fault in table if not options.only or fault.name in options.only]
    missing = sorted({*options.only} - {fault.name for fault in table})
    if missing:
        _stop(f"--only must name faults of the table; got {', '.join(missing)}. Run with --list.")
    if options.list:
        for fault in chosen:
            print(f"{fault.name}\n    {fault.file}: {fault.why}")
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for fault in chosen:
            fault.check(ROOT)
            if options.check and (line := complaint(fault)):
                raise ValueError(f"{fault.name}: its replacement must compile; got {line[:800]}.")
        if options.check:
            _say(f"{len(chosen)} can be inserted and compile")
            return
        results = _try_all(chosen)
    except KeyboardInterrupt:
        _say("interrupted; nothing is left behind.")
        sys.exit(INTERRUPTED)
    except ValueError as failure:
        _stop(str(failure))
    counts = {result: results.count(result) for result in ("caught", "missed", "not tried")}
    _say(", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit(MISSED if counts["missed"] else NOT_TRIED if counts["not tried"] else 0)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seed faults into a copy of the library and run the tests on each.")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--check", action="store_true", help="only check that each can be inserted and compiles")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault to try; may be repeated")
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    print(f"faults: {line}", flush=True)


def _stop(line: str) -> NoReturn:
    print(f"seeded_faults: {line}", file=sys.stderr)
    sys.exit(NOT_TRIED)


if __name__ == "__main__":
    main()
