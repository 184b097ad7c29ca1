"""Linear attention: attention with a state whose size does not depend on the number of tokens.

Every function computes, in every form, with a feature map ``phi``::

    S_i = g_i * S_(i-1) + phi(k_i)^T v'_i                the state, [features, value_dim]; S_0 is the argument ``state``
    z_i = g_i * z_(i-1) + phi(k_i)                       the normaliser, if outputs are normalised
    output_i = scale * phi(q_i) S_i / (scale * phi(q_i) z_i), or without the divisor

================================  =================  =================================  ==========  ==============
function                          ``g_i``            ``v'_i``                           normalised  ``scale``
================================  =================  =================================  ==========  ==============
``linear_attention``              1                  ``v_i``                            yes, or no  1
``retention``                     a number per head  ``v_i``                            no          1/sqrt(head_dim)
``gated_linear_attention``        per token and row  ``v_i``                            no          1/sqrt(head_dim)
``delta_attention``               1, or per token    ``rate_i (v_i - phi(k_i) g_i S)``  no          1/sqrt(head_dim)
================================  =================  =================================  ==========  ==============

1. **Decay**: the state decays before a token is added, so a query attends to its own key without decay.
2. **Normalisation**: outputs are normalised by default if features are nonnegative; ``scale`` then cancels.
3. **Empty rows**: a row without keys, or whose weights are all 0, has an output of 0 and a gradient of 0.
4. **Absent keys** (``Padding``) do not change the state and are not read. A query at such a place reads the state after
   the last real token.
5. **Documents** are a batch: each starts from its own state, and the returned state has one entry for each document
   with tokens. ``Documents(lengths=[3, 0, 2])`` has two such entries.
6. **Precision**: features, state and sums are float32 (float64 for float64 inputs), the output has the inputs' dtype.
7. **NaN and infinity** in an absent key have no effect. In a later key or value they do not affect earlier chunks, but
   may affect earlier queries of their own chunk; in the recurrent form they affect no earlier query.
8. **Forms**: ``recurrent``, ``chunked`` and ``parallel`` give equal results up to rounding, and so does a sequence that
   is split into calls, each of which gets the state of the previous one.
"""

from clearhead.linear.attention import (
    CHUNK,
    default_decay,
    delta_attention,
    gated_linear_attention,
    linear_attention,
    retention,
)
from clearhead.linear.feature_maps import FeatureMap, PositiveRandomFeatures
from clearhead.linear.state import LinearCache, LinearState

__all__ = [
    "CHUNK",
    "FeatureMap",
    "LinearCache",
    "LinearState",
    "PositiveRandomFeatures",
    "default_decay",
    "delta_attention",
    "gated_linear_attention",
    "linear_attention",
    "retention",
]
