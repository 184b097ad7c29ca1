"""A fused decoder block that attends to a memory matches its formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import DTYPES, fused, same, tokens, upstream_of
from tests.nn.layers.with_memory import (
    budget_of,
    checked,
    decoder,
    factors_of,
    formula,
    memory_of,
    output_and_gradients,
    seeds_of,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
MASKS: dict[str, dict[str, ch.Mask]] = {
    "none": {},
    "padded memory": {"memory_mask": ch.Padding([11, 4])},
    "memory fully padded": {"memory_mask": ch.Padding([0, 11]), "mask": ch.Padding([7, 3])},
    "a table": {"memory_mask": ch.Dense(torch.rand(7, 11, generator=torch.Generator().manual_seed(4)) < 0.4)},
}

# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_output_and_every_gradient(norm_first: bool, dtype: torch.dtype, activation: str, masks: str) -> None:
    module = decoder(dtype, norm_first=norm_first, activation=activation)
    checked(module, tokens(dtype), memory_of(dtype), **MASKS[masks])


@pytest.mark.parametrize(
    ("width", "heads", "options"),
    [
        (20, 2, {}),
        (36, 3, {"num_kv_heads": 1}),
        (64, 4, {"num_kv_heads": 2, "bias": False}),
        (96, 6, {"memory_dim": 40}),
        (32, 1, {"memory_dim": 7, "feedforward_dim": 33}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 17, 5), (1, 5, 300), (2, 300, 9), (1, 260, 270)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_any_size_matches_the_formula(
    norm_first: bool, dtype: torch.dtype, lengths: tuple[int, int, int], width: int, heads: int, options: dict[str, Any]
) -> None:
    module = decoder(dtype, width=width, heads=heads, norm_first=norm_first, **options)
    (batch, length, others), of_memory = lengths, options.get("memory_dim", width)
    checked(module, tokens(dtype, batch, length, width), memory_of(dtype, batch, others, of_memory))


@NORMS
def test_memories_of_different_lengths_alternate(norm_first: bool) -> None:
    module, x = decoder(norm_first=norm_first), tokens()
    for _ in range(2):
        for length in (3, 11, 7):
            memory = memory_of(length=length)
            budget_of(module, x, memory, output_and_gradients(module, x, memory))


def test_strides_of_a_memory_do_not_change_bits() -> None:
    module, x, memory = decoder(), tokens(), memory_of()
    right = output_and_gradients(module, x, memory)
    across = memory.detach().transpose(0, 1).contiguous().requires_grad_()
    for _ in range(2):
        results = output_and_gradients(module, x, across.transpose(0, 1))
        same([results[0], *results[3:]], [right[0], *right[3:]])
    wide = torch.cat([memory.detach(), memory.detach()], -1)
    for _ in range(2):
        assert torch.equal(module(x, memory=wide[..., :32]), right[0])


@NORMS
def test_tokens_used_as_memory_sum_both_gradients(norm_first: bool) -> None:
    module, x = decoder(norm_first=norm_first), tokens()
    separate = output_and_gradients(module, x, x.detach().clone().requires_grad_())
    for _ in range(2):
        output = fused(module, x, memory=x)
        assert torch.equal(output, separate[0])
        (grad,) = torch.autograd.grad(output, x, upstream_of(output))
        torch.testing.assert_close(grad, separate[1] + separate[2], rtol=1e-6, atol=1e-6)


@NORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_norms_match_the_formula(dtype: torch.dtype, norm_first: bool) -> None:
    module = decoder(norm_first=norm_first)
    module.cross_norm, module.feedforward_norm = nn.RMSNorm(32, eps=1e-3), nn.LayerNorm(32, elementwise_affine=False)
    checked(module.to(dtype), tokens(dtype), memory_of(dtype))


@NORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_grad_and_inference_mode_give_the_same_bits(dtype: torch.dtype, norm_first: bool) -> None:
    module, x, memory = decoder(dtype, norm_first=norm_first), tokens(dtype), memory_of(dtype)
    right = module(x, memory=memory)
    for context in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with context():
                assert torch.equal(module(x, memory=memory), right)


def test_a_memory_modified_in_place_takes_effect() -> None:
    module, x, memory = decoder(), tokens(), memory_of().detach()
    lengths = torch.tensor([11, 4])
    mask = ch.Padding(lengths)
    for count in range(1, 8):
        memory.mul_(-1.5)
        lengths[1] = count
        within_budget(
            "output",
            module(x, memory=memory, memory_mask=mask),
            formula(module, x, memory, memory_mask=mask),
            formula(module.double(), x.double(), memory.double(), memory_mask=mask),
            terms=128,
        )
        module.float()


# ---- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [(0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3), (0.2, 0.4, 0.1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_dropout_matches_the_formula(norm_first: bool, dtype: torch.dtype, drops: tuple[float, ...]) -> None:
    module, x, memory = (
        decoder(dtype, norm_first=norm_first, attention_dropout=drops[0]),
        tokens(dtype),
        memory_of(dtype),
    )
    module.feedforward.dropout.p, module.residual_dropout.p = drops[1:]
    for seed in (7, 7, 8, 9):
        results = output_and_gradients(module, x, memory, seed=seed, memory_mask=ch.Padding([11, 4]))
        factors = factors_of(module, x, memory, seeds_of(module, seed))
        budget_of(module, x, memory, results, factors, memory_mask=ch.Padding([11, 4]))


# ---- gradients ----------------------------------------------------------------------------------------------

NEEDED: dict[str, Callable[[str], bool]] = {
    "x": lambda name: name == "x",
    "memory": lambda name: name == "memory",
    "both": lambda name: name in ("x", "memory"),
    "all but both": lambda name: name not in ("x", "memory"),
    "all but x": lambda name: name != "x",
    "attention": lambda name: name.startswith("attention."),
    "first norm": lambda name: name.startswith("attention_norm"),
    "cross-attention": lambda name: name.startswith("cross_attention."),
    "queries of the memory": lambda name: name == "cross_attention.query_projection.weight",
    "keys of the memory": lambda name: name.startswith("cross_attention.key_projection"),
    "norm of the memory": lambda name: name.startswith("cross_norm"),
    "memory and last layers": lambda name: name == "memory" or "contract" in name or "output" in name,
    "feedforward": lambda name: name.startswith("feedforward."),
    "last norm": lambda name: name.startswith("feedforward_norm"),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@NORMS
def test_only_needed_gradients_are_computed(norm_first: bool, dropout: float, needed: str) -> None:
    module, x, memory = decoder(norm_first=norm_first, dropout=dropout), tokens(), memory_of()
    inputs = {"x": x, "memory": memory, **dict(module.named_parameters())}
    whole = dict(zip(inputs, output_and_gradients(module, x, memory)[1:], strict=True))
    for name, part in inputs.items():
        part.requires_grad_(NEEDED[needed](name))
    for _ in range(2):
        torch.manual_seed(7)
        output = fused(module, x, memory=memory)
        output.backward(upstream_of(output))
        for name, part in inputs.items():
            if not NEEDED[needed](name):
                assert part.grad is None, name
                continue
            assert part.grad is not None, name
            if "bias" in name and "norm" not in name and not NEEDED[needed](name.replace("bias", "weight")):
                # A separate sum, not part of the GEMM.
                torch.testing.assert_close(part.grad, whole[name], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(part.grad, whole[name]), name
            part.grad = None


@NORMS
def test_create_graph_gives_the_same_gradients(norm_first: bool) -> None:
    module, x, memory = decoder(norm_first=norm_first, dropout=0.3), tokens(), memory_of()
    for _ in range(2):
        torch.manual_seed(7)
        output, inputs = module(x, memory=memory), [x, memory, *module.parameters()]
        gradients = torch.autograd.grad(output, inputs, upstream_of(output), create_graph=True)
        assert gradients[1].requires_grad
        factors = factors_of(module, x, memory, seeds_of(module))
        budget_of(module, x, memory, [output.detach(), *(part.detach() for part in gradients)], factors)


def test_modifying_a_memory_before_backward_raises() -> None:
    module = decoder()
    memory = memory_of().detach()
    output = module(tokens(), memory=memory)
    memory.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# ---- NaN and infinity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_masked_nan_or_infinity_in_a_memory_is_not_read(norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """Masked values are not read: the same output, and gradients within the budget of the formula."""
    module, x, mask = decoder(dtype, norm_first=norm_first), tokens(dtype), ch.Padding([11, 6])
    wide = copy.deepcopy(module).double()
    clean, spoiled = memory_of(dtype), memory_of(dtype)
    with torch.no_grad():
        clean[1, 8], spoiled[1, 8] = 0.0, bad
    for _ in range(2):
        output = fused(module, x, memory=spoiled, memory_mask=mask)
        assert torch.equal(output, module(x, memory=clean, memory_mask=mask))
        upstream = upstream_of(output)
        gradients = torch.autograd.grad(output, [x, spoiled], upstream)
        assert bool(gradients[1][1, 6:].eq(0.0).all())
        textbook = torch.autograd.grad(formula(module, x, clean, memory_mask=mask), [x, clean], upstream)
        doubles = [each.detach().double().requires_grad_() for each in (x, clean)]
        exact = torch.autograd.grad(formula(wide, *doubles, memory_mask=mask), doubles, upstream.double())
        for name, *three in zip(("dx", "dmemory"), gradients, textbook, exact, strict=True):
            within_budget(name, *three, terms=128, dtype=dtype)


# ---- observed, and op by op ----


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_observation_gives_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, training: bool) -> None:
    module, x, memory = decoder(dtype, norm_first=norm_first, dropout=dropout), tokens(dtype), memory_of(dtype)
    module.train(training)
    inputs, rounding = [x, memory, *module.parameters()], 1e-5 if dtype is torch.float32 else 0.1
    for masks in MASKS.values():
        for _ in range(3):
            torch.manual_seed(7)
            unobserved = fused(module, x, memory=memory, **masks)
            torch.manual_seed(7)
            with ch.observe(module, ch.Want(entropy=True)) as observations:
                observed = module(x, memory=memory, **masks)
            assert len(list(observations)) == 2
            assert torch.equal(unobserved, observed)
            upstream = upstream_of(unobserved)
            both = [torch.autograd.grad(output, inputs, upstream) for output in (unobserved, observed)]
            for one, other in zip(*both, strict=True):
                torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "name", ["attention", "cross_attention", "cross_attention.key_projection", "cross_norm", "feedforward"]
)
@NORMS
def test_hooks_fire_once_for_each_call(norm_first: bool, name: str) -> None:
    module, x, memory = decoder(norm_first=norm_first), tokens(), memory_of()
    for _ in range(3):
        right = output_and_gradients(module, x, memory)
    part, fired = module.get_submodule(name), []
    handle = part.register_forward_hook(lambda *given: fired.append(given[0]))
    for count in (1, 2, 3):
        results = output_and_gradients(module, x, memory, layer=False)
        assert fired == [part] * count
        budget_of(module, x, memory, results)
    handle.remove()
    same(output_and_gradients(module, x, memory), right)


def test_other_backends_run_op_by_op() -> None:
    module, x, memory = decoder(), tokens(), memory_of()
    with torch.no_grad():
        whole, cache, memories = module(x, memory=memory), ch.KVCache(), ch.KVCache()
        steps = [
            module(x[:, place : place + 1], memory=memory, cache=cache, memory_cache=memories) for place in range(7)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    for name in ("attention", "cross_attention"):
        part = getattr(module, name)
        part.backend = "tiled"
        budget_of(module, x, memory, output_and_gradients(module, x, memory, layer=False))
        part.backend = "auto"


def test_an_unbatched_sequence_matches_its_batch() -> None:
    module, x, memory = decoder(), tokens(), memory_of()
    right = module(x, memory=memory)[1]
    torch.testing.assert_close(module(x[1], memory=memory[1]), right, rtol=1e-5, atol=1e-5)


def test_checkpointing_gives_the_same_bits() -> None:
    module, x, memory = decoder(dropout=0.3), tokens(), memory_of()
    right = output_and_gradients(module, x, memory)
    module.checkpoint_activations = True
    for _ in range(3):
        same(output_and_gradients(module, x, memory, layer=None), right)


def test_wrong_arguments_raise_after_good_calls() -> None:
    module, x, memory = decoder(), tokens(), memory_of()
    for _ in range(3):
        output_and_gradients(module, x, memory)
    for bad, error in (
        (memory[..., :31], "memory must .*32"),
        (memory.double(), "dtype"),
        (memory[:1], "batch"),
        (memory[0], "batch"),
        ([1.0], "memory"),
    ):
        with pytest.raises(ch.ClearheadError, match=error):
            module(x, memory=bad)
    with pytest.raises(ch.ClearheadError, match="memory"):
        module(x)
    with pytest.raises(ch.MaskError, match="lengths"):
        module(x, memory=memory, memory_mask=ch.Padding([3, 4, 5]))
    with pytest.raises(ch.MaskError, match="query_offset"):
        module(x, memory=memory, memory_mask=ch.Causal())
    fused(module, x, memory=memory)
