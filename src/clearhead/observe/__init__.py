"""Look inside attention while it runs: statistics, inner tensors, edits and measures of heads.

The package is callable: ``clearhead.observe(model, want)`` calls the function ``clearhead.observe.observe``.
"""

import inspect
import sys
from types import ModuleType

from clearhead.observe.ablation import head_effects
from clearhead.observe.contribution import contributions, received_contributions, value_norms
from clearhead.observe.explain import explain, find_token
from clearhead.observe.explanation import Explanation, Step
from clearhead.observe.layers import attention_layers
from clearhead.observe.observe import Observed, Seen, observe
from clearhead.observe.points import POINTS, Points
from clearhead.observe.rollout import rollout
from clearhead.observe.taxonomy import HeadScores, head_scores, repeated_tokens
from clearhead.observe.trace import Edit, Trace, trace

__all__ = [
    "POINTS",
    "Edit",
    "Explanation",
    "HeadScores",
    "Observed",
    "Points",
    "Seen",
    "Step",
    "Trace",
    "attention_layers",
    "contributions",
    "explain",
    "find_token",
    "head_effects",
    "head_scores",
    "observe",
    "received_contributions",
    "repeated_tokens",
    "rollout",
    "trace",
    "value_norms",
]


class _ObserveModule(ModuleType):
    """The package, made callable as the function of the same name."""

    __call__ = staticmethod(observe)
    __signature__ = inspect.signature(observe)


sys.modules[__name__].__class__ = _ObserveModule
