"""The process of a command: Ctrl-C at any moment, and standard streams that are closed or broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.processes import started
from typer.testing import CliRunner

from clearhead import command_process
from clearhead.cli.app import COMMANDS, app, main
from clearhead.train.progress import Silent, watcher_for

LINE = "clearhead: interrupted.\n"
SIZES = ["--embed-dim", "16", "--num-heads", "2", "--num-layers", "1"]
SDPA = "torch.nn.functional:scaled_dot_product_attention"
#: A call of every command; one that is missing here shows its help.
CALLS = {
    "demo": "demo --quick --out {home}/demo",
    "explain": "explain --text film",
    "observe": "observe {play} --text Speak --json {home}/heads.json",
    "view": "view {play} --text Speak --out {home}/page.html",
    "lab": "lab",
    "train": "train lm --data {home}/play.txt --steps 2 --eval-every 2 --context 8 --out {home}/run",
    "predict": "predict {films} --text film",
    "generate": "generate {play} --prompt Speak --max-new-tokens 3",
    "bench": "bench --quick --shape 1,1,8,8 --repeats 1 --out {home}/bench",
    "conform": f"conform {SDPA} --law scale --examples 0",
    "doctor": "doctor",
    "run": "run {home}/program.py",
}
SLOW = ("demo", "doctor", "bench", "lab")
#: Exit statuses of calls that do not end by themselves.
STATUS = {"lab": 130}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a table and a small run of each."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "play.txt").write_text("All:\nSpeak, speak.\n" * 40)
    (folder / "films.csv").write_text("\n".join(["label,text", *["good,a fine film", "poor,a dull film"] * 10]) + "\n")
    lines = {
        "play": "train lm --data {home}/play.txt --out {home}/play --steps 2 --eval-every 2 --context 16",
        "films": "train classify --data {home}/films.csv --out {home}/films --epochs 1 --batch-size 8",
    }
    for line in lines.values():
        assert CliRunner().invoke(app, [*line.format(home=folder).split(), *SIZES]).exit_code == 0
    return folder


def _words(name: str, home: Path, place: Path) -> list[str]:
    line = CALLS.get(name, f"{name} --help")
    (place / "play.txt").write_bytes((home / "play.txt").read_bytes())
    (place / "program.py").write_text("print('said')\n")
    return line.format(home=place, play=home / "play", films=home / "films").split()


def _end_soon() -> None:
    """Ctrl-C after two seconds, for a command that runs until then; a shell's background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def _with_closed(streams: Sequence[int], words: list[str]) -> None:
    """Run a command as an interpreter does that was started with these descriptors closed."""
    for number in streams:
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
        os.close(number)
    if words == ["lab"]:
        _end_soon()
    sys.argv = ["clearhead", *words]
    main()


def _into_a_broken_pipe(streams: Sequence[int], words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    for number in streams:
        os.dup2(write, number)
    if words == ["lab"]:
        _end_soon()
    sys.argv = ["clearhead", *words]
    main()


PARAMETERS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMMANDS]
#: Two commands that print line by line and token by token, and all others. The program of ``run`` has its own errors.
PRINTING = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("train", "generate")))
    for name in COMMANDS
    if name != "run"
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "streams",
    [pytest.param((1,), marks=pytest.mark.slow), pytest.param((2,), marks=pytest.mark.slow), (0, 1, 2)],
    ids=["stdout", "stderr", "all"],
)
@pytest.mark.parametrize("name", PARAMETERS)
def test_command_runs_with_closed_streams(home: Path, tmp_path: Path, name: str, streams: tuple[int, ...]) -> None:
    process = started(_with_closed, streams, _words(name, home, tmp_path), errors=tmp_path / "errors")
    process.join(200)
    assert process.exitcode == STATUS.get(name, 0), (tmp_path / "errors").read_text()
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.covering(0)
@pytest.mark.parametrize("streams", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["stdout", "both"])
@pytest.mark.parametrize("name", PRINTING)
def test_command_ends_quietly_at_a_broken_pipe(home: Path, tmp_path: Path, name: str, streams: tuple[int, ...]) -> None:
    process = started(_into_a_broken_pipe, streams, _words(name, home, tmp_path), errors=tmp_path / "errors")
    process.join(200)
    assert process.exitcode == 1
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_closed_stream_does_not_give_its_descriptor_to_a_file(tmp_path: Path) -> None:
    script = (
        "import command_process, os\n"
        "command_process.open_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "os.write(1, b'said by a library')\n"
        "assert file.fileno() > 2\n"
    )
    # Without torch: the module needs the standard library alone.
    place = Path(command_process.__file__).parent
    command = f'"{sys.executable}" -c "{script}" <&- >&-'
    variables = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=variables, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_text() == ""


def test_progress_without_standard_error_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(watcher_for(), Silent)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Processes that a test starts are interruptible, also where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


#: Modules that interrupt the process while they are imported; the second hides the interruption, as some modules do.
INTERRUPTING = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
HIDING = f"try:\n    {INTERRUPTING.strip()}\nexcept BaseException:\n    raise ImportError\n".replace("; ", "\n    ")


@pytest.fixture(params=["-m clearhead", "script"])
def entry(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command, started in both ways."""
    if request.param != "script":
        return [sys.executable, "-m", "clearhead"]
    script = tmp_path / "bin" / "clearhead"
    script.parent.mkdir()
    script.write_text("import sys\nfrom clearhead.cli.app import main\nsys.exit(main())\n")
    return [sys.executable, str(script)]


def _interrupted_in(module: str, source: str, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "fakes").mkdir(exist_ok=True)
    (folder / "fakes" / f"{module}.py").write_text(source)
    path = os.pathsep.join([str(folder / "fakes"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120, cwd=folder
    )


@pytest.mark.parametrize(("module", "source"), [("torch", INTERRUPTING), ("torch", HIDING)], ids=["plain", "hidden"])
def test_interruption_while_torch_loads_is_one_line(entry: list[str], tmp_path: Path, module: str, source: str) -> None:
    done = _interrupted_in(module, source, [*entry, "doctor"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [("typer", ["doctor"]), ("rich", ["--help"]), ("sklearn", ["demo"]), ("uvicorn", ["lab"]), ("numpy", ["doctor"])],
)
def test_interruption_while_a_package_loads_is_one_line(
    entry: list[str], tmp_path: Path, module: str, words: list[str]
) -> None:
    done = _interrupted_in(module, INTERRUPTING, [*entry, *words], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_other_programs_keep_their_interruption(tmp_path: Path) -> None:
    done = _interrupted_in("torch", INTERRUPTING, [sys.executable, "-c", "import clearhead"], tmp_path)
    assert done.returncode in (-signal.SIGINT, 130)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ignored_interruption_stays_ignored() -> None:
    """As in a job that a shell runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command_process.leave_on_interrupt()
    command_process.raise_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="sees in /proc what a process has loaded")
@pytest.mark.parametrize("words", [("doctor",), ("--help",), ("explain", "--text", "a"), ("lab",)], ids=" ".join)
def test_interruption_at_any_moment_is_one_line(words: tuple[str, ...]) -> None:
    for step in range(12):
        process = subprocess.Popen(
            [sys.executable, "-m", "clearhead", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        time.sleep(0.35 * step)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        if process.returncode != 0:
            said = said.removeprefix("Open this address in a browser on this machine. Ctrl-C ends the lab.\n")
            assert (process.returncode, said) == (130, LINE)


@pytest.mark.slow
def test_interruption_within_executed_text_has_the_same_status(tmp_path: Path) -> None:
    """CPython would end such a process by the signal, also where the exception was caught."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n\n\nclass Interrupting:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'clearhead.doctor':\n            exec('raise KeyboardInterrupt')\n\n\n"
        "sys.meta_path.insert(0, Interrupting())\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, LINE)
