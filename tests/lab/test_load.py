"""Many clients and many works: right answers or a clear busy, and memory that stays where it is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.readers import reader_of
from tests.lab.folders import language_run
from tests.lab.running import asked, running, sent, until, work_request

pytest.importorskip("safetensors", reason="needs the extra 'train'")

CLIENTS = 50
TEXTS = ("Speak", "All", "peak, s", "All:\nSp", "k")
#: Works of the soak, the first of which warm up allocators and caches.
WARM, MORE = 100, 300
#: What memory may grow by during the rest, in bytes. A leak of each comparison's page alone would be more.
SLACK = 4 * 2**20


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_run(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def lab(play: Path) -> Iterator[Lab]:
    with running([play], Limits(works=2, waiting=20, views=3)) as started:
        yield started


def _exact(play: Path, text: str, head: int) -> float:
    """How much of the probability moves without a head, by the library."""
    reader = reader_of("test", play)
    ids = torch.tensor([reader.encode(text)])
    with torch.no_grad():
        plain = reader.model(ids)[0, -1].double().softmax(-1)
        with ch.trace(reader.model) as traced:
            traced.switch_off(head, layers=0)
            moved = reader.model(ids)[0, -1].double().softmax(-1)
    return float((moved - plain).abs().sum() / 2)


@pytest.mark.slow
def test_fifty_clients_get_the_answer_of_the_library_or_busy(lab: Lab, play: Path) -> None:
    exact = {(text, head): _exact(play, text, head) for text in TEXTS for head in range(2)}

    def one(n: int) -> tuple[tuple[str, int], Any]:
        text, head = TEXTS[n % len(TEXTS)], n % 2
        params = {"model": 1, "text": text, "edits": [{"layer": 0, "off": [head]}]}
        return (text, head), asked(lab, "compare" if n % 5 == 0 else "edit", params)

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(one, range(CLIENTS)))
    right = 0
    for which, answer in answers:
        if "result" in answer.last:
            assert answer.last["result"]["said"]["moved"] == pytest.approx(exact[which], abs=1e-7)
            right += 1
        else:
            assert answer.status == 503
            assert answer.last["error"].startswith("busy: ")
    assert right >= 20
    until(lambda: lab.desk.num_jobs == 0)


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _work(lab: Lab, n: int) -> None:
    params = {"model": 1, "text": TEXTS[n % len(TEXTS)], "edits": [{"layer": n % 2, "off": [0]}]}
    if n % 10 == 9:
        with work_request(lab, "models"):
            pass
    elif n % 10 == 8:
        assert "error" in asked(lab, "look", {"model": 1, "text": "#"}).last
    else:
        name = "compare" if n % 3 == 0 else "edit"
        result = asked(lab, name, params).last["result"]
        if "view" in result:
            assert sent(lab, "GET", f"/{lab.token}/views/{result['view']}").status == 200


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_memory_is_constant_over_many_jobs(lab: Lab) -> None:
    for n in range(WARM):
        _work(lab, n)
    before = _resident()
    for n in range(MORE):
        _work(lab, n)
    until(lambda: lab.desk.num_jobs == 0)
    grown = _resident() - before
    assert len(lab.views) <= 3
    assert lab.views.size < 2**20
    assert grown < SLACK, f"{grown / 2**20:.1f} MB more after {MORE} works"
