"""``make wheel``: what a wheel must be, and that one built here computes without the checkout."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import clearhead
from clearhead.ops import binary
from tests.agreement import needs_native

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "clearhead-0.1.0-py3-none-manylinux_2_27_x86_64.whl"

#: Imports from a folder alone, where an editable install would come first, and computes by the kernels.
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "clearhead" not in type(finder).__module__]
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path != sys.argv[2])]
import torch, clearhead
assert clearhead.__file__.startswith(sys.argv[1]), clearhead.__file__
x = torch.randn(2, 4, 50, 16)
output = clearhead.attention(x, x, x, mask=clearhead.Causal(), backend="native")
torch.testing.assert_close(output, clearhead.attention(x, x, x, mask=clearhead.Causal(), backend="reference"))
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "build_wheel.py"
    spec = importlib.util.spec_from_file_location("build_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, name: str, *files: str) -> Path:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
    return folder / name


def test_wheel_with_the_kernels_passes(tool: ModuleType, tmp_path: Path) -> None:
    tool.check(written(tmp_path, WHEEL, "clearhead/__init__.py", tool.LIBRARY), "x86_64")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("clearhead-0.1.0-cp311-cp311-manylinux_2_27_x86_64.whl", "must be for every Python 3"),
        ("clearhead-0.1.0-py3-none-linux_x86_64.whl", "must be a manylinux wheel for x86_64"),
        ("clearhead-0.1.0-py3-none-manylinux_2_27_aarch64.whl", "must be a manylinux wheel for x86_64"),
        ("clearhead-0.1.0-py3-none-any.whl", "must be a manylinux wheel for x86_64"),
        ("clearhead-0.1.0-py3-none-manylinux_2_34_x86_64.whl", "must load with glibc 2.28; it needs 2.34"),
    ],
)
def test_other_tags_are_refused(tool: ModuleType, tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(tool.WheelError, match=reason):
        tool.check(written(tmp_path, name, tool.LIBRARY), "x86_64")


def test_wheel_without_kernels_or_with_another_library_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(tool.WheelError, match="must hold clearhead/_native"):
        tool.check(written(tmp_path, WHEEL, "clearhead/__init__.py"), "x86_64")
    with pytest.raises(tool.WheelError, match=r"no other library; got clearhead\.libs/libgomp\.so\.1"):
        tool.check(written(tmp_path, WHEEL, tool.LIBRARY, "clearhead.libs/libgomp.so.1"), "x86_64")


def test_given_wheel_is_checked_and_none_is_built(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[Path, str]] = []
    monkeypatch.setattr(tool, "make", lambda machine: pytest.fail("a wheel is built"))
    monkeypatch.setattr(tool, "try_fresh", lambda *arguments: pytest.fail("an environment is made"))
    monkeypatch.setattr(tool, "try_existing", lambda wheel, python: tried.append((wheel, python)))
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    wheel = written(tmp_path, WHEEL, tool.LIBRARY)
    tool.main(["--wheel", str(wheel), "--existing", "python-of-it"])
    assert tried == [(wheel, "python-of-it")]
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--wheel", str(written(tmp_path, WHEEL)), "--existing", "python-of-it"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("wheel: clearhead-0.1.0-py3-none-manylinux_2_27_x86_64.whl must hold")


@needs_native
def test_library_asks_for_nothing_newer_than_a_wheel_may(tool: ModuleType) -> None:
    """The library in place is built as a wheel's is, from the same sources."""
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs the extra dev, for auditwheel")
    if not binary.PATH.is_file() or not Path("/proc/self/exe").exists():
        pytest.skip("there is no ELF library in place")
    with binary.PATH.open("rb") as file:
        needed = elffile.ELFFile(file).get_section_by_name(".gnu.version_r")
        names = [auxiliary.name for _, auxiliaries in needed.iter_versions() for auxiliary in auxiliaries]
    newest = tool.NEWEST_VERSIONS
    of_kind = [(name, *name.rpartition("_")[::2]) for name in names]
    newer = [name for name, kind, number in of_kind if kind in newest and _numbers(number) > newest[kind]]
    assert {kind for _, kind, _ in of_kind} >= {"GLIBC", "CXXABI"}
    assert not newer


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.slow
def test_wheel_built_here_computes_without_the_checkout(tool: ModuleType, tmp_path: Path) -> None:
    for package in ("build", "auditwheel"):
        pytest.importorskip(package, reason="needs the extra dev")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no compiler is here")
    try:
        raw = tool.build(platform.machine())
    except subprocess.CalledProcessError as failure:
        if "Could not find a version" in failure.stdout:
            pytest.skip("the build backend cannot be fetched without a network")
        raise
    tool.audit(raw, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    tool.check(wheel, platform.machine())
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    source = str(Path(clearhead.__file__).resolve().parent.parent)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "site"), source]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
