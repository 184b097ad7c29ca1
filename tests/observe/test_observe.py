"""``observe``: correct statistics by module path, and no change to the model or its output."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import Decoder, Encoder, EncoderDecoder, LanguageModel, MultiHeadAttention, SequenceClassifier
from clearhead.observe import Observed

ALL = ch.Want(
    lse=True, max_score=True, entropy=True, top_k=2, received=True, heatmap=3, sink=1, distance=True, rows=[0, 2]
)


def encoder(**options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(16, 4, 3, **options).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


def explicit(module: MultiHeadAttention, x: Tensor, mask: ch.Mask | None = None) -> ch.Observation:
    """The statistics of a self-attention on this input, by the reference backend."""
    query, key, value = module.project(x)
    return ch.observe_attention(
        query, key, value, want=ALL, mask=mask, scores=module.scores.rules(), backend="reference"
    )


def same(record: Observed, wanted: ch.Observation) -> None:
    for name, value in record.statistics.items():
        expected = getattr(wanted, name)
        if name == "top_indices":
            assert torch.equal(value, expected)
        else:
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)


def inputs_of(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The input of each attention module."""
    given: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: given.__setitem__(name, inputs[0].detach()))
        for name, part in model.named_modules()
        if isinstance(part, MultiHeadAttention)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return given


def test_every_layer_has_the_statistics_of_the_formula(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad():
        given = inputs_of(model, lambda: model(x))
        with ch.observe(model, ALL) as records:
            model(x)
        assert list(records) == [f"blocks.{place}.attention" for place in range(3)]
        for name in records:
            record = records[name]
            assert set(record.statistics) == {
                "lse", "max_score", "entropy", "top_indices", "top_weights", "received", "heatmap_max", "heatmap_mean",
                "sink", "distance", "rows",
            }  # fmt: skip
            assert (record.layer, record.heads, record.queries, record.lengths) == (
                name,
                (0, 1, 2, 3),
                tuple(range(6)),
                None,
            )
            same(record, explicit(model.get_submodule(name), given[name]))  # type: ignore[arg-type]
    assert records[1] is records["blocks.1.attention"]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("lengths", [None, [6, 4]])
def test_output_gradients_and_random_state_are_unmodified(
    x: Tensor, gradients: bool, lengths: list[int] | None
) -> None:
    """Output, gradients and random numbers, bit for bit, while training with dropout too."""
    for training in (False, True):
        results = []
        for observed in (False, True):
            model = encoder(dropout=0.2).train(training)
            torch.manual_seed(3)
            with torch.set_grad_enabled(gradients):
                if observed:
                    with ch.observe(model, ALL):
                        output = model(x, lengths=lengths)
                else:
                    output = model(x, lengths=lengths)
            if gradients:
                output.square().sum().backward()
            grads = [part.grad for part in model.parameters() if part.grad is not None]
            assert bool(grads) is gradients
            results.append([output.detach(), *grads, torch.get_rng_state()])
        for plain, watched in zip(*results, strict=True):
            assert torch.equal(plain, watched)


def test_only_chosen_layers_are_recorded(x: Tensor) -> None:
    model = encoder()
    for layers, wanted in ((1, [1]), ("*.2.*", [2]), ([2, "blocks.0.attention"], [0, 2])):
        with ch.observe(model, ch.Want(lse=True), layers=layers) as records:  # type: ignore[arg-type]
            model(x)
        assert list(records) == [f"blocks.{place}.attention" for place in wanted]
        assert records[wanted[0]] is records[f"blocks.{wanted[0]}.attention"]


def test_only_chosen_heads_and_queries_are_recorded(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad():
        with ch.observe(model, ALL) as whole:
            model(x)
        with ch.observe(model, ALL, heads=[3, 1], queries=[4, 0], layers=0) as records:
            model(x)
    record, wanted = records[0], whole[0]
    assert (record.heads, record.queries) == ((3, 1), (4, 0))
    for name, value in record.statistics.items():
        expected = getattr(wanted, name)[:, [3, 1]]
        if name in ("received", "heatmap_max", "heatmap_mean", "rows"):
            assert torch.equal(value, expected), name
        else:
            assert torch.equal(value, expected[:, :, [4, 0]]), name
        assert value.untyped_storage().nbytes() == value.nbytes, name


def test_keep_records_all_calls_or_the_last(x: Tensor) -> None:
    model, other = encoder(), torch.randn(1, 3, 16)
    for keep, count in (("last", 1), ("all", 2)):
        with torch.no_grad(), ch.observe(model, ch.Want(entropy=True), keep=keep) as records:
            model(x)
            model(other)
        calls = records.calls(0)
        assert len(calls) == count
        assert calls[-1] is records[0]
        assert calls[-1].entropy is not None
        assert calls[-1].entropy.shape == (1, 4, 3)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_generate_records_the_prompt_and_each_token_by_position(positions: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(20, 16, 4, 2, max_len=16, positions=positions).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    want = ch.Want(entropy=True, rows=[0, 6], distance=True)
    plain = model.generate(ids, 3, temperature=0.0)
    with ch.observe(model, want, keep="all") as records:
        longer = model.generate(ids, 3, temperature=0.0)
    assert torch.equal(plain, longer)
    calls = records.calls("decoder.blocks.1.attention")
    assert [call.queries for call in calls] == [(0, 1, 2, 3, 4), (5,), (6,)]
    with torch.no_grad(), ch.observe(model, want) as whole:
        model(longer[:, :-1])
    wanted = whole[1]
    assert wanted.entropy is not None
    assert wanted.distance is not None
    assert wanted.rows is not None
    for name in ("entropy", "distance"):
        joined = torch.cat([getattr(call, name) for call in calls], dim=2)
        torch.testing.assert_close(joined, getattr(wanted, name), rtol=1e-4, atol=1e-5)
    assert calls[1].rows is None
    assert calls[0].rows is not None
    assert calls[2].rows is not None
    torch.testing.assert_close(calls[2].rows[:, :, 0], wanted.rows[:, :, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, ch.Causal() & ch.Window(2)])
def test_packed_batch_has_the_statistics_of_each_sequence(x: Tensor, mask: ch.Mask | None) -> None:
    """Each sequence has the statistics that it has alone."""
    model = encoder(scores=ch.Alibi(4))
    lengths = [4, 6]
    with torch.no_grad():
        with ch.observe(model, ALL) as records:
            model(x, lengths=lengths, mask=mask)
        record = records[2]
        assert record.lengths == (4, 6)
        assert record.entropy is not None
        assert record.entropy.shape == (2, 4, 6)
        for place, length in enumerate(lengths):
            with ch.observe(model, ALL) as alone:
                model(x[place : place + 1, :length], mask=mask)
            for name, value in alone[2].statistics.items():
                if name.startswith("heatmap"):
                    continue  # a shorter sequence's last tile is cut elsewhere
                part = getattr(record, name)[place : place + 1]
                part = part[:, :, :length] if name not in ("rows", "received") else part[..., :length]
                torch.testing.assert_close(part, value, rtol=1e-4, atol=1e-5, msg=name)
        assert record.received is not None
        assert record.received[0, :, 4:].abs().max() == 0.0
        assert record.entropy[0, :, 4:].abs().max() == 0.0


def test_mask_on_packed_positions_leaves_the_batch_packed(x: Tensor) -> None:
    """Under a mask that reads positions of the packed row, a sequence alone would mean another thing."""
    module = MultiHeadAttention(16, 4)
    documents = ch.Documents(lengths=[4, 2]) & ch.Global(1)
    with torch.no_grad(), ch.observe(module, ch.Want(lse=True)) as records:
        module(x[:1], mask=documents)
    assert records[0].lengths is None
    assert records[0].lse is not None
    assert records[0].lse.shape == (1, 4, 6)


def test_cross_attention_and_unbatched_calls(x: Tensor) -> None:
    model = EncoderDecoder(20, 20, 16, 4, 1).eval()
    source, target = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6]])
    with torch.no_grad(), ch.observe(model, ch.Want(received=True)) as records:
        model(source, target)
    shapes = {name: tuple(record.received.shape) for name, record in records.items() if record.received is not None}
    assert shapes == {
        "encoder.blocks.0.attention": (1, 4, 4),
        "decoder.blocks.0.attention": (1, 4, 2),
        "decoder.blocks.0.cross_attention": (1, 4, 4),
    }
    module = MultiHeadAttention(16, 4)
    with ch.observe(module, ch.Want(entropy=True)) as alone:
        module(x[0])
    assert alone[""].entropy is not None
    assert alone[""].entropy.shape == (1, 4, 6)


@pytest.mark.parametrize("length", [6, 200], ids=["torch's path", "clearhead's path"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_swapped_module_is_observed_on_both_paths(length: int, need_weights: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, length, 64)
    ch.swap(module)
    with torch.no_grad():
        plain = module(x, x, x, need_weights=need_weights)[0]
        with ch.observe(module, ch.Want(rows=[3], entropy=True)) as records:
            watched = module(x, x, x, need_weights=need_weights)[0]
        weights = module(x, x, x, average_attn_weights=False)[1]
    assert torch.equal(plain, watched)
    assert records[0].rows is not None
    torch.testing.assert_close(records[0].rows[:, :, 0], weights[:, :, 3], rtol=1e-4, atol=1e-6)


def test_swapped_encoder_with_padding_has_the_statistics_of_each_sequence() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ch.swap(model)
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
        with ch.observe(model, ch.Want(entropy=True)) as records:
            watched = model(x, src_key_padding_mask=padding)
        with ch.observe(model, ch.Want(entropy=True)) as alone:
            model(x[1:, :3])
    assert torch.equal(plain, watched)
    record = records["layers.1.self_attn"]
    assert record.lengths == (5, 3)
    assert record.entropy is not None
    assert alone[1].entropy is not None
    torch.testing.assert_close(record.entropy[1:, :, :3], alone[1].entropy, rtol=1e-4, atol=1e-5)


def test_statistics_can_be_part_of_a_loss(x: Tensor) -> None:
    model = encoder().double()
    wanted = []
    for way in ("observed", "explicit"):
        model.zero_grad()
        if way == "observed":
            with ch.observe(model, ch.Want(entropy=True), layers=0, detach=False) as records:
                output = model(x.double())
            entropy = records[0].entropy
        else:
            output = model(x.double())
            block: Any = model.blocks[0]
            entropy = explicit(block.attention, block.attention_norm(x.double())).entropy
        assert entropy is not None
        (output.square().mean() + entropy.mean()).backward()
        wanted.append([part.grad.clone() for part in model.parameters() if part.grad is not None])
    for observed, expected in zip(*wanted, strict=True):
        torch.testing.assert_close(observed, expected)


def test_detached_statistics_have_no_graph(x: Tensor) -> None:
    model = encoder()
    with ch.observe(model, ALL) as records:
        model(x).sum().backward()
    assert not any(value.requires_grad for record in records.values() for value in record.statistics.values())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_checkpoint_recomputation_is_not_recorded(x: Tensor, checkpoints: bool) -> None:
    model = encoder(checkpoint_activations=checkpoints).train()
    with ch.observe(model, ch.Want(entropy=True), keep="all") as records:
        model(x).sum().backward()
    assert [len(records.calls(name)) for name in records] == [1, 1, 1]


def test_nothing_is_left_behind(x: Tensor) -> None:
    model = encoder()
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    with torch.no_grad(), ch.observe(model, ALL) as records:
        model(x)
    for name, part in model.named_modules():
        assert set(vars(part)) == attributes[name]
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    gone, references = weakref.ref(model), [weakref.ref(value) for value in records[0].statistics.values()]
    del model, part
    gc.collect()
    assert gone() is None
    assert records[0].entropy is not None
    assert records[0].entropy.shape == (2, 4, 6)
    assert "blocks.2.attention     0  entropy       [2, 4, 6]" in str(records)
    del records
    gc.collect()
    assert [each() for each in references] == [None] * len(references)


def test_nested_blocks_have_their_own_statistics(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad():
        plain = model(x)
        with ch.observe(model, ch.Want(top_k=3, heatmap=2)) as outer:
            with ch.observe(model, ch.Want(top_k=1, entropy=True), layers=1, keep="all") as inner:
                output = model(x)
            model(x)
    assert torch.equal(output, plain)
    assert len(inner.calls(1)) == 1
    assert set(inner[1].statistics) == {"top_indices", "top_weights", "entropy"}
    assert outer[1].top_weights is not None
    assert inner[1].top_weights is not None
    assert torch.equal(outer[1].top_weights[..., :1], inner[1].top_weights)
    assert outer[0].heatmap_max is not None


def test_each_thread_observes_its_own_calls(x: Tensor) -> None:
    model, barrier = encoder(), threading.Barrier(3)
    lengths: dict[int, list[int]] = {}

    def watch(length: int) -> None:
        with torch.no_grad(), ch.observe(model, ch.Want(entropy=True), keep="all") as records:
            barrier.wait()
            for _ in range(5):
                model(x[:, :length])
            barrier.wait()
        lengths[length] = [call.entropy.shape[2] for call in records.calls(0) if call.entropy is not None]

    threads = [threading.Thread(target=watch, args=(length,)) for length in (2, 5)]
    for thread in threads:
        thread.start()
    barrier.wait()
    with torch.no_grad():
        model(x)
    barrier.wait()
    for thread in threads:
        thread.join()
    assert lengths == {2: [2] * 5, 5: [5] * 5}


def test_exception_propagates_and_ends_the_block(x: Tensor) -> None:
    model = encoder()
    with pytest.raises(RuntimeError, match="on purpose"), ch.observe(model, ch.Want(lse=True)):
        raise RuntimeError("on purpose")
    with ch.observe(model, ch.Want(lse=True)) as records:
        model(x)
    assert len(records) == 3


@pytest.mark.slow
def test_compiled_model_raises_that_it_was_not_observed(x: Tensor) -> None:
    model = encoder()
    model.compile_blocks(backend="eager")
    wanted = "got no call of blocks.0.attention, blocks.1.attention, blocks.2.attention. Graphs of torch.compile cannot"
    with torch.no_grad(), pytest.raises(ch.UnsupportedError, match=wanted), ch.observe(model, ch.Want(lse=True)):
        model(x)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"layers": 3},
            "layers must be one of 0 (blocks.0.attention), 1 (blocks.1.attention), 2 (blocks.2.attention);",
        ),
        ({"layers": "nope.*"}, "got 'nope.*'"),
        ({"layers": [0, -1]}, "got -1"),
        ({"layers": True}, "got True"),
        ({"heads": 4}, "heads must lie from 0 to 3; got 4"),
        ({"heads": [0, -1]}, "got -1"),
        ({"queries": -1}, "queries must be positions"),
        ({"queries": [0, 6]}, "queries must lie from 0 to 5, the observed positions; got [0, 6]"),
        ({"want": ch.Want(rows=[9])}, "want.rows must lie from 0 to 5"),
        ({"want": ch.Want(top_k=7)}, "want.top_k must be a whole number from 0 to k_len 6"),
        ({"want": ch.Want(lse=True), "keep": "first"}, "keep must be one of last, all; got 'first'"),
    ],
    ids=str,
)
def test_bad_arguments_raise_one_line_that_lists_the_choices(x: Tensor, arguments: dict[str, Any], words: str) -> None:
    model = encoder()
    with pytest.raises(ch.ClearheadError) as caught, ch.observe(model, **{"want": ch.Want(lse=True), **arguments}):
        model(x)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    model(x)


@pytest.mark.parametrize(
    ("model", "want", "words"),
    [
        (nn.Linear(2, 2), ch.Want(lse=True), "must have attention that can be observed; got Linear."),
        (
            nn.MultiheadAttention(4, 2),
            ch.Want(lse=True),
            "got MultiheadAttention with MultiheadAttention. Use modules of",
        ),
        ("model", ch.Want(lse=True), "model must be a torch.nn.Module; got str"),
        (MultiHeadAttention(4, 2), ch.Want(), "want must be a ch.Want with a statistic"),
        (MultiHeadAttention(4, 2), "entropy", "must be a ch.Want with a statistic; got str"),
        (MultiHeadAttention(4, 2), ch.Want(lse=True), "must be run within the block; got no call of MultiHeadAtt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unobservable_model_raises(model: Any, want: Any, words: str) -> None:
    with pytest.raises(ch.UnsupportedError) as caught, ch.observe(model, want):
        pass
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_layer_raises_and_lists_the_records(x: Tensor) -> None:
    model = encoder()
    with ch.observe(model, ch.Want(lse=True), layers=[0, 1]) as records:
        model(x)
    for layer, words in ((2, "got 2, which was not observed"), ("nope", "got 'nope', which does not exist")):
        with pytest.raises(ch.ShapeError) as caught:
            records[layer]
        assert f"layer must be one of 0 (blocks.0.attention), 1 (blocks.1.attention); {words}" in str(caught.value)
    assert "nope" not in records
    assert records.get("nope") is None


def test_queries_are_positions_across_calls_with_a_cache(x: Tensor) -> None:
    decoder = Decoder(16, 4, 1).eval()
    cache = decoder.new_cache()
    with torch.no_grad(), ch.observe(decoder, ch.Want(distance=True), keep="all", queries=[1, 4]) as records:
        decoder(x[:, :3], cache=cache)
        decoder(x[:, 3:], cache=cache)
    assert [call.queries for call in records.calls(0)] == [(1,), (4,)]


def test_received_sums_to_the_lengths_in_a_classifier() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(30, 16, 4, 2, 3).eval()
    ids = torch.randint(0, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.observe(model, ch.Want(received=True)) as records:
        model(ids, lengths=[7, 2, 5])
    record = records["encoder.blocks.1.attention"]
    assert record.lengths == (7, 2, 5)
    assert record.received is not None
    torch.testing.assert_close(record.received.sum(-1), torch.tensor([7.0, 2.0, 5.0])[:, None].expand(3, 4))
