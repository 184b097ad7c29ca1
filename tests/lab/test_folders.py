"""Files are read from the folders named on the command line and from nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clearhead.errors import ClearheadError, DataError
from clearhead.lab import folders
from clearhead.lab.limits import Limits
from clearhead.lab.models import Models
from tests.lab.folders import language_run
from tests.lab.running import Ticketless


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of its own for a test that changes it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def outside(run: Path, name: str) -> Path:
    """Move a file of the run out of its folder, where it would still be read through a link."""
    moved = run.parent / name
    shutil.move(run / name, moved)
    return moved


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("relative", [True, False])
def test_outside_link_is_refused_at_the_start(run: Path, name: str, relative: bool) -> None:
    there = outside(run, name)
    (run / name).symlink_to(Path("..") / name if relative else there)
    with pytest.raises(DataError, match=rf"got {name}, which is outside\. Copy the model with 'cp -rL'"):
        Models([run], Limits())


def test_later_outside_link_is_refused_when_read(run: Path) -> None:
    models = Models([run], Limits())
    (run / "model.safetensors").symlink_to(outside(run, "model.safetensors"))
    with pytest.raises(DataError, match="which is outside"):
        models.get(1, Ticketless())


def test_link_within_the_folder_is_followed(run: Path) -> None:
    shutil.move(run / "tokenizer.json", run / "tokenizer")
    (run / "tokenizer.json").symlink_to("tokenizer")
    assert Models([run], Limits()).get(1, Ticketless()).outlook.kind == "next"


def test_folder_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(run)
    assert Models([tmp_path / "named"], Limits()).get(1, Ticketless()).outlook.kind == "next"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": {"a": "{there}"}}),
        ("tokenizer_config.json", {"vocab_file": "{there}"}),
        ("tokenizer_config.json", {"tokenizer_file": "../tokenizer.json"}),
    ],
)
def test_outside_name_in_settings_is_refused(run: Path, name: str, content: dict[str, object]) -> None:
    there = run.parent / "model.safetensors"
    for each in ("model.safetensors", "tokenizer.json"):
        shutil.copy(run / each, run.parent / each)
    (run / name).write_text(json.dumps(content).replace("{there}", str(there)))
    with pytest.raises(DataError, match=rf"in {name}, which is outside"):
        Models([run], Limits())


def test_absent_files_in_settings_are_accepted(run: Path) -> None:
    (run / "tokenizer_config.json").write_text(json.dumps({"special_tokens_map_file": "/none/of/ours.json"}))
    (run / "generation_config.json").write_text("{")
    assert Models([run], Limits()).get(1, Ticketless()).outlook.kind == "next"


def test_hugging_face_cache_folder_gives_its_snapshot(run: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--some--play"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    for place, path in enumerate(path for path in run.iterdir() if path.is_file()):
        shutil.copy(path, cache / "blobs" / str(place))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(place))
    assert Models([cache], Limits()).get(1, Ticketless()).outlook.kind == "next"
    with pytest.raises(DataError, match="which is outside"):
        Models([snapshot], Limits())
    (cache / "refs" / "main").write_text("../../run")
    assert folders.of_folder(cache) == cache


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0" + b'{"a": {}}'],
)
def test_damaged_weights_raise(run: Path, content: bytes) -> None:
    (run / "model.safetensors").write_bytes(content)
    with pytest.raises(ClearheadError, match="must be a complete safetensors file; got a damaged header"):
        Models([run], Limits()).get(1, Ticketless())


def test_folder_without_a_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ClearheadError):
        Models([tmp_path], Limits()).get(1, Ticketless())


def test_parameters_are_counted_from_the_headers(trained: Path) -> None:
    from clearhead.readers import reader_of

    exact = {id(each): each.numel() for each in reader_of("test", trained).model.parameters()}
    assert folders.parameters(trained, 10**9) == sum(exact.values())


def test_loop_of_links_is_refused(run: Path) -> None:
    (run / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="'loop', a link to itself"):
        folders.check(run, run)


def test_snapshot_name_that_is_not_text_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_bytes(b"\xff")
    assert folders.of_folder(tmp_path) == tmp_path
