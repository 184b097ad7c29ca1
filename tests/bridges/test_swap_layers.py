"""Swapped layers and stacks give what torch's give; at padding an encoder stack gives 0."""

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
from tests.budget import within_budget

EXACT = {"atol": 1e-11, "rtol": 1e-11}
BATCH, LENGTH, MEMORY, WIDTH, HEADS = 4, 6, 9, 8, 2
LENGTHS = (6, 3, 1, 4)

RIGHT = torch.arange(LENGTH) >= torch.tensor(LENGTHS)[:, None]
HOLES = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True, params=["small", "large"])
def _road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of these sizes on the road of small calls, and on that of large ones."""
    if request.param == "large":
        monkeypatch.setattr(torch_attention, "_LEAST", 0)


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
    """Outputs and gradients agree, where ``real`` says that the output counts."""
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


def _name(options: dict[str, Any]) -> str:
    """The same in every process: no addresses."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "plain"


OPTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"activation": nn.functional.silu},
    {"bias": False},
    {"batch_first": False},
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS, ids=_name)
def test_encoder_layer(options: dict[str, object], training: bool) -> None:
    theirs, ours = (module.train(training) for module in _pair(lambda: _layer(**options)))
    x = _tokens(LENGTH, ours.self_attn.batch_first, 1)
    for call in ({}, {"src_mask": CAUSAL, "is_causal": True}, {"src_key_padding_mask": RIGHT}):
        _same(theirs, ours, (x,), call)
        with torch.no_grad():
            torch.testing.assert_close(ours(x, **call), theirs(x, **call), **EXACT)


@pytest.mark.parametrize("options", OPTIONS, ids=_name)
def test_decoder_layer(options: dict[str, object]) -> None:
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
        "causal by look": {"mask": CAUSAL},
        "causal by hint": {"mask": causal, "is_causal": True},
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
def test_encoder_stack(name: str, options: dict[str, object]) -> None:
    theirs, ours = _pair(lambda: _encoder(**options))
    call, batch_first = _stack_calls()[name], ours.layers[0].self_attn.batch_first
    x, real = _tokens(LENGTH, batch_first, 1), _real(call, batch_first)
    for training in (True, False):
        _same(theirs.train(training), ours.train(training), (x,), call, real)
    if real is not None:
        assert (ours(x, **call)[~real] == 0).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_train_and_eval_agree_at_padding_too() -> None:
    theirs, ours = _pair(lambda: nn.TransformerEncoder(_layer(), 2))
    x = _tokens(LENGTH, True, 1).detach()
    outputs = [ours.train(training)(x, src_key_padding_mask=RIGHT) for training in (True, False)]
    assert torch.equal(*outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], theirs.eval()(x, src_key_padding_mask=RIGHT), **EXACT)


def test_padding_can_be_kept() -> None:
    theirs, ours = _pair(_encoder)
    ours = copy.deepcopy(theirs)
    swap(ours, leave_padding_out=False)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT})


def test_sequences_of_nothing_but_padding() -> None:
    _, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    for padding in (RIGHT | (torch.arange(BATCH) == 1)[:, None], torch.ones_like(RIGHT)):
        output = ours(x, src_key_padding_mask=padding)
        assert (output[padding] == 0).all()
        grads = torch.autograd.grad(output.sum(), [x, *ours.layers.parameters()])
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][padding] == 0).all()


def test_real_tokens_alone_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = _pair(_encoder)
    rows = []
    project = torch_attention.project

    def counted(x: Tensor, *layer: Tensor | None, **options: Any) -> Tensor:
        rows.append(x.shape[:-1])
        return project(x, *layer, **options)  # type: ignore[arg-type]

    for module in (torch_attention, torch_parts):
        monkeypatch.setattr(module, "project", counted)
    ours(_tokens(LENGTH, True, 1), src_key_padding_mask=RIGHT)
    assert set(rows) == {(1, sum(LENGTHS))}
    assert len(rows) == 2 * 4


def test_many_tokens_are_filled_up_to_rows_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_MANY", 1)
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


def test_a_long_ragged_batch_within_the_budget_of_float32() -> None:
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


@pytest.mark.parametrize("watched", [False, True], ids=["bare", "watched"])
@pytest.mark.parametrize("options", [{}, {"batch_first": False}], ids=str)
def test_decoder_stack(options: dict[str, object], watched: bool) -> None:
    theirs, ours = _pair(
        lambda: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer, **options), 2, norm=nn.LayerNorm(WIDTH))
    )
    batch_first = ours.layers[0].self_attn.batch_first
    if watched:
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
def test_transformer(batch_first: bool) -> None:
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


def test_unbatched_stacks() -> None:
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)[0].detach().requires_grad_()
    real = ~RIGHT[1]
    _same(theirs, ours, (x,), {"src_key_padding_mask": RIGHT[1]}, real)
    assert (ours(x, src_key_padding_mask=RIGHT[1])[~real] == 0).all()


def test_dropout_is_drawn_anew_and_right_on_average() -> None:
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
    seen: dict[bool, list[object]] = {True: [], False: []}

    def watch(module: nn.Module, own: bool) -> None:
        for name, part in module.named_modules():
            part.register_forward_pre_hook(
                lambda _, args, name=name: seen[own].append(("pre", name, [tuple(arg.shape) for arg in args]))
            )
            part.register_forward_hook(
                lambda _, args, output, name=name: seen[own].append(("post", name, _shape(output)))
            )
            part.register_full_backward_hook(
                lambda _, before, after, name=name: seen[own].append(("back", name, _shape(after)))
            )

    watch(ours, True)
    watch(theirs, False)
    _same(theirs, ours, (x,), {"src_key_padding_mask": RIGHT}, ~RIGHT)
    assert seen[True] == seen[False]
    assert {kind for kind, *_ in seen[True]} == {"pre", "post", "back"}
    assert ("post", "layers.0.self_attn", (BATCH, LENGTH, WIDTH)) in seen[True]


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else _shape(value[0])  # type: ignore[index]


@pytest.mark.parametrize("low", [-3e4, -1e9], ids=str)
def test_padding_marked_by_a_large_negative_number_is_not_attended_to(low: float) -> None:
    theirs, ours = _pair(_encoder)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(RIGHT, low)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": mask}, ~RIGHT)


class _Centred(nn.Module):
    """Works on a sequence as a whole."""

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


def test_a_layer_exchanged_since_is_called_as_torch_calls_it() -> None:
    class Same(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, **call: object) -> Tensor:  # type: ignore[override]
            calls.append(call)
            return super().forward(src, **call)  # type: ignore[arg-type]

    calls: list[dict[str, object]] = []
    theirs, ours = _pair(_encoder)
    exchanged = copy.deepcopy(theirs.layers[0])
    exchanged.__class__ = Same
    ours.layers[0] = exchanged
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT}, ~RIGHT)
    assert isinstance(calls[0]["src_key_padding_mask"], Tensor)


def test_one_of_our_masks_in_a_stack() -> None:
    theirs, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    window = ch.Window(1, after=1)
    expected = theirs(x, mask=~window.dense(LENGTH, LENGTH), src_key_padding_mask=RIGHT)
    output = ours(x, mask=window, src_key_padding_mask=RIGHT)
    torch.testing.assert_close(output[~RIGHT], expected[~RIGHT], **EXACT)


@pytest.mark.parametrize(
    "mask", [ch.Window(1, after=1), ch.Causal() & ch.Window(2), ch.Causal() & ch.Strided(2)], ids=repr
)
def test_a_mask_of_distances_over_padding_with_holes(mask: ch.Mask) -> None:
    theirs, ours = _pair(_encoder)
    x, forbidden = _tokens(LENGTH, True, 1), ~mask.dense(LENGTH, LENGTH)
    left = RIGHT.flip(1)
    for padding in (HOLES, left):
        real = ~padding & ~(forbidden | padding[:, None, :]).all(dim=2)
        _same(theirs, ours, (x,), {"src_key_padding_mask": padding, "mask": forbidden}, real)
        expected = theirs(x, src_key_padding_mask=padding, mask=forbidden)
        torch.testing.assert_close(ours(x, src_key_padding_mask=padding, mask=mask)[real], expected[real], **EXACT)


def test_one_run_of_real_tokens_is_packed_under_a_mask_of_distances(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # What lies at padding differs between the two from the second layer on.
    theirs.layers, ours.layers = (nn.ModuleList(list(model.layers)[:1]) for model in (theirs, ours))
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT}, ~RIGHT)


@pytest.mark.parametrize("name", ["self_attn", "linear1", "norm2", "", "_sa_block", "_ff_block"])
def test_what_was_replaced_on_an_object_sees_what_torch_shows_it(name: str) -> None:
    theirs, ours = _pair(_encoder)
    seen: dict[bool, list[object]] = {True: [], False: []}
    for model in (theirs, ours):
        part = model.layers[0] if name.startswith("_") else model.layers[0].get_submodule(name)
        called = name if name.startswith("_") else "forward"
        original = getattr(part, called)

        def wrap(
            *args: object,
            own: list[object] = seen[model is ours],
            original: Callable[..., object] = original,
            **kwargs: object,
        ) -> object:
            own.append([tuple(each.shape) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:1])
            assert not any(isinstance(each, torch_attention.Meaning) for each in (*args, *kwargs.values()))
            return original(*args, **kwargs)

        setattr(part, called, wrap)
    _same(theirs, ours, (_tokens(LENGTH, True, 1),), {"src_key_padding_mask": RIGHT, "mask": CAUSAL}, ~RIGHT)
    assert seen[True] == seen[False]
    assert seen[True]


@pytest.mark.parametrize(("batch", "length"), [(0, LENGTH), (BATCH, 0)])
def test_batches_without_tokens_under_a_mask(batch: int, length: int) -> None:
    _, ours = _pair(_encoder)
    x = torch.zeros(batch, length, WIDTH, dtype=torch.float64)
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    for call in ({"mask": causal}, {"src_key_padding_mask": torch.zeros(batch, length, dtype=torch.bool)}):
        assert ours(x, **call).shape == x.shape


def test_bad_masks() -> None:
    _, ours = _pair(_encoder)
    x = _tokens(LENGTH, True, 1)
    with pytest.raises(ch.MaskError, match=r"^TransformerEncoder: attn_mask must be given with is_causal=True"):
        ours(x, is_causal=True)
    with pytest.raises(ch.MaskError, match=r"^TransformerEncoder: key_padding_mask must be .*\[4, 6\]; got bool"):
        ours(x, src_key_padding_mask=RIGHT[:, :3])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_batch_of_one_may_have_padding(dtype: torch.dtype) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, padding = torch.randn(1, 3, 16), torch.tensor([[False, False, True]])
    given = padding if dtype == torch.bool else torch.zeros(1, 3).masked_fill(padding, -torch.inf)
    right = encoder(x, src_key_padding_mask=given)
    ch.swap(encoder)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=given)[:, :2], right[:, :2], rtol=1e-4, atol=1e-5)
