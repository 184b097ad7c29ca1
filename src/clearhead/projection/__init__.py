"""GEMMs of linear layers, forward and backward, by the path that the table of processors selects."""

from clearhead.projection.activations import ACTIVATIONS, ActivationFormula
from clearhead.projection.feedforward import project_activate, project_activate_project
from clearhead.projection.linear import (
    are_plain,
    has_choice,
    kernels_take,
    project,
    project_each,
    recorded,
    unlooked,
    unrecorded,
)
from clearhead.projection.paths import KINDS, NATIVE, Layer, Path, layers_of
from clearhead.projection.selection import (
    DTYPES,
    Gain,
    GemmChoice,
    check_variable,
    choice,
    choices,
    gemm_gains_alone,
    gemm_path,
    layer_gains,
    named_by_variable,
    takes_small,
)

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "KINDS",
    "NATIVE",
    "ActivationFormula",
    "Gain",
    "GemmChoice",
    "Layer",
    "Path",
    "are_plain",
    "check_variable",
    "choice",
    "choices",
    "gemm_gains_alone",
    "gemm_path",
    "has_choice",
    "kernels_take",
    "layer_gains",
    "layers_of",
    "named_by_variable",
    "project",
    "project_activate",
    "project_activate_project",
    "project_each",
    "recorded",
    "takes_small",
    "unlooked",
    "unrecorded",
]
