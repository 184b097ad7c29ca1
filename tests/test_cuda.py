"""What runs on a CUDA device: calls, modules, swapped models and training agree with the CPU and the specification."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import clearhead as ch
from clearhead.verify import law_names
from tests.commands import called
from tests.linear.members import MEMBERS
from tests.net.calls import distance, results
from tests.net.families import FAMILIES, TOKENS, Family
from tests.net.modules import MODULES, Module, modules
from tests.problems import HEADS, LEN, MASKS, RULES, tensors
from tests.statistics_agreement import everything

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
#: Tolerance, relative in the 2-norm, of a result against one in float64 or of another device.
FAR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
CALLS = [*((mask, "none") for mask in MASKS), *(("causal", rule) for rule in RULES if rule != "none")]
ROWS = [row for kind in MODULES for row in modules(kind) if not row.drops]


def call_results(inputs: tuple[Tensor, ...], **options: Any) -> dict[str, Tensor]:
    """Output of a call, and gradients of its inputs."""
    output = ch.attention(*inputs, **options)
    upstream = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).view(output.shape).to(output)
    grads = torch.autograd.grad(output, inputs, upstream)
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def on_both(mask: str, rule: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a call on the CPU, and on the device."""
    allowed, rules = MASKS[mask].mask, RULES[rule].rules
    moved = None if allowed is None else allowed.to(CUDA)
    return {"mask": allowed, "scores": rules}, {"mask": moved, "scores": tuple(part.to(CUDA) for part in rules)}


@pytest.mark.parametrize(("mask", "rule"), CALLS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 6), (16, 32)])
def test_attention_and_its_gradients(mask: str, rule: str, head_dim: int, value_dim: int) -> None:
    inputs = tensors(head_dim=head_dim, value_dim=value_dim)
    moved = tuple(tensor.detach().to(CUDA).requires_grad_() for tensor in inputs)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    options, on_device = on_both(mask, rule)
    right = call_results(exact, backend="reference", **options)
    assert distance(on_cpu(call_results(moved, **on_device)), right) < FAR[torch.float32]
    with torch.no_grad():
        alone = ch.attention(*moved, **on_device)
    assert distance({"output": alone.cpu()}, {"output": right["output"]}) < FAR[torch.float32]


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("kind", [ch.RelativeBias, ch.DenseBias, ch.Sink], ids=lambda kind: kind.__name__)
def test_gradients_of_learned_rules(kind: Any, head_dim: int) -> None:
    shape = {ch.RelativeBias: (HEADS, 7), ch.DenseBias: (HEADS, LEN, LEN), ch.Sink: (HEADS,)}[kind]
    learned = torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float64).view(shape)
    inputs = tensors(head_dim=head_dim, value_dim=head_dim)

    def gradients(device: torch.device, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
        given = [part.detach().to(device, dtype).requires_grad_() for part in (*inputs, learned)]
        output = ch.attention(*given[:3], mask=ch.Causal(), scores=kind(given[3]), **options)
        grads = torch.autograd.grad(output.square().sum(), given)
        return {name: grad.cpu() for name, grad in zip(("query", "key", "value", "rule"), grads, strict=True)}

    exact = gradients(torch.device("cpu"), torch.float64, backend="reference")
    assert distance(gradients(CUDA, torch.float32), exact) < FAR[torch.float32]


@pytest.mark.parametrize(("mask", "rule"), CALLS)
def test_statistics(mask: str, rule: str) -> None:
    inputs = tuple(tensor.detach() for tensor in tensors())
    want = everything(inputs)
    options, on_device = on_both(mask, rule)
    right = ch.observe_attention(*(each.double() for each in inputs), want=want, backend="reference", **options)
    observation = ch.observe_attention(*(each.to(CUDA) for each in inputs), want=want, **on_device)
    for name, wanted in vars(right).items():
        if wanted is None or name == "top_indices":
            continue
        torch.testing.assert_close(
            getattr(observation, name).double().cpu(), wanted.double(), rtol=1e-4, atol=1e-4, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("law", law_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_breaks_no_law(dtype: torch.dtype, law: str) -> None:
    report = ch.verify(ch.attention, signature="clearhead", device="cuda", dtype=dtype, examples=2, laws=law)
    assert report.ok, report


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_module_equals_itself_on_the_cpu(row: Module) -> None:
    module, call = row.make(), row.call()
    wanted = results(module, call)
    actual = on_cpu(results(module.to(CUDA), call.on(CUDA)))
    if row.gradient_jumps:
        actual, wanted = ({"output": each["output"]} for each in (actual, wanted))
    assert distance(actual, wanted) < FAR[row.dtype]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_swapped_model_equals_original(family: Family) -> None:
    call = family.call(TOKENS, family.paddings[0] if family.paddings else "none").on(CUDA)
    plain = family.plain().to(CUDA)
    wanted = results(plain, call)
    swapped = family.plain().to(CUDA)
    ch.swap(swapped)
    assert distance(results(swapped, call), wanted) < FAR[torch.float32]
    moved = family.swapped().to(CUDA)
    assert distance(results(moved, call), wanted) < FAR[torch.float32]


@pytest.mark.parametrize("family", [each for each in FAMILIES.values() if each.generates], ids=lambda each: each.name)
def test_swapped_model_generates_the_same(family: Family) -> None:
    prompt = family.call(TOKENS, "none").on(CUDA)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    models = (family.plain().to(CUDA), family.swapped().to(CUDA))
    wanted, actual = (model.generate(**prompt.arguments, **options) for model in models)
    assert torch.equal(actual, wanted)


def test_observed_model_on_the_device() -> None:
    family = FAMILIES["bert"]
    call = family.call(TOKENS, "right")
    model, entropies = family.swapped(), []
    for device in (torch.device("cpu"), CUDA):
        model.to(device)
        with torch.no_grad(), ch.observe(model, ch.Want(entropy=True)) as observations:
            model(**call.on(device).arguments)
        entropies.append({name: torch.as_tensor(observations[name].entropy).cpu() for name in observations})
    assert distance(entropies[1], entropies[0]) < FAR[torch.float32]


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_linear_attention(name: str, form: str) -> None:
    member = MEMBERS[name]
    inputs = member.draw(dtype=torch.float32)
    exact, _ = member.run(inputs.mapped(torch.Tensor.double), form="recurrent")
    output, _ = member.run(inputs.mapped(lambda part: part.to(CUDA)), form=form)
    assert distance({"output": output.cpu()}, {"output": exact}) < FAR[torch.float32]


@pytest.mark.parametrize("mask", [None, ch.Window(5, 5)], ids=["no mask", "window"])
@pytest.mark.parametrize("compiled", [False, True])
def test_encoder_in_half_precision(compiled: bool, mask: ch.Mask | None) -> None:
    torch.manual_seed(0)
    model = ch.nn.Encoder(64, 4, 2, dropout=0.0).to(CUDA)
    x = torch.randn(2, 33, 64, device=CUDA)
    wanted = model(x, mask=mask)
    forward = torch.compile(model) if compiled else model
    with torch.autocast("cuda", torch.bfloat16):
        actual = forward(x, mask=mask)
        with torch.no_grad():
            alone = forward(x, mask=mask)
    for each in (actual, alone):
        assert distance({"output": each}, {"output": wanted}) < 0.05
    actual.float().sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in model.parameters())


def test_dropout_is_repeatable_on_the_device() -> None:
    torch.manual_seed(0)
    model = ch.nn.Encoder(64, 4, 2, dropout=0.3).to(CUDA)
    x = torch.randn(2, 33, 64, device=CUDA)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_frozen_model_on_the_device() -> None:
    family = FAMILIES["llama"]
    call = family.call(TOKENS, "none").on(CUDA)
    wanted = results(family.plain().to(CUDA), call, gradients=False)
    model = family.swapped().to(CUDA)
    ch.freeze(model)
    assert distance(results(model, call, gradients=False), wanted) < FAR[torch.float32]


def test_accelerate_leaves_the_device_alone() -> None:
    query, key, value = (tensor.detach().to(CUDA) for tensor in tensors(kv_heads=4, value_dim=8))
    wanted = F.scaled_dot_product_attention(query, key, value)
    with ch.accelerate():
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), wanted)


def test_training_on_the_device(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    options = ("--embed-dim", 32, "--num-heads", 2, "--num-layers", 1, "--context", 32, "--batch-size", 4, "--steps", 6)
    code, _, err = called("train", "lm", "--data", text, "--out", tmp_path / "run", "--device", "cuda", *options)
    assert code == 0, err
    assert (tmp_path / "run" / "model.safetensors").is_file()
