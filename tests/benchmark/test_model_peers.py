"""The suite peers: rows, adapters that reproduce float64, and peers that are missing, broken or wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.benchmark import Journal, Line, machine, measure_row
from clearhead.benchmark.block import block
from clearhead.benchmark.cases import errors_against
from clearhead.benchmark.model_peers import rows as rows_module
from clearhead.benchmark.model_peers.contenders import INT4, INT8, PEERS, peers_of
from clearhead.benchmark.model_peers.peer import BUDGETS, CannotRunError, Peer
from clearhead.benchmark.model_peers.rows import HALF_FILLED, ModelRow, peer_rows
from clearhead.benchmark.model_peers.sheets import peers_sheets
from clearhead.benchmark.model_peers.torch_models import sdpa_call
from clearhead.benchmark.model_peers.work import DECODED, KINDS, ModelWork
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.errors import UnsupportedError
from tests.benchmark.test_lines import line as line_of

pytest.importorskip("transformers", reason="needs the extra hf")

ROWS = peer_rows()
TINY = {(row.kind, row.half_filled, row.batch > 1): row.small() for row in ROWS if row.number_format == "float32"}
HAS_VNNI = any("vnni" in name for name in machine()["instructions"])
WORKS = [pytest.param(row, id=row.title) for row in TINY.values()]
#: Compiling takes half a minute for each model.
COMPILED = ("torch.compile", "zentorch", "torchao weights", "torchao dynamic")
ADAPTERS = [
    pytest.param(peer, id=f"{peer.name} {peer.number_format}", marks=[pytest.mark.slow] * (peer.name in COMPILED))
    for peer in PEERS
]


def wrong(work: ModelWork, number_format: str) -> Call:
    call = sdpa_call(work, number_format)
    return lambda: tuple(tuple(tensor + 0.5 for tensor in group) for group in call())


def failing(work: ModelWork, number_format: str) -> Call:
    raise RuntimeError("no kernel\nfor this")


def fake(name: str, build: Callable[[ModelWork, str], Call], **fields: Any) -> Peer:
    return Peer(name=name, rows="float32", number_format="float32", build=build, **fields)


def encoder() -> ModelRow:
    return next(row for row in TINY.values() if row.kind == "encoder")


def measured(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> Line:
    first = next(peer for peer in PEERS if peer.name == OURS)
    monkeypatch.setattr(rows_module, "peers_of", lambda rows: (first, *peers))
    return measure_row(encoder(), repeats=2, seconds=None)


def test_rows_are_those_of_the_table() -> None:
    titles = [row.title for row in ROWS]
    assert len(set(titles)) == len(titles) == 9 + 9 + 8
    for number_format in ("float32", "bfloat16", "int8"):
        chosen = [row for row in ROWS if row.number_format == number_format]
        assert {row.kind for row in chosen} == set(KINDS) - ({"training"} if number_format == "int8" else set())
        assert sum(HALF_FILLED in row.title for row in chosen) == 1
        assert {row.batch for row in chosen if row.kind == "token"} == {1, 8}


def test_every_format_has_clearhead_first_and_every_peer_says_what_its_threads_do() -> None:
    for number_format in ("float32", "bfloat16", "int8"):
        names = [peer.name for peer in peers_of(number_format)]
        assert names[0] == OURS
        assert len(set(names)) == len(names)
    assert all(peer.spinning and peer.threads for peer in PEERS)


def test_half_of_a_half_filled_batch_is_padding() -> None:
    work = next(row for row in ROWS if row.half_filled).work
    assert work.padding_mask is not None
    assert abs(float(work.padding_mask.float().mean()) - 0.5) < 0.01


@pytest.mark.covering(1)
@pytest.mark.parametrize("row", WORKS)
@pytest.mark.parametrize("peer", ADAPTERS)
def test_peer_reproduces_float64_within_its_budget(peer: Peer, row: ModelRow) -> None:
    for module in peer.modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module} (the extra peers)")
    work = replace(row.work, dropout=0.0)
    try:
        peer.load()
        call = peer.call(work)
    except CannotRunError as error:
        pytest.skip(str(error))
    exact = work.pick(work.exact())
    errors = errors_against(exact, work.pick(call()))
    assert len(errors) == len(exact)
    overflows = peer.name == "CTranslate2" and peer.number_format == "int8" and not HAS_VNNI
    # Without VNNI its decoders in int8 are off by up to 0.4, and the suite leaves them out.
    assert max(errors) <= (0.5 if overflows else peer.budget)


@pytest.mark.slow
def test_limit_of_four_bits_is_below_the_error_of_a_model_without_a_layer() -> None:
    (row,) = (row for row in peer_rows() if row.title == "Llama 8x1024 a token at 512, batch 1, int8")
    work = row.work
    exact = work.exact()
    model = work.model.model
    del model.layers[3]
    model.config.num_hidden_layers = len(model.layers)
    for place, layer in enumerate(model.layers):
        layer.self_attn.layer_idx = place
    assert errors_against(exact, work.exact())[0] > 1.1 * BUDGETS["int4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [OURS, "torch sdpa", "ONNX Runtime", "OpenVINO", "llama.cpp"])
def test_later_tokens_are_decoded_after_the_earlier_ones_and_the_cache_starts_anew(name: str) -> None:
    peer = next(peer for peer in peers_of("float32") if peer.name == name)
    for module in peer.modules:
        pytest.importorskip(module, reason="needs the extra peers")
    row = next(row for row in TINY.values() if row.kind == "token" and row.batch > 1)
    work = row.work
    call = peer.call(work)
    outputs = [call()[0][0] for _ in range(DECODED + 2)]
    model = work.model.double()
    with torch.no_grad():
        exact = model(input_ids=work.ids).logits[:, work.length :]
    for step in (0, 1, DECODED - 1):
        assert errors_against(((exact[:, step],),), ((outputs[step],),))[0] < 1e-4
    assert errors_against(((exact[:, 1],),), ((outputs[DECODED + 1],),))[0] < 1e-4
    assert float((exact[:, 0] - exact[:, 1]).abs().max()) > 1e-2, "the steps differ"


def test_wrong_peer_is_reported_with_its_error_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = measured(monkeypatch, fake("right", sdpa_call), fake("wrong", wrong))
    assert set(line.timings) == {OURS, "right"}
    assert line.errors["right"] < 1e-5
    assert line.left_out["wrong"].startswith("wrong: error ")
    assert line.left_out["wrong"].endswith("against float64, allowed 0.0001")


def test_missing_and_failing_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = fake("missing", sdpa_call, modules=("no_such_module_of_a_peer",))
    excused = fake("excused", sdpa_call, excuses={"encoder": "decoders only"})
    line = measured(monkeypatch, missing, fake("failing", failing), excused)
    assert set(line.timings) == {OURS}
    assert line.left_out == {
        "missing": "not installed: no_such_module_of_a_peer",
        "failing": "failed: no kernel for this",
        "excused": "decoders only",
    }


def test_peer_that_fails_when_it_is_called_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(work: ModelWork, number_format: str) -> Call:
        def call() -> Groups:
            raise ValueError("out of memory")

        return call

    line = measured(monkeypatch, fake("late", build))
    assert line.left_out == {"late": "failed: out of memory"}


def test_wrong_clearhead_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "peers_of", lambda rows: (fake(OURS, wrong), fake("right", sdpa_call)))
    with pytest.raises(UnsupportedError, match="contender 'clearhead' must compute the same"):
        measure_row(encoder(), repeats=2, seconds=None)


def test_peer_that_exports_symbols_of_others_is_loaded_last(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Peer, "load", lambda peer: order.append(peer.name))
    first = next(peer for peer in PEERS if peer.name == OURS)
    peers = (first, fake("last", sdpa_call, loaded_last=True), fake("other", sdpa_call))
    rows_module.comparison_of(encoder(), peers)
    assert order == [OURS, "other", "last"]
    assert next(peer for peer in PEERS if peer.name == "zentorch").loaded_last


def test_overview_of_integers_compares_with_clearheads_own() -> None:
    seconds = {OURS: 0.004, INT8: 0.002, INT4: 0.001, "OpenVINO": 0.003, "llama.cpp q4_0": 0.0025}
    line = replace(line_of("Llama a token, int8", seconds, group="int8"), left_out={"CTranslate2": "not installed"})
    overview, _ = peers_sheets([line], {}, judged=False)
    others = [OURS, INT4, "OpenVINO", "llama.cpp q4_0", "CTranslate2"]
    assert overview.header == ["work", "clearhead int8, ms", *others, "fastest peer"]
    assert overview.rows == [[line.title, "2", "2.00", "0.50", "1.50", "1.25", "–", "1.25"]]


def test_every_contender_of_a_row_begins_with_an_untimed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "peers_of", lambda rows: (fake(OURS, sdpa_call), fake("peer", sdpa_call)))
    assert set(encoder().comparison().isolated) == {OURS, "peer"}


@pytest.mark.slow
def test_tables_show_times_errors_reasons_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = measured(monkeypatch, fake("torch sdpa", sdpa_call), fake("broken", wrong))
    journal = Journal(tmp_path / "peers.json", command="clearhead bench --suite peers", load_before=0.0)
    journal.head["small"] = True
    journal.add(line.to_dict())
    overview, details = peers_sheets([line], journal.head, judged=False)
    assert overview.header == ["work", "clearhead, ms", "torch sdpa", "broken", "fastest peer"]
    assert overview.rows[0][3] == "–"
    assert [row[1] for row in details.rows] == [OURS, "torch sdpa", "broken"]
    assert "e-07" in details.rows[1][5]
    assert details.rows[2][6].startswith("wrong: error ")
    assert any(note.startswith("torch sdpa: threads by ") for note in details.notes)
    assert any(note.startswith("OMP_WAIT_POLICY: ") for note in details.notes)
    text = block(tmp_path)
    assert "### peers, float32" in text
    assert "### peers, every contender" in text
    assert "floors" not in text.partition("### peers, every")[0], "small sizes are not judged"
