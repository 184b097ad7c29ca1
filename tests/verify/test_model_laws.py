"""The laws of models can fail: each is broken by a model whose numbers depend on what the law varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.choices import is_invariant, overrides
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.verify import model_law_names
from clearhead.verify.bit_comparison import BitComparison
from clearhead.verify.law import Broken
from clearhead.verify.laws import models as laws
from clearhead.verify.model_under_test import Generated, ModelCall, ModelUnderTest
from clearhead.watch import watched
from tests.agreement import needs_native

LAWS = {law.name: law for law in laws.MODEL_LAWS}
VOCABULARY, WIDTH = 31, 4


class Sums(nn.Module):
    """Prefix sums of whole numbers, which are exact in any order, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randint(-8, 9, parameter.shape, generator=generator).double()


Fault = Callable[["Exact", ModelCall], float]


class Exact(ModelUnderTest):
    """``Sums``, called in every way, with a fault that a call may have."""

    kind = "exact model"
    model: Sums

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(Sums())
        self.fault = fault

    def draw(self, lengths: Sequence[int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]

    def inputs(self) -> nn.Module:
        return self.model.embedding

    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        states = self.model.embedding(batch)
        outputs = torch.zeros_like(states)
        for place, piece in enumerate(call.pieces):
            row, start = 0 if call.packed else place, call.offset(place)
            sums = states[row, start : start + piece.count].cumsum(0)
            outputs[row, start : start + piece.count] = sums if cache is None else sums + cache[place]
        last = outputs[:, -1] if call.cached else None
        logits = self.model.head(outputs)
        if self.fault is not None:
            logits = logits * (1.0 + self.fault(self, call))
            if logits.requires_grad and len(call.pieces) > 1 and self.fault is _in_gradients:
                logits.register_hook(lambda grad: grad * 1.5)
        return logits, last

    def generate(self, prompts: Sequence[Tensor], count: int, seed: int | None) -> list[Generated]:
        results = []
        for prompt in prompts:
            ids = torch.cat([prompt, prompt[:1].expand(count)])
            logits = self.model.head(self.model.embedding(ids))[-count:]
            results.append(Generated(ids, logits * (1.5 if self.fault is _in_text and len(prompts) > 1 else 1.0)))
        return results


def _in_gradients(model: Exact, call: ModelCall) -> float:
    return 0.0


def _in_text(model: Exact, call: ModelCall) -> float:
    return 0.0


#: A fault for each law but "observed", which needs an attention.
FAULTS: dict[str, Fault] = {
    "batch": lambda model, call: float(len(call.pieces) > 1 and not call.is_padded),
    "place": lambda model, call: float(call.pieces[0].sequence % 2),
    "padding right": lambda model, call: float(call.is_padded and call.side == "right"),
    "padding left": lambda model, call: float(call.is_padded and call.side == "left"),
    "packing": lambda model, call: 2.0**-20 * call.packed,
    "chunks": lambda model, call: float(call.cached and call.pieces[0].start > 0),
    "decoding": lambda model, call: float(call.cached and call.longest == 1),
    "decoding in a batch": lambda model, call: float(call.cached and call.longest == 1 and len(call.pieces) > 1),
    "threads": lambda model, call: float(torch.get_num_threads() == 3),
    "op by op": lambda model, call: float(overrides().fused is False),
    "autograd": lambda model, call: float(torch.is_grad_enabled()),
    "gradients": _in_gradients,
    "micro-batches": _in_gradients,
    "greedy text": _in_text,
    "sampled text": _in_text,
}


@pytest.fixture(autouse=True)
def whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(output: Tensor, seed: int) -> Tensor:
        return torch.randint(-4, 5, output.shape, generator=torch.Generator().manual_seed(seed)).to(output)

    monkeypatch.setattr(laws, "upstream", whole)


def _check(law: str, fault: Fault | None) -> None:
    with torch.no_grad():
        LAWS[law].check(BitComparison.of(Exact(fault), (37, 20, 9, 3)))


def test_every_law_of_models_has_a_fault() -> None:
    assert {*FAULTS, "observed"} == set(model_law_names())


@pytest.mark.parametrize("law", FAULTS)
def test_exact_model_breaks_no_law(law: str) -> None:
    _check(law, None)


@pytest.mark.parametrize("law", FAULTS)
def test_fault_breaks_its_law(law: str) -> None:
    with pytest.raises(Broken, match="differ"):
        _check(law, FAULTS[law])


# ---- verify_model ---------------------------------------------------------------------------------------------------


class _Watched(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.module(*args, **kwargs)
        return output * 2.0 if watched() else output


@needs_native
def test_observation_that_changes_a_model_is_reported_with_its_module() -> None:
    model = ch.nn.Encoder(16, 2, 2)
    model.blocks[1].feedforward = _Watched(model.blocks[1].feedforward)
    report = ch.verify_model(model, laws=["observed", "batch"], lengths=[40, 23])
    assert report.broken == ("observed",), report
    assert report["batch"].status == "holds"


@needs_native
def test_first_module_that_differs_is_named() -> None:
    class ByBatch(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * (1.0 + 1e-3 * (len(input) > 1))

    model = ch.nn.Encoder(16, 2, 2)
    model.norm = ByBatch(16)
    report = ch.verify_model(model, laws="batch", lengths=[40, 23])
    assert report.broken == ("batch",)
    assert "a sequence of 23 tokens differs by" in report["batch"].detail
    assert "; first in norm, by" in report["batch"].detail


@needs_native
def test_report_names_what_does_not_apply_and_leaves_the_model_as_it_was() -> None:
    model, modes = ch.nn.LanguageModel(20, 16, 2, 1, max_len=64).train(), set[bool]()
    model.decoder.register_forward_hook(lambda module, args, output: modes.add(module.training))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = is_invariant()
    report = ch.verify_model(model, laws=["batch", "padding left", "gradients"], lengths=[40, 23], name="mine")
    assert report["padding left"].detail == "it pads to the right only"
    assert report["gradients"].status == "holds"
    assert str(report).startswith("mine: signature language model, float32 on cpu")
    assert model.training
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert is_invariant() == before


@needs_native
def test_a_model_that_raises_breaks_the_law_and_the_others_are_tried() -> None:
    class Alone(ch.nn.Encoder):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            if len(x) > 1:
                raise RuntimeError("one sequence\nat a time")
            output: Tensor = super().forward(x, **options)
            return output

    report = ch.verify_model(Alone(8, 2, 1), laws=["batch", "threads"], lengths=[5, 3])
    assert (report["batch"].status, report["batch"].detail) == ("fails", "raises RuntimeError: one sequence at a time")
    assert [finding.law for finding in report.findings] == ["batch", "threads"]


@needs_native
def test_tokenizer_gives_the_ids() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            texts.append(text)
            return [ord(letter) % 20 for letter in text]

    texts = list[str]()
    ch.verify_model(ch.nn.LanguageModel(20, 16, 2, 1, max_len=64), Letters(), laws=["batch"], lengths=[40, 23])
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ch.verify_model(ch.attention), UnsupportedError, "model must be a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: ch.verify_model(nn.Linear(2, 2)), UnsupportedError, "model must be a LanguageModel"),
        (
            lambda: ch.verify_model(ch.nn.Encoder(8, 2, 1), laws=["bits"]),
            UnsupportedError,
            "laws must be names of laws",
        ),
        (lambda: ch.verify_model(ch.nn.Encoder(8, 2, 1), lengths=[]), ShapeError, "lengths must name a length"),
        (lambda: ch.verify_model(ch.nn.Encoder(8, 2, 1), lengths=[0]), ShapeError, "lengths must be a whole number"),
        (
            lambda: ch.verify_model(ch.nn.Encoder(8, 2, 1), tokenizer=3),
            UnsupportedError,
            "tokenizer must have a method",
        ),
    ],
    ids=["a function", "another module", "a law", "no length", "length 0", "a tokenizer"],
)
def test_wrong_argument_is_one_line(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"^verify_model: {text}[^\n]*$"):
        call()


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ["lm", "rotary", "classifier", "encoder", "decoder"])
def test_models_of_nn_break_no_law(make: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"positions": "rotary", "norm": "rms", "gated": True, "activation": "silu"}
    models: dict[str, Callable[[], nn.Module]] = {
        "lm": lambda: ch.nn.LanguageModel(97, 64, 4, 2, max_len=128),
        "rotary": lambda: ch.nn.LanguageModel(97, 64, 4, 2, max_len=128, num_kv_heads=2, bias=False, **options),
        "classifier": lambda: ch.nn.SequenceClassifier(97, 64, 4, 2, 3, max_len=128, neighbours=1),
        "encoder": lambda: ch.nn.Encoder(64, 4, 2),
        "decoder": lambda: ch.nn.Decoder(64, 4, 2),
    }
    report = ch.verify_model(models[make]().to(dtype))
    assert report.ok, str(report)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ["llama", "gpt2", "bert", "torch encoder"])
def test_swapped_models_break_no_law(make: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 97}
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=128)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128)
        ),
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**sizes)),
        "torch encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2, enable_nested_tensor=False
        ),
    }
    model = models[make]().to(dtype).eval()
    with ch.invariant():
        ch.swap(model)
    report = ch.verify_model(model)
    assert report.ok, str(report)
