"""The project's set-up: consistent pins, a light import, and no CUDA unless requested."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import clearhead

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_file_can_be_imported() -> None:
    """``--doctest-ignore-import-errors`` skips a file with a failed import, and its tests with it."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        with suppress(pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def tool(name: str) -> ModuleType:
    """A fresh copy of a module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_env() -> ModuleType:
    return tool("setup_env")


def requirements(project: dict[str, Any]) -> list[Requirement]:
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups.append(project["build-system"]["requires"])
    listed = [Requirement(line) for group in groups for line in group]
    return [requirement for requirement in listed if requirement.name != "clearhead"]


def test_every_requirement_is_pinned_to_a_version_it_allows(project: dict[str, Any], pins: dict[str, str]) -> None:
    wrong = [
        str(requirement)
        for requirement in requirements(project)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_the_torch_range_includes_the_oldest_and_the_pinned_release(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    (torch,) = [requirement for requirement in requirements(project) if requirement.name == "torch"]
    assert [version for version in ("2.11.0", "2.13.0", "2.13.0+cpu") if version in torch.specifier] == [
        "2.11.0",
        "2.13.0",
        "2.13.0+cpu",
    ]
    assert "2.10.0" not in torch.specifier
    assert pins["torch"] == "2.13.0"


def test_the_pins_name_no_local_build_and_no_place(pins: dict[str, str]) -> None:
    assert [version for version in pins.values() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)] == []


def test_pre_commit_runs_the_pinned_tools(pins: dict[str, str]) -> None:
    named = re.findall(r"\"([\w-]+)==([\w.]+)\"", read(".pre-commit-config.yaml"))
    assert named, "no pinned tool found"
    assert [pins[canonicalize_name(name)] for name, _ in named] == [version for _, version in named]


def test_ci_runs_lint_and_tests_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in lines
    assert lines.index("make lint") < lines.index("make test")


@pytest.mark.parametrize(
    "target",
    [
        "help",
        "setup",
        "native",
        "test-native",
        "test-emulated",
        "test-arm",
        "demo",
        "test",
        "lint",
        "bench",
        "fuzz",
        "quality",
        "wheel",
    ],
)
def test_make_has_the_target_and_says_what_it_does(target: str) -> None:
    assert re.search(rf"(?m)^{target}:.*## \w", read("Makefile"))


def test_the_marker_of_a_typed_package_ships() -> None:
    assert (Path(clearhead.__file__).parent / "py.typed").is_file()


def test_few_statements_keep_a_format_of_their_own() -> None:
    skips = [
        path for path in (ROOT / "src").rglob("*.py") for line in path.open(encoding="utf-8") if "# fmt: skip" in line
    ]
    assert len(skips) < 150


def test_no_file_names_a_place_on_one_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("this copy is not a git checkout, so the tracked files are unknown")
    homes = "|".join(["home", "root", "Users", "work", "tmp", "mnt"])
    place = re.compile(rf"(?<![\w.<*}}$)-])/({homes})/\w|[A-Z]:\\Users")
    violations = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            text = read(name)
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        lines = enumerate(text.splitlines(), start=1)
        violations += [f"{name}:{number}: {line.strip()[:80]}" for number, line in lines if place.search(line)]
    assert violations == []


class TestSetup:
    """tools/setup_env.py decides which torch a machine gets; its commands are recorded, not run."""

    @pytest.fixture
    def machine(self, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        commands: list[list[str]] = []

        def record(title: str, *command: str | Path) -> None:
            commands.append([str(part) for part in command])

        monkeypatch.setattr(setup_env, "run_command", record)
        monkeypatch.setattr(setup_env.sys, "platform", "linux")
        monkeypatch.setattr(setup_env, "has_gpu", lambda: False)
        return commands

    def test_linux_without_a_gpu_gets_the_cpu_build(self, setup_env: ModuleType, machine: list[list[str]]) -> None:
        setup_env.install_torch(None)
        assert [command[-1] for command in machine] == ["torch==2.13.0+cpu"]

    def test_uv_is_asked_where_pip_has_no_cpu_build(
        self, setup_env: ModuleType, machine: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = setup_env.run_command

        def refuse_the_cpu_build(title: str, *command: str | Path) -> None:
            record(title, *command)
            if command[-1] == "torch==2.13.0+cpu":
                raise setup_env.CommandFailed("ERROR: No matching distribution")

        monkeypatch.setattr(setup_env, "run_command", refuse_the_cpu_build)
        setup_env.install_torch(None)
        assert machine[1][-1].startswith("uv==")
        assert {"--torch-backend=cpu", "--no-deps", "torch==2.13.0"} <= set(machine[2])

    def test_cuda_is_never_taken_unasked(
        self,
        setup_env: ModuleType,
        machine: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def refuse(title: str, *command: str | Path) -> None:
            raise setup_env.CommandFailed("no network")

        monkeypatch.setattr(setup_env, "run_command", refuse)
        with pytest.raises(SystemExit) as stopped:
            setup_env.install_torch(None)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert 'make setup TORCH="torch==2.13.0"' in said

    def test_a_gpu_gets_the_ordinary_wheel(
        self, setup_env: ModuleType, machine: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup_env, "has_gpu", lambda: True)
        setup_env.install_torch(None)
        assert [command[-1] for command in machine] == ["torch==2.13.0"]

    @pytest.mark.parametrize(
        ("version", "fits"),
        [("2.11.0", True), ("2.13.0+cpu", True), ("2.14.1+cu130", True), ("2.10.1", False), ("3.0.0", True)],
    )
    def test_installed_torch_in_range_is_not_replaced(self, setup_env: ModuleType, version: str, fits: bool) -> None:
        assert setup_env.fits(version) is fits

    def test_the_pins_pip_obeys_name_the_torch_that_is_kept(
        self, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(setup_env, "PINS", tmp_path / "pins")
        setup_env.write_pins(torch="2.11.0+cpu")
        lines = (tmp_path / "pins").read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith("torch==")] == ["torch==2.11.0+cpu"]
        assert len(lines) == len(read("constraints.txt").splitlines())

    @pytest.mark.parametrize(("compiler", "asks"), [(None, []), ("g++", [["cmake", "ninja"]])])
    def test_cmake_is_brought_only_where_a_compiler_wants_it(
        self,
        compiler: str | None,
        asks: list[list[str]],
        setup_env: ModuleType,
        machine: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(setup_env, "VENV", tmp_path)
        monkeypatch.setattr(setup_env.shutil, "which", lambda name: name if name == compiler else None)
        setup_env.install_cmake()
        assert [command[-2:] for command in machine] == asks


class TestNative:
    """tools/build_native.py: its messages if it cannot build."""

    @pytest.fixture
    def build(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
        module = tool("build_native")
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "SOURCE", tmp_path)
        monkeypatch.setattr(module, "BIN", tmp_path)
        monkeypatch.setattr(sys, "argv", ["build_native.py"])
        monkeypatch.delenv("CXX", raising=False)
        return module

    @pytest.mark.parametrize(
        ("form", "there", "missing"),
        [
            ([], [], "CMake"),
            ([], ["cmake"], "C++ compiler"),
            (["--arm"], ["cmake", "c++"], "g++-aarch64-linux-gnu"),
            (["--arm"], ["cmake", "c++", "aarch64-linux-gnu-g++"], "qemu-user-static"),
        ],
    )
    def test_nothing_to_build_with(
        self,
        form: list[str],
        there: list[str],
        missing: str,
        build: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["build_native.py", *form])
        monkeypatch.setattr(build, "tool_path", lambda name: name if name in there else None)
        with pytest.raises(SystemExit) as stopped:
            build.main()
        assert stopped.value.code == 3
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert missing in said

    def test_a_build_that_fails(self, build: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        if not all(map(build.tool_path, ("cmake", "c++"))):
            pytest.skip("CMake or a compiler is not here")
        (tmp_path / "CMakeLists.txt").write_text("message(FATAL_ERROR no-such-machine)\n", encoding="utf-8")
        with pytest.raises(SystemExit) as stopped:
            build.main()
        assert stopped.value.code == 2
        said = capfd.readouterr().err
        assert "no-such-machine" in said
        assert said.splitlines()[-1].startswith("native: ")

    def test_one_form_at_a_time(
        self, build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["build_native.py", "--emulated", "--arm"])
        with pytest.raises(SystemExit) as stopped:
            build.main()
        assert stopped.value.code == 2
        assert "--arm: not allowed with argument --emulated" in capsys.readouterr().err
