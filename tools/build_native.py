"""Build the CPU kernels into the source tree, only what changed: `make native`, and part of `make setup`.

Exits with status 2 where the build fails, and with 3 where there is no compiler. In both cases clearhead works
without the kernels, only slower; `clearhead doctor` reports it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "native"
BIN = ROOT / ".venv" / "bin"
FAILED, NO_TOOLS = 2, 3
#: CMake options of each form; the build folder has its name.
FORMS = {
    "native": ["-DCLEARHEAD_IN_PLACE=ON"],
    "tests": ["-DCLEARHEAD_TESTS=ON"],
    "emulated": ["-DCLEARHEAD_TESTS=ON", "-DCLEARHEAD_EMULATED=amx;avx512bf16;avx512vnni;avx512"],
    "arm": ["-DCLEARHEAD_TESTS=ON", f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'tests' / 'aarch64.cmake'}"],
}
CROSS_COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")


def main() -> None:
    options = _options()
    cmake = tool_path("cmake")
    if cmake is None:
        _stop(NO_TOOLS, "CMake is not here, so the CPU kernels are not built. Install cmake and run make native.")
    if options.form == "arm" and not (tool_path(CROSS_COMPILER) and any(map(tool_path, EMULATORS))):
        packages = "g++-aarch64-linux-gnu and qemu-user-static"
        _stop(NO_TOOLS, f"{CROSS_COMPILER} or {EMULATORS[0]} is not here. Install {packages}.")
    if not any(map(tool_path, (os.environ.get("CXX"), "c++", "g++", "clang++"))):
        _stop(NO_TOOLS, "No C++ compiler is here, so the CPU kernels are not built. Install g++ and run make native.")
    build = ROOT / "build" / options.form
    try:
        if not _configured(build):
            shutil.rmtree(build, ignore_errors=True)
            _run(cmake, "--log-level=NOTICE", "-S", SOURCE, "-B", build, *_generator(), *FORMS[options.form])
        _run(cmake, "--build", build)
    except subprocess.CalledProcessError:
        _stop(FAILED, "The CPU kernels could not be built; the compiler's words are above.")
    if options.form != "native" and subprocess.run([cmake, "--build", build, "--target", "check"]).returncode != 0:
        _stop(FAILED, "The kernels' own tests failed; their words are above.")


def _configured(build: Path) -> bool:
    """Whether CMake has configured this folder before, for this checkout; a moved checkout starts again."""
    cache = build / "CMakeCache.txt"
    finished = (build / "build.ninja").exists() or (build / "Makefile").exists()
    return finished and cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={SOURCE}\n" in cache.read_text()


def _generator() -> list[str]:
    ninja = tool_path("ninja")
    return [] if ninja is None else ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]


def tool_path(name: str | None) -> str | None:
    """Path of a command: on the path, or in .venv."""
    if not name:
        return None
    return shutil.which(name) or shutil.which(name, path=str(BIN))


def _run(*command: str | Path) -> None:
    """Run a command, whose output is the user's to see: a build takes minutes, and says how far it is."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the CPU kernels into the source tree.")
    form = parser.add_mutually_exclusive_group()
    form.set_defaults(form="native")
    for name, what in (
        ("tests", "build and run the kernels' own tests, with sanitizers"),
        ("emulated", "the tests of the kernels for AVX-512, in plain C++, on any processor"),
        ("arm", f"the tests of the kernels for ARM, with {CROSS_COMPILER} and {EMULATORS[0]}"),
    ):
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=what)
    return parser.parse_args(arguments)


def _stop(code: int, line: str) -> NoReturn:
    print(f"native: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
