"""torch.compile and torch.export of the modules: one graph with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import Encoder, EncoderBlock, LanguageModel, MultiHeadAttention, SequenceClassifier

NEAR = {"atol": 1e-5, "rtol": 1e-5}
#: Traces and differentiates like the default backend, but generates no C++.
QUICK = "aot_eager"


class Masked(nn.Module):
    """A module called with a mask, as torch.export needs it: tensors in, tensors out."""

    def __init__(self, module: nn.Module, mask: ch.Mask | None) -> None:
        super().__init__()
        self.module = module
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x, mask=self.mask)
        return output


def _modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(4, 5))
    return {
        "attention": MultiHeadAttention(16, 4),
        "rotary, grouped, rules": MultiHeadAttention(
            16,
            4,
            num_kv_heads=2,
            rotary=True,
            scores=[ch.RelativeBias(table), ch.SoftCap(3.0), ch.Sink(torch.zeros(4))],
        ),
        "block": EncoderBlock(16, 4, dropout=0.0, scores=[ch.Alibi(4)]),
    }


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["attention", "rotary, grouped, rules", "block"])
@pytest.mark.parametrize("mask", [None, ch.Causal() & ch.Window(3), ch.Padding([7, 4])], ids=repr)
def test_compiles_as_one_graph_forward_and_backward(kind: str, mask: ch.Mask | None) -> None:
    torch._dynamo.reset()
    module = Masked(_modules()[kind], mask)
    compiled = torch.compile(module, fullgraph=True, backend=QUICK)
    results = []
    for run in (module, compiled):
        x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        module.zero_grad()
        output = run(x)
        output.square().sum().backward()
        results.append([output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
    for eager, result in zip(*results, strict=True):
        torch.testing.assert_close(result, eager, **NEAR)


@pytest.mark.slow
def test_compiles_with_the_default_backend() -> None:
    torch._dynamo.reset()
    module = Masked(_modules()["block"], ch.Causal())
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(compiled(x), module(x), **NEAR)
    compiled(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "rotary, grouped, rules", "block"])
def test_exports_for_any_batch_and_length(kind: str) -> None:
    module = Masked(_modules()[kind].eval(), ch.Causal() & ch.Window(3))
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    exported = torch.export.export(module, (torch.randn(2, 7, 16),), dynamic_shapes=(sizes,))
    assert "clearhead.attention" in str(exported.graph)
    for shape in ((2, 7, 16), (3, 11, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(exported.module()(x), module(x), **NEAR)


@pytest.mark.slow
def test_models_compile_and_export_without_padding() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (2, 9))
    for model in (
        SequenceClassifier(20, 16, 4, 1, 3, max_len=16).eval(),
        LanguageModel(20, 16, 4, 1, max_len=16).eval(),
    ):
        expected = model(ids)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=QUICK)(ids), expected, **NEAR)
        torch.testing.assert_close(torch.export.export(model, (ids,)).module()(ids), expected, **NEAR)


@pytest.mark.slow
def test_compiled_blocks_serve_packed_batches_of_any_length() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SequenceClassifier(20, 16, 4, 2, 3, max_len=32, dropout=0.0)
    plain = SequenceClassifier(20, 16, 4, 2, 3, max_len=32, dropout=0.0)
    plain.load_state_dict(model.state_dict())
    model.compile_blocks(QUICK)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 20, (4, 9 + seed), generator=generator)
        lengths = torch.randint(1, 9, (4,), generator=generator)
        for each in (model, plain):
            each.zero_grad()
            each(ids, lengths=lengths).square().sum().backward()
        torch.testing.assert_close(model(ids, lengths=lengths), plain(ids, lengths=lengths), **NEAR)
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, **NEAR)
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.slow
def test_compiled_blocks_with_checkpointing_and_autocast() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Encoder(16, 2, 1, checkpoint_activations=True)
    x = torch.randn(2, 6, 16)
    eager = model(x)
    model.compile_blocks(QUICK)
    torch.testing.assert_close(model(x), eager, **NEAR)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.float().square().sum().backward()
    assert (output - eager).abs().max() < 0.1
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_a_compiled_language_model_generates_the_same() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LanguageModel(20, 16, 2, 1, max_len=16)
    ids = torch.tensor([[1, 2, 3]])
    expected = model.generate(ids, 6, temperature=0.0)
    model.compile_blocks(QUICK)
    assert torch.equal(model.generate(ids, 6, temperature=0.0), expected)


@pytest.mark.slow
def test_a_cached_step_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    module = ch.nn.MultiHeadAttention(8, 2)
    x = torch.randn(1, 4, 8)

    def steps(x: Tensor) -> Tensor:
        cache = ch.KVCache()
        return torch.cat([module(part, mask=ch.Causal(), cache=cache) for part in x.split(2, dim=1)], dim=1)

    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x, mask=ch.Causal()))
