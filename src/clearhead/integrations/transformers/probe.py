"""Recognition by trial: a module and its fused form run on the same small random inputs, and must agree.

A trial runs once per class and configuration in a process, in float32, on a copy of the module: a new one of few heads
and channels if the config allows, else one that shares the module's parameters. It draws from a generator of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.pytorch_utils import Conv1D

from clearhead.integrations.recast import Fast, class_of, original_of
from clearhead.integrations.transformers.attention import NAME
from clearhead.integrations.transformers.calls import Signature, signature_of
from clearhead.integrations.transformers.families import HEAD_DIMS, NUM_HEADS, FeedForwardRow
from clearhead.integrations.transformers.forwards import AttendingForward, AttentionForward, LayerForward
from clearhead.integrations.transformers.masks import MaskTensor
from clearhead.integrations.transformers.match import (
    at,
    attention_rows,
    epsilon_name,
    feedforward_rows,
    first_of,
    layer_matches,
)
from clearhead.integrations.transformers.parts import (
    Formulas,
    FusedFeedForward,
    NormForward,
    TokenwiseForward,
    linear_of,
)
from clearhead.integrations.transformers.traits import traits_of
from clearhead.masks import Causal, Mask, Padding, Window
from clearhead.ops.kinds import NormKind
from clearhead.torch_private import implementation_of, set_implementation

__all__ = ["Trial", "attempt"]

#: Largest relative differences in float32: of outputs, and of gradients.
_BUDGETS: Final = (2e-5, 2e-4)
#: A gradient below this, relative to the largest, counts as 0.
_LEAST: Final = 1e-2
_BATCH, _LENGTH, _MEMORY, _HEAD_DIM, _MOST_HEADS = 2, 7, 5, 8, 16
_WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim")
_INNER_WIDTHS: Final = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "d_ff")
_HEADS: Final = (
    "num_attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
)
_HEAD_DIMS: Final = ("head_dim", "d_kv")


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        fast: the forward that agrees; None if none does.
        difference: the largest relative difference, of outputs and gradients; None if nothing was compared.
        reason: why there is no such forward.
    """

    fast: Fast | None = None
    difference: float | None = None
    reason: str = ""


_TRIALS: Final[dict[object, Trial]] = {}


def attempt(module: nn.Module, *, interface: bool) -> Trial | None:
    """Try the fused forms that a module's structure fits; None if it fits none.

    Args:
        module: of a class of transformers, or one like it.
        interface: whether attention in it goes through transformers' attention interface.
    """
    candidates = [*_candidates(module, interface)]
    if not candidates:
        return None
    # A norm does not attend.
    interface = interface or epsilon_name(module) is not None
    key = (class_of(module), interface, traits_of(module))
    if key not in _TRIALS:
        trial = _tried(module, candidates)
        if trial.difference is None:
            # The kernels may be switched off now and not later.
            return trial
        _TRIALS[key] = trial
    return _TRIALS[key]


def _candidates(module: nn.Module, interface: bool) -> Iterator[Fast]:
    name = epsilon_name(module)
    if name is not None:
        yield from (NormForward(kind, name) for kind in (NormKind.RMS, NormKind.RMS_FROM_ONE))
        return
    if next(module.children(), None) is None:
        # The other rows name submodules.
        return
    yield from (LayerForward(match, interface=interface) for match in layer_matches(module))
    yield from (FusedFeedForward(row) for row in feedforward_rows(module))
    if hasattr(module, "config") and signature_of(_kind_of(module).forward).rotary:
        yield from (AttentionForward(row, interface=interface) for row in attention_rows(module))


def _tried(module: nn.Module, candidates: Sequence[Fast]) -> Trial:
    best = Trial(reason="")
    with _undisturbed():
        for candidate in candidates:
            try:
                trial = _compare(module, candidate)
            except Exception as error:
                # A module that raises on inputs that it was not made for is left unmodified.
                trial = Trial(reason=f"the trial raised {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            if trial.fast is not None:
                return trial
            nearer = trial.difference is not None and trial.difference < (best.difference or torch.inf)
            if nearer or not best.reason:
                best = trial
    return best


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ordinary tensors on the CPU, in float32, with gradients; torch's generator is restored."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for context in (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            stack.enter_context(context)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


# ---- subjects -----------------------------------------------------------------------------------------------


def _kind_of(module: nn.Module) -> type[nn.Module]:
    """The module's class before ``swap``."""
    return original_of(class_of(module)) or class_of(module)


def _reduced(module: nn.Module) -> nn.Module | None:
    """A new module of the same class from a config of few heads and channels; None if the class or its config does not
    allow that."""
    kind, config = _kind_of(module), _small(first_of(module.modules(), ("config",)))
    names = inspect.signature(kind.__init__).parameters
    if config is None or "config" not in names:
        return None
    place = {"layer_idx": first_of(module.modules(), ("layer_idx",))} if "layer_idx" in names else {}
    try:
        with torch.device("cpu"):
            reduced: nn.Module = kind(config=config, **place)
    except Exception:
        return None
    structure = [[(name, _kind_of(part)) for name, part in each.named_modules()] for each in (module, reduced)]
    return reduced.float().train(module.training) if structure[0] == structure[1] else None


def _small(config: Any) -> Any:
    """A copy of a config with few heads and channels; None if its sizes have other names."""
    names = {name: getattr(config, name, None) for name in (*_WIDTHS, *_INNER_WIDTHS, *_HEADS, *_HEAD_DIMS)}
    sizes = {name: size for name, size in names.items() if isinstance(size, int) and not isinstance(size, bool)}
    heads = next((sizes[name] for name in _HEADS if name in sizes), None)
    width = next((sizes[name] for name in _WIDTHS if name in sizes), None)
    if heads is None or width is None:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    group = heads // kv_heads
    if 2 * group > _MOST_HEADS or heads % kv_heads:
        return None
    few = 2 * group
    head_dim = next((sizes[name] for name in _HEAD_DIMS if name in sizes), width // heads)
    small_width = few * _HEAD_DIM if width == heads * head_dim else few * _HEAD_DIM + 16
    small = copy.deepcopy(config)
    values = {
        **dict.fromkeys(_HEADS, few),
        **dict.fromkeys(_HEAD_DIMS, _HEAD_DIM),
        **dict.fromkeys(_WIDTHS, small_width),
        **dict.fromkeys(_INNER_WIDTHS, small_width + 8),
        "num_key_value_heads": few // group,
    }
    for name, value in values.items():
        if isinstance(getattr(config, name, None), int):
            setattr(small, name, value)
    return small


def _replica(module: nn.Module, implementation: str | None, memo: dict[object, Any]) -> nn.Module:
    """A module of the original classes with the same parameters and buffers, in float32, and without hooks; dropout is
    off, and its configs name another attention implementation. ``memo`` holds what several modules share."""
    kind = _kind_of(module)
    twin = kind.__new__(kind)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            hooks = name.endswith("_hooks") or "_hooks_" in name
            parts = {} if hooks else {key: _copied(part, implementation, memo) for key, part in value.items()}
            vars(twin)[name] = parts
        elif name != "forward":
            dropout = "drop" in name and isinstance(value, float)
            vars(twin)[name] = 0.0 if dropout else _copied(value, implementation, memo)
    if isinstance(twin, nn.Dropout):
        twin.p = 0.0
    return twin


def _copied(value: Any, implementation: str | None, memo: dict[object, Any]) -> Any:
    """A replica's part: a submodule, a parameter or a config, or what is shared as it is."""
    if isinstance(value, nn.Module):
        return _replica(value, implementation, memo)
    if isinstance(value, nn.Parameter):
        if id(value) not in memo:
            data = value.detach().float()
            # What was made in inference mode has no gradient.
            memo[id(value)] = nn.Parameter(data.clone() if data.is_inference() else data)
        return memo[id(value)]
    if implementation is None or implementation_of(value) is None:
        return value
    if (id(value), implementation) not in memo:
        memo[id(value), implementation] = copy.deepcopy(value)
        set_implementation(memo[id(value), implementation], implementation)
    return memo[id(value), implementation]


def _shrink(row: FeedForwardRow, *modules: nn.Module) -> None:
    """Give feedforwards that share their parameters small ones."""
    for path in (row.gate, row.expand, row.contract):
        if path is None:
            continue
        linear: Any = at(modules[0], path)
        last = path == row.contract
        rows, columns = (16, 24) if last else ((48 if row.packed_gate else 24), 16)
        size = (columns, rows) if isinstance(linear, Conv1D) else (rows, columns)
        weight = nn.Parameter(torch.empty(size))
        bias = None if linear.bias is None else nn.Parameter(torch.empty(rows))
        for module in modules:
            part: Any = at(module, path)
            part.weight, part.bias, part.nf = weight, bias, rows


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Give the parameters new storage with random values: their own may be that of the module that is tried."""
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5


# ---- comparisons --------------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """Runs two forms of a module on the same inputs.

    Attributes:
        theirs: the original.
        ours: the same, whose attention is ours.
        fast: the fused form.
        differences: the largest relative ones, of outputs and of gradients.
        fused: how many calls were fused.
        length: of the tuple that the original returns.
        leaves: what the last call's arguments were made of and learns: embeddings of relative positions.
    """

    theirs: nn.Module
    ours: nn.Module
    fast: Fast
    differences: list[float] = field(default_factory=lambda: [0.0, 0.0])
    fused: int = 0
    length: int = 0
    leaves: tuple[Tensor, ...] = ()

    def outputs(self, x: Tensor, theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The outputs of both forms, for calls that differ in masks and caches."""
        forward, fast = type(self.theirs).forward, self.fast
        result = forward(self.theirs, x, **theirs)
        self.length = len(result) if isinstance(result, tuple) else 0
        output = fast.compute(self.ours, x) if isinstance(fast, TokenwiseForward) else fast(self.ours, (x,), ours)
        self.fused += output is not None
        return _first(result), _first(forward(self.ours, x, **ours) if output is None else output)

    def note(self, kind: int, theirs: Tensor, ours: Tensor, least: float = 1e-30) -> None:
        """Record a relative difference: of outputs (0) or of gradients (1)."""
        with torch.no_grad():
            difference = float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=least))
        self.differences[kind] = max(self.differences[kind], difference if difference == difference else torch.inf)

    def gradients(self, x: Tensor, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        """Compare the gradients of inputs and parameters in training mode."""
        self.theirs.train()
        self.ours.train()
        wanted = [x.requires_grad_(), *self.leaves, *self.theirs.parameters()]
        pair = self.outputs(x, theirs, ours)
        self.note(0, *pair)
        arriving = torch.linspace(-1, 1, pair[0].numel()).view_as(pair[0])
        # The arguments' graph is that of both.
        gradients = [torch.autograd.grad(each, wanted, arriving, retain_graph=True, allow_unused=True) for each in pair]
        # A gradient may be 0 but for rounding, as that of a bias of keys.
        least = max(float(one.abs().max()) for one in gradients[0] if one is not None) * _LEAST
        for one, other in zip(*gradients, strict=True):
            if one is not None:
                self.note(1, one, torch.zeros_like(one) if other is None else other, least)

    def trial(self) -> Trial:
        """The result of all comparisons."""
        difference = max(self.differences)
        if self.fused == 0:
            return Trial(reason="the CPU kernels take no call of it")
        if any(largest > budget for largest, budget in zip(self.differences, _BUDGETS, strict=True)):
            return Trial(None, difference, f"its fused form differs by {difference:.1e}")
        fast = self.fast
        if isinstance(fast, AttendingForward):
            fast = replace(fast, length=self.length)
        return Trial(fast, difference)


def _first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _compare(module: nn.Module, fast: Fast) -> Trial:
    generator = torch.Generator().manual_seed(0)
    simple = isinstance(fast, TokenwiseForward)
    base = None if simple else _reduced(module)
    interface = getattr(fast, "interface", False)
    memo: dict[object, Any] = {}
    theirs, ours = (
        _replica(module if base is None else base, implementation if interface else None, memo)
        for implementation in ("eager", NAME)
    )
    if isinstance(fast, FusedFeedForward):
        _shrink(fast.row, theirs, ours)
    if simple or base is not None:
        _randomise(theirs, generator)
    if isinstance(fast, AttendingForward):
        fast = replace(fast, formulas=_formulas(ours))
    comparison = _Comparison(theirs.eval(), ours.eval(), fast)
    if simple:
        width = next(iter(theirs.parameters())).shape[-1]
        if isinstance(fast, FusedFeedForward):
            width = 16
        x = torch.randn(3, 5, width, generator=generator)
        # A row of small values shows the epsilon.
        x[0, 0] *= 1e-3
        with torch.no_grad():
            comparison.note(0, *comparison.outputs(x, {}, {}))
        comparison.gradients(x, {}, {})
        return comparison.trial()
    _Calls(comparison, signature_of(type(theirs).forward), generator).run()
    return comparison.trial()


def _formulas(module: nn.Module) -> Formulas:
    """The formulas of the norms in a module of original classes."""
    norms = {type(part): part for part in module.modules() if epsilon_name(part) is not None}
    trials = {kind: attempt(part, interface=True) for kind, part in norms.items()}
    return tuple(
        (kind, trial.fast)
        for kind, trial in trials.items()
        if trial is not None and isinstance(trial.fast, NormForward)
    )


class _Calls:
    """The calls of a layer or an attention on which its two forms are compared."""

    def __init__(self, comparison: _Comparison, signature: Signature, generator: torch.Generator) -> None:
        if not signature.names:
            raise TypeError("its forward names no arguments")
        self._comparison, self._signature, self._generator = comparison, signature, generator
        module = comparison.theirs
        fast = comparison.fast
        self._disentangled = isinstance(fast, LayerForward) and fast.match.is_disentangled
        self._memory = isinstance(fast, LayerForward) and len(fast.match.attentions) > 1
        modules = [*module.modules()]
        config = first_of(modules, ("config",))
        heads = first_of((*modules, config), NUM_HEADS)
        if isinstance(fast, LayerForward):
            norm: Any = at(module, fast.match.row.norms[-1])
            self._width = norm.weight.shape[0]
        else:
            assert isinstance(fast, AttentionForward)
            output = linear_of(at(module, fast.row.output))
            assert output is not None
            self._width = output[0].shape[0]
        self._head_dim = first_of((*modules, config), HEAD_DIMS) or self._width // heads
        core = next((part for part in modules if hasattr(part, "is_causal")), module)
        self._causal = bool(getattr(core, "is_causal", False)) or (signature.cache is not None and not self._memory)
        self._heads = heads
        self._place = first_of(modules, ("layer_idx",)) or 0
        self._config = config

    def run(self) -> None:
        """All of them."""
        note, memory = self._comparison.note, self._states(_MEMORY) if self._memory else None
        masked = bool(self._signature.masks)
        masks: list[Mask | None] = [Causal() if self._causal else None]
        if self._causal and not getattr(self._comparison.fast, "interface", True):
            # A module that computes attention itself decides what no mask means.
            masks.append(None)
        if masked:
            masks += [Window(2, 0 if self._causal else 3), ~Padding(torch.tensor([0, 2]))]
            if self._causal:
                masks[-1] = masks[-1] & Causal()  # type: ignore[operator]
        with torch.no_grad():
            for mask in masks:
                x = self._states(_LENGTH)
                one, other = self._comparison.outputs(x, *self._pair(_LENGTH, mask, memory))
                # A row that may attend to nothing is an average in eager attention, and 0 here.
                note(0, one[:, 2:], other[:, 2:])
            if not self._causal:
                note(0, *self._comparison.outputs(self._states(1), *self._pair(1, None, memory)))
            if self._signature.cache is not None:
                self._decode(memory)
        self._comparison.gradients(self._states(_LENGTH), *self._pair(_LENGTH, masks[0], memory))

    def _decode(self, memory: Tensor | None) -> None:
        """Several tokens at first, then one, then two."""
        caches = [self._cache(), self._cache()]
        before = 0
        for length in (5, 1, 2):
            mask = Causal() if self._causal else None
            theirs, ours = self._pair(length, mask, memory, before)
            name = self._signature.cache
            assert name is not None
            theirs[name], ours[name] = caches
            self._comparison.note(0, *self._comparison.outputs(self._states(length), theirs, ours))
            before += length

    def _cache(self) -> Any:
        if self._memory:
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        return DynamicCache()

    def _states(self, length: int) -> Tensor:
        return torch.randn(_BATCH, length, self._width, generator=self._generator)

    def _relative(self, length: int) -> dict[str, Tensor]:
        """Arguments of relative positions."""
        roles, given = self._signature.relative, dict[str, Tensor]()
        leaves = list[Tensor]()
        place = torch.arange(length)
        distances = place[:, None] - place
        if "bias" in roles:
            leaves.append(torch.randn(1, self._heads, 2 * length - 1, generator=self._generator).requires_grad_())
            given[roles["bias"]] = leaves[-1][:, :, distances + length - 1].expand(_BATCH, -1, -1, -1)
        span = first_of(self._comparison.theirs.modules(), ("pos_ebd_size",))
        if "embeddings" in roles and span is not None:
            leaves.append(torch.randn(2 * span, self._width, generator=self._generator).requires_grad_())
            given[roles["embeddings"]], given[roles["distances"]] = leaves[-1], distances.clamp(-3, 3)[None]
        self._comparison.leaves = tuple(leaves)
        return given

    def _pair(
        self, length: int, mask: Mask | None, memory: Tensor | None, before: int = 0
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of a call with the original, whose mask is added to scores, and with the fused form."""
        shared: dict[str, Any] = dict.fromkeys(self._signature.required)
        for name in self._signature.rotary:
            angles = torch.randn(1, length, self._head_dim // 2, generator=self._generator) * 3
            shared[name] = tuple(torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        for name in self._signature.positions:
            shared[name] = torch.arange(length)[None] * 3
        shared.update(self._relative(length))
        if memory is not None:
            shared[self._signature.memory or ""] = memory
        theirs, ours = dict(shared), dict(shared)
        if self._disentangled:
            allowed = torch.ones(1, 1) if mask is None else mask.dense(length, length, batch=_BATCH)
            theirs[self._signature.masks[0]] = ours[self._signature.masks[0]] = allowed.int().expand(
                _BATCH, 1, length, length
            )
        elif mask is not None and self._signature.masks:
            name, shape = self._signature.masks[0], (_BATCH, 1, length, before + length)
            symbolic = MaskTensor(mask, shape, before, "cpu")
            lowest = torch.finfo(torch.float32).min
            added = torch.zeros(shape).masked_fill(~symbolic.table(), lowest)
            interface = getattr(self._comparison.fast, "interface", True)
            theirs[name] = added
            ours[name] = MaskTensor(mask, shape, before, "cpu") if interface else added
        return theirs, ours
