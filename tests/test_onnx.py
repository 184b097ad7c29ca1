"""``torch.onnx.export(dynamo=True)`` of calls, modules and swapped models: ONNX Runtime computes what we compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.functional import flex_attention
from tests.onnx_runtime import ATTENTION, PLAIN, export, needs_onnx, operators, run, same_values

pytestmark = needs_onnx

OPSETS = pytest.mark.parametrize("opset", [ATTENTION, PLAIN])
BATCH, LENGTH = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("length", min=2, max=64)


class Call(nn.Module):
    """One call of ``ch.attention`` with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ch.attention(query, key, value, **self.options)


class Applied(nn.Module):
    """A module with the arguments that a function gives it."""

    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.call = module.eval(), call

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        return self.call(self.module, first) if second is None else self.call(self.module, first, second)


def draw(q_len: int = 7, k_len: int = 7, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of four heads, two heads of keys, and values narrower than keys."""
    generator = torch.Generator().manual_seed(q_len + 100 * k_len)
    shapes = ((2, 4, q_len, 8), (2, 2, k_len, 8), (2, 2, k_len, 6))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


def table(*, empty: bool = True) -> Tensor:
    """A mask of seven tokens; with an empty row."""
    allowed = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    allowed[0, 0, 3] = False
    return allowed if empty else allowed | torch.eye(7, dtype=torch.bool)


def parity(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return (q_pos + k_pos) % 2 == 0


def farther(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return score - 0.1 * (q_pos - k_pos).abs()


BIAS = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(2))
#: Calls that ONNX's Attention expresses.
EXPRESSED: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"mask": ch.Causal()},
    "scale": {"scale": 0.7},
    "negative scale": {"mask": ch.Causal(), "scale": -0.5},
    "zero scale": {"scale": 0.0},
    "window": {"mask": ch.Causal() & ch.Window(2)},
    "not window": {"mask": ~ch.Window(2, 9)},
    "dense": {"mask": ch.Dense(table())},
    "dense and causal": {"mask": ch.Dense(table()) & ch.Causal()},
    "padding": {"mask": ch.Padding([3, 0])},
    "documents": {"mask": ch.Documents(lengths=[3, 4])},
    "function": {"mask": ch.MaskFunction(parity)},
    "bias": {"scores": ch.DenseBias(BIAS)},
    "bias and dense": {"mask": ch.Dense(table()), "scores": ch.DenseBias(BIAS)},
    "bias of -inf": {"scores": ch.DenseBias(BIAS.masked_fill(~table()[0], -torch.inf))},
    "alibi": {"mask": ch.Causal(), "scores": ch.Alibi(4)},
    "relative": {"scores": ch.RelativeBias(torch.linspace(-1.0, 1.0, 20).view(4, 5))},
}
#: Calls that become the formula in plain operators.
PLAINLY: dict[str, dict[str, Any]] = {
    "soft cap": {"mask": ch.Causal(), "scores": ch.SoftCap(1.5)},
    "sink": {"mask": ch.Dense(table()), "scores": [ch.Alibi(4), ch.Sink(0.3)]},
    "score function": {"mask": ch.Dense(table()), "scores": ch.ScoreFunction(farther)},
}
#: One of each, for `make test`.
QUICK = ("causal", "bias and dense", "soft cap")


def case(name: str) -> Any:
    return pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("name", [case(name) for name in (*EXPRESSED, *PLAINLY)])
def test_call_gives_the_same_values(name: str, opset: int) -> None:
    options = (EXPRESSED | PLAINLY)[name]
    counts = same_values(Call(**options), draw(), opset=opset)
    assert (counts["Attention"] == 1) == (name in EXPRESSED and opset == ATTENTION)
    assert ("Softmax" in counts) != ("Attention" in counts)


@pytest.mark.slow
def test_empty_row_gives_zero_output() -> None:
    inputs = draw()
    (result,) = run(export(Call(mask=ch.Dense(table())), inputs), inputs)
    assert torch.equal(result[0, :, 3], torch.zeros(4, 6))
    assert bool(result.isfinite().all())


@pytest.mark.slow
def test_rows_that_cannot_be_empty_are_not_guarded() -> None:
    assert "Where" not in operators(export(Call(mask=ch.Causal() & ch.Window(2)), draw()))
    assert "Where" in operators(export(Call(mask=ch.Window(1), query_offset=6), draw()))


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize(
    "options",
    [
        {"mask": ch.Causal()},
        {"mask": ch.Causal() & ch.Window(3), "scores": ch.Alibi(4)},
        {"mask": ~ch.Padding([3, 1]) | ch.Causal()},
        {"mask": ch.Causal(), "scores": [ch.SoftCap(2.0), ch.Sink(0.1)]},
    ],
    ids=["causal", "alibi", "either", "plain"],
)
def test_length_may_be_dynamic(options: dict[str, Any], opset: int) -> None:
    same_values(Call(**options), draw(), draw(11, 11), opset=opset, dynamic=({2: LENGTH},) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [4, -2])
def test_first_query_may_stand_anywhere(offset: int) -> None:
    counts = same_values(Call(mask=ch.Causal(), query_offset=offset), draw(3, 7))
    assert counts["Attention"] == 1


@pytest.mark.slow
def test_decoding_step_with_cached_keys() -> None:
    class Step(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
            return ch.attention(query, key, value, mask=ch.Causal(), query_offset=keys.shape[2])

    past = torch.export.Dim("past", min=2, max=60)
    example, inputs = (*draw(1, 1), *draw(1, 7)[1:]), (*draw(1, 1), *draw(1, 20)[1:])
    counts = same_values(Step(), example, inputs, dynamic=(None, None, None, {2: past}, {2: past}))
    assert counts["Attention"] == 1


@pytest.mark.slow
@OPSETS
def test_lengths_may_be_an_input(opset: int) -> None:
    class Padded(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
            return ch.attention(query, key, value, mask=ch.Padding(lengths) & ch.Causal())

    inputs = (*draw(11, 11), torch.tensor([5, 0]))
    same_values(Padded(), (*draw(), torch.tensor([3, 7])), inputs, opset=opset, dynamic=(*({2: LENGTH},) * 3, None))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    inputs = draw(dtype=dtype)
    # ONNX Runtime computes tanh of float64 to 2e-8.
    capped = ({"scores": ch.SoftCap(2.0), "scale": 0.3},) if dtype is torch.float16 else ()
    for options in ({}, {"mask": ch.Causal(), "scores": ch.Alibi(4)}, *capped):
        (result,) = run(export(Call(**options), inputs), inputs)
        exact = ch.attention(*(each.double() for each in inputs), backend="reference", **options)
        assert result.dtype == dtype
        # Five roundings of values of at most 4: inputs, scores, weights, sums and the output.
        torch.testing.assert_close(result.double(), exact, rtol=0.0, atol=5 * 4 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_leading_axes_may_be_missing() -> None:
    query, key, _ = draw()
    assert same_values(Call(mask=ch.Causal()), (query[0, 0], key[0, 0], key[1, 0]))["Attention"] == 1


@pytest.mark.slow
def test_default_opset_needs_no_arguments() -> None:
    program = torch.onnx.export(Call(mask=ch.Causal()), draw(), dynamo=True, verbose=False)
    (result,) = run(program, draw())
    torch.testing.assert_close(result, ch.attention(*draw(), mask=ch.Causal()), rtol=0.0, atol=1e-5)


# ---- what ONNX cannot say --------------------------------------------------------------------------------------------


def refusal(module: nn.Module, *inputs: Tensor) -> str:
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        export(module, inputs)
    return str(caught.value)


@pytest.mark.slow
def test_dropout_is_refused() -> None:
    line = "attention: dropout must be 0 under torch.onnx.export; got 0.1. Call model.eval() first"
    assert line in refusal(Call(dropout=0.1), *draw())


@pytest.mark.slow
def test_module_in_training_is_refused() -> None:
    module = Applied(ch.nn.MultiHeadAttention(16, 4, dropout=0.1), lambda module, x: module(x)).train()
    assert "dropout must be 0 under torch.onnx.export" in refusal(module, torch.randn(2, 7, 16))


@pytest.mark.slow
def test_statistics_are_refused() -> None:
    class Observed(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return ch.observe_attention(query, key, value, want=ch.Want(lse=True)).lse

    assert "observe_attention: the call must be one that ONNX can express" in refusal(Observed(), *draw())


@pytest.mark.slow
def test_wrong_shapes_are_refused() -> None:
    query, key, value = draw()
    assert "attention: key must have query's head_dim 8" in refusal(Call(), query, key[..., :4], value)


# ---- FlexAttention's signature ---------------------------------------------------------------------------------------


class Flex(nn.Module):
    """One call of ``flex_attention`` with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_attention(query, key, value, enable_gqa=True, **self.options)


DOCUMENT = torch.tensor([0] * 13 + [1] * 20 + [2] * 7)
LENGTHS = torch.tensor([40, 22])
BY_DISTANCE = torch.randn(4, 79, generator=torch.Generator().manual_seed(3))


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def block_mask(mask_mod: Callable[..., Tensor], batch: int | None = None, heads: int | None = None) -> Any:
    """Blocks of 16 for 40 tokens: skipped, partial and full ones, and a part of a block at the end."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, batch, heads, 40, 40, device="cpu", BLOCK_SIZE=16)


#: Options of a call, made in the test, and whether ONNX's Attention expresses them.
FLEX: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "plain": (lambda: {"scale": 0.3}, True),
    "causal": (lambda: {"block_mask": block_mask(causal)}, True),
    "documents": (lambda: {"block_mask": block_mask(lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k))}, True),
    "padding": (lambda: {"block_mask": block_mask(lambda b, h, q, k: k < LENGTHS[b], batch=2)}, True),
    "per head": (lambda: {"block_mask": block_mask(lambda b, h, q, k: k + h <= q, heads=4)}, True),
    "distance": (lambda: {"score_mod": lambda score, b, h, q, k: score - 0.1 * (q - k).abs()}, False),
    "look-up": (
        lambda: {
            "score_mod": lambda score, b, h, q, k: score + BY_DISTANCE[h, q - k + 39],
            "block_mask": block_mask(causal),
        },
        False,
    ),
    "soft cap": (
        lambda: {
            "score_mod": lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0),
            "block_mask": block_mask(causal),
        },
        False,
    ),
    "-inf": (lambda: {"score_mod": lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf)}, False),
}


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_gives_the_same_values(name: str, opset: int) -> None:
    options, expressed = FLEX[name]
    counts = same_values(Flex(**options()), draw(40, 40), opset=opset)
    assert (counts["Attention"] == 1) == (expressed and opset == ATTENTION)


@pytest.mark.slow
def test_flex_attention_with_an_empty_row_gives_zero_output() -> None:
    inputs = draw(40, 40)
    (result,) = run(export(Flex(block_mask=block_mask(lambda b, h, q, k: q > k)), inputs), inputs)
    assert torch.equal(result[:, :, 0], torch.zeros(2, 4, 6))
    assert bool(result.isfinite().all())


@pytest.mark.slow
def test_length_of_flex_attention_may_be_dynamic() -> None:
    module = Flex(score_mod=lambda score, b, h, q, k: score - 0.1 * (q - k).abs())
    same_values(module, draw(), draw(11, 11), dynamic=({2: LENGTH},) * 3)


@pytest.mark.slow
def test_block_mask_in_a_call_of_attention_gives_the_same_values() -> None:
    mask = ch.masks.from_block_mask(block_mask(causal))
    assert same_values(Call(mask=mask & ch.Window(3)), draw(40, 40))["Attention"] == 1


@pytest.mark.slow
def test_flex_attention_for_the_log_sum_exp_is_refused() -> None:
    assert "flex_attention: return_lse must be left out under torch.onnx.export; got True" in refusal(
        Flex(return_lse=True), *draw()
    )


# ---- modules ---------------------------------------------------------------------------------------------------------

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], int]] = {
    "MultiHeadAttention": (
        lambda: ch.nn.MultiHeadAttention(32, 4, num_kv_heads=2, rotary=True),
        lambda module, x: module(x, mask=ch.Causal()),
        1,
    ),
    "FeedForward": (lambda: ch.nn.FeedForward(32, 64, gated=True), lambda module, x: module(x), 0),
    "EncoderBlock": (lambda: ch.nn.EncoderBlock(32, 4), lambda module, x: module(x), 1),
    "Encoder": (lambda: ch.nn.Encoder(32, 4, 2), lambda module, x: module(x), 2),
    "Decoder": (
        lambda: ch.nn.Decoder(32, 4, 2, scores=[ch.Alibi(4)], norm="rms", gated=True, num_kv_heads=2),
        lambda module, x: module(x),
        2,
    ),
    "LinearAttention": (lambda: ch.nn.LinearAttention(32, 4), lambda module, x: module(x), 0),
    "TransformerEncoder": (
        lambda: swapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)),
        lambda module, x: module(x),
        2,
    ),
}


def swapped(module: nn.Module) -> nn.Module:
    ch.swap(module.eval())
    return module


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "EncoderBlock" else pytest.mark.slow) for name in MODULES]
)
def test_module_gives_the_same_values(name: str, opset: int) -> None:
    torch.manual_seed(0)
    made, call, count = MODULES[name]
    counts = same_values(
        Applied(made(), call),
        (torch.randn(2, 9, 32),),
        (torch.randn(3, 17, 32),),
        opset=opset,
        dynamic={"first": {0: BATCH, 1: LENGTH}},
    )
    assert counts["Attention"] == (count if opset == ATTENTION else 0)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "LanguageModel": (
        lambda: ch.nn.LanguageModel(50, 32, 4, 2, positions="rotary", norm="rms"),
        lambda module, ids, lengths: module(ids, lengths=lengths),
    ),
    "SequenceClassifier": (
        lambda: ch.nn.SequenceClassifier(50, 32, 4, 2, 3),
        lambda module, ids, lengths: module(ids, lengths=lengths),
    ),
}


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("name", MODELS)
def test_model_with_lengths_gives_the_same_values(name: str, opset: int) -> None:
    torch.manual_seed(0)
    made, call = MODELS[name]
    counts = same_values(
        Applied(made(), call),
        (torch.randint(50, (2, 9)), torch.tensor([9, 4])),
        (torch.randint(50, (3, 17)), torch.tensor([17, 1, 9])),
        opset=opset,
        dynamic={"first": {0: BATCH, 1: LENGTH}, "second": {0: BATCH}},
    )
    assert counts["Attention"] == (2 if opset == ATTENTION else 0)


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_encoder_decoder_gives_the_same_values(positions: str, opset: int) -> None:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = ch.nn.EncoderDecoder(40, 50, 32, 4, 2, positions=positions).eval()

        def forward(self, source: Tensor, target: Tensor, source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
            return self.module(source, target, source_lengths=source_lengths, target_lengths=target_lengths)

    torch.manual_seed(0)
    target_length = torch.export.Dim("target_length", min=2, max=64)
    counts = same_values(
        Translation(),
        (torch.randint(40, (2, 9)), torch.randint(50, (2, 5)), torch.tensor([9, 4]), torch.tensor([5, 2])),
        (torch.randint(40, (3, 17)), torch.randint(50, (3, 11)), torch.tensor([17, 1, 6]), torch.tensor([11, 3, 1])),
        opset=opset,
        dynamic=({0: BATCH, 1: LENGTH}, {0: BATCH, 1: target_length}, {0: BATCH}, {0: BATCH}),
    )
    # Two blocks of the encoder, and two of the decoder with two attentions each.
    assert counts["Attention"] == (6 if opset == ATTENTION else 0)


@pytest.mark.slow
def test_encoder_with_lengths_exports_as_a_program_too() -> None:
    """torch.export alone, whose graph keeps clearhead's operators."""
    encoder = Applied(ch.nn.Encoder(32, 4, 1), lambda module, x, lengths: module(x, lengths=lengths))
    x, lengths = torch.randn(2, 9, 32), torch.tensor([9, 4])
    with torch.no_grad():
        program = torch.export.export(encoder, (x, lengths))
        other = torch.tensor([2, 7])
        torch.testing.assert_close(program.module()(x, other), encoder(x, other), rtol=0.0, atol=1e-5)


# ---- models of transformers ------------------------------------------------------------------------------------------


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.BertModel(
        transformers.BertConfig(vocab_size=50, max_position_embeddings=64, **sizes, **options)
    )


def llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(
        vocab_size=50, max_position_embeddings=64, num_key_value_heads=2, **sizes, **options
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("implementation", ["swapped", "named"])
def test_bert_gives_the_same_values(implementation: str, opset: int) -> None:
    torch.manual_seed(0)
    model = swapped(bert()) if implementation == "swapped" else named(bert)
    real, others = torch.ones(2, 9, dtype=torch.int64), torch.ones(3, 17, dtype=torch.int64)
    real[1, 5:] = others[1, 5:] = 0
    counts = same_values(
        Applied(model, lambda model, ids, real: model(input_ids=ids, attention_mask=real).last_hidden_state),
        (torch.randint(50, (2, 9)), real),
        (torch.randint(50, (3, 17)), others),
        opset=opset,
        dynamic={"first": {0: BATCH, 1: LENGTH}, "second": {0: BATCH, 1: LENGTH}},
    )
    assert counts["Attention"] == (2 if opset == ATTENTION else 0)


@pytest.mark.slow
@OPSETS
@pytest.mark.parametrize("implementation", ["swapped", "named"])
def test_llama_gives_the_same_values(implementation: str, opset: int) -> None:
    # One sequence: from opset 23 on the exporter writes RotaryEmbedding, which ONNX Runtime refuses for several.
    torch.manual_seed(0)
    model = swapped(llama()) if implementation == "swapped" else named(llama)
    counts = same_values(
        Applied(model, lambda model, ids: model(input_ids=ids, use_cache=False).logits),
        (torch.randint(50, (1, 9)),),
        (torch.randint(50, (1, 17)),),
        opset=opset,
        dynamic={"first": {1: LENGTH}},
    )
    assert counts["Attention"] == (2 if opset == ATTENTION else 0)


def named(make: Callable[..., nn.Module]) -> nn.Module:
    pytest.importorskip("transformers", reason="needs the extra hf")
    ch.bridges.transformers.enable()
    return make(attn_implementation="clearhead")
