"""Whole blocks by the operators ``clearhead::block``, ``block_forward`` and ``block_backward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.backends.recorded import is_recorded, recorded_gradients
from clearhead.choices import overrides
from clearhead.ops.kinds import Stored
from clearhead.ops.packed_weight import PackedWeight, Weight
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.shapes import Float

__all__ = ["MALFORMED", "PLAIN", "Tape", "run_blocks"]

#: Classes of tensors that the operators read.
PLAIN: Final = frozenset({Tensor, nn.Parameter})
#: Ends the error of lists that do not describe blocks: a fault of clearhead, which must not be hidden.
MALFORMED: Final = "The description is malformed."


@dataclass
class Tape:
    """Blocks as the lists that the operators read, in the order of native/torch/block_read.cpp: first what every block
    is, and then for every block what differs from call to call. A flag in front of each of the two says whether the
    first block's integers and numbers are those of all.

    Attributes:
        integers: counts, kinds, flags, positions and seeds.
        numbers: epsilons, scales, probabilities and caps.
        tensors: weights, biases, tables, masks and rules.
        caches: keys and values of each cache, which forward writes to.
    """

    integers: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    caches: list[Tensor] = field(default_factory=list)

    @cached_property
    def is_plain(self) -> bool:
        """Whether no tensor is of a subclass. Asked of a tape that is complete."""
        return {*map(type, self.tensors)} <= PLAIN

    def copy(self) -> Tape:
        """The same lists, to which a call adds its own."""
        return Tape([*self.integers], [*self.numbers], [*self.tensors], [*self.caches])

    def blocks(self, blocks: Sequence[Tape]) -> None:
        """What every block is; integers and numbers once where they are the same."""
        first, *others = blocks
        same = bool(others) and all((each.integers, each.numbers) == (first.integers, first.numbers) for each in others)
        self.integers += (len(blocks), same)
        for block in blocks[:1] if same else blocks:
            self.integers += block.integers
            self.numbers += block.numbers
        for block in blocks:
            self.tensors += block.tensors

    def integer(self, *values: int) -> None:
        self.integers.extend(values)

    def number(self, *values: float) -> None:
        self.numbers.extend(values)

    def optional(self, tensor: Tensor | None) -> None:
        """A flag, and the tensor where there is one."""
        self.integers.append(tensor is not None)
        if tensor is not None:
            self.tensors.append(tensor)

    def linears(self, layers: Sequence[tuple[Weight, Tensor | None]]) -> None:
        """The weight and bias of each linear layer, and how its weight is stored."""
        for weight, bias in layers:
            if isinstance(weight, QuantizedWeight):
                self.tensors.append(weight.read)
                self.optional(bias)
                packed = weight.panels is not None
                self.integer(Stored.INT8_PANELS if packed else Stored.INT8 if weight.bits == 8 else Stored.INT4)
                self.tensors.append(weight.scale)
                if packed:
                    self.integer(weight.shape[1])
                self.optional(weight.offset)
                self.integer(weight.rounding, *weight.bounds)
            elif isinstance(weight, PackedWeight):
                self.tensors.append(weight.panels)
                self.optional(bias)
                self.integer(Stored.PANELS, *weight.shape)
            else:
                self.tensors.append(weight)
                self.optional(bias)
                self.integer(Stored.PLAIN)

    def seeds(self, seeds: Sequence[int], rows: Tensor | int) -> None:
        """The seeds of a block's dropouts of activations, and the rows' numbers, or the first one's."""
        self.optional(None if isinstance(rows, int) else rows)
        for seed in seeds:
            self.integers += (seed, rows if isinstance(rows, int) else 0)

    def norm(self, kind: int, epsilon: float, weight: Tensor | None, bias: Tensor | None) -> None:
        """A norm."""
        self.integers.append(kind)
        self.numbers.append(epsilon)
        self.optional(weight)
        self.optional(bias)

    def mask(self, options: Mapping[str, Any]) -> None:
        """A mask, from the arguments that ``clearhead.ops.attention.options_of`` gives for it."""
        if not options:
            self.integers += (0, 0, 0, 0, 0)
            return
        for name in ("before", "after"):
            bound = options.get(name)
            self.integers += (0,) if bound is None else (1, bound)
        self.optional(options.get("start"))
        if "stop" in options:
            self.tensors.append(options["stop"])
        self.optional(options.get("allowed"))
        self.optional(options.get("blocks"))
        if "blocks" in options:
            self.integers.append(options["block_size"])

    def rules(self, options: Mapping[str, Any]) -> None:
        """Score rules, from the arguments that ``clearhead.ops.attention.options_of`` gives for them."""
        kinds: Sequence[int] = options.get("rule_kinds", ())
        self.integers.append(len(kinds))
        if kinds:
            self.integers += kinds
            self.numbers += options["rule_values"]
            self.tensors += options["rule_tables"]
        self.optional(options.get("sink"))


#: Computes a block's output on other tensors in place of its own, by operations that autograd can differentiate.
Recompute = Callable[[Mapping[int, Tensor], Sequence[Tensor]], Tensor]


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, recompute: Recompute, sequences: int, *inputs: Tensor) -> Tensor:
        tokens, tensors = [*inputs[:sequences]], [*inputs[sequences:]]
        output: Tensor
        output, *saved = torch.ops.clearhead.block_forward.default(tokens, tensors, tape.integers, tape.numbers)
        ctx.lists, ctx.sequences, ctx.recompute = (tape.integers, tape.numbers), sequences, recompute
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        if grad is None:
            return (None,) * (3 + len(needs))
        # Unpacked once: a checkpoint recomputes them for it.
        tensors = ctx.saved_tensors
        inputs, saved = tensors[: len(needs)], [*tensors[len(needs) :]]
        if not is_recorded(grad):
            tokens, weights = [*inputs[: ctx.sequences]], [*inputs[ctx.sequences :]]
            gradients, finite = torch.ops.clearhead.block_backward.default(
                grad, tokens, weights, saved, *ctx.lists, [*map(int, needs)]
            )
            if finite:
                results = iter(gradients)
                return None, None, None, *(next(results) if needed else None for needed in needs)
        return None, None, None, *_by_parts(ctx, inputs, grad, needs)


def _by_parts(ctx: Any, inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients op by op: where they are recorded, or where NaN or infinity meets a mask."""

    def compute(copies: list[Tensor | None]) -> list[Tensor]:
        places = {id(tensor): copy for tensor, copy in zip(inputs, copies, strict=True) if copy is not None}
        tokens = [part for part in copies[: ctx.sequences] if part is not None]
        return [ctx.recompute(places, tokens)]

    return recorded_gradients(compute, inputs, [grad], needs)


def run_blocks(
    tokens: Sequence[Float[Tensor, "batch _len _width"]], tape: Tape, recompute: Recompute | None = None
) -> Float[Tensor, "batch len width"]:
    """The output of blocks, each of which reads what the one before it gives.

    Args:
        tokens: those of the first block and, where attentions read one, the memory.
        tape: the blocks.
        recompute: the same op by op, of a single block that learns; None where no gradient is wanted.
    """
    output: Tensor
    if recompute is None:
        output = torch.ops.clearhead.block.default([*tokens], tape.tensors, tape.caches, tape.integers, tape.numbers)
    else:
        output = _Block.apply(tape, recompute, len(tokens), *tokens, *tape.tensors)  # type: ignore[no-untyped-call]
    # What the operator refused did not run.
    calls = overrides().fused_calls
    if calls is not None:
        calls.append(_kind(tape))
    return output


def _kind(tape: Tape) -> str:
    """What the blocks are, in a word."""
    # The first five integers of block_read.cpp.
    count, _, residual, _, attentions = tape.integers[:5]
    if count > 1:
        return "stack"
    return "layer" if residual else "attention" if attentions else "feedforward"
