"""One comparison: contenders must compute the same numbers before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch

from clearhead.benchmark.peers import MODULE, TEXTBOOK, Call, Groups, ModuleWork, TensorWork
from clearhead.errors import UnsupportedError
from clearhead.functional.exact import explain_dispatch
from clearhead.masks import Causal

__all__ = ["Comparison", "PlainRow", "Setting", "chosen_backend", "comparison_of", "errors_against", "grid", "noise_of"]

LEVELS = ("attention", "module")
MODES = ("forward", "training")

#: Contenders that store all scores are left out where the scores take more than this many bytes.
_MOST_SCORE_BYTES = 2**31
_HOLD_ALL_SCORES = (TEXTBOOK, f"{MODULE}, weights")
#: Tolerance of a contender's error, as a multiple of the textbook formula's rounding error.
_ALLOWANCE = 8.0
#: Largest relative difference between the dropout noise of two contenders; dropout 0.15 makes 26 % more than 0.1.
_NOISE_ALLOWANCE = 0.15
#: The noise is estimated from at least this many numbers of each group, or from at most this many draws.
_NOISE_NUMBERS, _MOST_DRAWS = 2**17, 64
_LONGEST_REASON: Final = 160


@dataclass(frozen=True)
class Setting:
    """The setting of a comparison. ``shape`` is ``(batch, heads, length, head_dim)``."""

    level: str
    mode: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    causal: bool

    @property
    def title(self) -> str:
        """The setting in one line."""
        kind = "causal" if self.causal else "full"
        return f"{self.level} {self.mode} {'x'.join(map(str, self.shape))} {str(self.dtype)[6:]} {kind}"

    @property
    def operations(self) -> float:
        """Multiplications and additions; a masked score counts as zero.

        Two matrix products forward and five backward (Dao 2023, FlashAttention-2, section 4.1); a module's projections
        add four products forward, and three times as many in training.
        """
        batch, heads, length, head_dim = self.shape
        scores = length * (length + 1) / 2 if self.causal else length * length
        passes = 1.0 if self.mode == "forward" else 3.5
        total = passes * 4.0 * batch * heads * scores * head_dim
        if self.level == "module":
            total += (1.0 if self.mode == "forward" else 3.0) * 8.0 * batch * length * (heads * head_dim) ** 2
        return total

    def to_dict(self) -> dict[str, Any]:
        """The setting as JSON values."""
        return {
            "level": self.level,
            "mode": self.mode,
            "shape": list(self.shape),
            "dtype": str(self.dtype)[6:],
            "causal": self.causal,
            "operations": self.operations,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders for one piece of work.

    Args:
        title: description of the work, one line.
        calls: the contenders; each call returns groups of tensors, with the same meaning for all contenders.
        exact: computes the same groups in float64.
        plain: computes the same groups by the textbook formula in the contenders' dtype; its error sets the tolerance.
        left_out: the reason for each contender that is left out.
        checked: the calls whose numbers are compared, by default ``calls``. With dropout, pass the same contenders
            without it; leave out contenders that do different work.
        noisy: names of the ``calls`` with dropout; their noise must be equal.
        pick: the part of each group that is compared, by default all.
        yardsticks: further calls that do different work and are timed in the same rounds.
        isolated: names of calls that start their own threads; the timing pauses before and after them.
        backend: returns the name of the backend that clearhead selects.
        budgets: for contenders that are left out with the reason where they fail: the largest error, relative to the
            largest exact number of its group. Other contenders that fail stop the command.
        block_seconds: shortest duration of a contender's sample; shorter calls are repeated.
    """

    title: str
    calls: Mapping[str, Call]
    exact: Callable[[], Groups]
    plain: Callable[[], Groups]
    left_out: Mapping[str, str] = field(default_factory=dict)
    checked: Mapping[str, Call] | None = None
    noisy: Sequence[str] = ()
    pick: Callable[[Groups], Groups] = lambda groups: groups
    yardsticks: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    isolated: Sequence[str] = ()
    backend: Callable[[], str] = lambda: "none"
    budgets: Mapping[str, float] = field(default_factory=dict)
    block_seconds: float = 0.005

    @property
    def timed(self) -> dict[str, Callable[[], object]]:
        """All calls that are timed in the same rounds."""
        return {**self.calls, **self.yardsticks}

    def examine(self) -> tuple[Self, dict[str, float]]:
        """Check all contenders; those with a budget that fail are left out, with the reason.

        Returns:
            The comparison without them, and each contender's largest error.

        Raises:
            UnsupportedError: a contender without a budget computes different numbers.
        """
        if not self.budgets:
            return self, self.check()
        exact = self.exact()
        rest = replace(self._without(self.budgets), exact=lambda: exact)
        errors, reasons = rest.check(), {}
        for name, budget in self.budgets.items():
            try:
                errors[name] = self._error_within(name, budget, self.pick(exact))
            except Exception as error:
                text = " ".join(str(error).split())
                reasons[name] = text if isinstance(error, UnsupportedError) else f"failed: {text}"[:_LONGEST_REASON]
        return replace(self._without(reasons), left_out={**self.left_out, **reasons}), errors

    def _error_within(self, name: str, budget: float, exact: Groups) -> float:
        """A contender's largest error; raises where it is above the budget or the noise is not that of the others."""
        groups = self.pick((self.calls if self.checked is None else self.checked)[name]())
        errors = errors_against(exact, groups)
        worst = max(errors) if len(errors) == len(exact) and len(groups) == len(exact) else torch.inf
        if not worst <= budget:
            raise UnsupportedError(f"wrong: error {worst:.1e} against float64, allowed {budget:g}")
        others = [other for other in self.noisy if other not in self.budgets]
        if name in self.noisy and others:
            replace(self, noisy=(others[0], name))._check_noise(exact)
        return worst

    def _without(self, names: Collection[str]) -> Self:
        def rest(calls: Mapping[str, Call]) -> dict[str, Call]:
            return {name: call for name, call in calls.items() if name not in names}

        return replace(
            self,
            calls=rest(self.calls),
            checked=None if self.checked is None else rest(self.checked),
            noisy=[name for name in self.noisy if name not in names],
            isolated=[name for name in self.isolated if name not in names],
        )

    def check(self) -> dict[str, float]:
        """Run every contender once and compare it with float64; contenders with dropout also by their noise.

        Returns:
            Each contender's largest error, relative to the largest number of its group.

        Raises:
            UnsupportedError: a contender computes different numbers.
        """
        exact = self.pick(self.exact())
        allowed = errors_against(exact, self.pick(self.plain()))
        worst = {}
        for name, call in (self.calls if self.checked is None else self.checked).items():
            groups = self.pick(call())
            errors = errors_against(exact, groups)
            floor = torch.finfo(groups[0][0].dtype).eps
            if len(errors) != len(allowed) or any(
                not error <= _ALLOWANCE * (allowance + floor) for error, allowance in zip(errors, allowed, strict=True)
            ):
                raise _other_work(
                    name,
                    f"compute the same as the others in '{self.title}'",
                    f"relative errors {_shown(errors)} where the textbook formula has {_shown(allowed)}",
                )
            worst[name] = max(errors)
        self._check_noise(exact)
        return worst

    def _check_noise(self, exact: Groups) -> None:
        """Check that the dropout noise of all contenders is equal in every group."""
        noises = {name: noise_of(lambda name=name: self.pick(self.calls[name]()), exact) for name in self.noisy}  # type: ignore[misc]
        for name, noise in noises.items():
            if any(
                not (min(one, other) > 0.0 and abs(one / other - 1.0) <= _NOISE_ALLOWANCE)
                for against in noises.values()
                for one, other in zip(noise, against, strict=True)
            ):
                others = "; ".join(f"{other} {_shown(far)}" for other, far in noises.items() if other != name)
                raise _other_work(
                    name,
                    f"drop as much as the others in '{self.title}'",
                    f"noise {_shown(noise)} of the numbers without dropout, others have {others}",
                )


def _other_work(name: str, must: str, got: str) -> UnsupportedError:
    return UnsupportedError.about(
        "bench", f"contender {name!r}", must=must, got=got, then="Different work is not timed."
    )


def noise_of(call: Call, exact: Groups) -> list[float]:
    """Noise of each group: root mean square difference from the exact numbers, relative to their root mean square."""
    wanted = [_flat(group) for group in exact]
    draws = max(1, min(_MOST_DRAWS, _NOISE_NUMBERS // min(one.numel() for one in wanted)))
    squares = [0.0] * len(wanted)
    for _ in range(draws):
        for place, (one, group) in enumerate(zip(wanted, call(), strict=True)):
            squares[place] += float((_flat(group) - one).square().sum())
    sizes = [max(float(one.square().sum()), 1e-300) for one in wanted]
    return [(square / draws / size) ** 0.5 for square, size in zip(squares, sizes, strict=True)]


def errors_against(exact: Groups, groups: Groups) -> list[float]:
    """Largest error of each group, relative to the group's largest exact number; infinite where shapes differ."""
    errors = []
    for wanted, got in zip(exact, groups, strict=False):
        one, other = _flat(wanted), _flat(got)
        if one.shape != other.shape:
            errors.append(torch.inf)
            continue
        errors.append(float((one - other).abs().max() / one.abs().max().clamp_min(1e-300)))
    return errors


def _flat(group: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in group])


def _shown(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.1e}" for error in errors)


class PlainRow:
    """Base of the rows of suites: a floor covers the rows of a dtype, and memory is not measured."""

    dtype: torch.dtype
    #: Whether the contenders' peak memory is measured too.
    memory: bool = False

    @property
    def group(self) -> str:
        """The dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def memory_read(self) -> float | None:
        """None: memory traffic does not bound this work."""
        return None


def grid(
    shapes: Sequence[tuple[int, int, int, int]],
    dtypes: Sequence[torch.dtype],
    *,
    levels: Sequence[str] = LEVELS,
    modes: Sequence[str] = MODES,
    causal: Sequence[bool] = (False, True),
) -> list[Setting]:
    """Settings of every combination, ordered by shape."""
    return [
        Setting(level, mode, shape, dtype, is_causal)
        for shape in shapes
        for level in levels
        for dtype in dtypes
        for mode in modes
        for is_causal in causal
    ]


def comparison_of(setting: Setting) -> Comparison:
    """The comparison for a setting, with tensors of a fixed seed."""
    training = setting.mode == "training"
    batch, heads, length, _ = setting.shape
    size = torch.empty((), dtype=setting.dtype).element_size()
    # At least the scores and the weights; in training also their gradients.
    score_bytes = (4 if training else 2) * batch * heads * length**2 * size
    too_large = score_bytes > _MOST_SCORE_BYTES
    if setting.level == "attention":
        tensors = TensorWork(setting.shape, setting.dtype, causal=setting.causal, training=training)
        calls, exact = tensors.calls(), lambda: tensors.by_rows(torch.float64)
        plain: Callable[[], Groups] = lambda: tensors.by_rows(setting.dtype)  # noqa: E731
    else:
        module = ModuleWork(setting.shape, setting.dtype, causal=setting.causal, training=training)
        calls, exact = module.calls(), module.exact
        plain = calls[MODULE if too_large else TEXTBOOK]
    left_out = {}
    if too_large:
        reason = f"would hold about {score_bytes / 2**30:.1f} GiB of scores"
        left_out = {name: reason for name in calls if name in _HOLD_ALL_SCORES}
    remaining = {name: call for name, call in calls.items() if name not in left_out}
    return Comparison(
        title=setting.title,
        calls=remaining,
        exact=exact,
        plain=plain,
        left_out=left_out,
        backend=lambda: chosen_backend(setting),
    )


def chosen_backend(setting: Setting) -> str:
    """Name of the backend that clearhead selects for a setting."""
    one = torch.zeros(setting.shape, dtype=setting.dtype, requires_grad=setting.mode == "training")
    choice = explain_dispatch(one, one, one, mask=Causal() if setting.causal else None).choice
    return choice or "none"
