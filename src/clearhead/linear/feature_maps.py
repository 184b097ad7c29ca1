"""Feature maps of linear attention, applied to queries and keys in place of the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import flag, number, repr_of, seed_of, whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.linear.linalg import matmul
from clearhead.shapes import Float
from clearhead.torch_private import constant_when_compiled

__all__ = ["FEATURE_MAPS", "PERFORMER", "FeatureMap", "PositiveRandomFeatures", "as_feature_map"]

PERFORMER: Final = "performer"
#: Smallest divisor of a vector that is normalised, equal to that of ``torch.nn.functional.normalize``.
_LEAST_LENGTH: Final = 1e-12


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """A function from channels to features, applied to each token.

    Attributes:
        name: its name in errors and tables.
        query: maps queries ``[..., head_dim]`` to features ``[..., features]``.
        key: maps keys ``[..., head_dim]`` to features ``[..., features]``.
        nonnegative: whether features are never negative, so that ``phi(q) z`` is a sum of weights; with such a map
            outputs are normalised by default.
        only_normalized: whether the features of each query have a factor that only normalisation cancels.
        absent: the value of a channel whose features are all exactly 0; None if there is none.
        num_features: number of features of a token; None for ``head_dim``.
        slope: the derivative as a function of the features, if ``query`` and ``key`` are the same elementwise function;
            with it and ``absent``, the chunked form computes features and gradients in the same pass as its GEMMs.
    """

    name: str
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    nonnegative: bool
    only_normalized: bool = False
    absent: float | None = None
    num_features: int | None = None
    slope: Callable[[Tensor], Tensor | float] | None = None

    def features(self, head_dim: int) -> int:
        """The number of features of a token of ``head_dim`` channels."""
        return head_dim if self.num_features is None else self.num_features


def _elu(x: Tensor) -> Tensor:
    """``elu(x) + 1`` without the subtraction and addition of 1, so that small features keep their digits."""
    return x.clamp_max(0.0).exp() + x.relu()


def _elu_slope(features: Tensor) -> Tensor:
    return features.clamp_max(1.0)


def _relu_slope(features: Tensor) -> Tensor:
    return features.sign()


def _identity(x: Tensor) -> Tensor:
    return x


def _one(features: Tensor) -> float:
    return 1.0


def _unit(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # A zero vector has features of 0 with a gradient of 0, not of 1 / _LEAST_LENGTH.
    return x / torch.where(length == 0.0, math.inf, length.clamp_min(_LEAST_LENGTH))


FEATURE_MAPS: Final = {
    feature_map.name: feature_map
    for feature_map in (
        FeatureMap(name="elu", query=_elu, key=_elu, nonnegative=True, absent=-math.inf, slope=_elu_slope),
        FeatureMap(name="relu", query=torch.relu, key=torch.relu, nonnegative=True, absent=0.0, slope=_relu_slope),
        FeatureMap(name="identity", query=_identity, key=_identity, nonnegative=False, absent=0.0, slope=_one),
        FeatureMap(name="unit", query=_unit, key=_unit, nonnegative=False, absent=0.0),
    )
}
"""Maps by name. ``elu``: ``elu(x) + 1`` (Katharopoulos et al. 2020, section 3.2.1); ``relu``; ``identity``;
``unit``: ``x / |x|``, for keys of the delta rule (Yang et al. 2024, "Parallelizing linear transformers with the delta
rule", section 3.3), and 0 with a gradient of 0 for a zero vector."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PositiveRandomFeatures:
    """Performer's random features, whose inner products are unbiased estimates of ``exp(scale * q . k)``.

    ``phi(x) = exp(weights @ y - |y|^2 / 2) / sqrt(num_features)`` with ``y = sqrt(scale) * x``

    Features of keys are not rescaled, since later calls add to the same state. If ``|y|^2 / 2`` exceeds ``weights @ y``
    by about 90, a feature underflows to 0 in float32. A call on a CPU raises ``UnsupportedError`` if all features of
    all keys of a head underflow.

    Attributes:
        weights: ``[num_features, head_dim]``, rows distributed as a standard normal.
        scale: factor on ``q . k`` within the exponential.

    Paper: Choromanski et al. 2021, "Rethinking attention with Performers", lemma 1 and section 2.4 (orthogonal rows).

    >>> import torch
    >>> PositiveRandomFeatures.draw(8, 32).features(torch.zeros(3, 8)).shape
    torch.Size([3, 32])
    """

    weights: Float[Tensor, "num_features head_dim"]
    scale: float

    @classmethod
    def draw(
        cls,
        head_dim: int,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        seed: int = 0,
        scale: float | None = None,
    ) -> PositiveRandomFeatures:
        """Features drawn from a seed.

        Args:
            head_dim: channels of a head.
            num_features: number of features; by default ``2 * head_dim``. The variance of the estimate falls as it
                grows.
            orthogonal: whether rows are orthogonal in blocks of ``head_dim``, which lowers the variance; each row alone
                has the distribution of an independent normal vector.
            seed: seed of the draw.
            scale: factor on ``q . k``; by default ``1 / sqrt(head_dim)``, that of softmax attention.

        Returns:
            The features, with ``weights`` of shape ``[num_features, head_dim]``.

        Raises:
            ShapeError: an argument is not a positive number, or ``seed`` is out of range.
        """
        name = "PositiveRandomFeatures.draw"
        head_dim = _size(name, "head_dim", head_dim)
        num_features = 2 * head_dim if num_features is None else _size(name, "num_features", num_features)
        orthogonal = flag(name, "orthogonal", orthogonal)
        scale = _softmax_scale(head_dim) if scale is None else number(
            name, "scale", scale, must="be positive and finite", fits=lambda given: given > 0.0,
            then="Usual: 1 / sqrt(head_dim).",
        )  # fmt: skip
        generator = torch.Generator("cpu").manual_seed(seed_of(name, seed))
        # The generator is on the CPU, so the draw must be too, whatever the default device is.
        rows = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64, device="cpu")
        if orthogonal:
            blocks = [_orthogonal(head_dim, generator) for _ in range(-(-num_features // head_dim))]
            rows = torch.cat(blocks)[:num_features] * rows.norm(dim=1, keepdim=True)
        return cls(weights=rows, scale=scale)

    def features(self, x: Float[Tensor, "*batch head_dim"]) -> Float[Tensor, "*batch num_features"]:
        """The features ``phi(x)`` of keys.

        Args:
            x: ``[..., head_dim]``.

        Returns:
            ``[..., num_features]``.
        """
        count: int = self.weights.shape[0]
        return self._exponents(x).exp() / math.sqrt(count)

    def query_features(self, x: Float[Tensor, "*batch head_dim"]) -> Float[Tensor, "*batch num_features"]:
        """The features ``phi(x)`` of queries, each divided by its largest, a factor that normalisation cancels.

        Args:
            x: ``[..., head_dim]``.

        Returns:
            ``[..., num_features]``.
        """
        exponents = self._exponents(x)
        return (exponents - exponents.detach().amax(dim=-1, keepdim=True)).exp()

    def _exponents(self, x: Tensor) -> Tensor:
        scaled = x * math.sqrt(self.scale)
        # In this order: a device may not support the weights' float64.
        weights = self.weights.to(scaled.dtype).to(scaled.device)
        projected = matmul(scaled.reshape(-1, scaled.shape[-1]), weights.mT).reshape(
            *scaled.shape[:-1], weights.shape[0]
        )
        return projected - scaled.square().sum(dim=-1, keepdim=True) / 2

    def as_map(self) -> FeatureMap:
        """The ``FeatureMap`` of these features."""
        return FeatureMap(
            name=PERFORMER,
            query=self.query_features,
            key=self.features,
            nonnegative=True,
            only_normalized=True,
            num_features=self.weights.shape[0],
        )


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A uniformly distributed orthogonal matrix: QR, with the signs of R's diagonal moved to Q."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu"))
    rotation: Tensor = (q * r.diagonal().sign()).mT
    return rotation


@lru_cache(maxsize=16)
def performer_map(head_dim: int) -> FeatureMap:
    # Drawn on another thread, since the cached map must not depend on this thread's modes and transforms.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(PositiveRandomFeatures.draw, head_dim).result().as_map()


@constant_when_compiled
def _drawn(head_dim: int) -> Tensor:
    return PositiveRandomFeatures.draw(head_dim).weights


def _compiled_performer(head_dim: int) -> FeatureMap:
    """The same map under the compiler, which makes constants of tensors but of no other objects."""
    return PositiveRandomFeatures(weights=_drawn(head_dim), scale=_softmax_scale(head_dim)).as_map()


def _size(function: str, argument: str, value: object) -> int:
    return whole(function, argument, value, low=1, high=2**24, then="Usual: head_dim, and twice as many features.")


def _softmax_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)


def as_feature_map(function: str, feature_map: object, head_dim: int) -> FeatureMap:
    """A feature map from its name, from random features, or itself."""
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if isinstance(feature_map, PositiveRandomFeatures):
        if feature_map.weights.shape[-1] != head_dim:
            raise ShapeError.about(
                function,
                "feature_map",
                must=f"be drawn for head_dim {head_dim}",
                got=f"weights of shape {tuple(feature_map.weights.shape)}",
                then=f"Call PositiveRandomFeatures.draw({head_dim}).",
            )
        return feature_map.as_map()
    if isinstance(feature_map, str) and feature_map == PERFORMER:
        return _compiled_performer(head_dim) if torch.compiler.is_compiling() else performer_map(head_dim)
    if isinstance(feature_map, str) and feature_map in FEATURE_MAPS:
        return FEATURE_MAPS[feature_map]
    raise UnsupportedError.about(
        function,
        "feature_map",
        must=f"be one of {', '.join((*FEATURE_MAPS, PERFORMER))}, or a FeatureMap",
        got=repr_of(feature_map),
        then="Pass a name, or FeatureMap(name=, query=, key=, nonnegative=).",
    )
