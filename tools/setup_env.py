"""Make .venv and install clearhead into it, without a CUDA download where a CPU build will do.

Run by `make setup`; needs nothing but Python. A torch that fits pyproject.toml is used, first from .venv,
then from the Python that runs this file. Otherwise one is installed; only a machine with a working NVIDIA GPU gets
the CUDA build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
PINS = VENV / "constraints.txt"
READY = VENV / ".ready"
OLDEST_PYTHON = (3, 11)
EXTRAS = "dev"
COMMANDS = {"lint-imports": "import-linter", "mypy": "mypy", "pre-commit": "pre-commit", "ruff": "ruff"}
"""What the Makefile and pre-commit call from .venv/bin, and the package that brings each."""


class CommandFailed(Exception):
    """A command failed; the message is the last line of its output."""


def main() -> None:
    started = time.monotonic()
    options = _options()
    if sys.version_info < OLDEST_PYTHON:
        _stop(
            f"needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
            "Name another: make setup PYTHON=python3.11"
        )
    os.chdir(ROOT)
    READY.unlink(missing_ok=True)
    try:
        make_venv()
        write_pins()
        installed = torch_version(PYTHON)
        if options.torch or not fits(installed):
            install_torch(options.torch)
            installed = torch_version(PYTHON)
            if not fits(installed):
                _stop(f"torch must be {oldest_torch()} or newer; got {installed}. Use make setup TORCH=torch==2.13.0")
        else:
            _say(f"torch {installed} is already installed")
        write_pins(torch=installed)
        install_clearhead()
        install_cmake()
    except CommandFailed as failure:
        _stop(f"{failure}. The whole output is in {LOG.relative_to(ROOT)}.")
    READY.touch()
    _say(f"ready in {time.monotonic() - started:.0f} s")


def make_venv() -> None:
    """Create .venv unless it exists and works; a suitable torch of this Python stays importable in it."""
    if PYTHON.exists() and _quiet(PYTHON, "-c", f"import sys; assert sys.version_info >= {OLDEST_PYTHON}"):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    shares = fits(torch_version(Path(sys.executable)))
    in_venv = sys.prefix != sys.base_prefix
    flags = ["--system-site-packages"] if shares and not in_venv else []
    made = subprocess.run([sys.executable, "-m", "venv", *flags, VENV], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        _stop(
            f"{sys.executable} cannot make a virtual environment. "
            "Install its venv package (on Debian: python3-venv) and run make setup again."
        )
    if shares and in_venv:
        # --system-site-packages would expose the packages of the base Python, not of the current venv.
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        site = Path(_output(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        (site / "parent_environment.pth").write_text("\n".join(sorted(paths)) + "\n", encoding="utf-8")
    _say(f"made .venv with Python {sys.version.split()[0]}")


def install_torch(asked: str | None) -> None:
    """Install the requested torch, or the pinned one: the CPU build without a working GPU."""
    pinned = f"torch=={_pin('torch')}"
    if asked or has_gpu() or not sys.platform.startswith("linux"):
        # Outside Linux the ordinary wheel carries no CUDA.
        run_command(f"installing {asked or pinned}", PYTHON, "-m", "pip", "install", asked or pinned)
        return
    try:
        run_command(f"installing {pinned}, CPU build", PYTHON, "-m", "pip", "install", f"{pinned}+cpu")
        return
    except CommandFailed:
        _say("pip's index has no CPU build; asking uv, which knows where PyTorch keeps it")
    uv = f"uv=={_pin('uv')}"
    try:
        run_command(f"installing {uv}", PYTHON, "-m", "pip", "install", uv)
        # Torch's dependencies come from pip's index, like everything else.
        options = ["--python", str(PYTHON), "--torch-backend=cpu", "--no-deps"]
        run_command(f"installing {pinned}, CPU build", VENV / "bin" / "uv", "pip", "install", *options, pinned)
    except CommandFailed as failure:
        _stop(
            f"no CPU build of {pinned} could be had ({failure}). To take the ordinary wheel, which may bring "
            f'several GB of CUDA: make setup TORCH="{pinned}"'
        )


def write_pins(torch: str | None = None) -> None:
    """Write the pins for pip: those of constraints.txt, but for torch the installed version."""
    line = f"torch=={torch}\n" if torch else ""
    PINS.write_text(re.sub(r"(?m)^torch==.*\n", line, _read("constraints.txt")), encoding="utf-8")


def install_clearhead() -> None:
    """Install the package in place, its pinned dependencies and the development tools."""
    pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--constraint", PINS]
    run_command(f"installing clearhead[{EXTRAS}] and what it needs", *pip, "--editable", f".[{EXTRAS}]")
    # A package of the Python whose torch is used has its command there, not here.
    absent = [package for command, package in COMMANDS.items() if not (VENV / "bin" / command).exists()]
    if absent:
        title = f"installing the commands of {', '.join(absent)}"
        run_command(title, *pip, "--force-reinstall", "--no-deps", *absent)


def install_cmake() -> None:
    """Install CMake and Ninja into .venv where there is a compiler but no CMake."""
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if shutil.which("cmake") or (VENV / "bin" / "cmake").exists() or not any(shutil.which(c) for c in compilers if c):
        return
    try:
        run_command(
            "installing cmake and ninja", PYTHON, "-m", "pip", "install", "--constraint", PINS, "cmake", "ninja"
        )
    except CommandFailed as failure:
        _say(f"no CMake could be had ({failure}), so the CPU kernels will not be built")


def torch_version(python: Path) -> str | None:
    """The version of the torch that `python` imports, or None."""
    try:
        return _output(python, "-c", "import torch; print(torch.__version__)").splitlines()[-1]
    except (CommandFailed, IndexError):
        return None


def fits(version: str | None) -> bool:
    """Whether a version is as new as pyproject.toml asks.

    >>> fits("2.13.0+cpu"), fits("2.11.0"), fits("2.9.1"), fits(None)
    (True, True, False, False)
    """
    return version is not None and _release(version) >= _release(oldest_torch())


def oldest_torch() -> str:
    """The oldest release that pyproject.toml allows, such as ``2.11``."""
    requirement = re.search(r'"torch>=([\d.]+)"', _read("pyproject.toml"))
    assert requirement, "pyproject.toml names torch as torch>=A"
    return requirement[1]


def has_gpu() -> bool:
    """Whether nvidia-smi finds a working GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and _quiet(Path(tool), "-L")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _pin(package: str) -> str:
    match = re.search(rf"(?m)^{package}==(\S+)$", _read("constraints.txt"))
    assert match, f"constraints.txt pins {package}"
    return match[1]


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _quiet(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"{Path(command[0]).name} failed")
    return done.stdout.strip()


def run_command(title: str, *command: str | Path) -> None:
    """Run a command with its output in the log; on a terminal show its latest line and the seconds."""
    started = time.monotonic()
    _say(f"{title} ...")
    # pip reads the first name for build environments up to 25.2, the second from 25.3 on.
    pins = {"PIP_CONSTRAINT": str(PINS), "PIP_BUILD_CONSTRAINT": str(PINS)}
    # The Makefile builds the kernels, so that a change to one is not a new installation.
    kernels = {"SKBUILD_WHEEL_CMAKE": "false"}
    speech = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    surroundings = {**os.environ, **speech, **pins, **kernels}
    lines = []
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=surroundings,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line.strip())
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                shown = f"       {time.monotonic() - started:4.0f} s  {line.strip()}"[:width]
                print(f"\r{shown:<{width}}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if process.returncode != 0:
        raise CommandFailed(_last_error(lines))


def _last_error(lines: list[str]) -> str:
    """The most useful line: a Python error, else an error of pip or uv, else the last line."""
    for kind in (r"\w+Error: .+", r"(?i)^(?:error|×).*", r"^.+"):
        matches = [match[0] for line in lines if (match := re.search(kind, line))]
        if matches:
            return matches[-1].rstrip(".")
    return "the command said nothing"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make .venv and install clearhead into it.")
    parser.add_argument("--torch", metavar="REQUIREMENT", help="install exactly this torch, such as torch==2.12.0")
    return parser.parse_args()


def _say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def _stop(line: str) -> NoReturn:
    print(f"setup: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
