"""Which lists of layers run as one operator: layers that differ in their weights only, proved by trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.integrations.recast import class_of, fast_of, original_of, recast, replacement
from clearhead.integrations.report import SwapRow
from clearhead.integrations.transformers.calls import cache_in, signature_of
from clearhead.integrations.transformers.forwards import LayerForward
from clearhead.integrations.transformers.match import at
from clearhead.integrations.transformers.parts import linear_of
from clearhead.integrations.transformers.specs import weights_in
from clearhead.integrations.transformers.stack import LayersAsOne, StackForward
from clearhead.nn.weight_packing import WeightOf
from clearhead.torch_private import submodules_of

__all__ = ["freeze_layers", "linear_weights", "unfreeze_layers"]

_BATCH, _LENGTH, _MEMORY = 2, 5, 3
_EMBEDDINGS: Final = "inputs_embeds"
_IMAGES: Final = "pixel_values"


def freeze_layers(model: nn.Module) -> list[SwapRow]:
    """Let each list of swapped layers run as one operator where a trial gives the same bits.

    Returns:
        A row for each list: why it still runs layer by layer, where it does.
    """
    rows = []
    for path, owner, name, layers in [*_lists(model)]:
        run, kind = _longest_run(layers), class_of(layers[-1]).__name__
        reason = _why_one_by_one(owner, layers, run) or _tried(owner, StackForward(name, run.start, run.stop))
        count = f"{len(run)} {kind}" if len(run) == len(layers) else f"{len(run)} of {len(layers)} {kind}"
        row = SwapRow(path, "ModuleList", "fused", 0.0, f"{count} are one operator")
        rows.append(row if reason is None else SwapRow(path, "ModuleList", "left", None, f"{count}: {reason}"))
    return rows


def _longest_run(layers: Sequence[nn.Module]) -> range:
    """The places of the most fused layers in a row that are of one class, and consist of the same parts."""
    runs = [[*places] for _, places in groupby(range(len(layers)), lambda place: class_of(layers[place]))]
    longest = max((run for run in runs if isinstance(fast_of(layers[run[0]]), LayerForward)), key=len)
    return range(longest[0], longest[-1] + 1)


def linear_weights(model: nn.Module) -> Iterator[WeightOf]:
    """The weights that the operators of swapped layers in lists read."""
    for _, _, _, layers in _lists(model):
        for layer in layers:
            fast = fast_of(layer)
            if isinstance(fast, LayerForward) and not fast.match.is_disentangled:
                yield from weights_in(fast.match, layer)


def unfreeze_layers(model: nn.Module) -> list[SwapRow]:
    """Let every list of layers run one by one again.

    Returns:
        A row for each list.
    """
    rows = []
    for path, module in model.named_modules():
        original = original_of(class_of(module))
        if original is None or not (isinstance(module, LayersAsOne) or isinstance(fast_of(module), StackForward)):
            continue
        recast(module, original)
        if original is nn.ModuleList:
            rows.append(SwapRow(path, "ModuleList", "fused"))
    return rows


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, list[nn.Module]]]:
    """The lists of layers some of which are fused: path, the module that has the list, its name in it, the layers."""
    for path, owner in model.named_modules():
        for name, part in owner.named_children():
            layers = [*part.children()] if isinstance(part, nn.ModuleList) else []
            if len(layers) > 1 and any(isinstance(fast_of(layer), LayerForward) for layer in layers):
                yield f"{path}.{name}".strip("."), owner, name, layers


def _why_one_by_one(owner: nn.Module, layers: Sequence[nn.Module], run: range) -> str | None:
    """Why the layers at the places of ``run`` cannot be one operator, before any trial."""
    fast = fast_of(layers[run.start])
    if len(run) == 1:
        return "no two in a row consist of the same parts"
    if isinstance(fast, LayerForward) and fast.match.is_disentangled:
        return "their attention adds terms of relative positions"
    if original_of(class_of(owner)) is not None or "forward" in vars(owner):
        return f"the forward of {class_of(owner).__name__} was replaced"
    return None


def _tried(owner: nn.Module, fast: StackForward) -> str | None:
    """Make the layers one and compare with one by one, bitwise; None if they agree, else they are as before."""
    layers, kind = submodules_of(owner)[fast.name], class_of(owner)
    recast(layers, LayersAsOne)
    recast(owner, replacement(kind, fast))
    reason: str | None = "no trial was possible"
    try:
        # Calls with gradients run layer by layer.
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            reason = _difference(owner, kind, fast)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        reason = f"the trial raised {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    finally:
        if reason is not None:
            recast(layers, nn.ModuleList)
            recast(owner, kind)
    return reason


def _difference(owner: nn.Module, kind: type[nn.Module], fast: StackForward) -> str | None:
    """Why the layers as one are not the layers one by one; None if they are."""
    layer = [*submodules_of(owner)[fast.name].children()][fast.start]
    for place, options in enumerate(_arguments(owner, kind, layer)):
        try:
            kind.forward(owner, **options)
        except (RuntimeError, ValueError, TypeError):
            # The first call must work; modules read masks in several forms.
            if place == 0:
                raise
            continue
        if place == 0 and not fast.run(kind.forward, owner, (), options)[1]:
            return f"{kind.__name__} does not loop over them alone, or they are not plain"
        if not _agree(owner, kind, options):
            return "the trial gave other bits"
    return None


def _arguments(owner: nn.Module, kind: type[nn.Module], layer: nn.Module) -> Iterator[dict[str, Any]]:
    """Small calls of the module that has the layers, the first without a mask or a cache."""
    fast = fast_of(layer)
    assert isinstance(fast, LayerForward)
    path = fast.match.row.attentions[0]
    first = linear_of(at(at(layer, path), fast.match.attentions[0].projections[0]))
    assert first is not None
    (weight, _), like, signature = first, next(layer.parameters()), signature_of(kind.forward)

    def states(*size: int) -> Tensor:
        return torch.randn(_BATCH, *(size or (_LENGTH, weight.shape[1])), dtype=like.dtype, device=like.device)

    name = _EMBEDDINGS if _EMBEDDINGS in signature.names else signature.names[0]
    call: dict[str, Any] = {name: states(*_image_size(owner)) if name == _IMAGES else states()}
    if signature.memory is not None and len(fast.match.attentions) > 1:
        call[signature.memory] = states(_MEMORY, weight.shape[1])
    uncached = {"use_cache": False} if "use_cache" in signature.names else {}
    yield {**call, **uncached}
    if name == _EMBEDDINGS and "attention_mask" in signature.names:
        mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
        mask[0, :2] = 0
        yield {**call, **uncached, "attention_mask": mask}
    if signature.cache is not None:
        yield {**call, "use_cache": True}


def _image_size(owner: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model reads."""
    size = owner.config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return owner.config.num_channels, height, width


def _agree(owner: Any, kind: type[nn.Module], options: dict[str, Any]) -> bool:
    """Whether a call has the same bits one by one and as one, and so has a token after it where there is a cache."""
    outputs = [kind.forward(owner, **options), owner(**options)]
    if not _are_equal(*outputs):
        return False
    caches = [*map(cache_in, outputs)]
    if not options.get("use_cache") or None in caches:
        return True
    name = signature_of(kind.forward).cache
    assert name is not None
    token = {**options, _EMBEDDINGS: options[_EMBEDDINGS][:, :1]}
    one_by_one, as_one = ({**token, name: cache} for cache in caches)
    return _are_equal(kind.forward(owner, **one_by_one), owner(**as_one))


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two outputs have the same tensors."""
    tensors, others = [*_tensors_in(one)], [*_tensors_in(two)]
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors_in(part)
