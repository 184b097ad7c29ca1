"""A frozen model has the bits of the model that it was, runs its layers as one operator, and says what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers import DynamicCache

import clearhead as ch
from clearhead.bridges.transformers import Int8Cache
from clearhead.integrations.transformers.stack import StackForward
from clearhead.ops.packed_weight import PackedParameter
from clearhead.testing import choices, forbid_fused, fused_calls
from tests.net.calls import equal, hooked, observed, results
from tests.net.changes import CHANGES
from tests.net.families import FAMILIES, TOKENS, TRANSFORMERS_4
from tests.net.modules import HEADS, MODULES, VOCAB, WIDTH, distinct, modules, typical

FAR = 1e-4
#: Families that compute attention by themselves in transformers 4, where ``swap`` leaves them.
LEFT = ("distilbert", "modernbert") if TRANSFORMERS_4 else ()
#: Families whose layers become one operator; those with a layer of other parts, or positions by pairs of tokens.
AS_ONE, DIFFERENT = (
    tuple(name for name in names if name not in LEFT)
    for names in (
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "bert", "roberta", "distilbert",
         "modernbert", "vit", "clip", "siglip", "bart", "marian", "whisper", "torch encoder", "torch encoder, pre-norm",
         "torch decoder"),
        ("mpnet", "deberta-v2", "deberta-v3"),
    )
)  # fmt: skip
#: Families with layers that attend to a window.
SLIDING = ("mistral", "qwen2", "gemma2", "gemma3")
GENERATING = [name for name in AS_ONE if FAMILIES[name].generates]
OURS = [
    kind
    for kind in MODULES
    if kind in ("EncoderBlock", "Encoder", "Decoder", "LanguageModel", "SequenceClassifier", "EncoderDecoder")
]
REFUSED = r"^freeze: a frozen model must .*; got .*\. Call ch\.unfreeze\(model\) first\.$"


def frozen(name: str, pack: bool = False) -> Any:
    model = FAMILIES[name].swapped()
    ch.freeze(model, pack=pack)
    return model


#: Changes that replace a parameter or a submodule.
REPLACED = ("state dict assigned", "parameters replaced", "weights tied", "parametrized", "weight norm",
            "low rank wrapper")  # fmt: skip
#: Changes of values that torch does not count, or that are made to a copy.
UNCOUNTED = ("data written to", "written through another view")
#: Changes of dtype, which packed weights refuse at once.
CONVERTED = ("to float64 and back", "to bfloat16 and back")


def language_model() -> ch.nn.LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return distinct(ch.nn.LanguageModel(VOCAB, WIDTH, HEADS, 3, max_len=64)).eval()  # type: ignore[return-value]


@pytest.mark.parametrize("name", AS_ONE)
def test_frozen_layers_are_one_operator_with_the_same_bits(name: str) -> None:
    # In a layer that is left to torch, whether its weights learn decides how torch's linear multiplies.
    family, model = FAMILIES[name], FAMILIES[name].swapped().requires_grad_(False)
    calls = [
        family.call(length, side)
        for side in ("none", *family.paddings)
        for length in (TOKENS, 1)[: 1 + (side == "none")]
    ]
    before = [results(model, call, gradients=False) for call in calls]
    report = ch.freeze(model)
    assert {row.how for row in report.rows} == {"fused"}
    with fused_calls() as kinds:
        after = [results(model, call, gradients=False) for call in calls]
    for one, other in zip(after, before, strict=True):
        equal(one, other)
    assert "stack" in kinds


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_cannot_be_one_are_left_with_the_reason(name: str) -> None:
    model, call = FAMILIES[name].swapped(), FAMILIES[name].call(TOKENS, "none")
    before = results(model, call, gradients=False)
    (row,) = ch.freeze(model).rows
    assert row.how == "left"
    assert row.reason
    equal(results(model, call, gradients=False), before)


@pytest.mark.parametrize("kind", OURS)
def test_frozen_modules_have_the_same_bits(kind: str) -> None:
    for each in modules(kind):
        module, call = each.make(), each.call()
        if module.training:
            continue
        before = results(module, call, gradients=False)
        ch.freeze(module)
        equal(results(module, call, gradients=False), before)


@pytest.mark.parametrize("kind", [ch.nn.Encoder, ch.nn.Decoder])
@pytest.mark.parametrize("layers", [2, 5])
def test_every_layer_of_a_stack_is_in_its_operator(kind: Any, layers: int) -> None:
    stack, x = kind(WIDTH, HEADS, layers, feedforward_dim=40).eval(), torch.randn(2, 7, WIDTH)
    with torch.no_grad():
        before = x
        for block in stack.blocks:
            before = block(before)
        before = stack.norm(before)
        for frozen_now in (False, True):
            if frozen_now:
                ch.freeze(stack)
            with fused_calls() as kinds:
                assert torch.equal(stack(x), before)
            assert kinds == ["stack"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_packed_weights_give_the_bits_of_the_invariant_order(name: str, dtype: torch.dtype) -> None:
    model, call = FAMILIES[name].swapped().to(dtype), FAMILIES[name].call(TOKENS, "none").to(dtype)
    with ch.invariant():
        before = results(model, call, gradients=False)
        ch.freeze(model, pack=True)
        equal(results(model, call, gradients=False), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_packed_layers_are_one_operator_without_the_setting(name: str) -> None:
    """The trial compares layers whose weights are not packed, whose sums have one order in both."""
    model, call = FAMILIES[name].swapped(), FAMILIES[name].call(TOKENS, "none")
    rows = ch.freeze(model).rows
    assert {row.how for row in rows} == {"fused"}
    with torch.no_grad():
        before = results(model, call, gradients=False)
        assert ch.freeze(model, pack=True).rows == rows
        with fused_calls() as kinds:
            after = results(model, call, gradients=False)
    assert "stack" in kinds
    for part, tensor in before.items():
        torch.testing.assert_close(after[part], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 24, 25, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 192, 260])
def test_every_number_of_rows_reads_packed_weights(width: int, dtype: torch.dtype, rows: int) -> None:
    stack = ch.nn.Encoder(width, 4, 2, feedforward_dim=320).eval().to(dtype)
    x = torch.randn(1, rows, width, dtype=dtype)
    with torch.no_grad(), ch.invariant(), choices(gemm="native", attention="native"):
        before = stack(x)
        ch.freeze(stack, pack=True)
        with fused_calls() as kinds:
            assert torch.equal(stack(x), before)
    assert kinds == ["stack"]
    # Some instruction sets widen 16 bits, or pad the last panel of 260 columns too much.
    if dtype is torch.float32:
        packed = [part for part in stack.parameters() if isinstance(part, PackedParameter)]
        assert packed
        assert width == 260 or len(packed) == sum(part.dim() == 2 for part in stack.parameters())


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"]
)
def test_frozen_models_generate_the_same_tokens(name: str, options: dict[str, int]) -> None:
    if "prompt_lookup_num_tokens" in options and name in ("bart", "marian"):
        pytest.skip("an encoder and decoder has no prompt to look into")
    if "prompt_lookup_num_tokens" in options and TRANSFORMERS_4:
        pytest.skip("transformers 4 looks for an end token, and there is none")
    call = FAMILIES[name].call(TOKENS, FAMILIES[name].paddings[0])
    rows = slice(0, 1) if "prompt_lookup_num_tokens" in options else slice(None)
    prompt = {key: call.arguments[key][rows] for key in ("input_ids", "attention_mask")}
    given = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **options}
    model = FAMILIES[name].swapped()
    before = model.generate(**prompt, **given)
    ch.freeze(model)
    with fused_calls() as kinds:
        assert torch.equal(model.generate(**prompt, **given), before)
    # A sliding cache that records its past is transformers'.
    assert "stack" in kinds or (name in SLIDING and "prompt_lookup_num_tokens" in options)


def test_a_token_is_one_call() -> None:
    ids = torch.tensor([[1, 2, 3]])
    for model in map(frozen, ("llama", "mistral", "gpt2", "qwen2", "gemma2", "gemma3")):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        for _ in range(9):
            with fused_calls() as kinds:
                model(ids[:, :1], past_key_values=cache)
            assert kinds == ["stack"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [DynamicCache, Int8Cache])
@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3"])
def test_layers_with_and_without_windows_are_one_operator(kind: str, make: Any, padded: bool) -> None:
    windows = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = getattr(transformers, "Gemma2Config" if kind == "Gemma2" else "Gemma3TextConfig")(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=5, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=windows,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = distinct(getattr(transformers, f"{kind}ForCausalLM")(config)).eval()
    ch.swap(model)
    ids, real = torch.randint(3, VOCAB, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    real[0, :4] = 0 if padded else 1

    def run() -> list[Tensor]:
        cache, logits = make(config=config), list[Tensor]()
        for start, stop in ((0, 9), (9, 10), (10, 11), (11, 13), *((place, place + 1) for place in range(13, 20))):
            logits.append(model(ids[:, start:stop], attention_mask=real[:, :stop], past_key_values=cache).logits)
        return logits

    with torch.no_grad():
        before = run()
        (row,) = ch.freeze(model).rows
        with fused_calls() as kinds:
            after = run()
    assert row.reason == f"5 {kind}DecoderLayer are one operator"
    assert [*map(torch.equal, after, before)] == [True] * len(before)
    assert {*kinds} == {"stack"}


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 computes ModernBERT's attention by itself")
def test_layers_of_other_parts_run_beside_those_that_are_one() -> None:
    model, call = FAMILIES["modernbert"].swapped(), FAMILIES["modernbert"].call(TOKENS, "right")
    before = results(model, call, gradients=False)
    (row,) = ch.freeze(model).rows
    # The first layer has no norm in front.
    assert row.reason == "2 of 3 ModernBertEncoderLayer are one operator"
    with fused_calls() as kinds:
        equal(results(model, call, gradients=False), before)
    assert "stack" in kinds


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 computes ModernBERT's attention by itself")
def test_a_loop_that_does_more_behind_layers_that_ran_is_refused() -> None:
    model = frozen("modernbert").model

    def forward(model: Any, x: Tensor) -> Tensor:
        for place, layer in enumerate(model.layers):
            x = layer(x + place) if place else x
        return x

    with pytest.raises(ch.UnsupportedError, match=REFUSED):
        StackForward("layers", 1, 3).run(forward, model, (torch.randn(1, 5, WIDTH),), {})


@pytest.mark.parametrize("name", [name for name in ("gemma3", "modernbert") if name not in LEFT])
def test_padding_of_layers_with_several_masks_is_removed_once(name: str) -> None:
    model, family = FAMILIES[name].swapped(), FAMILIES[name]
    calls = [family.call(TOKENS, side) for side in family.paddings]
    with ch.invariant():
        before = [results(model, call, gradients=False) for call in calls]
        ch.freeze(model)
        with fused_calls() as kinds:
            for call, one in zip(calls, before, strict=True):
                equal(results(model, call, gradients=False), one)
    assert kinds.count("stack") == len(calls)


@pytest.fixture
def qwen() -> Any:
    """Qwen3-VL, whose loop adds to the tokens of images behind its first layers."""
    module = pytest.importorskip("transformers.models.qwen3_vl", reason="this release has no Qwen3-VL")
    config = module.Qwen3VLTextConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    model = module.Qwen3VLTextModel(config).eval()
    ch.swap(model)
    return model


@pytest.mark.parametrize("in_place", [False, True])
def test_a_loop_that_adds_to_tokens_in_some_calls_gets_each_layer(
    qwen: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(states: Tensor, places: Tensor, image: Tensor) -> Tensor:
        states = states if in_place else states.clone()
        states[places] += image
        return states

    monkeypatch.setattr(qwen, "_deepstack_process", add)
    x, places = torch.randn(1, 7, WIDTH), torch.zeros(1, 7, dtype=torch.bool)
    places[0, 2:4] = True
    image = {"visual_pos_masks": places, "deepstack_visual_embeds": [torch.randn(2, WIDTH) for _ in range(2)]}
    with torch.no_grad():
        before = [qwen(inputs_embeds=x, use_cache=False, **given)[0] for given in ({}, image)]
        assert {row.how for row in ch.freeze(qwen).rows} == {"fused"}
        for given, output, kind in zip(({}, image), before, ("stack", "layer"), strict=True):
            with fused_calls() as kinds:
                assert torch.equal(qwen(inputs_embeds=x, use_cache=False, **given)[0], output)
            assert {*kinds} == {kind}


def test_a_loop_that_does_more_without_being_given_more_gets_each_layer(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen, "_deepstack_process", lambda states, _, image: states + image)
    x, image = torch.randn(1, 7, WIDTH), UserList([torch.randn(WIDTH), torch.randn(WIDTH)])
    cache = DynamicCache(config=qwen.config)
    with torch.no_grad():
        before = qwen(inputs_embeds=x, use_cache=False, deepstack_visual_embeds=image)[0]
        assert {row.how for row in ch.freeze(qwen).rows} == {"fused"}
        assert torch.equal(qwen(inputs_embeds=x, use_cache=False, deepstack_visual_embeds=image)[0], before)
        qwen(inputs_embeds=x, past_key_values=cache, deepstack_visual_embeds=image)
    # No layer ran before the loop was left.
    assert cache.get_seq_length() == 7


def test_caches_of_several_lengths_are_read_as_they_are() -> None:
    stack, x = ch.nn.Decoder(WIDTH, HEADS, 3).eval(), torch.randn(2, 7, WIDTH)

    def run() -> Tensor:
        cache = stack.new_cache()
        stack(x[:, :5], cache=cache)
        # The blocks after the first one forget a token.
        for each in cache.layers[1:]:
            each.truncate(4)
        output: Tensor = stack(x[:, 5:6], cache=cache)
        return output

    with torch.no_grad(), forbid_fused():
        before = run()
    ch.freeze(stack)
    torch.testing.assert_close(run(), before)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_copied_cache_goes_on_by_itself(name: str) -> None:
    model, ids = frozen(name), torch.randint(3, VOCAB, (2, 11))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    shallow = copy.copy(cache.layers[0])
    keys = shallow.keys.clone()
    logits = [model(ids[:, 1:2], past_key_values=each).logits for each in (cache, *copies)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(shallow.keys, keys)
    other = model(ids[:, 2:3], past_key_values=copies[0]).logits
    assert torch.equal(model(ids[:, 2:3], past_key_values=copies[1]).logits, other)


def test_a_cache_that_was_cropped_or_reordered_is_read_as_it_is_now() -> None:
    model, plain, ids = frozen("llama"), FAMILIES["llama"].plain(), torch.randint(3, VOCAB, (2, 11))

    def run(of: Any) -> Tensor:
        cache = DynamicCache(config=of.config)
        with torch.no_grad():
            of(ids, past_key_values=cache)
            of(ids[:, :2], past_key_values=cache)
            cache.crop(-4)
            of(ids[:, 3:4], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            logits: Tensor = of(ids[:, 4:5], past_key_values=cache).logits
        return logits

    torch.testing.assert_close(run(model), run(plain), rtol=FAR, atol=FAR)


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "bart", "gemma3"])
def test_states_and_weights_between_layers_are_those_of_the_layers(name: str, wanted: str) -> None:
    family = FAMILIES[name]
    model, call = family.swapped(), family.call(TOKENS, "none")
    with torch.no_grad():
        before = model(**call.arguments, **{wanted: True})
        ch.freeze(model)
        plain = [model(**call.arguments), model(**call.arguments)]
        after = model(**call.arguments, **{wanted: True})
    for field in ("hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions"):
        given = getattr(before, field, None)
        if given is not None:
            pairs = zip(given, getattr(after, field), strict=True)
            # GPT-2 of transformers 4 has weights of "eager" alone.
            assert all(one is other is None or torch.equal(one, other) for one, other in pairs)
    assert all(torch.equal(each[0], before[0]) or torch.allclose(each[0], before[0], atol=FAR) for each in plain)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3", "LanguageModel"])
def test_observers_and_hooks_get_every_layer(name: str) -> None:
    family = FAMILIES.get(name)
    row = typical("LanguageModel")[0]
    model = row.make() if family is None else family.swapped()
    call = row.call() if family is None else family.call(TOKENS, "none")
    model.eval()
    before = results(model, call, gradients=False)
    ch.freeze(model)
    calls: list[str] = []
    linears = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    handles = [part.register_forward_hook(lambda *_, path=path: calls.append(path)) for path, part in linears]
    results(model, call, gradients=False)
    assert {path for path, _ in linears if "pooler" not in path} <= {*calls, "head", "lm_head"}
    for handle in handles:
        handle.remove()
    with observed(model):
        watched = results(model, call, gradients=False)
    torch.testing.assert_close(watched["output"], before["output"], rtol=FAR, atol=FAR)
    equal(results(model, call, gradients=False), before)


def _model(name: str, pack: bool = False) -> tuple[Any, Callable[[], Any], Any]:
    """A frozen model, what it was, and a call."""
    if name in FAMILIES:
        return frozen(name, pack), FAMILIES[name].swapped, FAMILIES[name].call(TOKENS, "none")
    row = next(each for each in modules(name) if not each.make().training)
    module = row.make()
    ch.freeze(module, pack=pack)
    return module, row.make, row.call()


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "optimizer step"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bert", "LanguageModel"])
@pytest.mark.parametrize("pack", [False, True], ids=["as they are", "packed"])
@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "between calls"])
def test_a_change_takes_effect_or_is_refused(called: bool, pack: bool, name: str, change: str) -> None:
    model, make, call = _model(name, pack)
    if pack and change in UNCOUNTED:
        pytest.skip("torch does not count such writes")
    if called:
        results(model, call, gradients=False)
    right = make()
    CHANGES[change](right)
    with hooked(right):
        wanted = results(right, call, gradients=False)["output"]
    if pack and change in CONVERTED:
        with pytest.raises(ch.UnsupportedError, match=r"^freeze: a packed weight must stay .*\. Call ch\.unfreeze"):
            CHANGES[change](model)
        ch.unfreeze(model)
    if pack and change == "weight norm":
        with pytest.raises(RuntimeError, match="PackedParameter"):
            CHANGES[change](model)
        return
    CHANGES[change](model)
    if change in REPLACED or (pack and change == "tensors swapped"):
        with pytest.raises(ch.UnsupportedError, match=REFUSED):
            results(model, call, gradients=False)
        ch.unfreeze(model)
    actual = results(model, call, gradients=False)["output"]
    torch.testing.assert_close(actual, wanted, rtol=FAR, atol=FAR)


@pytest.mark.parametrize("name", ["llama", "LanguageModel"])
@pytest.mark.parametrize("pack", [False, True], ids=["as they are", "packed"])
def test_training_mode_is_refused_until_unfrozen(pack: bool, name: str) -> None:
    model, _, call = _model(name, pack)
    outputs = []
    for _ in ("before the first call", "between calls"):
        model.train()
        with pytest.raises(ch.UnsupportedError, match=REFUSED):
            results(model, call, gradients=False)
        outputs.append(results(model.eval(), call, gradients=False))
    before, after = outputs
    equal(after, before)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ch.unfreeze(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    equal(results(model, call, gradients=False), before)
    assert results(model.train(), call).keys() > {"output"}


def test_only_parameters_that_took_gradients_take_them_again() -> None:
    model = language_model()
    model.embedding.requires_grad_(False)
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    ch.freeze(model)
    ch.freeze(model)
    ch.unfreeze(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted


def test_calls_outside_no_grad_are_one_operator_too() -> None:
    ids = torch.tensor([[1, 2, 3]])
    ours, llama = language_model(), frozen("llama")
    ch.freeze(ours)
    cache, past = ours.new_cache(), DynamicCache(config=llama.config)
    for _ in range(3):
        with fused_calls() as kinds:
            ours(ids, cache=cache)
            llama(ids, past_key_values=past)
        assert kinds == ["stack", "stack"]


def test_gradients_of_inputs_flow_through_a_frozen_model() -> None:
    model = ch.nn.Encoder(8, num_heads=2, num_layers=2).eval()
    x = torch.randn(1, 5, 8)

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    before = gradient()
    ch.freeze(model)
    assert torch.equal(gradient(), before)


def test_state_dict_is_the_same_and_can_be_loaded() -> None:
    model, call = frozen("llama"), FAMILIES["llama"].call(TOKENS, "none")
    plain = FAMILIES["llama"].plain()
    assert [*model.state_dict()] == [*plain.state_dict()]
    state = {name: 0.9 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    actual, wanted = (results(each, call, gradients=False)["output"] for each in (model, plain))
    torch.testing.assert_close(actual, wanted, rtol=FAR, atol=FAR)


def test_unfrozen_and_unswapped_models_are_the_originals() -> None:
    for name in ("llama", "bart"):
        model, plain = frozen(name), FAMILIES[name].plain()
        types = [type(part) for part in FAMILIES[name].swapped().modules()]
        assert [row.path for row in ch.unfreeze(model).rows]
        assert [type(part) for part in model.modules()] == types
        ch.freeze(model)
        ch.unswap(model)
        assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
        assert all(parameter.requires_grad for parameter in model.parameters())


class Wrapped(nn.Module):
    """An attention within another module, which has none of its names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 looks for an attribute of each attention")
def test_a_copy_whose_attention_was_replaced_runs_its_layers_one_by_one() -> None:
    model, call = frozen("bert"), FAMILIES["bert"].call(TOKENS, "none")
    before = results(model, call, gradients=False)
    for is_read in (False, True):
        copied = copy.deepcopy(model)
        if is_read:
            equal(results(copied, call, gradients=False), before)
        (layers,) = (each for each in copied.modules() if isinstance(each, nn.ModuleList))
        layers[1].attention = Wrapped(layers[1].attention)
        with fused_calls() as kinds:
            torch.testing.assert_close(results(copied, call, gradients=False), before, rtol=FAR, atol=FAR)
        assert "stack" not in kinds
        assert "layer" in kinds


def test_loops_over_the_layers_outside_the_model_get_each_of_them() -> None:
    model = frozen("llama")
    layers = model.model.layers
    assert [*layers] == [layers[0], layers[1]]
    assert len(layers[:2]) == 2
    copied = copy.deepcopy(model)
    call = FAMILIES["llama"].call(TOKENS, "none")
    equal(results(copied, call, gradients=False), results(model, call, gradients=False))


def test_what_cannot_be_frozen_is_told_in_one_line() -> None:
    for model, must in (
        ("model", "be a torch.nn.Module"),
        (language_model().train(), "be in eval mode"),
        (nn.Sequential(nn.Linear(4, 4)).eval(), "have modules of ch.nn"),
    ):
        with pytest.raises(ch.UnsupportedError, match=rf"^freeze: model must {must}") as caught:
            ch.freeze(model)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(ch.UnsupportedError, match=r"^unfreeze: model must be a torch\.nn\.Module"):
        ch.unfreeze(3)  # type: ignore[arg-type]
    with pytest.raises(ch.UnsupportedError, match=r"^swap: model must not be frozen"):
        ch.swap(frozen("llama"))


@pytest.mark.skipif(TRANSFORMERS_4, reason="quantises as in transformers 5")
def test_quantising_a_frozen_model_is_refused_at_the_next_call() -> None:
    model, call = frozen("llama"), FAMILIES["llama"].call(TOKENS, "none")
    for layer in model.model.layers:
        layer.mlp.up_proj = torch.ao.nn.quantized.dynamic.Linear(WIDTH, layer.mlp.up_proj.out_features)
    with pytest.raises(ch.UnsupportedError, match=REFUSED):
        results(model, call, gradients=False)
