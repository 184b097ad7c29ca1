"""A swapped nn.MultiheadAttention matches torch's outputs, weights and gradients for every option."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.bridges import swap, unswap
from clearhead.integrations.torch import attention as torch_attention
from clearhead.integrations.torch import attention_weights as exact_weights
from tests.budget import within_budget

pytestmark = pytest.mark.covering(1)

EXACT = {"atol": 1e-11, "rtol": 1e-11}
BATCH, HEADS, WIDTH, Q_LEN, K_LEN = 3, 2, 8, 5, 7


@pytest.fixture(autouse=True, params=["small", "large"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test on the path of small calls and on that of large calls."""
    if request.param == "large":
        monkeypatch.setattr(torch_attention, "LEAST_WORK", 0)


def _pair(**options: object) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's module in float64, and a swapped copy of it."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).double()  # type: ignore[arg-type]
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = copy.deepcopy(theirs)
    assert len(swap(ours).replaced) == 1
    return theirs, ours


def _inputs(kind: str, *, batch_first: bool = False, kdim: int = WIDTH, vdim: int = WIDTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int, width: int) -> Tensor:
        shape = (BATCH, length, width) if batch_first else (length, BATCH, width)
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    query = tokens(Q_LEN, WIDTH)
    if kind == "self":
        return query, query, query
    key = tokens(K_LEN, kdim)
    return query, key, key if kind == "memory" else tokens(K_LEN, vdim)


def _forbidden(*shape: int) -> Tensor:
    """A random mask in which every row may attend to a key."""
    forbidden = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.6
    forbidden[..., 0] = False
    return forbidden


def _padding(k_len: int, side: str) -> Tensor:
    right = torch.arange(k_len) >= torch.tensor([[k_len], [2], [3]])
    return right if side == "right" else right.flip(1)


def _run(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], call: dict[str, object]) -> Iterator[Tensor]:
    """Output, weights if returned, and gradients of a sum that weighs every element differently."""
    module.zero_grad()
    output, weights = module(*inputs, **call)
    results = [output] if weights is None else [output, weights]
    total = sum((tensor * torch.arange(tensor.numel()).view(tensor.shape).cos()).sum() for tensor in results)
    sources = [*dict.fromkeys(inputs), *module.parameters()]
    yield from results
    yield from torch.autograd.grad(total, sources)


def _same(
    theirs: nn.MultiheadAttention, ours: nn.MultiheadAttention, inputs: tuple[Tensor, ...], **call: object
) -> None:
    expected, actual = list(_run(theirs, inputs, call)), list(_run(ours, inputs, call))
    assert len(expected) == len(actual)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


WEIGHTS = [{"need_weights": False}, {"need_weights": True}, {"need_weights": True, "average_attn_weights": False}]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=["output", "averaged", "by head"])
@pytest.mark.parametrize("kind", ["self", "memory", "three"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
def test_every_call_signature_matches_torch(
    kind: str, batch_first: bool, weights: dict[str, object], training: bool
) -> None:
    for bias in (True, False):
        theirs, ours = (module.train(training) for module in _pair(batch_first=batch_first, bias=bias))
        _same(theirs, ours, _inputs(kind, batch_first=batch_first), **weights)


def _masks(k_len: int) -> dict[str, dict[str, Tensor]]:
    flat, full = _forbidden(Q_LEN, k_len), _forbidden(BATCH * HEADS, Q_LEN, k_len)
    bias = torch.randn(Q_LEN, k_len, dtype=torch.float64)
    right, left = _padding(k_len, "right"), _padding(k_len, "left")
    inf = {"dtype": torch.float64}
    return {
        "bool": {"attn_mask": flat},
        "bool by head": {"attn_mask": full},
        "float": {"attn_mask": bias.masked_fill(flat, -torch.inf)},
        "float by head": {"attn_mask": torch.randn(full.shape, **inf).masked_fill(full, -1e9)},
        "nothing forbidden": {"attn_mask": torch.zeros_like(flat)},
        "padding right": {"key_padding_mask": right},
        "padding left": {"key_padding_mask": left},
        "no padding": {"key_padding_mask": torch.zeros_like(right)},
        "float padding": {"key_padding_mask": torch.zeros(right.shape, **inf).masked_fill(right, -torch.inf)},
        "float padding bias": {"key_padding_mask": torch.randn(right.shape, **inf)},
        "both bool": {"attn_mask": flat, "key_padding_mask": right & (torch.arange(k_len) > 0)},
        "both float": {
            "attn_mask": bias,
            "key_padding_mask": torch.zeros(right.shape, **inf).masked_fill(right, -torch.inf),
        },
    }


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["output", "averaged"])
@pytest.mark.parametrize("mask", list(_masks(K_LEN)))
def test_every_mask_matches_torch(mask: str, weights: dict[str, object]) -> None:
    for batch_first, kind in product((True, False), ("self", "three")):
        theirs, ours = _pair(batch_first=batch_first)
        given = _masks(Q_LEN if kind == "self" else K_LEN)[mask]
        _same(theirs, ours, _inputs(kind, batch_first=batch_first), **given, **weights)


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["output", "averaged"])
@pytest.mark.parametrize("padded", [False, True])
def test_causal_masks_with_and_without_is_causal(weights: dict[str, object], padded: bool) -> None:
    theirs, ours = _pair(batch_first=True)
    inputs = _inputs("self", batch_first=True)
    call = dict(weights) | ({"key_padding_mask": _padding(Q_LEN, "right")} if padded else {})
    as_bool = torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1)
    as_float = nn.Transformer.generate_square_subsequent_mask(Q_LEN, dtype=torch.float64)
    for mask, hint in product((as_bool, as_float), (True, False)):
        if padded:
            call["key_padding_mask"] = (
                _padding(Q_LEN, "right")
                if mask is as_bool
                else torch.zeros(BATCH, Q_LEN).double().masked_fill(_padding(Q_LEN, "right"), -torch.inf)
            )
        _same(theirs, ours, inputs, attn_mask=mask, is_causal=hint, **call)


@pytest.mark.parametrize("weights", WEIGHTS, ids=["output", "averaged", "by head"])
@pytest.mark.parametrize(
    "extra", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_extra_keys_match_torch(extra: dict[str, bool], weights: dict[str, object]) -> None:
    for batch_first, mask in product((True, False), ("bool", "float by head", "padding right", "both float")):
        theirs, ours = _pair(batch_first=batch_first, **extra)
        _same(theirs, ours, _inputs("three", batch_first=batch_first), **_masks(K_LEN)[mask], **weights)
    causal = {"attn_mask": torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1), "is_causal": weights["need_weights"]}
    theirs, ours = _pair(**extra)
    _same(theirs, ours, _inputs("self"), **causal, **weights)


@pytest.mark.parametrize("weights", WEIGHTS, ids=["output", "averaged", "by head"])
def test_key_and_value_widths_match_torch(weights: dict[str, object]) -> None:
    for kdim, vdim in ((6, 8), (8, 4), (6, 4)):
        theirs, ours = _pair(kdim=kdim, vdim=vdim)
        _same(theirs, ours, _inputs("three", kdim=kdim, vdim=vdim), **_masks(K_LEN)["bool by head"], **weights)


@pytest.mark.parametrize("weights", WEIGHTS, ids=["output", "averaged", "by head"])
def test_unbatched_inputs_match_torch(weights: dict[str, object]) -> None:
    theirs, ours = _pair(batch_first=True)
    query, key, value = (tensor[0].detach().requires_grad_() for tensor in _inputs("three", batch_first=True))
    for call in ({}, {"attn_mask": _forbidden(HEADS, Q_LEN, K_LEN)}, {"key_padding_mask": _padding(K_LEN, "left")[1]}):
        _same(theirs, ours, (query, key, value), **call, **weights)


def test_float32_is_within_the_error_budget() -> None:
    exact, _ = _pair(batch_first=True)
    theirs = copy.deepcopy(exact).float()
    ours = copy.deepcopy(theirs)
    swap(ours)
    x = torch.randn(2, 64, WIDTH)
    padding = torch.arange(64) >= torch.tensor([[64], [40]])
    for call in ({"need_weights": False}, {"need_weights": True}, {"attn_mask": _forbidden(64, 64)}):
        wide = exact(x.double(), x.double(), x.double(), key_padding_mask=padding, **call)[0]
        pair = (module(x, x, x, key_padding_mask=padding, **call)[0] for module in (ours, theirs))
        within_budget(str(call), *pair, wide, terms=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_twice_torchs_error(dtype: torch.dtype) -> None:
    exact, _ = _pair(batch_first=True)
    theirs, x = copy.deepcopy(exact).to(dtype), torch.randn(2, 9, WIDTH).to(dtype)
    ours = copy.deepcopy(theirs)
    swap(ours)
    for weights in WEIGHTS[:2]:
        wide = copy.deepcopy(theirs).double()(x.double(), x.double(), x.double(), **weights)
        actual, expected = ours(x, x, x, **weights), theirs(x, x, x, **weights)
        for one, other, right in zip(actual, expected, wide, strict=True):
            if other is not None:
                assert one.dtype == other.dtype
                # Torch may be exact by chance where ours rounds: allow one ULP of this dtype.
                slack = torch.finfo(dtype).eps * right.abs().max()
                assert (one - right).abs().max() <= 2 * (other - right).abs().max() + slack


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["output", "averaged"])
def test_autocast_is_within_twice_torchs_error(weights: dict[str, object]) -> None:
    exact, _ = _pair(batch_first=True)
    theirs, x = copy.deepcopy(exact).float(), torch.randn(2, 9, WIDTH)
    ours = copy.deepcopy(theirs)
    swap(ours)
    mask = {"attn_mask": _forbidden(9, 9)}
    wide = exact(x.double(), x.double(), x.double(), **mask, **weights)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = (module(x, x, x, **mask, **weights)[0] for module in (ours, theirs))
    assert output.dtype == expected.dtype == torch.bfloat16
    slack = torch.finfo(torch.bfloat16).eps * wide.abs().max()
    assert (output - wide).abs().max() <= 2 * (expected - wide).abs().max() + slack


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_fully_padded_row_is_zero_and_has_no_gradient(need_weights: bool) -> None:
    theirs, ours = _pair(batch_first=True)
    x = _inputs("self", batch_first=True)[0]
    padding = torch.ones(BATCH, Q_LEN, dtype=torch.bool)
    padding[0] = False
    assert theirs(x, x, x, key_padding_mask=padding)[0].isnan().any()
    output, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(output[1:], ours.out_proj.bias.expand_as(output[1:]), **EXACT)
    torch.testing.assert_close(output[0], theirs(x[:1], x[:1], x[:1])[0][0], **EXACT)
    assert weights is None or (weights[1:] == 0).all()
    grads = torch.autograd.grad(output.square().sum(), [x, *ours.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][1:] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_nan_in_padding_does_not_reach_real_tokens(need_weights: bool) -> None:
    _, ours = _pair(batch_first=True)
    x = _inputs("self", batch_first=True)[0].detach()
    padding = _padding(Q_LEN, "right")
    clean = x.masked_fill(padding[..., None], 0.0)
    broken = x.masked_fill(padding[..., None], torch.nan)
    call = {"key_padding_mask": padding, "need_weights": need_weights}
    results = []
    for memory in (clean, broken):
        ours.zero_grad()
        query = x.clone().requires_grad_()
        output = ours(query, memory, memory, **call)[0]
        output.sum().backward()
        results.append((output, query.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_row_of_large_negative_scores_averages_as_in_torch() -> None:
    theirs, ours = _pair(batch_first=True)
    bias = torch.zeros(Q_LEN, Q_LEN, dtype=torch.float64)
    bias[1] = -1e9
    bias[2, 1:] = -1e9
    x = _inputs("self", batch_first=True)
    for need_weights in (False, True):
        expected, output = (module(*x, attn_mask=bias, need_weights=need_weights)[0] for module in (theirs, ours))
        # A float64 score near 1e9 has a rounding error of 1e-7, half an ULP, which weights and outputs inherit.
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=0.0)


def test_a_learned_bias_gets_torchs_gradient() -> None:
    theirs, ours = _pair(batch_first=True)
    x = _inputs("self", batch_first=True)[0].detach()
    grads = []
    for module in (theirs, ours):
        bias = torch.randn(Q_LEN, Q_LEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        bias.requires_grad_()
        module(x, x, x, attn_mask=bias, need_weights=False)[0].square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(grads[1], grads[0], **EXACT)


def test_weights_from_the_kernels_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_weights, "FEW_WEIGHTS", 0)
    for mask in _masks(K_LEN).values():
        theirs, ours = _pair(batch_first=True)
        with torch.no_grad():
            results = [module(*_inputs("three", batch_first=True), **mask) for module in (ours, theirs)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_active_only_in_training_mode(need_weights: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True).double()
    x = torch.randn(64, 24, 16, dtype=torch.float64)
    plain = module.eval()(x, x, x)[0].detach()
    swap(module)
    torch.testing.assert_close(module(x, x, x, need_weights=need_weights)[0], plain, **EXACT)
    module.train()
    outputs = torch.stack([module(x, x, x, need_weights=need_weights)[0].detach() for _ in range(40)])
    assert not torch.equal(outputs[0], outputs[1])
    # The mean of 40 draws lies within five of its standard deviations for nearly every element.
    deviation = (outputs.mean(dim=0) - plain).abs() / (outputs.std(dim=0) / 40**0.5)
    assert (deviation < 5).double().mean() > 0.999
    torch.manual_seed(7)
    first = module(x, x, x, need_weights=need_weights)[0]
    torch.manual_seed(7)
    assert torch.equal(module(x, x, x, need_weights=need_weights)[0], first)


def test_weights_in_training_mode_are_returned_after_dropout() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True).double()
    ours = copy.deepcopy(theirs)
    swap(ours)
    x = torch.randn(4, 30, 16, dtype=torch.float64)
    weights = ours(x, x, x, average_attn_weights=False)[1]
    survived = weights != 0
    torch.testing.assert_close(
        weights[survived], 2 * ours.eval()(x, x, x, average_attn_weights=False)[1][survived], **EXACT
    )
    assert 0.45 < survived.double().mean() < 0.55
    whole = nn.MultiheadAttention(16, 4, dropout=1.0, batch_first=True).double()
    swap(whole)
    assert (whole(x, x, x, need_weights=False)[0] == 0).all()


def test_a_clearhead_mask_equals_its_dense_form() -> None:
    theirs, ours = _pair(batch_first=True)
    x = _inputs("self", batch_first=True)[0]
    window = ch.Causal() & ch.Window(1)
    expected = theirs(x, x, x, attn_mask=~window.dense(Q_LEN, Q_LEN))
    for one, other in zip(ours(x, x, x, attn_mask=window), expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:The PyTorch API of nested tensors")
def test_vmap_nested_and_meta_tensors_use_torchs_code() -> None:
    theirs, ours = (module.eval().requires_grad_(False) for module in _pair(batch_first=True))
    x = torch.randn(4, 2, 5, WIDTH, dtype=torch.float64)
    mapped = [torch.vmap(lambda t, layer=module: layer(t, t, t, need_weights=False)[0])(x) for module in (ours, theirs)]
    torch.testing.assert_close(*mapped, **EXACT)
    nested = torch.nested.nested_tensor([x[0, 0], x[0, 1, :3]])
    both = [module(nested, nested, nested, need_weights=False)[0].to_padded_tensor(0.0) for module in (ours, theirs)]
    torch.testing.assert_close(*both, **EXACT)
    meta = torch.empty(2, 5, WIDTH, device="meta", dtype=torch.float64)
    assert copy.deepcopy(ours).to("meta")(meta, meta, meta)[0].shape == meta.shape


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"is_causal": True}, r"^MultiheadAttention: attn_mask must be given with is_causal=True.*; got None\."),
        ({"attn_mask": torch.zeros(4, 4)}, r"shape \[5, 5\] or \[6, 5, 5\]; got float32 of shape \(4, 4\)\."),
        ({"attn_mask": torch.zeros(5, 5).int()}, r"attn_mask must be bool or floating point .*got int32"),
        (
            {"key_padding_mask": torch.zeros(1, 5).bool()},
            r"key_padding_mask must be .*\[3, 5\]; got bool of shape \(1, 5\)",
        ),
        ({"key_padding_mask": [True]}, r"got list\."),
    ],
)
def test_invalid_masks_raise(call: dict[str, object], text: str) -> None:
    _, ours = _pair(batch_first=True)
    x = _inputs("self", batch_first=True)[0]
    with pytest.raises(ch.MaskError, match=text):
        ours(x, x, x, **call)


def test_invalid_axes_raise() -> None:
    _, ours = _pair()
    x = torch.zeros(3, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(ch.ShapeError, match=r"^MultiheadAttention: query must have 3 axes"):
        ours(x[None], x[None], x[None])
    with pytest.raises(
        ch.ShapeError, match=r"^MultiheadAttention: key must have query's axes and batch, as in \(3, 5, 8\); got"
    ):
        ours(x, x[0], x[0])
    with pytest.raises(ch.ShapeError, match=r"^MultiheadAttention: value must have key's length"):
        ours(x, x, x[:1])


X = torch.zeros(3, 5, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ((X[..., :7],) * 3, ch.ShapeError, r"query must be 8 channels wide; got shape \(3, 5, 7\)\."),
        ((X, X[..., :7], X), ch.ShapeError, r"key must be 8 channels wide"),
        ((X, X, X[..., :7]), ch.ShapeError, r"value must be 8 channels wide"),
        (
            (X.float(),) * 3,
            ch.UnsupportedError,
            r"query must have the module's dtype torch\.float64; got torch\.float32",
        ),
        ((X, X, X.long()), ch.UnsupportedError, r"value must have the module's dtype torch\.float64; got torch\.int64"),
        ((None, X, X), ch.ShapeError, r"query must be a tensor; got NoneType\."),
        ((X, None, None), ch.ShapeError, r"key must be a tensor; got NoneType\."),
        ((X, X, [1.0]), ch.ShapeError, r"value must be a tensor; got list\."),
    ],
)
def test_invalid_inputs_raise(inputs: tuple[Tensor, Tensor, Tensor], error: type[Exception], text: str) -> None:
    _, ours = _pair(batch_first=True)
    for call in ({}, {"need_weights": False}, {"key_padding_mask": torch.zeros(3, 5).bool()}):
        with pytest.raises(error, match="^MultiheadAttention: " + text):
            ours(*inputs, **call)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (ch.Padding([1, 2]), r"mask must have batch 1 or 3; got batch 2"),
        (ch.Padding([1, 2, 9]), r"mask must have lengths of at most k_len 5; got 9\."),
        (ch.Dense(torch.ones(3, 3).bool()), r"mask must have shape \[\.\.\., 5, 5\]; got \(1, 1, 3, 3\)"),
        (ch.Documents(lengths=[3, 3]), r"mask must cover the call's tokens \(5 keys, queries 0 to 4\)"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_clearhead_mask_of_the_wrong_size_raises(mask: ch.Mask, text: str, need_weights: bool) -> None:
    _, ours = _pair(batch_first=True)
    with pytest.raises(ch.ClearheadError, match="^MultiheadAttention: " + text):
        ours(X, X, X, attn_mask=mask, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_positional_clearhead_mask_with_unequal_lengths_raises(need_weights: bool) -> None:
    theirs, ours = _pair(batch_first=True)
    text = r"^MultiheadAttention: attn_mask must not read positions where .*; got q_len 3, k_len 5 under Causal\(\)\."
    with pytest.raises(ch.MaskError, match=text):
        ours(X[:, :3], X, X, attn_mask=ch.Causal(), need_weights=need_weights)
    call = {"attn_mask": ~ch.Causal().dense(3, 5, query_offset=0), "need_weights": need_weights}
    torch.testing.assert_close(ours(X[:, :3], X, X, **call)[0], theirs(X[:, :3], X, X, **call)[0], **EXACT)
    ours(X[:, :3], X, X, attn_mask=ch.Padding([5, 2, 1]), need_weights=need_weights)


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_without_tokens_accept_masks(batch: int, q_len: int, k_len: int, need_weights: bool) -> None:
    _, ours = _pair(batch_first=True)
    query, key = (torch.zeros(batch, length, WIDTH, dtype=torch.float64) for length in (q_len, k_len))
    for call in (
        {"key_padding_mask": torch.zeros(batch, k_len).bool()},
        {"attn_mask": torch.zeros(q_len, k_len).bool()},
    ):
        output, weights = ours(query, key, key, need_weights=need_weights, **call)
        assert output.shape == query.shape
        assert not output.isnan().any()
        assert weights is None or weights.shape == (batch, q_len, k_len)


def test_unswap_restores_torchs_bits() -> None:
    theirs, ours = _pair()
    unswap(ours)
    assert type(ours) is nn.MultiheadAttention
    inputs = _inputs("three")
    assert torch.equal(ours(*inputs)[0], theirs(*inputs)[0])
