"""Parallelized models compute and learn what one process does."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import clearhead as ch
from clearhead.distributed.launch import run_ranks
from clearhead.ops.library import library
from clearhead.testing import fused_calls

VOCABULARY, LENGTH, BATCH = 50, 16, 4


@dataclass(frozen=True)
class Run:
    """A training run on a mesh, beside the same run in one process."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str = "float32"
    steps: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    scores: str = "none"
    mask: str = "none"
    compiled: bool = False


def _rules(kind: str, heads: int) -> list[Any]:
    torch.manual_seed(5)
    return {
        "none": lambda: [],
        "learned": lambda: [
            ch.RelativeBias(nn.Parameter(torch.randn(heads, 9))),
            ch.Sink(nn.Parameter(torch.randn(heads))),
        ],
        "shared": lambda: [ch.RelativeBias(nn.Parameter(torch.randn(1, 9))), ch.SoftCap(20.0)],
        "alibi": lambda: [ch.Alibi(heads)],
    }[kind]()


def _model(run: Run) -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_layers": 2, "max_len": LENGTH, **dict(run.options)}
    model = ch.nn.LanguageModel(
        VOCABULARY,
        embed_dim=32,
        dropout=run.dropout,
        attention_dropout=run.attention_dropout,
        scores=_rules(run.scores, options["num_heads"]),
        **options,
    )
    return model.to(getattr(torch, run.dtype))


def _mask(kind: str) -> Any:
    torch.manual_seed(6)
    return {
        "none": None,
        "window": ch.Window(5),
        "dense heads": ch.Dense(torch.rand(1, 4, LENGTH, LENGTH) > 0.3),
        "function": ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos + head) % 3 > 0),
    }[kind]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, mask: Any) -> Any:
    torch.manual_seed(3)
    loss = F.cross_entropy(model(ids, mask=mask).float().flatten(0, 1), labels.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = [_whole(parameter.grad) for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), float(_whole(norm)), gradients


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _part(run: Run, mesh: Any, x: Tensor) -> Tensor:
    """The rank's tokens of the rank's sequences."""
    sizes = dict(zip(run.names, run.shape, strict=True))
    place, parts = 0, 1
    for name in ("data", "shard"):
        if name in sizes:
            place, parts = place * sizes[name] + mesh.get_local_rank(name), parts * sizes[name]
    x = x.chunk(parts)[place]
    if "context" in sizes:
        return ch.distributed.shard(x, dim=1, layout=run.layout, group=mesh.get_group("context"))  # type: ignore[arg-type]
    return x


def _errors(run: Run) -> dict[str, float]:
    """The largest relative differences of losses, norms, logits, and gradients of the first steps."""
    expected, model = _model(run), _model(run)
    mesh = init_device_mesh("cpu", run.shape, mesh_dim_names=run.names)
    ch.distributed.parallelize(model, mesh, layout=run.layout)  # type: ignore[arg-type]
    if run.compiled:
        model.compile_blocks("eager")
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected)]
    errors = {"loss": 0.0, "norm": 0.0, "gradient": 0.0}
    mask = _mask(run.mask)
    for step in range(run.steps):
        torch.manual_seed(10 + step)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        loss, norm, gradients = _step(model, optimizers[0], _part(run, mesh, ids), _part(run, mesh, labels), mask)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        whole_loss, whole_norm, whole_gradients = _step(expected, optimizers[1], ids, labels, mask)
        errors["loss"] = max(errors["loss"], float((loss - whole_loss).abs() / whole_loss))
        errors["norm"] = max(errors["norm"], abs(norm - whole_norm) / whole_norm)
        # Rounding of earlier steps is in later gradients, so those of the first steps are compared.
        for one, other in zip(gradients, whole_gradients, strict=True) if step < 3 else ():
            scale = max(float(other.abs().max()), 1e-3)
            errors["gradient"] = max(errors["gradient"], float((one - other).abs().max()) / scale)
    model.eval(), expected.eval()
    with torch.no_grad():
        logits, whole = model(_part(run, mesh, ids), mask=mask), _part(run, mesh, expected(ids, mask=mask))
    errors["logits"] = float((logits - whole).abs().max() / whole.abs().max())
    return errors


def _check(run: Run, budget: float = 2e-5) -> None:
    for errors in run_ranks(_errors, prod(run.shape), run, timeout=200):
        assert errors["loss"] < 1e-6, errors
        assert max(errors.values()) < budget, errors


AXES = ["data", "shard", "tensor", "context"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("axis", AXES)
def test_two_ranks_learn_as_one_process(axis: str) -> None:
    _check(Run((axis,), (2,)))


def _seq2seq_errors(names: tuple[str, ...], shape: tuple[int, ...], layout: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    run, models = Run(names, shape, layout), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ch.nn.EncoderDecoder(40, 50, 32, 4, 1, max_len=20, dropout=0.0, positions="sinusoidal").double())
    model, expected = ch.distributed.parallelize(models[0], mesh, layout=layout), models[1]  # type: ignore[arg-type]
    torch.manual_seed(1)
    source, target = torch.randint(0, 40, (BATCH, 14)), torch.randint(0, 50, (BATCH, 10))
    source_lengths, target_lengths = torch.tensor([14, 9, 3, 12]), torch.tensor([10, 2, 7, 10])
    whole = expected(source, target, source_lengths=source_lengths, target_lengths=target_lengths)
    whole_loss = (whole * whole.detach().cos()).sum() / BATCH
    rows = _part(Run(names, shape), mesh, torch.arange(BATCH)) if "context" not in names else torch.arange(BATCH)
    logits = model(
        _part(run, mesh, source), _part(run, mesh, target),
        source_lengths=source_lengths[rows], target_lengths=target_lengths[rows],
    )  # fmt: skip
    loss = ch.distributed.mean_loss(
        (logits * logits.detach().cos()).sum(), len(rows) / (2 if "context" in names else 1), mesh
    )
    whole_loss.backward(), loss.backward()
    return {
        "logits": float((logits - _part(run, mesh, whole)).detach().abs().max()),
        "loss": float((loss - whole_loss).detach().abs() / whole_loss.detach().abs()),
        "gradient": _gradient_error(model, expected),
    }


def _gradient_error(model: nn.Module, expected: nn.Module) -> float:
    errors = [0.0]
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert other.grad is not None
        scale = max(float(other.grad.abs().max()), 1e-3)
        errors.append(float((_whole(one.grad) - other.grad).abs().max()) / scale)
    return max(errors)


#: Every axis, of which the two that divide a layer are in the quick tests.
DIVIDED = [pytest.param(axis, marks=pytest.mark.slow) for axis in ("data", "shard")] + ["tensor", "context"]


@pytest.mark.slow
@pytest.mark.parametrize("axis", DIVIDED)
def test_padded_encoder_decoder_is_equal(axis: str) -> None:
    for errors in run_ranks(_seq2seq_errors, 2, (axis,), (2,), "zigzag"):
        assert max(errors.values()) < 1e-10, errors


def _classifier_errors(axis: str, pooling: str, dropout: float) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    run, models = Run((axis,), (2,), "zigzag"), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            ch.nn.SequenceClassifier(
                VOCABULARY, 32, 4, 2, 3, pooling=pooling, dropout=dropout, scores=[ch.DenseBias(torch.zeros(1, 1))]
            ).double()
        )
    model, expected = ch.distributed.parallelize(models[0], mesh, layout="zigzag"), models[1]
    torch.manual_seed(1)
    ids, lengths = torch.randint(0, VOCABULARY, (BATCH, 15)), torch.tensor([15, 9, 0, 3])
    rows = torch.arange(BATCH) if axis in ("context", "tensor") else _part(run, mesh, torch.arange(BATCH))
    torch.manual_seed(2)
    whole = expected(ids, lengths=lengths)
    torch.manual_seed(2)
    logits = model(_part(run, mesh, ids), lengths=lengths[rows])
    (whole.square().sum() / BATCH).backward()
    (logits.square().sum() / len(rows)).backward()
    return {"logits": float((logits - whole[rows]).detach().abs().max()), "gradient": _gradient_error(model, expected)}


@pytest.mark.slow
@pytest.mark.parametrize("axis", DIVIDED)
@pytest.mark.parametrize(
    ("pooling", "dropout"), [("mean_max", 0.2), pytest.param("first", 0.0, marks=pytest.mark.slow)]
)
def test_padded_classifier_is_equal(axis: str, pooling: str, dropout: float) -> None:
    for errors in run_ranks(_classifier_errors, 2, axis, pooling, dropout):
        assert max(errors.values()) < 1e-10, errors


def _observed(model: nn.Module, ids: Tensor) -> Tensor:
    """The entropy of each row of the first layer."""
    with ch.observe(model, ch.Want(entropy=True)) as observed, torch.no_grad():
        model(ids)
    entropy = next(iter(observed.values())).entropy
    assert entropy is not None
    return entropy


def _refusals() -> list[str]:
    """What each wrong call says on this rank."""
    torch.manual_seed(0)
    mesh = {axis: init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)) for axis in AXES}
    odd = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",))
    small = {"vocab_size": 20, "embed_dim": 12, "num_layers": 1, "max_len": 8}
    rule = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score * head)
    rank = dist.get_rank()

    def language_model(num_heads: int = 2, **options: Any) -> nn.Module:
        return ch.nn.LanguageModel(num_heads=num_heads, **{**small, **options})

    sharded = ch.distributed.parallelize(language_model(), mesh["context"])
    split = ch.distributed.parallelize(language_model(), mesh["tensor"])
    ids = torch.zeros(1, 4, dtype=torch.int64)
    jagged = torch.nested.nested_tensor([torch.zeros(3, 12), torch.zeros(2, 12)], layout=torch.jagged)
    parallelize = ch.distributed.parallelize
    calls = [
        lambda: parallelize(language_model(), odd),
        lambda: parallelize(language_model(), "cpu"),
        lambda: parallelize(language_model(num_heads=3), mesh["tensor"]),
        lambda: parallelize(language_model(feedforward_dim=7), mesh["tensor"]),
        lambda: parallelize(language_model(scores=[rule]), mesh["tensor"]),
        lambda: parallelize(nn.Linear(2, 2), mesh["tensor"]),
        lambda: parallelize(nn.TransformerEncoderLayer(8, 2), mesh["context"]),
        lambda: parallelize(language_model(max_len=8 + rank), mesh["data"]),
        lambda: parallelize(language_model(), mesh["data"] if rank else odd),
        lambda: parallelize(language_model(), mesh["data"], layout="stripes"),
        lambda: sharded(torch.zeros(1, 3 + 3 * rank, dtype=torch.int64)),
        lambda: sharded(torch.zeros(1, 5, dtype=torch.int64)),
        lambda: sharded.generate(ids, 2),
        lambda: _observed(sharded.eval(), ids),
        lambda: _observed(split.eval(), ids),
        lambda: parallelize(split, mesh["data"]),
        lambda: sharded.decoder(jagged),
        lambda: split.decoder.blocks[0].attention(jagged),
        lambda: ch.distributed.mean_loss(torch.zeros(2), 1, mesh["data"]),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except ch.ClearheadError as error:
            said.append(str(error))
    return said


def test_wrong_calls_are_refused_in_one_line_on_every_rank() -> None:
    words = [
        "name its axes", "be a DeviceMesh", "divides num_heads", "divides feedforward_dim", "rules of the library",
        "have a tp_plan", "with 'context'", "the same on every rank", "name its axes", "contiguous",
        "parts of the lengths", "at most 8 tokens long", "sharded over ranks", "while a model is observed",
        "while a model is observed", "be whole on every rank", "be padded",
        "be padded", "one floating point number",
    ]  # fmt: skip
    for said in run_ranks(_refusals, 2):
        for word, line in zip(words, said, strict=True):
            assert word in line, line
            assert "\n" not in line


def _observed_difference(axis: str) -> float:
    torch.manual_seed(0)
    expected = _model(Run((axis,), (2,))).eval()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model = ch.distributed.parallelize(_model(Run((axis,), (2,))).eval(), mesh)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    rows = _part(Run((axis,), (2,)), mesh, torch.arange(BATCH))
    return float((_observed(model, ids[rows]) - _observed(expected, ids)[rows]).abs().max())


@pytest.mark.parametrize("axis", [pytest.param("data", marks=pytest.mark.slow), "shard"])
def test_each_rank_observes_its_sequences(axis: str) -> None:
    assert max(run_ranks(_observed_difference, 2, axis)) < 1e-6


def _generated(axis: str) -> bool:
    """Whether a rank generates what one process does, of a tensor of prompts and of a list of them."""
    expected, model = _model(Run((axis,), (2,))).eval(), _model(Run((axis,), (2,))).eval()
    ch.distributed.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)))
    prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
    one = [each.generate(prompts, 4, temperature=0.0) for each in (model, expected)]
    several = [each.generate([prompts[0], prompts[1, :2]], 4, temperature=0.0) for each in (model, expected)]
    return torch.equal(*one) and all(map(torch.equal, *several))


@pytest.mark.covering(0)
@pytest.mark.parametrize("axis", [pytest.param("data", marks=pytest.mark.slow), "shard", "tensor"])
def test_parallelized_model_generates_as_in_one_process(axis: str) -> None:
    assert all(run_ranks(_generated, 2, axis))


def _saved_on_one_mesh_and_loaded_on_another(folder: str, names: tuple[str, str]) -> bool:
    """Whether a trained model and its optimizer, saved along one axis, go on equally along another."""
    one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in names)
    results = []
    model = ch.distributed.parallelize(_model(Run(names, (2, 1), scores="learned")), one)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    learn(model, optimizer)
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    second = ch.distributed.parallelize(_model(Run(names, (2, 1), scores="learned")), other)
    second_optimizer = torch.optim.AdamW(second.parameters(), 0.01)
    learn(second, second_optimizer)
    state = _state(second, second_optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(second, second_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for each, its_optimizer in ((model, optimizer), (second, second_optimizer)):
        learn(each, its_optimizer)
        results.append([_whole(parameter) for parameter in each.parameters()])
    return all(torch.allclose(left, right, atol=1e-5) for left, right in zip(*results, strict=True))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("tensor", "shard"), ("data", "tensor")])
def test_checkpoint_loads_on_another_mesh(names: tuple[str, str], tmp_path: Path) -> None:
    assert all(run_ranks(_saved_on_one_mesh_and_loaded_on_another, 2, str(tmp_path), names))


#: Runs that two ranks or four make, each of which a quick test covers in part.
SLOW = [
    Run(("data",), (4,), dropout=0.2, attention_dropout=0.2),
    Run(("shard",), (4,), dropout=0.2, attention_dropout=0.2),
    Run(("tensor",), (4,), dropout=0.2, attention_dropout=0.2),
    Run(("context",), (4,), "zigzag", dropout=0.2, attention_dropout=0.2),
    Run(("data", "shard"), (2, 2), scores="learned"),
    Run(("tensor", "data"), (2, 2), dropout=0.2, attention_dropout=0.2, scores="alibi"),
    Run(("data", "context"), (2, 2), "zigzag", dropout=0.2, mask="window"),
    Run(("shard", "tensor"), (2, 2), scores="learned", mask="dense heads"),
    Run(("shard", "context"), (2, 2), "zigzag", scores="learned"),
    Run(("context", "data"), (2, 2), scores="shared"),
    Run(("context", "tensor"), (2, 2), scores="shared", mask="function"),
    Run(("tensor",), (2,), options=(("checkpoint_activations", True),), dropout=0.2),
    Run(("shard",), (2,), options=(("checkpoint_activations", True),), dropout=0.2),
    Run(("context",), (2,), options=(("checkpoint_activations", True),), dropout=0.2),
    Run(("data",), (2,), compiled=True),
    Run(("shard",), (2,), compiled=True),
    Run(("tensor",), (2,), compiled=True),
    Run(("context",), (2,), compiled=True),
    Run(("tensor",), (2,), steps=50),
    Run(("context",), (2,), "zigzag", steps=50),
    Run(("shard",), (2,), steps=50),
]
#: Options of Llama's blocks.
LLAMA = (("positions", "rotary"), ("num_kv_heads", 2), ("gated", True), ("activation", "silu"), ("norm", "rms"))


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW, ids=repr)
def test_ranks_learn_as_one_process(run: Run) -> None:
    _check(run)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "tensor", "context"])
def test_llama_blocks_with_learned_rules_learn_as_in_one_process(axis: str) -> None:
    _check(Run((axis,), (2,), "zigzag", options=LLAMA, scores="learned", dropout=0.2, attention_dropout=0.2))


def _errors_in_16_bits(axis: str) -> tuple[float, float]:
    """The root mean square errors of logits in bfloat16 on two ranks and in one process, against float64."""
    run = Run((axis,), (2,), "zigzag", dtype="bfloat16")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    exact, single = _model(run).double(), _model(run)
    model = ch.distributed.parallelize(_model(run), mesh, layout="zigzag")
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    with torch.no_grad():
        whole = exact(ids)
        errors = model(_part(run, mesh, ids)).double() - _part(run, mesh, whole), single(ids).double() - whole
    return tuple(float(error.square().mean().sqrt()) for error in errors)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("axis", DIVIDED)
def test_bfloat16_on_two_ranks_is_as_exact_as_in_one_process(axis: str) -> None:
    # A sum of two rounded halves in place of one: one more rounding in each sublayer.
    for parallel, single in run_ranks(_errors_in_16_bits, 2, axis):
        assert parallel < 1.5 * single, (parallel, single)


def _swapped_errors(axis: str) -> dict[str, float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(config))
    model, expected = models
    ch.swap(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    if axis == "context":
        with pytest.raises(ch.UnsupportedError, match="mesh with 'context'"):
            ch.distributed.parallelize(model, mesh)
        return {"none": 0.0}
    ch.distributed.parallelize(model, mesh)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    rows = _part(Run((axis,), (2,)), mesh, torch.arange(BATCH))
    logits, whole = model(ids[rows]).logits, expected(ids).logits
    logits.square().mean().backward(), whole.square().mean().backward()
    error = float((logits - whole[rows]).detach().abs().max() / whole.detach().abs().max())
    return {"logits": error, "gradient": _gradient_error(model, expected)}


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_swapped_llama_learns_as_the_original_in_one_process(axis: str) -> None:
    for errors in run_ranks(_swapped_errors, 2, axis, timeout=200):
        assert max(errors.values()) < 2e-5, errors


def _fused(axis: str) -> list[str]:
    """The operators of which a step consists."""
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(VOCABULARY, embed_dim=256, num_heads=4, num_layers=1, max_len=64)
    ch.distributed.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)))
    with fused_calls() as calls:
        model(torch.zeros(2, 32, dtype=torch.int64)).sum().backward()
    return calls


def test_parts_of_layers_are_fused_operators() -> None:
    if library() is None:
        pytest.skip("without the compiled kernels nothing is fused")
    for axis, kinds in (("shard", ["layer"]), ("tensor", ["attention", "feedforward"]), ("context", ["feedforward"])):
        assert run_ranks(_fused, 2, axis) == [kinds, kinds]
