"""``ch.accelerate``: when it holds, how it is undone, and ``clearhead run``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import clearhead as ch
from clearhead import testing
from clearhead.cli.app import app
from clearhead.integrations import accelerate as module
from clearhead.ops import library
from tests.processes import reported, with_torch_alone
from tests.threads import on_threads

pytestmark = pytest.mark.skipif(library.reason() is not None, reason="the CPU kernels are not available")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Every processor takes the kernels."""
    with testing.choices(gemm="native", attention="native"):
        yield


def fast() -> tuple[bool, bool]:
    """Whether attention and linear layers run on clearhead's kernels, by their bits."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 300, 64), torch.randn(600, 600)
    return not torch.equal(scaled_dot_product_attention(x, x, x), PLAIN[0]), not torch.equal(weight @ weight, PLAIN[1])


def _plain() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 300, 64), torch.randn(600, 600)
    return scaled_dot_product_attention(x, x, x), weight @ weight


PLAIN = _plain()


def test_contexts_nest_and_restore() -> None:
    assert fast() == (False, False)
    with ch.accelerate() as outer:
        assert fast() == (True, True)
        assert outer.attention
        assert outer.linear
        with ch.accelerate(linear=False):
            assert fast() == (True, False)
            with ch.accelerate(attention=False):
                assert fast() == (False, True)
            assert fast() == (True, False)
        with ch.accelerate(False) as off:
            assert fast() == (False, False)
            assert not off.attention
        assert fast() == (True, True)
    assert fast() == (False, False)


def test_a_call_lasts_until_it_is_undone() -> None:
    ch.accelerate()
    try:
        assert fast() == (True, True)
        ch.accelerate()
        assert fast() == (True, True)
    finally:
        ch.accelerate(False)
    assert fast() == (False, False)


def test_an_error_inside_restores_torchs_kernels() -> None:
    with pytest.raises(ZeroDivisionError), ch.accelerate():
        raise ZeroDivisionError
    assert fast() == (False, False)


def test_every_thread_is_served() -> None:
    threads_served: list[tuple[bool, bool]] = []
    with ch.accelerate():
        on_threads(4, lambda _: threads_served.append(fast()))
    assert len(threads_served) == 4
    assert all(attention for attention, _ in threads_served)


@pytest.mark.slow
def test_no_warning() -> None:
    code = "import warnings; warnings.simplefilter('error'); import clearhead as ch; ch.accelerate(); print('quiet')"
    done = with_torch_alone(code)
    assert (done.stdout, done.stderr) == ("quiet\n", "")


def test_kernels_of_another_package_get_the_calls_that_are_passed_on() -> None:
    theirs = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.impl("mm", lambda left, right: torch.full((len(left), right.shape[1]), 7.0), "CPU")
    small, large = torch.ones(2, 2), torch.ones(600, 600)
    with ch.accelerate():
        assert float((small @ small).max()) == 7.0
        assert float((large @ large).max()) == 600.0
    assert float((large @ large).max()) == 7.0
    del theirs
    assert float((large @ large).max()) == 600.0


@pytest.mark.slow
def test_without_kernels_it_raises_one_line() -> None:
    code = "import clearhead as ch\ntry: ch.accelerate()\nexcept ch.UnsupportedError as error: print(error)"
    done = reported(code, environment={"CLEARHEAD_NATIVE": "0"})
    assert done.stdout.startswith("accelerate: the CPU kernels must be available; got ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("arguments", [{"enabled": "yes"}, {"linear": "no"}, {"attention": None}], ids=str)
def test_wrong_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(ch.ClearheadError, match="accelerate: "):
        ch.accelerate(**arguments)  # type: ignore[arg-type]
    assert fast() == (False, False)


PROGRAM = """
import sys
from clearhead.integrations import accelerate
print(__name__, sys.argv[1:], accelerate.ACCELERATED.attention, accelerate.ACCELERATED.linear)
import beside
if "--fail" in sys.argv: raise ValueError("mine")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else None)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    # The command changes both, as Python does.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return path


def test_run_a_script(program: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(program), "3", "--no-linear", "-m"])
    assert (result.exit_code, result.stdout) == (3, "__main__ ['3', '--no-linear', '-m'] True True\n")
    assert module.Accelerated() == module.ACCELERATED


def test_run_a_module(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    result = CliRunner().invoke(app, ["run", "--no-linear", "-m", "program"])
    assert (result.exit_code, result.stdout) == (0, "__main__ [] True False\n")


def test_run_shows_the_programs_own_error(program: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(program), "--fail"])
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert str(program) in lines[1]
    assert lines[-1] == "ValueError: mine"
    assert "runpy" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "clearhead run: script must be a file; got nothing.py."),
        (["-m", "no.such.module"], "clearhead run: -m must name a module; got no.such.module."),
        ([], "Name a script, or a module with -m."),
    ],
)
def test_run_refuses_in_one_line(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["run", *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
