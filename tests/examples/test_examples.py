"""Every program in ``examples/`` runs, in its small size, on one core, without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: A line that an example prints when what it shows is true, as a pattern. An example that is not named here has to end
#: with exit status 0 and to print something.
LINES = {
    "faster.py": r"largest difference at real tokens  \d\.\de-0[6-9] of the largest output",
    "long_contexts.py": r"largest difference to one call: \d\.\de-0[6-9]",
    "ragged_batches.py": r"what stands in the padding changes the logits: False",
    "see_image.py": r"see_image.html holds Page\('Which colour has the disc\?', 2 layers, 8 heads\)",
    "see_speech.py": r"see_speech.html holds Page\('Which sound does each note come from\?', 2 layers, 8 heads\)",
    "see_text.py": r"the output changes under observation: False",
    "several_processes.py": r"loaded along 'tensor': the same weights: True",
    "write_a_mask.py": r"largest output of each query \['0\.[1-9]\d', '0\.[1-9]\d', '0\.00', '0\.00'\]",
    "write_a_score_rule.py": r"d slope     \d\.\de-0[6-9]",
}
#: What an example prints where an extra or a data set is absent.
SKIPPED = re.compile(r"^skipped: (.+)$", re.MULTILINE)


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """Run an example from an empty folder, on one thread."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(path), "--quick"], capture_output=True, text=True, timeout=300, env=os.environ | offline
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example prints what it shows"
    if skipped := SKIPPED.search(done.stdout):
        pytest.skip(skipped[1])
    assert re.search(LINES.get(path.name, ""), done.stdout), done.stdout


def test_failing_example_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("raise SystemExit('fails: a reason')")
    assert run(path).returncode == 1


def test_every_checked_example_exists() -> None:
    assert {name for name in LINES if not (EXAMPLES / name).exists()} == set()


def test_every_example_has_a_quick_size() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py") if '"--quick"' not in path.read_text("utf-8")] == []
