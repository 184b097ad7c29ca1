"""``freeze(pack=True)`` stores weights in the kernels' panels alone, and everything reads and writes them as before."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import clearhead as ch
from clearhead.ops.packed_weight import PackedParameter, PackedWeight
from clearhead.projection import project, project_activate
from clearhead.testing import choices, fused_calls
from tests.agreement import needs_native
from tests.net.calls import equal, observed, results
from tests.net.families import FAMILIES, TOKENS
from tests.net.test_freeze import AS_ONE, DIFFERENT

pytestmark = needs_native
#: Families whose attention reads weights op by op.
RELATIVE = ("deberta-v2", "deberta-v3")


def packed_in(model: nn.Module) -> list[PackedParameter]:
    return [part for part in model.parameters() if isinstance(part, PackedParameter)]


def encoder(width: int = 64) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ch.nn.Encoder(width, 4, 3, feedforward_dim=2 * width).eval()


def packed_encoder() -> Any:
    model = encoder()
    ch.freeze(model, pack=True)
    return model


@pytest.mark.parametrize("pack", [False, True], ids=["as they are", "packed"])
@pytest.mark.parametrize("name", [name for name in (*AS_ONE, *DIFFERENT) if name not in RELATIVE])
def test_every_family_has_the_bits_of_the_invariant_order(name: str, pack: bool) -> None:
    """With padding too, which the invariant order leaves out."""
    family = FAMILIES[name]
    model, calls = family.swapped(), [family.call(TOKENS, side) for side in ("none", *family.paddings)]
    with ch.invariant(), choices(gemm="native", attention="native"):
        before = [results(model, call, gradients=False) for call in calls]
        ch.freeze(model, pack=pack)
        assert bool(packed_in(model)) == pack
        with fused_calls() as kinds:
            for call, wanted in zip(calls, before, strict=True):
                equal(results(model, call, gradients=False), wanted)
    assert {"stack", "layer"} & {*kinds}


#: Blocks that threads compute in parts of their rows.
IN_PARTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "gated, rotary": {"gated": True, "activation": "silu", "norm": "rms", "rotary": True, "num_kv_heads": 2},
}


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", IN_PARTS.values(), ids=IN_PARTS)
def test_parts_of_the_rows_have_the_bits_of_all(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ch.nn.Encoder(128, 4, 2, feedforward_dim=192, **options).eval().to(dtype)
    ch.freeze(model, pack=True)
    if not all(isinstance(part.weight, PackedParameter) for part in model.modules() if isinstance(part, nn.Linear)):
        pytest.skip("panels of this instruction set widen the dtype")
    x, lengths = torch.randn(4, 81, 128).to(dtype), torch.tensor([81, 3, 80, 64])
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with torch.no_grad(), fused_calls() as calls:
            results.append([model(x), model(x, mask=ch.masks.Padding(lengths))])
        assert set(calls) <= {"stack", "layer"}
    for parts in results[1:]:
        assert all(map(torch.equal, parts, results[0]))


@pytest.mark.parametrize("name", RELATIVE)
def test_weights_that_are_read_op_by_op_stay(name: str) -> None:
    model = FAMILIES[name].swapped()
    ch.freeze(model, pack=True)
    assert not packed_in(model)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "llama", "torch encoder"])
def test_nothing_keeps_the_usual_layout(name: str) -> None:
    model = FAMILIES[name].swapped()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    ch.freeze(model, pack=True)
    packed = packed_in(model)
    assert packed
    for parameter in packed:
        assert parameter.original.numel() == 0
        assert parameter.packed.panels.numel() <= 1.25 * parameter.numel() * parameter.element_size()
    for key, value in model.state_dict().items():
        assert type(value) is Tensor
        assert torch.equal(value, state[key])


def test_unfreeze_gives_the_same_parameters_and_bits() -> None:
    for make in (encoder, FAMILIES["gpt2"].swapped, FAMILIES["torch decoder"].swapped):
        model = make()
        before = {name: (id(part), part.detach().clone()) for name, part in model.named_parameters()}
        ch.freeze(model, pack=True)
        assert packed_in(model)
        ch.unfreeze(model)
        for name, part in model.named_parameters():
            assert type(part) is nn.Parameter
            assert part.requires_grad
            assert id(part) == before[name][0]
            assert torch.equal(part, before[name][1])


def test_files_and_copies_have_ordinary_tensors() -> None:
    model, plain, x = packed_encoder(), encoder(), torch.randn(1, 5, 64)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict({name: 0 * value for name, value in plain.state_dict().items()})
    plain.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), plain):
        assert {type(part) for part in other.parameters()} == {nn.Parameter}
        with torch.no_grad(), ch.invariant(), choices(gemm="native", attention="native"):
            assert torch.equal(other(x), model(x))


def test_a_model_of_transformers_is_saved_as_it_was(tmp_path: Any) -> None:
    model, call = FAMILIES["llama"].swapped(), FAMILIES["llama"].call(TOKENS, "none")
    before = results(model, call, gradients=False)
    ch.freeze(model, pack=True)
    model.save_pretrained(tmp_path)
    loaded, plain = type(model).from_pretrained(tmp_path), FAMILIES["llama"].plain()
    assert all(torch.equal(part, loaded.get_parameter(name)) for name, part in plain.named_parameters())
    ch.unfreeze(model)
    equal(results(model, call, gradients=False), before)


@pytest.mark.parametrize("moved", [torch.float64, torch.bfloat16])
def test_packed_weights_stay_where_they_are(moved: Any) -> None:
    model, x = packed_encoder(), torch.randn(1, 5, 64)
    with pytest.raises(
        ch.UnsupportedError, match=r"^freeze: a packed weight must stay .*\. Call ch\.unfreeze\(model\) first\.$"
    ):
        model.blocks[0].to(moved)
    ch.unfreeze(model)
    assert model.to(torch.float64)(x.double()).dtype is torch.float64


def test_writes_by_operators_take_effect() -> None:
    model, x = packed_encoder(), torch.randn(1, 5, 64)
    with torch.no_grad(), ch.invariant(), choices(gemm="native", attention="native"):
        before = model(x)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        doubled = model(x)
        assert not torch.equal(doubled, before)
        torch._foreach_mul_([*model.parameters()], 0.5)
        assert torch.equal(model(x), before)
        for parameter in model.parameters():
            parameter.data = parameter.data * 2.0
        assert torch.equal(model(x), doubled)
        for parameter in model.parameters():
            torch.mul(parameter.detach(), 0.5, out=parameter)
        assert torch.equal(model(x), before)
        ch.unfreeze(model)
        assert torch.equal(model(x), before)


def test_calls_layer_by_layer_read_copies() -> None:
    """Gradients of inputs, observers, hooks and autocast."""
    model, plain, x = packed_encoder(), encoder(), torch.randn(2, 5, 64)

    def gradient(module: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(model), gradient(plain))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
        with observed(model):
            torch.testing.assert_close(model(x), plain(x))
        outputs = list[Tensor]()
        model.blocks[1].feedforward.register_forward_hook(lambda *parts: outputs.append(parts[2]))
        torch.testing.assert_close(model(x), plain(x))
        assert len(outputs) == 1


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_states_between_layers_are_those_of_packed_layers(name: str) -> None:
    model, call = FAMILIES[name].swapped(), FAMILIES[name].call(TOKENS, "none")
    ch.freeze(model, pack=True)
    with torch.no_grad():
        states = model(**call.arguments, output_hidden_states=True)
        equal({"output": states[0]}, {"output": model(**call.arguments)[0]})


@pytest.mark.slow
def test_a_compiled_packed_model_computes_the_same() -> None:
    model, plain, x = packed_encoder(), encoder(), torch.randn(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), plain(x))


def test_shared_weights_stay_shared_and_those_read_elsewhere_stay() -> None:
    model = encoder()
    first, second = model.blocks[0].feedforward, model.blocks[1].feedforward
    names = [name for name, part in first.named_parameters() if part.dim() == 2]
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(second.get_submodule(path), leaf, first.get_parameter(name))
    table = nn.Embedding(64, 64)
    table.weight = next(part for part in model.blocks[2].parameters() if part.shape == (64, 64))  # type: ignore[assignment]
    whole = nn.ModuleDict({"model": model, "table": table}).eval()
    ch.freeze(whole, pack=True)
    for name in names:
        assert first.get_parameter(name) is second.get_parameter(name)
        assert isinstance(first.get_parameter(name), PackedParameter)
    assert type(table.weight) is nn.Parameter
    ch.unfreeze(whole)
    assert all(first.get_parameter(name) is second.get_parameter(name) for name in names)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_a_layer_alone_reads_panels_with_the_bits_of_the_invariant_order(rows: int, activation: str | None) -> None:
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(rows, 64, requires_grad=True)
    packed = PackedWeight.of(weight)
    with ch.invariant(), torch.no_grad():
        if activation is None:
            wanted, given = project(x, weight, bias), project(x, packed, bias)
        else:
            arguments = {"bias": bias, "activation": activation}
            wanted, given = (project_activate(x, each, **arguments) for each in (weight, packed))  # type: ignore[arg-type]
    assert torch.equal(given, wanted)
    (of_x,) = torch.autograd.grad(project(x, packed, bias).square().sum(), x)
    (exact,) = torch.autograd.grad((x @ weight.T + bias).square().sum(), x)
    torch.testing.assert_close(of_x, exact, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert project(x, packed, bias).dtype is torch.bfloat16


@pytest.mark.covering(0)
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("pack", [False, True])
def test_threads_that_stay_awake_change_no_bit(threads: int, pack: bool) -> None:
    """Layers wide enough to be shared, of few tokens: one operator keeps its threads."""
    model, x = encoder(384), torch.randn(1, 4, 384)
    ch.freeze(model, pack=pack)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            alone = model(x)
            torch.set_num_threads(threads)
            assert all(torch.equal(model(x), alone) for _ in range(20))
            with ThreadPoolExecutor(4) as pool:
                assert all(torch.equal(each, alone) for each in pool.map(lambda _: model(x), range(40)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (16, 64), (33, 17), (160, 40), (96, 513)])
def test_unpacking_gives_every_bit(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    weight.view(-1)[0], weight.view(-1)[-1] = -0.0, float("nan")
    packed = PackedWeight.of(weight)
    if packed.panels.shape[2] >= 2 * size[1] * weight.element_size() and dtype is not torch.float32:
        pytest.skip("panels of this instruction set widen the dtype")
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(packed.dense().view(bits), weight.view(bits))
    assert torch.equal(PackedWeight.of(weight.t().contiguous().t()).panels, packed.panels)
    if size[0] > packed.columns:
        part = packed.rows(packed.columns, size[0])
        assert torch.equal(part.dense().view(bits), weight[packed.columns :].view(bits))
