"""Conformance: any attention function checked against laws of attention, with the smallest failing examples.

The package is callable: ``clearhead.verify(fn)`` calls the function ``clearhead.verify.verify``.
"""

import inspect
import sys
from types import ModuleType

from clearhead.verify.distributed import Distributed
from clearhead.verify.layer_errors import LayerError, LayerErrors
from clearhead.verify.models import model_law_names, verify_model
from clearhead.verify.report import Finding, Report
from clearhead.verify.signatures import SIGNATURES
from clearhead.verify.suite import law_names, verify

__all__ = [
    "SIGNATURES",
    "Distributed",
    "Finding",
    "LayerError",
    "LayerErrors",
    "Report",
    "law_names",
    "model_law_names",
    "verify",
    "verify_model",
]


class _VerifyModule(ModuleType):
    """The package, made callable as the function of the same name."""

    __call__ = staticmethod(verify)
    __signature__ = inspect.signature(verify)


sys.modules[__name__].__class__ = _VerifyModule
