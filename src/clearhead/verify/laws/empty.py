"""The law of empty calls: no sequence, no query or no key."""

from __future__ import annotations

from dataclasses import replace

from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.subject import NAMES, Subject

__all__ = ["LAWS"]


def _check_empty(subject: Subject, case: Case) -> None:
    """All results are 0: an output without keys is an empty sum, and its gradients are 0."""
    tensors = subject.draw(case)
    lacking = {"sequence": case.batch, "query": case.q_len, "key": case.k_len}
    where = f"without a {' and a '.join(name for name, count in lacking.items() if not count)}"
    shapes = ((*tensors[0].shape[:3], case.value_dim), *(tuple(tensor.shape) for tensor in tensors))
    for learning in (False, True):
        try:
            results = subject.gradients(case, tensors) if learning else [subject.call(case, tensors).output]
        except REFUSALS:
            if learning:
                return
            raise
        except Exception as error:
            said = (
                f"{'with gradients ' * learning}it raises {type(error).__name__}: {' '.join(str(error).split())[:120]}"
            )
            raise NotApplicable(f"{where} {said}") from None
        for name, one, shape in zip(("the output", *NAMES), results or (), shapes, strict=False):
            if tuple(one.shape) != shape:
                raise Broken(f"{where}, {name} has shape {tuple(one.shape)}, not {shape}")
            if not bool((one == 0.0).all()):
                raise Broken(f"{where}, {name} is {one[one != 0.0][0].item():.4g}, not 0")


_SMALL = Case(batch=2, kv_heads=2, q_len=3, k_len=3)
_LACKING = (
    replace(_SMALL, k_len=0),
    replace(_SMALL, q_len=0),
    replace(_SMALL, batch=0),
    replace(_SMALL, q_len=1, k_len=0),
)

LAWS = (
    Law(
        name="empty calls",
        says="without a sequence, a query or a key, output and gradients are 0, or an error is raised",
        check=_check_empty,
        search=False,
        every_form=True,
        cases=(*_LACKING, *(replace(case, mask="dense") for case in _LACKING), replace(_LACKING[2], mask="causal")),
    ),
)
"""The law of empty calls."""
