"""Products of linear layers, forward and backward, by the path that the table of processors names."""

from clearhead.projection.activations import ACTIVATIONS, Activation
from clearhead.projection.chosen import DTYPES, Choice, check_variable, choice, choices, gemm_path, takes_small
from clearhead.projection.feedforward import project_activate, project_activate_project
from clearhead.projection.paths import KINDS, NATIVE, Layer, Path, layers_of
from clearhead.projection.products import (
    are_plain,
    has_choice,
    kernels_take,
    project,
    project_each,
    recorded,
    unlooked,
    unrecorded,
)

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "KINDS",
    "NATIVE",
    "Activation",
    "Choice",
    "Layer",
    "Path",
    "are_plain",
    "check_variable",
    "choice",
    "choices",
    "gemm_path",
    "has_choice",
    "kernels_take",
    "layers_of",
    "project",
    "project_activate",
    "project_activate_project",
    "project_each",
    "recorded",
    "takes_small",
    "unlooked",
    "unrecorded",
]
