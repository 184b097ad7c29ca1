"""Every environment variable of clearhead refuses other values in one line, at the first call that reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.environment import INSTRUCTION_SETS, VARIABLES, value_of
from clearhead.errors import UnsupportedError
from clearhead.ops import library
from tests.processes import reported

ROOT = Path(__file__).resolve().parents[1]
NONSENSE = ("nonsense", "maybe", "-1", "1.5", "0 1", "²", "None")

#: A call that reads each variable.
READ_BY = {
    "CLEARHEAD_NATIVE": "ch.attention(q, q, q)",
    "CLEARHEAD_ISA": "ch.attention(q, q, q)",
    "CLEARHEAD_KEEP_MEMORY": "ch.attention(q, q, q)",
    "CLEARHEAD_INVARIANT": "ch.attention(q, q, q)",
    "CLEARHEAD_PROJECTION": "ch.nn.MultiHeadAttention(8, 2)(q[0])",
}


UNSET = dict.fromkeys(VARIABLES, "")


def test_every_variable_of_the_page_is_known() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    users = page[: page.index("## For contributors")]
    assert set(re.findall(r"CLEARHEAD_[A-Z_]+", users)) == set(VARIABLES) == set(READ_BY)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=f"{name} must be ") as refusal:
        value_of(name)
    assert "\n" not in str(refusal.value)
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("value", ["", "  "])
@pytest.mark.parametrize("name", VARIABLES)
def test_blank_value_means_unset(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert value_of(name) == ""


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", VARIABLES)
def test_import_succeeds_and_the_first_call_raises(name: str) -> None:
    code = f"""
import torch, clearhead as ch
q = torch.zeros(1, 2, 3, 8)
for call in ({READ_BY[name]!r}, {READ_BY[name]!r}):
    try:
        eval(call)
    except ch.UnsupportedError as refusal:
        print(refusal)
"""
    done = reported(code, environment={**UNSET, name: "nonsense"})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert re.match(rf"\w+: {name} must .*; got 'nonsense'\. ", first)


@pytest.mark.slow
def test_import_without_a_server_succeeds() -> None:
    code = "import clearhead"
    environment = {**os.environ, **dict.fromkeys(VARIABLES, "nonsense")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", VARIABLES)
def test_doctor_prints_one_line(name: str) -> None:
    code = "from clearhead.cli.app import app; app(['doctor'])"
    done = reported(code, environment={**UNSET, name: "nonsense"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{name} must " in done.stderr


def test_set_of_another_processor_is_refused() -> None:
    here = library.isa_names()
    foreign = next((name for name in INSTRUCTION_SETS if name not in here), None)
    if not here or foreign is None:
        pytest.skip("the kernels are not built, or this processor has every set")
    code = "from clearhead.ops import library as n; n.loaded_library.cache_clear(); n.reason()"
    done = reported(code, environment={**UNSET, "CLEARHEAD_ISA": foreign})
    assert done.returncode != 0
    assert "CLEARHEAD_ISA must be a set that was built and that this processor has" in done.stderr
