"""The other family: attention whose state has one size, however many tokens it has seen.

What every member computes, in every form, with ``phi`` its feature map::

    S_i = g_i * S_(i-1) + phi(k_i)^T v'_i                the state, [features, value_dim]; S_0 is the state given
    z_i = g_i * z_(i-1) + phi(k_i)                       where outputs are normalised
    output_i = scale * phi(q_i) S_i / (scale * phi(q_i) z_i), or without the divisor

================================  =================  =================================  ==========  ==============
verb                              ``g_i``            ``v'_i``                           normalised  ``scale``
================================  =================  =================================  ==========  ==============
``linear_attention``              1                  ``v_i``                            yes, or no  1
``retention``                     a number per head  ``v_i``                            no          1/sqrt(head_dim)
``gated_linear_attention``        per token and row  ``v_i``                            no          1/sqrt(head_dim)
``delta_attention``               1, or per token    ``rate_i (v_i - phi(k_i) g_i S)``  no          1/sqrt(head_dim)
================================  =================  =================================  ==========  ==============

1. **A decay** falls on what was there before the token is added; a query sees its own key undecayed.
2. **Normalised** are by default the maps whose features are nonnegative; ``scale`` then cancels.
3. **An empty row**, one without keys or whose weights are all 0, gives 0 with gradient 0.
4. **An absent key** (``Padding``) adds nothing, decays nothing and is not read. A query at its place sees the state
   that the last real token left.
5. **Documents** are a batch: each starts from its own state, and the state that comes back has one entry for each
   that has tokens. ``Documents(lengths=[3, 0, 2])`` has two: the mask keeps the tokens' documents and no others.
6. **Precision**: features, state and sums in float32 (float64 for float64 inputs), the output in the inputs' dtype.
7. **NaN and inf** in an absent key reach nothing. In a later key or value they do not reach an earlier chunk, but may
   reach earlier queries of their own chunk; the recurrent form keeps them out of all.
8. **The forms** ``recurrent``, ``chunked`` and ``parallel`` give the same numbers, and so does any split of the
   sequence whose parts hand the state on, up to rounding.
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
