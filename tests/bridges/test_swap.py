"""swap changes only classes and reports them, and unswap undoes it."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import clearhead as ch
from clearhead.bridges import SwapReport, swap, unswap
from clearhead.integrations.torch import attention as torch_attention
from tests.threads import on_threads

EXACT = {"atol": 1e-11, "rtol": 1e-11}


class Model(nn.Module):
    """Every swapped class, and one attention used twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.shared = self.attention
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.decoder(x, memory, memory_key_padding_mask=padding)
        y = self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        output: Tensor = self.head(self.shared(y, y, y)[0])
        return output


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse small calls without a mask, which use torch's code by default."""
    monkeypatch.setattr(torch_attention, "LEAST_WORK", 0)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


X = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(5) >= torch.tensor([[5], [2], [4]])


def test_the_report_lists_every_replaced_module(model: Model) -> None:
    report = swap(model)
    assert isinstance(report, SwapReport)
    assert str(report).splitlines() == [
        "fused   2 TransformerEncoderLayer",
        "fused   1 TransformerDecoderLayer",
        "native  1 TransformerEncoder",
        "native  5 MultiheadAttention",
        "native  1 TransformerDecoder",
    ]
    assert [row.path for row in report.rows if row.class_name == "TransformerEncoderLayer"] == [
        "encoder.layers.0",
        "encoder.layers.1",
    ]
    second = swap(model)
    assert second.replaced == second.left == ()
    assert second.before == report.replaced
    assert str(second).splitlines()[0] == "fused   2 TransformerEncoderLayer  swapped before"
    restored = unswap(model)
    assert restored.replaced == report.replaced
    assert str(unswap(model)) == "no module of the model attends, or was swapped"


def test_a_second_swap_changes_leave_padding_out(model: Model) -> None:
    for leave in (True, False, True):
        swap(model, leave_padding_out=leave)
        assert model.encoder.leaves_padding_out == leave
        assert bool((model.encoder(X, src_key_padding_mask=PADDING)[PADDING] == 0).all()) == leave
    swap(model, leave_padding_out=False)
    unswap(model)
    assert "leaves_padding_out" not in vars(model.encoder)


def test_symbolic_tracing_treats_swapped_modules_as_leaves(model: Model) -> None:
    swap(model)
    traced = torch.fx.symbolic_trace(model)
    targets = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {"encoder", "decoder", "attention"} <= targets
    torch.testing.assert_close(traced(X, PADDING), model(X, PADDING), **EXACT)
    layers = nn.Sequential(*copy.deepcopy(model.encoder.layers))
    torch.testing.assert_close(torch.fx.symbolic_trace(layers)(X), layers(X), **EXACT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_stay_quantised() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    kind = type(model.linear1)
    assert kind is not nn.Linear
    swap(model)
    assert isinstance(model.linear1, kind)
    assert type(model.linear1).__name__ == "Linear"
    assert model(X.float()).shape == X.shape


def test_swap_changes_only_classes(model: Model) -> None:
    def snapshot() -> dict[str, object]:
        return {
            "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
            "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "state": {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
            "shown": str(model),
        }

    before = snapshot()
    swap(model, leave_padding_out=False)
    swapped = snapshot()
    assert swapped["parameters"] == before["parameters"]
    assert swapped["state"] == before["state"]
    assert isinstance(model.attention, nn.MultiheadAttention)
    assert isinstance(model.encoder.layers[0], nn.TransformerEncoderLayer)
    assert model.shared is model.attention
    assert type(model.head) is nn.Linear
    assert type(model.encoder.layers[0].linear1) is not nn.Linear
    unswap(model)
    assert snapshot() == before


def test_state_dicts_load_in_both_directions(model: Model) -> None:
    theirs, ours = copy.deepcopy(model), model
    swap(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(X), theirs(X), **EXACT)
    fresh = Model().double()
    file = io.BytesIO()
    torch.save(fresh.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(ours(X), fresh(X), **EXACT)


def test_an_optimizer_works_across_swap_and_unswap(model: Model) -> None:
    plain = copy.deepcopy(model)
    losses = []
    for each, steps in ((plain, (None, None, None)), (model, (None, swap, unswap))):
        optimizer = torch.optim.Adam(each.parameters(), lr=1e-2)
        for change in steps:
            if change is not None:
                change(each)
            optimizer.zero_grad()
            loss = each(X, PADDING)[~PADDING].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:3], losses[3:], atol=1e-9, rtol=1e-9)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_copies_of_a_swapped_model_work(model: Model, training: bool) -> None:
    expected = model.train(training)(X, PADDING)[~PADDING]
    swap(model)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(X, PADDING)[~PADDING], expected, **EXACT)
    unswap(copied)
    assert type(copied.attention) is nn.MultiheadAttention
    assert type(model.attention) is not nn.MultiheadAttention
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    torch.testing.assert_close(read(X, PADDING)[~PADDING], expected, **EXACT)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_report_says_why_modules_are_left() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    class MyLayer(nn.TransformerEncoderLayer):
        pass

    foreign = type("BertSelfAttention", (nn.Module,), {"__module__": "transformers.models.bert.modeling_bert"})
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = Mine(8, 2, batch_first=True)
    odd = nn.MultiheadAttention(8, 2)
    odd.forward = odd.forward
    model = nn.ModuleDict(
        {
            "mine": Mine(8, 2),
            "layer": layer,
            "stack": nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
            "my layer": MyLayer(8, 2, 16),
            "foreign": foreign(),
            "odd": odd,
            "script": torch.jit.script(nn.TransformerEncoderLayer(8, 2, 16)),
        }
    )
    report = swap(model)
    assert {part.name: part.why for part in report.left if "." not in part.name} == {
        "mine": "a subclass may compute something else",
        "layer": "its self_attn, a Mine, is left",
        "stack": "its layers.0, a TransformerEncoderLayer, is left",
        "my layer": "a subclass may compute something else",
        "foreign": "part of a transformers model outside its PreTrainedModel; swap the model before it is divided",
        "odd": "its forward was replaced on the object",
        "script": "compiled by TorchScript, which ours cannot be; swap the model itself and use torch.compile",
    }
    assert [part.name for part in report.replaced] == ["my layer.self_attn"]
    assert re.search(r"left +1 BertSelfAttention +part of a transformers model outside its Pre", str(report))
    assert type(model["mine"]) is Mine
    assert type(layer) is nn.TransformerEncoderLayer
    assert type(layer.linear1) is nn.Linear


def test_swap_of_a_model_without_attention_and_of_a_non_module() -> None:
    assert str(swap(nn.Linear(2, 2))) == "no module of the model attends, or was swapped"
    for function in (swap, unswap):
        with pytest.raises(
            ch.UnsupportedError, match=rf"^{function.__name__}: model must be a torch.nn.Module; got str"
        ):
            function("model")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_subclass_that_is_left_uses_the_attention_inside(model: Model) -> None:
    class MyLayer(nn.TransformerEncoderLayer):
        pass

    layer = MyLayer(8, 2, 16, 0.0, batch_first=True).double()
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    ours = copy.deepcopy(theirs)
    assert len(swap(ours).replaced) == 2
    for training in (True, False):
        theirs.train(training), ours.train(training)
        expected = theirs(X, src_key_padding_mask=PADDING)[~PADDING]
        torch.testing.assert_close(ours(X, src_key_padding_mask=PADDING)[~PADDING], expected, **EXACT)
        with torch.no_grad():
            output = ours(X, src_key_padding_mask=PADDING)[~PADDING]
        torch.testing.assert_close(output, expected, **EXACT)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("first", ["swap", "parametrize"])
def test_parametrized_modules_match_the_original(model: Model, first: str) -> None:
    def parametrized(each: Model) -> None:
        parametrize.register_parametrization(each.attention, "in_proj_weight", Doubled())
        parametrize.register_parametrization(each.attention, "in_proj_bias", Doubled())
        parametrizations.weight_norm(each.encoder.layers[0].linear1)
        parametrizations.weight_norm(each.attention.out_proj)

    theirs, ours = model, copy.deepcopy(model)
    parametrized(theirs)
    for step in (parametrized, swap) if first == "parametrize" else (swap, parametrized):
        step(ours)
    for each in (theirs, ours):
        each.zero_grad()
        each(X, PADDING)[~PADDING].square().sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)
    copied = copy.deepcopy(ours)
    unswap(copied)
    torch.testing.assert_close(copied(X), theirs(X), **EXACT)
    assert copied.state_dict().keys() == theirs.state_dict().keys()
    for each in (copied, ours):
        for name in ("in_proj_weight", "in_proj_bias"):
            parametrize.remove_parametrizations(each.attention, name)
        torch.testing.assert_close(each(X), theirs(X), **EXACT)
    assert type(copied.attention) is nn.MultiheadAttention
    unswap(ours)
    assert type(ours.attention) is nn.MultiheadAttention


def test_a_swapped_model_can_change_dtype(model: Model) -> None:
    swap(model)
    half = model.to(torch.bfloat16)
    assert half(X.bfloat16(), PADDING).dtype == torch.bfloat16
    assert half.float()(X.float(), PADDING).dtype == torch.float32


def test_concurrent_threads_match_the_original(model: Model) -> None:
    expected = model(X, PADDING)[~PADDING]
    failures: list[BaseException] = []

    def work(_: int) -> None:
        try:
            for _ in range(5):
                assert len(swap(model).replaced) in (0, 10)
                torch.testing.assert_close(model(X, PADDING)[~PADDING], expected, **EXACT)
        except BaseException as error:
            failures.append(error)

    on_threads(4, work)
    assert failures == []


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_compiled_model_matches_the_original(model: Model, training: bool) -> None:
    expected = model.train(training)(X, PADDING)
    swap(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(X, PADDING)
    torch.testing.assert_close(output[~PADDING], expected[~PADDING], **EXACT)
    output[~PADDING].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    unswap(model)
    model(X, PADDING)[~PADDING].square().sum().backward()
    for one, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, **EXACT)


@pytest.mark.slow
def test_compiled_attention_with_causal_and_float_masks_and_weights() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours = copy.deepcopy(theirs)
    swap(ours)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for call in (
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": causal, "need_weights": True},
        {"attn_mask": torch.ones(6, 5, 5).triu(1).bool(), "average_attn_weights": False},
        {"key_padding_mask": torch.zeros(3, 5).double().masked_fill(PADDING, -torch.inf), "need_weights": False},
    ):
        for one, other in zip(compiled(X, X, X, **call), theirs(X, X, X, **call), strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.slow
def test_an_exported_model_matches_the_original(model: Model) -> None:
    swap(model.eval())
    program = torch.export.export(model, (X, PADDING))
    expected = model(X, PADDING)
    torch.testing.assert_close(program.module()(X, PADDING)[~PADDING], expected[~PADDING], **EXACT)
