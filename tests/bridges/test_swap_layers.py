"""Swapped layers and stacks match torch's; an encoder stack gives 0 at padding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.bridges import swap
from clearhead.integrations.torch import attention as torch_attention
from clearhead.integrations.torch import layers as torch_layers
from clearhead.integrations.torch import parts as torch_parts
from clearhead.integrations.torch import unpadded as packed
from tests.bridges.torch_layers import name_of
from tests.budget import within_budget

pytestmark = pytest.mark.covering(1)

EXACT = {"atol": 1e-11, "rtol": 1e-11}
BATCH, LENGTH, MEMORY, WIDTH, HEADS = 4, 6, 9, 8, 2
LENGTHS = (6, 3, 1, 4)

RIGHT = torch.arange(LENGTH) >= torch.tensor(LENGTHS)[:, None]
HOLES = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True, params=["small", "large"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test on the path of small calls and on that of large calls."""
    if request.param == "large":
        monkeypatch.setattr(torch_attention, "LEAST_WORK", 0)


def _tokens(length: int, batch_first: bool, seed: int) -> Tensor:
    shape = (BATCH, length, WIDTH) if batch_first else (length, BATCH, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def _pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = make().double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1) / 2, std=0.4)
    ours = copy.deepcopy(theirs)
    assert swap(ours).left == ()
    return theirs, ours


def _layer(kind: type[nn.Module] = nn.TransformerEncoderLayer, **options: object) -> nn.Module:
    return kind(WIDTH, HEADS, **({"dim_feedforward": 20, "dropout": 0.0, "batch_first": True} | options))


def _encoder(**options: object) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(_layer(**options), 2, norm=nn.LayerNorm(WIDTH))


def _same(
    theirs: nn.Module,
    ours: nn.Module,
    inputs: tuple[Tensor, ...],
    call: dict[str, object],
    real: Tensor | None = None,
) -> None:
    """Assert that outputs and gradients agree for the rows that ``real`` selects."""
    results = []
    for module in (ours, theirs):
        output = module(*inputs, **call)
        counted = output if real is None else output[real]
        grads = torch.autograd.grad(
            (counted * torch.arange(counted.numel()).view(counted.shape).cos()).sum(), [*inputs, *module.parameters()]
        )
        results.append([counted, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


OPTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"activation": nn.functional.silu},
    {"bias": False},
    {"batch_first": False},
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_encoder_layer_matches_torch(options: dict[str, object], training: bool) -> None:
    theirs, ours = (module.train(training) for module in _pair(lambda: _layer(**options)))
    x = _tokens(LENGTH, ours.self_attn.batch_first, 1)
    for call in ({}, {"src_mask": CAUSAL, "is_causal": True}, {"src_key_padding_mask": RIGHT}):
        _same(theirs, ours, (x,), call)
        with torch.no_grad():
            torch.testing.assert_close(ours(x, **call), theirs(x, **call), **EXACT)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_decoder_layer_matches_torch(options: dict[str, object]) -> None:
    theirs, ours = _pair(lambda: _layer(nn.TransformerDecoderLayer, **options))
    inputs = (_tokens(LENGTH, ours.self_attn.batch_first, 1), _tokens(MEMORY, ours.self_attn.batch_first, 2))
    memory_padding = torch.arange(MEMORY) >= torch.tensor([[9], [4], [1], [7]])
    for call in (
        {},
        {"tgt_mask": CAUSAL, "tgt_is_causal": True, "tgt_key_padding_mask": RIGHT},
        {
            "memory_mask": torch.arange(MEMORY) > torch.arange(LENGTH)[:, None],
            "memory_key_padding_mask": memory_padding,
        },
    ):
        _same(theirs, ours, inputs, call)


def _stack_calls() -> dict[str, dict[str, object]]:
    as_float = {"dtype": torch.float64}
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    bias = torch.randn(LENGTH, LENGTH, **as_float)
    return {
        "plain": {},
        "causal mask": {"mask": CAUSAL},
        "causal mask and is_causal": {"mask": causal, "is_causal": True},
        "bias": {"mask": bias},
        "padding": {"src_key_padding_mask": RIGHT},
        "holes": {"src_key_padding_mask": HOLES},
        "padding as float": {
            "src_key_padding_mask": torch.zeros(RIGHT.shape, **as_float).masked_fill(RIGHT, -torch.inf)
        },
        "padding and causal": {"mask": CAUSAL, "src_key_padding_mask": RIGHT},
        "padding and bias": {
            "mask": bias,
            "src_key_padding_mask": torch.zeros(RIGHT.shape, **as_float).masked_fill(RIGHT, -torch.inf),
        },
        "padding that is a bias": {"src_key_padding_mask": torch.randn(RIGHT.shape, **as_float)},
    }


def _real(call: dict[str, object], batch_first: bool) -> Tensor | None:
    padding = call.get("src_key_padding_mask")
    if not isinstance(padding, Tensor) or not (padding.dtype == torch.bool or padding.isinf().any()):
        return None
    real = ~padding if padding.dtype == torch.bool else padding == 0
    return real if batch_first else real.T


@pytest.mark.parametrize("options", [{}, {"batch_first": False, "norm_first": True}], ids=str)
@pytest.mark.parametrize("name", list(_stack_calls()))
def test_encoder_stack_matches_torch(name: str, options: dict[str, object]) -> None:
    theirs, ours = _pair(lambda: _encoder(**options))
    call, batch_first = _stack_calls()[name], ours.layers[0].self_attn.batch_first
    x, real = _tokens(LENGTH, batch_first, 1), _real(call, batch_first)
    for training in (True, False):
        _same(theirs.train(training), ours.train(training), (x,), call, real)
    if real is not None:
        assert (ours(x, **call)[~real] == 0).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_is_0_in_train_and_eval_mode() -> None:
    theirs, ours = _pair(lambda: nn.TransformerEncoder(_layer(), 2))
    x = _tokens(LENGTH, True, 1).detach()
    outputs = [ours.train(training)(x, src_key_padding_mask=RIGHT) for training in (True, False)]
    assert torch.equal(*outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], theirs.eval()(x, src_key_padding_mask=RIGHT), **EXACT)


def test_leave_padding_out_false_keeps_padding() -> None:
    theirs, ours = _pair(_encoder)
    ours = copy.deepcopy(theirs)
    swap(ours, leave_padding_out=False)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT})


def test_fully_padded_sequences_give_zeros_and_finite_gradients() -> None:
    _, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    for padding in (RIGHT | (torch.arange(BATCH) == 1)[:, None], torch.ones_like(RIGHT)):
        output = ours(x, src_key_padding_mask=padding)
        assert (output[padding] == 0).all()
        grads = torch.autograd.grad(output.sum(), [x, *ours.layers.parameters()])
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][padding] == 0).all()


def test_only_real_tokens_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = _pair(_encoder)
    rows = []
    project = torch_attention.project

    def counted(x: Tensor, *layer: Tensor | None, **options: Any) -> Tensor:
        rows.append(x.shape[:-1])
        return project(x, *layer, **options)  # type: ignore[arg-type]

    for module in (torch_attention, torch_parts):
        monkeypatch.setattr(module, "project", counted)
    monkeypatch.setattr(torch_parts, "SMALL", 0)
    ours(_tokens(LENGTH, True, 1), src_key_padding_mask=RIGHT)
    assert set(rows) == {(1, sum(LENGTHS))}
    assert len(rows) == 2 * 4


def test_packed_tokens_are_padded_to_a_common_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MANY", 1)
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    rows = []
    project = torch_attention.project

    def counted(x: Tensor, *layer: Tensor | None, **options: Any) -> Tensor:
        rows.append(x.shape[1])
        return project(x, *layer, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_attention, "project", counted)
    for call in ({"src_key_padding_mask": RIGHT}, {"src_key_padding_mask": HOLES, "mask": CAUSAL}):
        _same(theirs, ours, (x,), call, ~call["src_key_padding_mask"])
    assert set(rows) == {32}


def test_a_long_ragged_batch_is_within_the_error_budget() -> None:
    wide, _ = _pair(_encoder)
    theirs = copy.deepcopy(wide).float()
    ours = copy.deepcopy(theirs)
    swap(ours)
    lengths = torch.tensor([90, 13, 57, 1])
    padding = torch.arange(90) >= lengths[:, None]
    x = torch.randn(4, 90, WIDTH)
    results = [
        module(x.to(next(module.parameters()).dtype), src_key_padding_mask=padding)[~padding]
        for module in (ours, theirs, wide)
    ]
    within_budget("encoder", *results, terms=90)


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("options", [{}, {"batch_first": False}], ids=str)
def test_decoder_stack_matches_torch(options: dict[str, object], hooked: bool) -> None:
    theirs, ours = _pair(
        lambda: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer, **options), 2, norm=nn.LayerNorm(WIDTH))
    )
    batch_first = ours.layers[0].self_attn.batch_first
    if hooked:
        ours.layers[1].register_forward_hook(lambda module, args, output: None)
    inputs = (_tokens(LENGTH, batch_first, 1), _tokens(MEMORY, batch_first, 2))
    memory_padding = torch.arange(MEMORY) >= torch.tensor([[9], [4], [1], [7]])
    by_head = torch.rand(BATCH * HEADS, LENGTH, MEMORY) > 0.7
    by_head[..., 0] = False
    for call in (
        {},
        {"tgt_mask": CAUSAL},
        {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": memory_padding},
        {"tgt_key_padding_mask": RIGHT, "memory_mask": by_head},
    ):
        _same(theirs, ours, inputs, call)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_matches_torch(batch_first: bool) -> None:
    theirs, ours = _pair(
        lambda: nn.Transformer(WIDTH, HEADS, 2, 2, dim_feedforward=20, dropout=0.0, batch_first=batch_first)
    )
    inputs = (_tokens(LENGTH, batch_first, 1), _tokens(LENGTH, batch_first, 2))
    for call in (
        {"tgt_mask": CAUSAL},
        {"src_key_padding_mask": RIGHT, "memory_key_padding_mask": RIGHT, "tgt_mask": CAUSAL, "tgt_is_causal": True},
    ):
        for training in (True, False):
            _same(theirs.train(training), ours.train(training), inputs, call)


def test_unbatched_stacks_match_torch() -> None:
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)[0].detach().requires_grad_()
    real = ~RIGHT[1]
    _same(theirs, ours, (x,), {"src_key_padding_mask": RIGHT[1]}, real)
    assert (ours(x, src_key_padding_mask=RIGHT[1])[~real] == 0).all()


@pytest.mark.slow
def test_dropout_draws_new_masks_with_torchs_mean() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoder(_layer(dropout=0.2), 1, enable_nested_tensor=False)
    ours = copy.deepcopy(theirs)
    swap(ours)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    draws = [
        torch.stack([module(x, src_key_padding_mask=RIGHT)[~RIGHT].detach() for _ in range(400)])
        for module in (ours, theirs)
    ]
    assert not torch.equal(draws[0][0], draws[0][1])
    error = (draws[0].mean(dim=0) - draws[1].mean(dim=0)).abs()
    allowed = 5 * ((draws[0].var(dim=0) + draws[1].var(dim=0)) / 400) ** 0.5
    assert (error < allowed).all()


def test_hooks_fire_and_see_the_padded_batch() -> None:
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    events: dict[bool, list[object]] = {True: [], False: []}

    def record(module: nn.Module, is_ours: bool) -> None:
        for name, part in module.named_modules():
            part.register_forward_pre_hook(
                lambda _, args, name=name: events[is_ours].append(("pre", name, [tuple(arg.shape) for arg in args]))
            )
            part.register_forward_hook(
                lambda _, args, output, name=name: events[is_ours].append(("post", name, _shape(output)))
            )
            part.register_full_backward_hook(
                lambda _, before, after, name=name: events[is_ours].append(("back", name, _shape(after)))
            )

    record(ours, True)
    record(theirs, False)
    _same(theirs, ours, (x,), {"src_key_padding_mask": RIGHT}, ~RIGHT)
    assert events[True] == events[False]
    assert {kind for kind, *_ in events[True]} == {"pre", "post", "back"}
    assert ("post", "layers.0.self_attn", (BATCH, LENGTH, WIDTH)) in events[True]


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else _shape(value[0])  # type: ignore[index]


@pytest.mark.parametrize("low", [-3e4, -1e9], ids=str)
def test_padding_marked_by_a_large_negative_value_is_masked(low: float) -> None:
    theirs, ours = _pair(_encoder)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(RIGHT, low)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": mask}, ~RIGHT)


class _Centred(nn.Module):
    """Mixes the tokens of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("place", ["norm1", "dropout1", "activation"])
def test_a_part_that_mixes_tokens_sees_the_padded_batch(place: str) -> None:
    theirs, ours = _pair(_encoder)
    for model in (theirs, ours):
        setattr(
            model.layers[0], place, (lambda x: x - x.mean(dim=1, keepdim=True)) if place == "activation" else _Centred()
        )
    theirs.train(), ours.train()
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT}, ~RIGHT)


def test_hooks_on_every_module_see_the_padded_batch() -> None:
    _, ours = _pair(_encoder)
    shapes: list[object] = []
    handle = nn.modules.module.register_module_forward_hook(lambda _, args, output: shapes.append(_shape(output)))
    try:
        ours(_tokens(LENGTH, True, 1), src_key_padding_mask=RIGHT)
    finally:
        handle.remove()
    assert {shape[:2] for shape in shapes} == {(BATCH, LENGTH)}  # type: ignore[index]


def test_a_layer_replaced_after_the_swap_is_called_as_torch_calls_it() -> None:
    class Same(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, **call: object) -> Tensor:  # type: ignore[override]
            calls.append(call)
            return super().forward(src, **call)  # type: ignore[arg-type]

    calls: list[dict[str, object]] = []
    theirs, ours = _pair(_encoder)
    replaced = copy.deepcopy(theirs.layers[0])
    replaced.__class__ = Same
    ours.layers[0] = replaced
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT}, ~RIGHT)
    assert isinstance(calls[0]["src_key_padding_mask"], Tensor)


def test_a_clearhead_mask_in_a_stack_equals_its_dense_form() -> None:
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    window = ch.Window(1, after=1)
    expected = theirs(x, mask=~window.dense(LENGTH, LENGTH), src_key_padding_mask=RIGHT)
    output = ours(x, mask=window, src_key_padding_mask=RIGHT)
    torch.testing.assert_close(output[~RIGHT], expected[~RIGHT], **EXACT)


@pytest.mark.parametrize(
    "mask", [ch.Window(1, after=1), ch.Causal() & ch.Window(2), ch.Causal() & ch.Strided(2)], ids=repr
)
def test_a_relative_mask_over_padding_with_holes_matches_torch(mask: ch.Mask) -> None:
    theirs, ours = _pair(_encoder)
    x, forbidden = _tokens(LENGTH, True, 1), ~mask.dense(LENGTH, LENGTH)
    left = RIGHT.flip(1)
    for padding in (HOLES, left):
        real = ~padding & ~(forbidden | padding[:, None, :]).all(dim=2)
        _same(theirs, ours, (x,), {"src_key_padding_mask": padding, "mask": forbidden}, real)
        expected = theirs(x, src_key_padding_mask=padding, mask=forbidden)
        torch.testing.assert_close(ours(x, src_key_padding_mask=padding, mask=mask)[real], expected[real], **EXACT)


def test_contiguous_real_tokens_are_packed_under_a_relative_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = _pair(_encoder)
    packed = []
    monkeypatch.setattr(torch_layers, "laid_out", lambda *_: packed.append(True))
    for padding, expected in ((RIGHT, [True]), (RIGHT.flip(1), [True]), (HOLES, [])):
        packed.clear()
        ours(_tokens(LENGTH, True, 1), src_key_padding_mask=padding, mask=ch.Window(1, after=1))
        assert packed == expected
    packed.clear()
    ours(_tokens(LENGTH, True, 1), src_key_padding_mask=HOLES, mask=ch.Causal())
    assert packed == [True]


class _CentredNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


class _CentredDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


class _CentredLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("place", "part"),
    [("norm1", _CentredNorm(WIDTH)), ("dropout1", _CentredDropout(0.5)), ("linear1", _CentredLinear(WIDTH, 20))],
    ids=["norm", "dropout", "linear"],
)
def test_a_subclass_that_mixes_tokens_sees_the_padded_batch(place: str, part: nn.Module) -> None:
    theirs, ours = _pair(_encoder)
    part = part.double()
    for model in (theirs, ours):
        setattr(model.layers[0], place, part)
        model.train()
    # From the second layer on the two differ at padding.
    theirs.layers, ours.layers = (nn.ModuleList(list(model.layers)[:1]) for model in (theirs, ours))
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT}, ~RIGHT)


@pytest.mark.parametrize("name", ["self_attn", "linear1", "norm2", "", "_sa_block", "_ff_block"])
def test_methods_replaced_on_an_object_see_torchs_arguments(name: str) -> None:
    theirs, ours = _pair(_encoder)
    shapes: dict[bool, list[object]] = {True: [], False: []}
    for model in (theirs, ours):
        part = model.layers[0] if name.startswith("_") else model.layers[0].get_submodule(name)
        called = name if name.startswith("_") else "forward"
        original = getattr(part, called)

        def wrap(
            *args: object,
            recorded: list[object] = shapes[model is ours],
            original: Callable[..., object] = original,
            **kwargs: object,
        ) -> object:
            recorded.append([tuple(each.shape) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:1])
            assert not any(isinstance(each, torch_attention.Meaning) for each in (*args, *kwargs.values()))
            return original(*args, **kwargs)

        setattr(part, called, wrap)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT, "mask": CAUSAL}, ~RIGHT)
    assert shapes[True] == shapes[False]
    assert shapes[True]


@pytest.mark.parametrize(("batch", "length"), [(0, LENGTH), (BATCH, 0)])
def test_batches_without_tokens_accept_masks(batch: int, length: int) -> None:
    _, ours = _pair(_encoder)
    x = torch.zeros(batch, length, WIDTH, dtype=torch.float64)
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    for call in ({"mask": causal}, {"src_key_padding_mask": torch.zeros(batch, length, dtype=torch.bool)}):
        assert ours(x, **call).shape == x.shape


def test_invalid_masks_raise() -> None:
    _, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    with pytest.raises(ch.MaskError, match=r"^TransformerEncoder: attn_mask must be given with is_causal=True"):
        ours(x, is_causal=True)
    with pytest.raises(ch.MaskError, match=r"^TransformerEncoder: key_padding_mask must be .*\[4, 6\]; got bool"):
        ours(x, src_key_padding_mask=RIGHT[:, :3])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_padding_in_a_batch_of_one_matches_torch(dtype: torch.dtype) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, padding = torch.randn(1, 3, 16), torch.tensor([[False, False, True]])
    given = padding if dtype == torch.bool else torch.zeros(1, 3).masked_fill(padding, -torch.inf)
    right = encoder(x, src_key_padding_mask=given)
    ch.swap(encoder)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=given)[:, :2], right[:, :2], rtol=1e-4, atol=1e-5)
