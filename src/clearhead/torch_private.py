"""The private names of torch and transformers that clearhead uses, the reason for each, and what happens without it.

Each section is one use. Other modules of clearhead call these functions; a test finds private names elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.overrides import has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "UNREAD",
    "WRAPPED_MODULE",
    "TorchDispatchMode",
    "any_hooks",
    "autograd_inside_operator",
    "base_of",
    "break_graph",
    "constant_when_compiled",
    "differentiates_forward",
    "has_dispatch_mode",
    "has_function_mode",
    "hooks_of",
    "implementation_of",
    "is_compiled_function",
    "is_compiled_module",
    "is_hooked",
    "modules_are_hooked",
    "no_torch_function",
    "onednn_linear",
    "outputs_collected",
    "packed_weight_of",
    "parameters_of",
    "set_implementation",
    "submodules_of",
    "supports_sdpa",
    "takes_implementation",
    "tensors_of",
    "transforms",
    "version_of",
    "versions_of",
    "wrapper_tensor",
]

Function = TypeVar("Function", bound=Callable[..., Any])
TensorKind = TypeVar("TensorKind", bound=Tensor)

# 1. Transforms of torch.func and forward-mode differentiation ---------------------------------------------------------

_transforms_active: Final[Callable[[], bool]] = getattr(torch._C, "_are_functorch_transforms_active", bool)


def transforms() -> bool:
    """Whether a transform of ``torch.func`` is active: ``autograd.Function`` without a rule for it would raise.

    Without the name the answer is no, and such a call raises what torch raises.
    """
    return bool(_transforms_active())


def differentiates_forward() -> bool:
    """Whether forward-mode differentiation is active: kernels have no rule for tangents.

    Without the name the answer is no, and such a call raises what torch raises.
    """
    return int(getattr(forward_ad, "_current_level", -1)) >= 0


# 2. Modes, and tensors that answer operators --------------------------------------------------------------------------

# Without TorchDispatchMode the tensors that users' functions read cannot be recorded, and the import fails.
_dispatch_depth: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", int)
_function_modes: Final[Callable[[], list[object]] | None] = getattr(
    torch.overrides, "_get_current_function_mode_stack", None
)


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode observes operators: then only operators of the computation itself may be called.

    Without the name the answer is no, and a mode observes clearhead's operators.
    """
    return _dispatch_depth() > 0


def has_function_mode() -> bool:
    """Whether a function mode observes torch's functions, other than the mode of a default device.

    Without the name the answer is yes under any mode, and a default device costs the fast paths.
    """
    if not has_torch_function_unary(None):
        return False
    return _function_modes is None or any(type(mode) is not _device_mode(_function_modes) for mode in _function_modes())


def wrapper_tensor(
    kind: type[TensorKind], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> TensorKind:
    """A tensor without elements, whose class has a ``__torch_dispatch__``: a mask that is computed when it is read.

    Without the name no mask of transformers can be made.
    """
    made: TensorKind = Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    return made


#: ``__torch_function__`` of a class whose results are plain tensors, from torch's guide to extending it.
#: Without the name the import of the integration fails.
no_torch_function: Final = torch._C._disabled_torch_function_impl


@cache
def _device_mode(modes: Callable[[], list[object]]) -> type:
    """The class of the mode that ``torch.set_default_device`` enters."""
    with torch.device("cpu"):
        return type(modes()[-1])


# 3. The contents of a module ------------------------------------------------------------------------------------------

# ``module.weight`` searches the class first and takes ten times as long as the module's dictionary.
_global_hooks: Final[Callable[[], bool]] = getattr(torch_module, "_has_any_global_hook", bool)


def submodules_of(module: nn.Module) -> dict[str, Any]:
    """The module's submodules by name. Without the attribute no module can be read."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The module's parameters by name. Without the attribute no module can be read."""
    return module._parameters


def tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's parameters and its buffers. Without the attributes no module can be read."""
    return parameters_of(module), module._buffers


_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks: Final = itemgetter(*_HOOKS)
#: Attributes of every module that do not affect what it computes: those that ``nn.Module`` sets, without these three.
UNREAD: Final = frozenset(vars(nn.Module())) - {"training", "_parameters", "_modules"}


def any_hooks(attributes: Iterable[dict[str, Any]]) -> bool:
    """Whether a hook observes the calls of one of the modules with these ``vars``.

    Without one of the attributes no module can be read.
    """
    return any(chain.from_iterable(map(_hooks, attributes)))


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that observe the module's calls. Without one of the attributes no module can be read."""
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook observes the module's calls, they are compiled, or a ``forward`` was set on the object.

    Without one of the attributes no module can be read.
    """
    # getattr of each name, which a compiler can trace.
    hooked = any(bool(getattr(module, name)) for name in _HOOKS)
    return hooked or "forward" in module.__dict__ or module._compiled_call_impl is not None


def modules_are_hooked() -> bool:
    """Whether a global hook observes the calls of all modules.

    Without the name the answer is no, and such a hook misses fused modules.
    """
    return bool(_global_hooks())


def packed_weight_of(module: nn.Module) -> object | None:
    """The packed weight of a quantised linear layer of ``torch.ao``: another object after each change.

    Without the name it is None, and the weight is read at each call.
    """
    holder = submodules_of(module).get("_packed_params")
    return None if holder is None else vars(holder).get("_packed_params")


# 4. The base of a view, and a tensor's version ------------------------------------------------------------------------


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, or None.

    A rule stores the parameter and not a view of it, and an autograd function returns no view. Without the name the
    answer is None: the rule's tensor becomes a buffer, and an output that is a view cannot be changed in place.
    """
    return getattr(tensor, "_base", None)


def version_of(tensor: Tensor) -> int:
    """The version of the tensor, which grows with each write.

    It is 0 for tensors made in inference mode. Without the name it is 0 for all, and a write is not noticed.
    """
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The versions of tensors that were not made in inference mode, without a call of Python's for each.

    Without the name there are none, and a write is not noticed.
    """
    return [*map(attrgetter("_version"), tensors)] if hasattr(Tensor, "_version") else []


# 5. torch.compile -----------------------------------------------------------------------------------------------------


def constant_when_compiled(function: Function) -> Function:
    """``torch.compiler.assume_constant_result`` without its import of torch's whole compiler, and of Triton with it.

    Without the name the compiler traces the function, and reports that it cannot.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: The name under which ``torch.compile`` wraps a module, and so a part of the names of its parameters.
#: Without the name such names keep the part that torch gives them.
WRAPPED_MODULE: Final = "_orig_mod"


def is_compiled_module(module: nn.Module) -> bool:
    """Whether the module's calls run in a compiled graph, which observers do not see.

    Without the names the answer is no, and an error gives another reason.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, WRAPPED_MODULE)


def is_compiled_function(function: object) -> bool:
    """Whether a function is the result of ``torch.compile``, whose graphs are stored in the globals of its file.

    Without the names the answer is no, and such a function inside a rule is compiled anew.
    """
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def break_graph(reason: str) -> None:
    """Break the graph that is being compiled: the compiler cannot make a constant of a function defined inside it.

    Without the name the compiler raises an error instead.
    """
    torch._dynamo.graph_break(msg=reason)


# 6. Autograd inside an operator's body --------------------------------------------------------------------------------


@contextmanager
def autograd_inside_operator() -> Iterator[None]:
    """Let autograd record inside an operator's body, where torch has switched it off for the thread.

    Without the names an operator's backward, which computes the call once more, raises.
    """
    keys = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


# 7. oneDNN's linear layer ---------------------------------------------------------------------------------------------


def onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's float32 and bfloat16 linear layer, which torch's own function takes for bfloat16 alone.

    Without the name it is None, and the path "onednn" says that it is absent.
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operator is None else operator.default


# 8. transformers' attention implementations ---------------------------------------------------------------------------


def implementation_of(config: Any) -> str | None:
    """The attention implementation that a config names; None of anything else.

    Without the name it is None, and no attention of transformers is replaced.
    """
    return getattr(config, "_attn_implementation", None)


def set_implementation(config: Any, name: str | None) -> None:
    """Select an attention implementation in a config and in those within it, also one that a model would refuse.

    Without the name nothing reads what is set.
    """
    config._attn_implementation = name


def takes_implementation(model: Any) -> bool:
    """Whether another attention implementation may be selected in a model.

    Without the name the answer is yes, and transformers warns where it may not.
    """
    ask = getattr(model, "_can_set_attn_implementation", None)
    return ask is None or bool(ask())


def supports_sdpa(model: type) -> bool:
    """Whether a model class has attention that is causal without a mask, as sdpa's is.

    Without the name the answer is no, and no mask means what it means in eager attention.
    """
    return bool(getattr(model, "_supports_sdpa", False))


def outputs_collected() -> Collection[str]:
    """The outputs that transformers collects from submodules around this call.

    Without the name there are none, and requested attention weights are missing.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return (collector.get() or ()) if collector is not None else ()
