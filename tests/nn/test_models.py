"""Models: padding, positions, pooling, generation and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import DecoderCache, EncoderDecoder, LanguageModel, SequenceClassifier
from clearhead.nn.pooling import POOLINGS, pool

EXACT = {"atol": 1e-10, "rtol": 1e-10}
POSITIONS = ("learned", "sinusoidal", "rotary", "none")
LLAMA = {"gated": True, "norm": "rms", "activation": "silu", "positions": "rotary", "bias": False, "num_kv_heads": 1}


def _ids(*shape: int, vocab: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def _classifier(**options: object) -> SequenceClassifier:
    torch.manual_seed(0)
    model = SequenceClassifier(20, 8, 2, 2, 3, max_len=16, **options).double()  # type: ignore[arg-type]
    return _spread(model)  # type: ignore[return-value]


def _language_model(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    return _spread(LanguageModel(20, 8, 2, 2, max_len=16, **options).double())  # type: ignore[arg-type, return-value]


def _spread(model: nn.Module) -> nn.Module:
    """Larger weights, so that a wrong token or position changes the output measurably."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_batch_with_padding_equals_each_sequence_alone(pooling: str, positions: str) -> None:
    model = _classifier(pooling=pooling, positions=positions)
    ids, lengths = _ids(3, 9), [9, 1, 5]
    whole = model(ids, lengths=lengths)
    assert whole.shape == (3, 3)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(whole[row], model(ids[row : row + 1, :length])[0], **EXACT)


@pytest.mark.parametrize("mask", [None, ch.Prefix(3)], ids=repr)
def test_ids_in_the_padding_do_not_matter(mask: ch.Mask | None) -> None:
    model = _classifier()
    ids, lengths = _ids(2, 6), [6, 2]
    spoiled = ids.clone()
    spoiled[1, 2:] = torch.tensor([-1, 999, 20, -100])
    assert torch.equal(model(spoiled, lengths=lengths, mask=mask), model(ids, lengths=lengths, mask=mask))
    model.zero_grad()
    model(spoiled, lengths=[1, 0], mask=mask).sum().backward()
    touched = model.embedding.token.weight.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert set(touched) <= {int(ids[0, 0])} | ({0} if mask is not None else set())


def test_an_empty_sequence_pools_to_zeros() -> None:
    for pooling in POOLINGS:
        model = _classifier(pooling=pooling)
        output = model(_ids(2, 4), lengths=[4, 0])
        torch.testing.assert_close(output[1], model.classifier.bias, **EXACT)
        torch.testing.assert_close(model(_ids(2, 4), lengths=[0, 0])[0], model.classifier.bias, **EXACT)
        assert model(_ids(2, 0)).shape == (2, 3)


def test_pooling_matches_its_formula() -> None:
    x = torch.tensor([[[1.0, -3.0], [3.0, -5.0], [0.0, 0.0]]])
    two = torch.tensor([2])
    assert pool(x, two, "mean").tolist() == [[2.0, -4.0]]
    assert pool(x, two, "max").tolist() == [[3.0, -3.0]]
    assert pool(x, two, "mean_max").tolist() == [[2.0, -4.0, 3.0, -3.0]]
    assert pool(x, two, "first").tolist() == [[1.0, -3.0]]
    assert pool(x, None, "max").tolist() == [[3.0, 0.0]]


def test_embeddings_see_real_tokens_only() -> None:
    model = _classifier()
    shapes: list[tuple[int, ...]] = []
    model.embedding.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model(_ids(3, 9), lengths=[9, 1, 5])
    assert shapes == [(1, 15, 8)]


def test_a_score_rule_that_reads_positions_keeps_the_batch_padded() -> None:
    bias = torch.randn(9, 9, dtype=torch.float64)
    model = _classifier(scores=[ch.DenseBias(bias)])
    ids = _ids(2, 9)
    small = _classifier(scores=[ch.DenseBias(bias[:4, :4])])
    small.load_state_dict(
        {name: part for name, part in model.state_dict().items() if ".scores." not in name}, strict=False
    )
    torch.testing.assert_close(model(ids, lengths=[9, 4])[1], small(ids[1:, :4])[0], **EXACT)


def test_language_model_padding_and_causality() -> None:
    model = _language_model()
    ids, lengths = _ids(3, 9), [9, 0, 5]
    whole = model(ids, lengths=lengths)
    assert (whole[1] == 0).all()
    assert (whole[2, 5:] == 0).all()
    torch.testing.assert_close(whole[2, :5], model(ids[2:, :5])[0], **EXACT)
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 20
    torch.testing.assert_close(model(changed)[0, :6], model(ids)[0, :6], **EXACT)
    assert not torch.allclose(model(changed)[0, 6], model(ids)[0, 6])


def test_tie_embeddings_shares_the_weight() -> None:
    tied, free = _language_model(), _language_model(tie_embeddings=False)
    assert tied.head.weight is tied.embedding.token.weight
    assert free.head.weight is not free.embedding.token.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 160


@pytest.mark.parametrize("options", [*({"positions": one, "num_kv_heads": 1} for one in POSITIONS), LLAMA], ids=str)
def test_decoding_step_by_step_equals_the_full_pass(options: dict[str, object]) -> None:
    model = _language_model(**options)
    ids, cache = _ids(2, 12), model.new_cache()
    with torch.no_grad():
        steps = torch.cat([model(part, cache=cache) for part in ids.split([4, 1, 1, 6], dim=1)], dim=1)
        torch.testing.assert_close(steps, model(ids), **EXACT)
    with pytest.raises(ch.ShapeError, match=r"ids must be at most 16 tokens long with the cache \(max_len\)"):
        model(_ids(2, 5), cache=cache)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("new", [0, 1, 9, 30])
def test_cached_generation_matches_uncached_beyond_max_len(temperature: float, new: int) -> None:
    model = _language_model()
    ids = _ids(2, 5)
    results = [model.generate(ids, new, temperature=temperature, seed=1, cached=cached) for cached in (True, False)]
    assert torch.equal(*results)
    assert results[0].shape == (2, 5 + new)
    assert torch.equal(results[0][:, :5], ids)


def test_generate_is_greedy_at_zero_and_reproducible_from_a_seed() -> None:
    model = _language_model()
    ids = _ids(2, 3)
    greedy = model.generate(ids, 4, temperature=0.0)
    for place in range(3, 7):
        assert torch.equal(greedy[:, place], model(greedy[:, :place])[:, -1].argmax(dim=-1))
    assert torch.equal(model.generate(ids, 8, top_k=1, seed=3), model.generate(ids, 8, temperature=0.0))
    assert torch.equal(model.generate(ids, 8, temperature=3.0, seed=3), model.generate(ids, 8, temperature=3.0, seed=3))
    assert not torch.equal(
        model.generate(ids, 8, temperature=3.0, seed=3), model.generate(ids, 8, temperature=3.0, seed=4)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_generate_reports_weights_that_are_not_finite(temperature: float, cached: bool, number: float) -> None:
    model = _language_model()
    with torch.no_grad():
        next(model.parameters()).fill_(number)
    with pytest.raises(
        ch.ShapeError, match=r"logits must be finite; got (nan|inf|-inf)\. Look for NaN in the model's weights"
    ) as error:
        model.generate(_ids(2, 5), 3, temperature=temperature, seed=1, cached=cached)
    assert "\n" not in str(error.value)


def test_a_llama_like_model_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, rope_theta=10000.0,
        attn_implementation="eager", tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = _spread(transformers.LlamaForCausalLM(config).double())
    model = LanguageModel(20, 16, 4, 2, max_len=16, feedforward_dim=24, **{**LLAMA, "num_kv_heads": 2}).double().eval()  # type: ignore[arg-type]
    names = {
        "embedding.token.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "decoder.norm.weight": "model.norm.weight",
        "decoder.blocks": "model.layers",
        "attention_norm": "input_layernorm",
        "feedforward_norm": "post_attention_layernorm",
        "feedforward.gate": "mlp.gate_proj",
        "feedforward.expand": "mlp.up_proj",
        "feedforward.contract": "mlp.down_proj",
        "attention.query_projection": "self_attn.q_proj",
        "attention.key_projection": "self_attn.k_proj",
        "attention.value_projection": "self_attn.v_proj",
        "attention.output_projection": "self_attn.o_proj",
    }
    state, parameters = theirs.state_dict(), model.state_dict()
    for name, tensor in parameters.items():
        called = name
        for ours, other in names.items():
            called = called.replace(ours, other)
        tensor.copy_(state[called])
    ids = _ids(3, 11)
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-5
        )  # transformers computes RoPE angles in float32


def test_top_k_samples_from_the_k_likeliest_tokens() -> None:
    model = _language_model()
    ids = _ids(1, 3)
    likeliest = set(model(ids)[0, -1].topk(3).indices.tolist())
    drawn = {int(model.generate(ids, 1, temperature=50.0, top_k=3, seed=seed)[0, -1]) for seed in range(40)}
    assert drawn == likeliest


def test_generate_stops_and_pads() -> None:
    model = _language_model()
    ids = _ids(2, 3)
    free = model.generate(ids, 10, temperature=0.0)
    stop = int(free[0, 5])
    stopped = model.generate(ids, 10, temperature=0.0, stop=stop)
    for row in range(2):
        new = free[row, 3:].tolist()
        end = new.index(stop) if stop in new else len(new)
        expected = new[:end] + [stop] * (stopped.shape[1] - 3 - end)
        assert stopped[row, 3:].tolist() == expected[: stopped.shape[1] - 3]


def test_generate_restores_training_modes() -> None:
    model = LanguageModel(20, 8, 2, 2, dropout=0.5).train()
    model.decoder.blocks[0].eval()
    model.generate(_ids(1, 2), 3, seed=0)
    assert model.training
    assert not model.decoder.blocks[0].training
    assert model.decoder.blocks[1].attention.training
    assert model.head.weight.requires_grad


def _encoder_decoder(**options: object) -> EncoderDecoder:
    torch.manual_seed(0)
    return _spread(EncoderDecoder(20, 15, 8, 2, 2, max_len=12, **options).double())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("positions", POSITIONS)
def test_encoder_decoder_padding_matches_each_sequence_alone(positions: str) -> None:
    model = _encoder_decoder(positions=positions)
    source, target = _ids(3, 9), _ids(3, 6, vocab=15, seed=1)
    whole = model(source, target, source_lengths=[9, 4, 1], target_lengths=[2, 6, 0])
    assert whole.shape == (3, 6, 15)
    torch.testing.assert_close(whole[1], model(source[1:2, :4], target[1:2])[0], **EXACT)
    torch.testing.assert_close(whole[0, :2], model(source[:1], target[:1, :2])[0], **EXACT)
    assert (whole[0, 2:] == 0).all()
    assert (whole[2] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_encoder_decoder_cached_generation_matches_uncached(temperature: float) -> None:
    model = _encoder_decoder()
    source = _ids(2, 7)
    results = [
        model.generate(source, 12, start=1, source_lengths=[7, 3], temperature=temperature, seed=2, cached=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*results)
    assert results[0].shape == (2, 13)
    alone = model.generate(source[1:, :3], 12, start=1)
    if temperature == 0.0:
        assert torch.equal(results[0][1:], alone)


def _llama() -> LanguageModel:
    return _language_model(**LLAMA)


@pytest.mark.parametrize("build", [_classifier, _language_model, _llama, _encoder_decoder])
def test_every_parameter_gets_a_gradient_and_state_dict_round_trips(build: object) -> None:
    model, other = build(), build()  # type: ignore[operator]
    arguments = (_ids(2, 7), _ids(2, 7, vocab=15)) if isinstance(model, EncoderDecoder) else (_ids(2, 7),)
    model(*arguments).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*arguments), model(*arguments))


@pytest.mark.parametrize("build", [_classifier, _language_model, _encoder_decoder])
def test_checkpointed_models_train_the_same(build: object) -> None:
    grads = []
    for thrifty in (False, True):
        model = build(checkpoint_activations=thrifty, dropout=0.2).train()  # type: ignore[operator]
        arguments = (_ids(2, 7), _ids(2, 7, vocab=15)) if isinstance(model, EncoderDecoder) else (_ids(2, 7),)
        torch.manual_seed(1)
        model(*arguments).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, **EXACT)


@pytest.mark.parametrize("build", [_classifier, _language_model])
def test_autocast_trains_in_bfloat16(build: object) -> None:
    model = build(dropout=0.1).float().train()  # type: ignore[operator]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(_ids(3, 8), lengths=[8, 2, 5])
        loss = output.float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_initial_weights_have_the_expected_deviation() -> None:
    torch.manual_seed(0)
    model = LanguageModel(2000, 128, 4, 4)
    assert abs(model.embedding.token.weight.std() - 0.02) < 5e-4
    block = model.decoder.blocks[2]
    for layer, std in (
        (block.attention.query_projection, 128**-0.5),
        (block.feedforward.expand, 128**-0.5),
        (block.attention.output_projection, (128 * 8) ** -0.5),
        (block.feedforward.contract, (512 * 8) ** -0.5),
    ):
        assert abs(layer.weight.std() / std - 1.0) < 0.03
        assert not layer.bias.any()


def test_a_few_steps_learn_a_simple_rule() -> None:
    """Learn whether token 7 occurs among the real tokens; padding must not count."""
    torch.manual_seed(0)
    model = SequenceClassifier(20, 16, 2, 1, 2, max_len=8, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 10, (64, 8), generator=generator)
        lengths = torch.randint(1, 9, (64,), generator=generator)
        ids = torch.where(torch.arange(8) < lengths[:, None], ids, 7)
        real = torch.arange(8) < lengths[:, None]
        return ids, lengths, ((ids == 7) & real).any(dim=1).long()

    for step in range(80):
        ids, lengths, labels = batch(step)
        loss = nn.functional.cross_entropy(model(ids, lengths=lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    ids, lengths, labels = batch(1000)
    assert (model(ids, lengths=lengths).argmax(dim=-1) == labels).float().mean() > 0.95


def _other_cache() -> DecoderCache:
    return LanguageModel(20, 8, 2, 1).new_cache()


IDS = torch.zeros(2, 5, dtype=torch.int64)
LONG = torch.zeros(2, 17, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: _classifier()(LONG), r"ids must be at most 16 tokens long \(max_len\); got 17\."),
        (lambda: _classifier()(IDS + 20), r"^SequenceClassifier: ids must lie from 0 to 19 .*; got 20\."),
        (lambda: _classifier()(IDS - 1), r"ids must lie from 0 to 19 .*; got -1\."),
        (lambda: _classifier()(IDS[0]), r"whole numbers \[batch, len\]; got int64 of shape \(5,\)"),
        (lambda: _classifier()(IDS.float()), r"ids must be token ids.*; got float32"),
        (lambda: _classifier()([[1, 2]]), r"ids must be token ids.*; got list\."),
        (lambda: _classifier()(IDS, lengths=[5, 6]), r"^SequenceClassifier: lengths must lie from 0 to 5; got 6\."),
        (lambda: _classifier()(IDS, mask=torch.ones(5, 5)), r"^SequenceClassifier: mask must be a mask; got Tensor\."),
        (lambda: _classifier(pooling="sum"), r"pooling must be one of mean, max, mean_max, first; got 'sum'\."),
        (lambda: _classifier(positions="up"), r"positions must be one of learned, .*, none; got 'up'\."),
        (lambda: SequenceClassifier(20, 8, 2, 2, 0), r"num_classes must be a whole number of at least 1; got 0\."),
        (lambda: _language_model()(LONG), r"^LanguageModel: ids must be at most 16"),
        (lambda: _language_model(norm="batch"), r"^DecoderBlock: norm must be one of layer, rms; got 'batch'\."),
        (lambda: _language_model(norm=None), r"^DecoderBlock: norm must be one of layer, rms; got None\."),
        (lambda: _language_model(gated="yes"), r"^FeedForward: gated must be .*; got 'yes'\."),
        (lambda: _language_model().generate(IDS[:, :0], 3), r"generate: ids must hold at least one token"),
        (lambda: _language_model().generate(IDS, -1), r"max_new_tokens must be a whole number of at least 0; got -1\."),
        (lambda: _language_model().generate(IDS, 3, temperature=-1), r"temperature must be a number .*; got -1\."),
        (lambda: _language_model().generate(IDS, 3, top_k=0), r"top_k must be a whole number of at least 1; got 0\."),
        (lambda: _language_model().generate(IDS, 3, seed="a"), r"seed must be a whole number"),
        (lambda: _encoder_decoder()(IDS, IDS[:1]), r"^EncoderDecoder: target must have source's batch size 2; got 1\."),
        (lambda: _encoder_decoder()(IDS, IDS + 15), r"^EncoderDecoder: target must lie from 0 to 14"),
        (lambda: _encoder_decoder()(IDS + 20, IDS), r"^EncoderDecoder: source must lie from 0 to 19"),
        (lambda: _encoder_decoder().generate(IDS, 13, start=1), r"max_new_tokens must be at most 12 .*; got 13\."),
        (lambda: _encoder_decoder().generate(IDS, 3, start=15), r"start must lie from 0 to 14"),
        (lambda: _encoder_decoder().generate(IDS, 3, start=1.7), r"start must be a token id, .*; got 1\.7\."),
        (lambda: _encoder_decoder().generate(IDS, 3, start="a"), r"start must be a token id, .*; got 'a'\."),
        (lambda: _encoder_decoder().generate(IDS, 3, start=1, stop="a"), r"stop must be a token id, .*; got 'a'\."),
        (lambda: _encoder_decoder().decode(IDS, None), r"^EncoderDecoder: memory must have axes .*; got NoneType\."),
        (lambda: _language_model().generate(IDS, 3, stop=1.5), r"generate: stop must be a token id, .*; got 1\.5\."),
        (lambda: _language_model()(IDS, cache=ch.KVCache()), r"^LanguageModel: cache must be a DecoderCache; got KV"),
        (lambda: _language_model()(IDS, cache=_other_cache()), r"^LanguageModel: cache must hold .* 2 layers.*; got 1"),
    ],
)
def test_invalid_input_raises_one_line(call: object, text: str) -> None:
    with pytest.raises(ch.ClearheadError, match=text) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_small_integer_ids_match_int64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = LanguageModel(1000, 8, 2, 1, max_len=32)
    ids = _ids(2, 5)
    assert torch.equal(model(ids.to(dtype)), model(ids))
    assert torch.equal(model.generate(ids.to(dtype), 20, seed=1).long(), model.generate(ids, 20, seed=1))
    classifier = _classifier()
    assert torch.equal(classifier(ids.to(dtype), lengths=[5, 2]), classifier(ids, lengths=[5, 2]))


def test_meta_device_gives_shapes() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert _language_model().to("meta")(ids).shape == (2, 5, 20)
    assert _classifier().to("meta")(ids).shape == (2, 3)


def test_a_tiny_temperature_picks_the_likeliest_token() -> None:
    model, ids = _language_model(), _ids(2, 3)
    expected = model.generate(ids, 6, temperature=0)
    for temperature in (1e-20, 1e-36, 1e-40, 5e-324):
        assert torch.equal(model.generate(ids, 6, temperature=temperature, seed=0), expected)


def test_repr_lists_the_options() -> None:
    text = repr(_classifier())
    assert "positions='learned', max_len=16" in text
    assert "num_heads=2" in text


def test_neighbours_stay_within_their_sequence() -> None:
    """Packed, padded and separate sequences agree, and the contents of padding do not matter."""
    torch.manual_seed(0)
    model = SequenceClassifier(20, 16, 2, 1, 3, max_len=12, neighbours=2).eval()
    ids = torch.randint(1, 20, (3, 9))
    lengths = [9, 1, 5]
    together = model(ids, lengths=lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(together[row], model(ids[row : row + 1, :length])[0])
    other = ids.clone()
    other[1, 1:], other[2, 5:] = 7, 3
    torch.testing.assert_close(model(other, lengths=lengths), together)
    # A mask of absolute positions keeps the batch padded.
    mask = ch.Dense(torch.ones(9, 9, dtype=torch.bool))
    torch.testing.assert_close(model(other, lengths=lengths, mask=mask), together)
