"""``import clearhead`` loads little, and nothing optional; public names are imported on first use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.dispatch import BACKENDS
from tests.agreement import needs_native
from tests.processes import with_torch_alone

#: In a fresh process: what a statement loads besides torch, the lines of clearhead's files, and its CPU time.
PROGRAM = """
import json, sys, time
import torch
import torch.utils.flop_counter  # imports triton where it is installed
before = set(sys.modules)
start = time.process_time()
exec(sys.argv[1])
seconds = time.process_time() - start
modules = sorted(set(sys.modules) - before)
files = [sys.modules[name].__file__ for name in modules if name.partition(".")[0] == "clearhead"]
print(json.dumps({"modules": modules, "lines": sum(len(open(file).readlines()) for file in files), "seconds": seconds}))
"""
OPTIONAL = {
    "matplotlib",
    "numpy",
    "onnx",
    "rich",
    "safetensors",
    "sklearn",
    "tokenizers",
    "transformers",
    "triton",
    "typer",
}
#: Packages of torch that take a second to import.
SHARDING = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"}
ATTENTION = "import clearhead as ch; x = torch.ones(1, 1, 4, 8); ch.attention(x, x, x)"


def loaded_by(statement: str) -> tuple[set[str], int, float]:
    """Modules, lines and seconds."""
    done = with_torch_alone(PROGRAM, [statement])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return set(report["modules"]), report["lines"], report["seconds"]


def test_import_loads_only_the_package() -> None:
    modules, lines, seconds = loaded_by("import clearhead")
    first = {"clearhead", "clearhead.command_process", "clearhead.lazy"}
    library = {"clearhead.ops", *(f"clearhead.ops.{name}" for name in ("binary", "elf", "openmp"))}
    assert modules == first | library | {"clearhead.environment", "clearhead.errors"}
    assert lines < 800
    assert seconds < 0.06


@pytest.mark.parametrize("statement", [ATTENTION, "import clearhead as ch; ch.nn.MultiHeadAttention(8, 2)"])
def test_first_use_loads_nothing_optional(statement: str) -> None:
    modules, _, _ = loaded_by(statement)
    assert not OPTIONAL & {name.partition(".")[0] for name in modules}
    assert not [name for name in modules if name.startswith(("clearhead.bridges", "clearhead.verify"))]


def test_attention_loads_no_modules() -> None:
    modules, lines, _ = loaded_by(ATTENTION)
    assert "clearhead.nn" not in modules
    assert lines < 12_000


@needs_native
def test_attention_by_the_kernels_loads_no_other_backend() -> None:
    modules, _, _ = loaded_by(ATTENTION + "; ch.attention(x, x, x, mask=ch.Padding([2]), scores=ch.Alibi(1))")
    others = {f"clearhead.backends.{name}" for name in BACKENDS if name not in ("native", "reference")}
    assert not modules & others


def test_every_public_name_is_there_and_listed() -> None:
    assert set(ch.__all__) <= set(dir(ch))
    assert [name for name in ch.__all__ if not hasattr(ch, name)] == []


def test_name_shared_with_a_module_is_the_function() -> None:
    statement = "import clearhead.packing, clearhead.observe.explain; from clearhead import explain, observe, pack; "
    loaded_by(statement + "assert callable(pack) and callable(observe) and callable(explain)")


def test_missing_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'clearhead' has no attribute 'attend'"):
        ch.attend  # noqa: B018


@pytest.mark.slow
def test_compiled_code_imports_what_it_reads() -> None:
    statement = (
        "import clearhead as ch; x = torch.ones(1, 1, 4, 8); "
        "call = torch.compile(lambda x: ch.attention(x, x, x, mask=ch.Causal()), backend='eager', fullgraph=True); "
        "assert torch.equal(call(x), ch.attention(x, x, x, mask=ch.Causal()))"
    )
    modules, _, _ = loaded_by(statement)
    assert "clearhead.torch_op" in modules


def test_operators_are_there_when_they_are_first_asked_for() -> None:
    names = ("attention", "observe_attention", "top_k_attention", "linear_documents")
    loaded_by(
        f"import clearhead; own = torch.ops.clearhead; "
        f"assert all(getattr(own, name + end) for name in {names} for end in ('_backward', ''))"
    )


def test_missing_operator_raises_attribute_error() -> None:
    loaded_by("import clearhead; assert not hasattr(torch.ops.clearhead, 'attend')")


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["clearhead", "clearhead.ops.library", "clearhead.compiled"])
def test_exported_program_loads_and_trains_after_an_import(imports: str, tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    x = torch.randn(1, 2, 4, 8)
    torch.export.save(torch.export.export(Causal(), (x.clone().requires_grad_(),)), path)
    loaded_by(
        f"import {imports}; x = torch.ones(1, 2, 4, 8, requires_grad=True); "
        f"torch.export.load({str(path)!r}).module()(x).sum().backward(); assert x.grad.isfinite().all()"
    )


@needs_native
@pytest.mark.slow
def test_compiled_package_runs_after_import_of_the_package(tmp_path: Path) -> None:
    path, x = str(tmp_path / "model.pt2"), torch.ones(1, 2, 4, 8)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(torch.export.export(Causal(), (x,)), package_path=path)
    loaded_by(f"import clearhead; torch._inductor.aoti_load_package({path!r})(torch.ones(1, 2, 4, 8))")


@pytest.mark.slow
@needs_native
def test_flops_of_a_first_call_are_counted() -> None:
    loaded_by(
        "import clearhead as ch; from torch.utils.flop_counter import FlopCounterMode; attention = ch.attention; "
        "x = torch.ones(1, 2, 4, 8)\nwith FlopCounterMode(display=False) as counter: attention(x, x, x)\n"
        "assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 4 * 8"
    )


class Causal(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ch.attention(x, x, x, mask=ch.Causal())


def test_training_in_one_process_imports_no_package_of_sharding() -> None:
    modules, _, _ = loaded_by("import clearhead.train")
    assert not modules & SHARDING
