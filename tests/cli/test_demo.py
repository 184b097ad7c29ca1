"""`clearhead demo` from outside: what it prints, what it leaves, how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import reported

from clearhead.inspector import validate

pytest.importorskip("sklearn", reason="scikit-learn is not installed (clearhead[demo] brings it)")

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'clearhead'; from clearhead.cli.app import main; main()",
    "demo",
]
# The same within a process that has torch already.
FORKED = """
import os, sys
os.chdir(sys.argv.pop(1))
sys.argv[:1] = ["clearhead", "demo"]
from clearhead.cli.app import main
main()
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return reported(FORKED, [str(cwd), *arguments], ENVIRONMENT, timeout=240)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo("--quick", "--seed", "3", cwd=folder)


Quick = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_demo_exits_with_0_and_prints_each_result(quick: Quick) -> None:
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert re.search(r"Test accuracy\n  0\.\d{4} on the held-out fifth \(\d+ of 359\)", out)
    assert re.search(r"held-out digit \d+: predicted \d with probability \d\.\d{4}", out)
    assert re.search(r"most influential: head [0-3] of layer [01]", out)
    assert re.search(r"softmax .* \[64\]", out)
    assert re.search(r"worst difference \d\.\de-\d\d, in head [0-3] of layer [01]: as exact as float32 allows", out)
    assert re.search(r"clearhead \d+\.\d+ ms, torch\.nn\.MultiheadAttention with the same weights \d+\.\d+ ms", out)
    assert "seed 3" in out


@pytest.mark.slow
def test_progress_is_lines_without_a_terminal(quick: Quick) -> None:
    _, done = quick
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"train loss \d", done.stderr)


@pytest.mark.slow
def test_demo_writes_page_and_metrics(quick: Quick) -> None:
    folder, done = quick
    out = folder / "clearhead-demo"
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["index.html", "metrics.json"]
    assert str(out / "index.html") in done.stdout
    match = re.search(r'id="data">(.*?)</script>', (out / "index.html").read_text("utf-8"), re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    validate(data)
    assert len(data["runs"]) >= 10
    assert len(data["layers"]) == 2 * len(data["runs"])
    numbers = json.loads((out / "metrics.json").read_text("utf-8"))
    assert numbers["seed"] == 3
    assert numbers["float64"]["holds"] is True
    assert numbers["float64"]["worst_difference"] < 1e-4
    assert f"{numbers['test_accuracy']:.4f} on the held-out fifth" in done.stdout
    assert data["facts"][0]["value"] == f"{100 * numbers['test_accuracy']:.1f}%"


@pytest.mark.browser
@pytest.mark.slow
def test_demo_page_opens_offline(quick: Quick) -> None:
    from tests.inspector.chromium import Opened, chromium

    folder, _ = quick
    with chromium() as browser:
        lines = Opened(browser, folder / "clearhead-demo" / "index.html")
        lines.page.wait_for_selector("#main[data-ready]")
        assert lines.page.locator("#heads .thumb").count() == 8
        assert lines.page.locator(".run").count() >= 10
        assert lines.page.locator("#panel-picture").is_visible()
        assert lines.page.locator("#facts .fact").count() == 3
        assert lines.complaints == []
        assert [request.split(":")[0] for request in lines.requests] == ["file"]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--epochs", "0"), "clearhead demo: --epochs must be at least 1; got 0."),
        (("--seed", "-1"), "clearhead demo: --seed must be at least 0; got -1."),
        (("--out", "file"), "clearhead demo: --out must be a writable folder"),
        (("--epochs", "many"), "clearhead demo: Invalid value for '--epochs'"),
    ],
)
def test_wrong_usage_is_one_line_and_2(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "file").write_text("")
    done = demo(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(says)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_interruption_is_one_line_and_leaves_no_files(tmp_path: Path) -> None:
    running = subprocess.Popen(
        COMMAND,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores interrupts, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert running.stdout is not None
    running.stdout.readline()  # training is about to start
    running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "clearhead: interrupted."
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
