"""Rows are on disk as soon as they are measured, and kept only where they belong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clearhead.benchmark import Journal
from clearhead.errors import DataError
from clearhead.ops import library as native_library


def journal(path: Path, *, resume: bool = False, **settings: object) -> Journal:
    return Journal(path, command="clearhead bench --suite x", load_before=0.5, settings=settings, resume=resume)


def test_each_row_is_written_immediately_with_its_head(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    one = journal(path)
    assert not path.parent.exists()
    one.add({"title": "a", "value": 1})
    assert json.loads(path.read_text())["rows"] == [{"title": "a", "value": 1}]
    one.add({"title": "b", "value": 2})
    one.add({"title": "a", "value": 3})
    content = Journal.read(path)
    assert content["rows"] == [{"title": "a", "value": 3}, {"title": "b", "value": 2}]
    assert content["head"]["versions"]["torch"] == torch.__version__
    assert content["head"]["threads"]["intra_op"] == torch.get_num_threads()
    assert content["head"]["load_before"] == 0.5
    assert content["head"]["kernels"] == native_library.isa_name()


def test_resume_keeps_rows_of_equal_conditions(tmp_path: Path) -> None:
    path, settings = tmp_path / "x.json", {"small": False, "against": ["OpenVINO"], "seconds": None}
    journal(path, **settings).add({"title": "a"})
    assert list(journal(path, resume=True, **settings).rows) == ["a"]
    assert journal(path, **settings).rows == {}
    for name, other in (("small", True), ("against", []), ("seconds", 2.0)):
        with pytest.raises(DataError, match=rf"x\.json with other {name}\. Leave --resume out"):
            journal(path, resume=True, **settings | {name: other})


def test_resume_on_another_machine_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    journal(path).add({"title": "a"})
    content = json.loads(path.read_text())
    content["head"]["threads"]["intra_op"] += 1
    content["head"]["kernels"] = "another set"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"x\.json with other kernels, threads\. Leave --resume out"):
        journal(path, resume=True)
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize("content", ["[1]", '{"rows": []}', "{"])
def test_reading_a_file_that_is_no_journal_raises(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        journal(path, resume=True)
