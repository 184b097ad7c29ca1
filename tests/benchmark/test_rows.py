"""Every kind of row: its contenders do the same work, and one that does not is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clearhead.benchmark import SUITES, product
from clearhead.benchmark.cases import Comparison, noise_of
from clearhead.benchmark.decoding_rows import PLAIN_LAYERS, DecodingRow
from clearhead.benchmark.encoders import STACK, SWAPPED, EncoderWork, ragged
from clearhead.benchmark.flex_rows import COMPILED, PLAIN_CAUSAL
from clearhead.benchmark.function_rows import DENSE, MADE
from clearhead.benchmark.hugging_face import ONNX_MODEL, SDPA_MODEL, CausalRow, EncoderModelRow
from clearhead.benchmark.layer_rows import LINEAR
from clearhead.benchmark.linear_rows import FULL
from clearhead.benchmark.lines import Line, measure_row
from clearhead.benchmark.model_peers.contenders import INT4, INT8, PEERS
from clearhead.benchmark.observed import MATERIALISED, PLAIN, ObserveRow
from clearhead.benchmark.peers import MODULE, OURS, SDPA, SDPA_WINDOW, TensorWork
from clearhead.benchmark.product import PRODUCT, yardsticks
from clearhead.benchmark.rows import EncoderRow, ModuleRow, SuiteRow, TensorRow
from clearhead.benchmark.small_layer_rows import DECODER_LAYER, ENCODER_LAYER, SmallLayerRow
from clearhead.benchmark.varlen_rows import PADDED, PADDED_SDPA, VarlenRow
from clearhead.benchmark.weights_rows import EAGER_WEIGHTS
from clearhead.errors import UnsupportedError

FLOAT, HALF = torch.float32, torch.bfloat16
ROWS: dict[str, SuiteRow] = {
    "grouped": TensorRow(shape=(2, 4, 1, 8), kv_heads=2, k_len=33, dtype=HALF),
    "window": TensorRow(shape=(1, 2, 40, 8), causal=True, window=5, dtype=FLOAT, peers=(SDPA, SDPA_WINDOW)),
    "dropout": TensorRow(shape=(2, 2, 40, 8), training=True, dropout=0.1, dtype=FLOAT),
    "module": ModuleRow(size=(2, 20, 32, 4), dtype=HALF),
    "module-training": ModuleRow(size=(2, 20, 32, 4), dtype=FLOAT, training=True),
    "module-dropout": ModuleRow(size=(2, 20, 32, 4), dtype=FLOAT, training=True, dropout=0.1),
    "encoder": EncoderRow(
        batch=4, longest=16, embed_dim=32, num_heads=4, num_layers=2, feedforward_dim=64, dtype=FLOAT
    ),
    "layer": SmallLayerRow(size=(2, 9, 32, 4), dtype=HALF),
    "decoder layer": SmallLayerRow(size=(2, 9, 32, 4), memory_len=5, dtype=FLOAT, training=True),
    "decoder layer with dropout": SmallLayerRow(
        size=(2, 9, 32, 4), memory_len=5, dtype=FLOAT, training=True, dropout=0.1
    ),
    "decoding": DecodingRow(size=(2, 9, 32, 4), dtype=FLOAT, layers=2),
    "observe": ObserveRow(wanted="everything", shape=(1, 2, 128, 8), causal=True),
    "varlen": VarlenRow(shape=(3, 2, 20, 8), dtype=FLOAT, training=True),
    "varlen, causal": VarlenRow(shape=(3, 2, 20, 8), dtype=HALF, causal=True),
}
#: Those that need transformers.
MODEL_ROWS: dict[str, SuiteRow] = {
    "encoder model": EncoderModelRow(model="MiniLM 6x384", batch=2, length=8).small(),
    "ragged encoder model": EncoderModelRow(model="BERT base", batch=2, length=8, ragged=True).small(),
    "prefill": CausalRow(decode=False).small(),
    "decode": CausalRow(decode=True).small(),
    "decode behind padding": CausalRow(decode=True, model="Qwen2.5 0.5B", batch=2).small(),
    "decode with a memory": CausalRow(decode=True, model="Whisper base").small(),
    "decode, windows": CausalRow(decode=True, model="Gemma 3 270M").small(),
    "prefill, windows": CausalRow(decode=False, model="Gemma 3 270M").small(),
    "decode, layers of other kinds": CausalRow(decode=True, model="Granite").small(),
    "decode, Llama's kind": CausalRow(decode=True, model="Qwen2.5 0.5B", dtype=torch.bfloat16).small(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_ROWS)
def test_transformers_models_do_the_same_work(name: str) -> None:
    pytest.importorskip("transformers", reason="models come from transformers")
    comparison = MODEL_ROWS[name].comparison()
    assert comparison.check().keys() == comparison.calls.keys()
    assert not comparison.left_out
    assert set(comparison.isolated) in (set(), set(comparison.calls)), "an untimed call before all or none"


@pytest.mark.slow
def test_statistics_are_measured_with_their_memory() -> None:
    row = ObserveRow(wanted="received", shape=(1, 4, 1024, 16))
    line = measure_row(row, repeats=5, seconds=None)
    assert line.memory.keys() == line.timings.keys()
    assert line.memory[MATERIALISED] > 2 * 4 * 1024**2 * 4 > line.memory[OURS], "weights take 16 MiB, twice"
    assert Line.from_dict(line.to_dict()).memory == line.memory


@pytest.mark.parametrize("name", ROWS)
def test_all_contenders_do_the_same_work(name: str) -> None:
    comparison = ROWS[name].comparison()
    errors = comparison.check()
    other_work = {"window": {SDPA}, "observe": {PLAIN}}.get(name, set())
    assert set(errors) == set(comparison.calls) - other_work
    assert max(errors.values()) < (6e-2 if ROWS[name].dtype == HALF else 1e-5)


def test_window_row_times_but_does_not_check_causal_attention() -> None:
    comparison = ROWS["window"].comparison()
    assert set(comparison.timed) == {OURS, SDPA, SDPA_WINDOW}
    assert comparison.checked is not None
    with pytest.raises(UnsupportedError, match="Different work is not timed"):
        replace(comparison, checked={"no window": comparison.calls[SDPA]}).check()


def test_missing_or_different_dropout_raises() -> None:
    work = TensorWork((2, 4, 64, 16), FLOAT, causal=False, training=True)
    honest = work.call(SDPA, dropout=0.1)
    comparison = Comparison(
        title="dropout",
        calls={"honest": honest},
        checked={},
        noisy=("honest",),
        exact=lambda: work.by_rows(torch.float64),
        plain=lambda: work.by_rows(FLOAT),
    )
    assert comparison.check() == {}
    for cheat in (work.call(SDPA), work.call(SDPA, dropout=0.2)):
        both = replace(comparison, calls={"honest": honest, "cheat": cheat}, noisy=("honest", "cheat"))
        with pytest.raises(UnsupportedError, match="drop as much as the others in 'dropout'"):
            both.check()


def test_noise_equals_that_of_dropped_weights() -> None:
    # One key: its weight is 1, dropped with p or divided by 1 - p, so the square of the noise is p / (1 - p).
    work = TensorWork((64, 8, 16, 8), FLOAT, causal=False, training=False, k_len=1)
    exact = work.by_rows(torch.float64)
    assert noise_of(work.call(SDPA, dropout=0.2), exact)[0] == pytest.approx(0.5, rel=0.03)
    assert noise_of(work.call(SDPA), exact)[0] < 1e-6


def test_gradient_without_dropout_raises() -> None:
    work = TensorWork((2, 4, 64, 16), FLOAT, causal=False, training=True)
    honest, without = work.call(SDPA, dropout=0.1), work.call(SDPA)
    comparison = Comparison(
        title="dropout",
        calls={"honest": honest, "half": lambda: (honest()[0], without()[1])},
        checked={},
        noisy=("honest", "half"),
        exact=lambda: work.by_rows(torch.float64),
        plain=lambda: work.by_rows(FLOAT),
    )
    with pytest.raises(UnsupportedError, match="drop as much"):
        comparison.check()


def test_comparison_of_some_heads() -> None:
    row = TensorRow(shape=(2, 5, 40, 8), causal=True, training=True, dtype=FLOAT, most_checked=3 * 40 * 40)
    comparison = row.comparison()
    work = TensorWork(row.shape, FLOAT, causal=True, training=True)
    assert work.pairs(row.most_checked) == [(0, 0), (0, 4), (1, 4)]
    assert [tensor.shape for group in comparison.pick(comparison.calls[OURS]()) for tensor in group] == [(3, 40, 8)] * 4
    assert max(comparison.check().values()) < 1e-5
    with pytest.raises(UnsupportedError):
        replace(
            comparison, checked={"wrong": lambda: tuple(tuple(-t for t in g) for g in comparison.calls[OURS]())}
        ).check()


def test_row_titles_are_unique_and_every_floor_has_rows() -> None:
    for name, suite in SUITES.items():
        rows = suite.rows()
        assert len({row.title for row in rows}) == len(rows), name
        assert {row.group for row in rows} >= {floor.group for floor in suite.floors}, name
        for floor in suite.floors:
            assert any(floor.only in row.title for row in rows if row.group == floor.group), floor
            assert (floor.share is None) == bool(floor.against), floor


def test_floors_name_existing_contenders() -> None:
    named = {peer for suite in SUITES.values() for floor in suite.floors for peer in (*floor.against, floor.ours)}
    onnx = {"ONNX Runtime Attention", "ONNX Runtime MultiHeadAttention"}
    models = {SDPA_MODEL, ONNX_MODEL}
    contenders = {OURS, PLAIN, FULL, EAGER_WEIGHTS}
    layers = {MODULE, STACK, LINEAR, ENCODER_LAYER, DECODER_LAYER, PLAIN_LAYERS}
    biases, flex, padded = {DENSE, MADE}, {COMPILED, PLAIN_CAUSAL}, {PADDED, PADDED_SDPA}
    peers = {peer.name for peer in PEERS if peer.rows != "int8"} | {INT8, INT4, "llama.cpp q8_0", "llama.cpp q4_0"}
    assert named == contenders | {SWAPPED, SDPA, MATERIALISED} | onnx | models | layers | biases | flex | padded | peers


def test_operations_and_bytes_equal_the_formulas() -> None:
    row = TensorRow(shape=(2, 8, 100, 16), dtype=FLOAT)
    assert row.operations == 4 * 2 * 8 * 100 * 100 * 16
    assert replace(row, causal=True).operations == 4 * 2 * 8 * 5050 * 16
    assert replace(row, causal=True, window=9).operations == 4 * 2 * 8 * (55 + 90 * 10) * 16
    assert replace(row, training=True).operations == 3.5 * row.operations
    decode = TensorRow(shape=(3, 8, 1, 16), kv_heads=2, k_len=50, dtype=HALF)
    assert decode.memory_read == 2 * 3 * 2 * 50 * 16 * 2
    assert decode.operations == 4 * 3 * 8 * 50 * 16
    assert row.memory_read is None


def test_ragged_lengths_fill_half_of_the_batch() -> None:
    for batch, longest in ((16, 256), (4, 24), (3, 10), (7, 50)):
        lengths = ragged(batch, longest)
        assert len(lengths) == batch
        assert max(lengths) == longest
        assert min(lengths) >= 1
        assert sum(lengths) == round(batch * longest / 2)


def test_padding_has_no_effect_and_a_missing_layer_raises() -> None:
    work = EncoderWork([12, 5, 7], embed_dim=16, num_heads=2, num_layers=2, feedforward_dim=32, dtype=FLOAT)
    output, _, parameters = work.our_call()()
    assert output[0].shape == (24, 16)
    assert sum(tensor.numel() for tensor in parameters) == sum(p.numel() for p in work.theirs.parameters())
    short = EncoderWork([12, 5, 7], embed_dim=16, num_heads=2, num_layers=2, feedforward_dim=32, dtype=FLOAT)
    short.theirs.layers[1].load_state_dict(short.theirs.layers[0].state_dict())
    comparison = Comparison(
        title="encoder", calls={"wrong": short.our_call()}, exact=work.exact, plain=work.their_call()
    )
    with pytest.raises(UnsupportedError):
        comparison.check()


def test_no_relu_unit_is_near_zero() -> None:
    work = EncoderWork([40, 20, 9], embed_dim=64, num_heads=2, num_layers=3, feedforward_dim=256, dtype=FLOAT)
    units: list[torch.Tensor] = []
    for layer in work.theirs.layers:
        layer.linear1.register_forward_hook(lambda module, given, output: units.append(output.detach()))
    work.their_call()
    work.theirs(work.x, src_key_padding_mask=work.padding)
    for output in units:
        real = output[~work.padding]
        assert real.abs().min() > 1e-3
        assert (real > 0).float().mean() == 0.5


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_yardstick_is_a_product_and_is_not_compared(dtype: torch.dtype) -> None:
    measure, absent = yardsticks(dtype)
    if absent:
        pytest.skip(absent[PRODUCT])
    product = measure[PRODUCT]()
    assert product.shape == (2048, 2048)
    assert product.dtype == dtype
    one = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    transposed = dtype == FLOAT and not torch.allclose(product[:4], one[:4] @ one, atol=1e-2)
    expected = one[:4] @ (one.T if transposed else one)
    torch.testing.assert_close(product[:4], expected, rtol=2e-2, atol=1e-2 if dtype == FLOAT else 2.0)
    comparison = replace(ROWS["window"], yardstick=True).comparison()  # type: ignore[type-var]
    assert PRODUCT in comparison.timed
    assert PRODUCT not in comparison.check()


def test_missing_onednn_product_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "ONEDNN", replace(product.ONEDNN, absent=lambda dtype: f"none in {dtype}"))
    measured = measure_row(replace(ROWS["grouped"], yardstick=True), repeats=1, seconds=None)  # type: ignore[type-var]
    assert PRODUCT not in measured.timings
    assert measured.share(OURS) is None
    assert measured.left_out[PRODUCT] == "none in torch.bfloat16"
    assert PRODUCT in replace(ROWS["window"], yardstick=True).comparison().timed  # type: ignore[type-var]
