"""clearhead conform: the exit code tells, the example is shown, and a wrong call is one line."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from clearhead.cli.app import app

QUICK = ["--law", "output", "--law", "lengths", "--law", "mask polarity", "--examples", "5"]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my_attention.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def right(query, key, value, attn_mask=None):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

            def inverted(query, key, value, attn_mask=None):
                if attn_mask is not None and attn_mask.dtype == torch.bool:
                    attn_mask = ~attn_mask
                return right(query, key, value, attn_mask)

            number = 3
        """),
        encoding="utf-8",
    )
    return path


def test_correct_function_exits_with_0(mine: Path) -> None:
    result = CliRunner().invoke(app, ["conform", f"{mine}:right", *QUICK])
    assert result.exit_code == 0, result.output
    assert "all 3 laws that apply hold." in result.stdout


def test_wrong_function_exits_with_1_and_shows_the_example(mine: Path) -> None:
    result = CliRunner().invoke(app, ["conform", f"{mine}:inverted", *QUICK])
    assert result.exit_code == 1
    assert "FAILS mask polarity" in result.stdout
    assert "True in its mask forbids" in result.stdout
    assert "with batch=1 heads=1 q_len=1 k_len=1" in result.stdout


def test_json(mine: Path) -> None:
    result = CliRunner().invoke(app, ["conform", f"{mine}:inverted", *QUICK, "--json"])
    assert result.exit_code == 1
    read = json.loads(result.stdout)
    assert not read["ok"]
    assert {finding["law"]: finding["status"] for finding in read["findings"]} == {
        "output": "holds",
        "lengths": "holds",
        "mask polarity": "fails",
    }


def test_json_is_valid_when_the_function_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talking.py"
    path.write_text(
        "import os\nprint('imported')\nfrom torch.nn.functional import scaled_dot_product_attention as plain\n"
        "def attention(query, key, value):\n    print('called')\n    os.write(1, b'written')\n"
        "    return plain(query, key, value)\n",
        encoding="utf-8",
    )
    with pytest.raises(SystemExit) as left:
        app(["conform", f"{path}:attention", "--law", "output", "--json"])
    said = capfd.readouterr()
    assert left.value.code == 0
    assert json.loads(said.out)["ok"]
    for word in ("imported", "called", "written"):
        assert word in said.err


def test_function_that_exits_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text("import sys\ndef attention(query, key, value):\n    sys.exit(0)\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["conform", f"{path}:attention", "--law", "output", "--examples", "0"])
    assert result.exit_code == 1
    assert "ends the process: sys.exit(0)" in result.stdout
    path.write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["conform", f"{path}:attention"])
    assert result.exit_code == 2
    assert "target must name a module that can be imported" in result.stderr
    assert "SystemExit" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_file_can_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("factor = 1.0\n", encoding="utf-8")
    (tmp_path / "later_beside_it.py").write_text("factor = 1.0\n", encoding="utf-8")
    path = tmp_path / "with_a_sibling.py"
    path.write_text(
        "import beside_it\nfrom torch.nn.functional import scaled_dot_product_attention as plain\n"
        "def attention(query, key, value):\n    import later_beside_it\n"
        "    return plain(query, key, value) * beside_it.factor * later_beside_it.factor\n",
        encoding="utf-8",
    )
    before = list(sys.path)
    result = CliRunner().invoke(app, ["conform", f"{path}:attention", "--law", "output", "--examples", "0"])
    assert result.exit_code == 0, result.output
    assert sys.path == before


@pytest.mark.parametrize("name", ["random", "json", "typer"])
def test_file_named_like_a_module_does_not_replace_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text("from torch.nn.functional import scaled_dot_product_attention as attention\n", encoding="utf-8")
    before = sys.modules[name]
    result = CliRunner().invoke(app, ["conform", f"{path}:attention", "--law", "output", "--examples", "3"])
    assert result.exit_code == 0, result.output
    assert sys.modules[name] is before


def test_process_state_is_restored_after_the_run(tmp_path: Path) -> None:
    path = tmp_path / "meddling.py"
    path.write_text(
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
        "from torch.nn.functional import scaled_dot_product_attention as attention\n",
        encoding="utf-8",
    )
    laws = ["--law", "output", "--law", "gradients", "--examples", "0"]
    result = CliRunner().invoke(app, ["conform", f"{path}:attention", *laws])
    assert result.exit_code == 0, result.output
    assert "ok    gradients" in result.stdout
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_module_by_name_with_mha_signature() -> None:
    arguments = ["torch.nn:MultiheadAttention", "--signature", "mha", "--law", "output", "--dtype", "float64"]
    result = CliRunner().invoke(app, ["conform", *arguments, "--examples", "0"])
    assert result.exit_code == 0, result.output
    assert "signature mha, float64 on cpu" in result.stdout


def test_help_prints_each_example_on_a_line() -> None:
    lines = CliRunner().invoke(app, ["conform", "--help"]).stdout.splitlines()
    for example in ("mine.py:attention --dtype bfloat16", "torch.nn:MultiheadAttention --signature mha"):
        assert f"clearhead conform {example}" in [line.strip() for line in lines]


def test_terminal_shows_the_current_law(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit) as left:
        app(["conform", f"{mine}:right", "--law", "output", "--examples", "0"])
    said = capsys.readouterr()
    assert left.value.code == 0
    assert "trying: output" in said.err
    assert said.err.endswith("\r")
    assert "trying" not in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "target must be MODULE:FUNCTION; got 'nothing'."),
        (["no_such_module:f"], "target must name a module that can be imported"),
        (["no_such_file.py:f"], "target must name a module that can be imported"),
        (["torch:no_such_name"], "target must name something in torch; got 'no_such_name'."),
        (["torch:__version__"], "target must be callable"),
        (["torch:add", "--dtype", "int8"], "--dtype must be one of"),
        (["torch:add", "--device", "moon"], "--device must be a device"),
        (["torch:add", "--signature", "onnx"], "signature must be one of"),
        (["torch:add", "--law", "gravity"], "laws must be names of laws; got 'gravity'."),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["conform", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_function_on_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "own_tokens.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def local(query, key, value, is_causal=False):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        """),
        encoding="utf-8",
    )
    command = ["conform", f"{path}:local", "--ranks", "2", "--layout", "zigzag", "--law", "causal"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1, result.output
    assert "own_tokens.py:local on 2 ranks, zigzag" in "".join(result.stdout.split("\n"))
    assert "FAILS causal" in result.stdout
    assert "raises" not in result.stdout
