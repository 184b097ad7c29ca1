"""Trust: any attention function through one suite of laws, with the smallest failing example of each that breaks.

The package can be called: ``clearhead.verify(fn)`` is the function ``verify`` in it, so that the verb and the place
where its relatives live share a name.
"""

import inspect
import sys
from types import ModuleType

from clearhead.verify.report import Finding, Report
from clearhead.verify.signatures import SIGNATURES
from clearhead.verify.suite import law_names, verify

__all__ = ["SIGNATURES", "Finding", "Report", "law_names", "verify"]


class _Verb(ModuleType):
    """This package, called as the function of its name."""

    __call__ = staticmethod(verify)
    __signature__ = inspect.signature(verify)


sys.modules[__name__].__class__ = _Verb
