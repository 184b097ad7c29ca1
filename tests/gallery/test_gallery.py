"""Every variant: its paper's formula in float64, a few steps of training, the laws that apply, and its 30 lines."""

from __future__ import annotations

import ast
import doctest
import importlib
import math
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.verify import verify
from tests.gallery import formulas
from tests.gallery.formulas import SEQUENCES

FOLDER = Path(__file__).parents[2] / "gallery"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
OTHERS = ("perceiver_resampler", "swin_windows")
ALL = (*SEQUENCES, *OTHERS)
EMBED, HEADS, LENGTH = 16, 2, 11
#: float64 rounding of sums of a few hundred terms of size one.
EXACT = 1e-12


def build(name: str, embed_dim: int = EMBED, num_heads: int = HEADS, **options: Any) -> Any:
    module = importlib.import_module(f"gallery.{name}")
    kind = getattr(module, "".join(word.capitalize() for word in name.split("_")))
    torch.manual_seed(0)
    return kind(embed_dim, num_heads, **options)


def tokens(dtype: torch.dtype = torch.float64, *shape: int) -> Tensor:
    return torch.randn(shape or (2, LENGTH, EMBED), generator=torch.Generator().manual_seed(1)).to(dtype)


def some_input(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Any]]:
    """What a module takes, and a usual mask."""
    if name == "swin_windows":
        return tokens(dtype, 2, 6, 5, EMBED), {}
    return tokens(dtype), {} if name == "perceiver_resampler" else {"mask": ch.Causal()}


def test_the_gallery_is_what_is_tested() -> None:
    assert {path.stem for path in FILES} == set(ALL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_at_most_thirty_lines_of_code_on_public_pieces(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    held = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    told = [node.body[0] for node in held if ast.get_docstring(node) is not None]
    docstrings = {line for one in told for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    with path.open("rb") as file:
        marks = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        marks.add(tokenize.ENCODING)
        code = {token.start[0] for token in tokenize.tokenize(file.readline) if token.type not in marks}
    assert len(code - docstrings) <= 30
    named = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clear")
        for part in (node.module or "").split(".")
    }
    assert named <= {"clearhead", "nn"}
    docstring = ast.get_docstring(tree) or ""
    assert "Paper" in docstring
    assert "section" in docstring
    example = doctest.testmod(importlib.import_module(f"gallery.{path.stem}"))
    assert example.attempted > 0
    assert example.failed == 0


def compare(module: nn.Module, ours: Callable[..., Tensor], theirs: Callable[..., Tensor], at: Tensor) -> None:
    """Hold one function of the module's input and parameters to another: numbers and gradients."""
    x, reference = at.clone().requires_grad_(), at.clone().requires_grad_()
    output, expected = ours(x), theirs(reference)
    torch.testing.assert_close(output, expected, atol=EXACT, rtol=EXACT)
    weight = torch.randn_like(output)
    got, wanted = (
        torch.autograd.grad((each * weight).sum(), [start, *module.parameters()])
        for each, start in ((output, x), (expected, reference))
    )
    for (name, _), own, other in zip([("x", x), *module.named_parameters()], got, wanted, strict=True):
        torch.testing.assert_close(own, other, atol=100 * EXACT, rtol=100 * EXACT, msg=name)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_formula(name: str, causal: bool) -> None:
    module = build(name).double()
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    allowed = allowed.tril() if causal else allowed
    mask = ch.Causal() if causal else None
    compare(module, lambda x: module(x, mask=mask), lambda x: SEQUENCES[name](module, x, allowed), tokens())


@pytest.mark.parametrize("name", SEQUENCES)
def test_padding_is_as_if_it_were_not_there(name: str) -> None:
    module, x = build(name).double(), tokens()
    x[1, 5:] = 99.0
    output = module(x, mask=ch.Causal() & ch.Padding([LENGTH, 5]))
    torch.testing.assert_close(output[1:, :5], module(x[1:, :5], mask=ch.Causal()), atol=EXACT, rtol=EXACT)


def steps(module: nn.Module, x: Tensor, target: Tensor, **options: Any) -> tuple[float, float]:
    """The loss before and after a few steps of training."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = (module(x, **options) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in module.parameters()), "a parameter that does nothing"
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", SEQUENCES)
def test_it_trains(name: str) -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    before, after = steps(build(name), x, x.cumsum(dim=1) / torch.arange(1.0, LENGTH + 1)[:, None], mask=ch.Causal())
    assert after < 0.6 * before


# --- The conformance suite, as far as it applies to a module that makes keys from the same tokens as queries.

# Most laws hold a function to the plain formula, which these are variants of; these do not.
LAWS = (
    "shape and dtype",
    "inputs unchanged",
    "no leak from the future",
    "no leak in gradients",
    "NaN is shown",
    "batch invariance",
    "determinism",
    "earlier results",
    "process state",
)
# Windows take no mask, and what lies in one of them does not reach the others; sinks are always causal.
NOT_OF = {
    "swin_windows": {"no leak from the future", "no leak in gradients", "NaN is shown"},
    "learned_sinks": {"NaN is shown"},
}


def as_attention(name: str) -> Callable[..., Tensor]:
    """A module as a function of query, key and value: their heads side by side are its tokens."""
    built: dict[tuple[int, int, int, torch.dtype], nn.Module] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: ch.Mask | None = None, query_offset: int = 0):
        heads, width = query.shape[1], query.shape[3]
        if (key.shape, query_offset) != (query.shape, 0) or value.shape[:3] != query.shape[:3] or width % 4:
            raise NotImplementedError("self-attention of whole sequences, of heads whose halves are even")
        x = torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], dim=-1)
        # As many latents as tokens, so that a causal mask fits: the first latent reads the first token, and so on.
        options = {"num_latents": x.shape[1]} if name == "perceiver_resampler" else {}
        place = (x.shape[1], x.shape[-1], heads, query.dtype)
        if place not in built:
            built[place] = build(name, x.shape[-1], heads, **options).to(query.dtype)
        if name == "swin_windows" and mask is not None:
            raise NotImplementedError("windows take no mask")
        # To windows, a sequence is an image of one column.
        output = built[place](x[:, :, None])[:, :, 0] if name == "swin_windows" else built[place](x, mask=mask)
        output = output[..., : heads * value.shape[3]]
        return output.unflatten(-1, (heads, -1)).transpose(1, 2)

    return attention


@pytest.mark.parametrize("name", ALL)
def test_the_laws_that_apply(name: str) -> None:
    laws = set(LAWS) - NOT_OF.get(name, set())
    report = verify(as_attention(name), signature="clearhead", laws=laws, examples=0)
    assert report.ok, str(report)
    held = {finding.law for finding in report.findings if finding.status == "holds"}
    assert held == laws, str(report)


# --- What somebody does who has copied one of them.


# torch's RMS norm says that under autocast it is not the fastest that it has.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", ALL)
def test_sixteen_bits_and_autocast(name: str) -> None:
    x, options = some_input(name)
    exact = build(name).double()(x.double(), **options)
    near = 0.02 * exact.abs().max().item()
    output = build(name).bfloat16()(x.bfloat16(), **options)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, atol=near, rtol=0)
    module = build(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x, **options)
    torch.testing.assert_close(output.double(), exact, atol=near, rtol=0)
    output.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["query_key_norm", "cosine_attention"])
def test_norms_in_float32_as_autocast_makes_them_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.normalize
    monkeypatch.setattr(F, "normalize", lambda x, **options: plain(x.float(), **options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build(name)(tokens(torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["query_key_norm", "cosine_attention"])
def test_rows_of_zeros_have_numbers_and_bounded_gradients(name: str) -> None:
    module, x = build(name), tokens(torch.float32)
    for own_name, parameter in module.named_parameters():
        if own_name.endswith("bias"):
            nn.init.zeros_(parameter)
    x[:, 0] = 0.0
    module(x).square().sum().backward()
    assert all(parameter.grad.abs().max() < 1e6 for parameter in module.parameters())
    assert module.half()(x.half()).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_any_sizes_a_copy_and_a_compiler(name: str) -> None:
    module, (x, options) = build(name), some_input(name)
    output = module(x, **options)
    assert module(x[:0], **options).shape == (0, *output.shape[1:])
    torch.testing.assert_close(module(x[:1], **options), output[:1])
    if name in SEQUENCES:
        assert module(x[:, :0], **options).shape == x[:, :0].shape
        torch.testing.assert_close(module(x[:, :1], **options), output[:, :1])
    elif name == "perceiver_resampler":
        assert module(x[:, :0]).isfinite().all()
    other = build(name)
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x, **options), output)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x, **options), output)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("differential_attention", (10, 2), {}),
        ("latent_attention", (15, 2), {}),
        ("latent_attention", (16, 2), {"rotary_dim": 7}),
        ("t5_attention", (16, 2), {"farthest": 8}),
        ("t5_attention", (16, 2), {"num_buckets": 2}),
        ("talking_heads", (15, 2), {}),
    ],
)
def test_sizes_that_do_not_fit_are_told(name: str, sizes: tuple[int, int], options: dict[str, int]) -> None:
    with pytest.raises(ch.ShapeError, match=r"must .*; got"):
        build(name, *sizes, **options)


# --- What single variants promise besides.


@pytest.mark.parametrize("name", ["latent_attention", "learned_sinks"])
def test_decoding_with_the_cache_is_the_whole(name: str) -> None:
    module, x = build(name).double(), tokens()
    whole = module(x, mask=ch.Causal())
    cache = ch.KVCache()
    with torch.no_grad():
        pieces = [
            module(x[:, part], mask=ch.Causal(), cache=cache) for part in (slice(0, 4), slice(4, 5), slice(5, 11))
        ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole.detach(), atol=EXACT, rtol=EXACT)
    if name == "latent_attention":
        assert cache.key is not None
        assert cache.value is not None
        assert cache.key.shape[1] * cache.key.shape[3] + cache.value.shape[1] * cache.value.shape[3] == 16 + 8


@pytest.mark.parametrize("depth", [1, 2, 12])
def test_differential_attention_begins_as_deep_as_it_lies(depth: int) -> None:
    module = build("differential_attention", depth=depth).double()
    assert module.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * (depth - 1)), abs=1e-15)
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    compare(module, module, lambda x: formulas.differential_attention(module, x, allowed), tokens())


def test_no_temperature_is_below_its_limit() -> None:
    module = build("cosine_attention").double()
    with torch.no_grad():
        module.log_scale.copy_(torch.tensor([6.0, 1.0]).view(2, 1, 1))
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    compare(module, module, lambda x: formulas.cosine_attention(module, x, allowed), tokens())


def test_sinks_take_a_window() -> None:
    module = build("learned_sinks", window=3).double()
    near = torch.ones(LENGTH, LENGTH).triu(-2)[None, None]
    compare(module, module, lambda x: formulas.learned_sinks(module, x, near), tokens())


def test_sinks_decode_in_a_window_on_grouped_heads() -> None:
    module, x, cache = build("learned_sinks", num_kv_heads=1, window=3).double(), tokens(), ch.KVCache()
    with torch.no_grad():
        pieces = [module(x[:, place : place + 1], cache=cache) for place in range(LENGTH)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), module(x), atol=EXACT, rtol=EXACT)


def test_cosine_attention_takes_a_bias() -> None:
    module = build("cosine_attention", scores=[ch.RelativeBias(nn.Parameter(torch.randn(HEADS, 2 * LENGTH - 1)))])
    module, x = module.double(), tokens()
    (table,) = (parameter for name, parameter in module.named_parameters() if "table" in name)
    query, key, value = formulas.projected(module.heads, x)
    place = torch.arange(LENGTH)
    scores = (
        formulas.unit(query) @ formulas.unit(key).mT * module.log_scale.exp()
        + table[:, place[:, None] - place + LENGTH - 1]
    )
    expected = module.heads.output_projection(formulas.side_by_side(torch.softmax(scores, dim=-1) @ value))
    torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("length", [3, 300])
@pytest.mark.parametrize("decoder", [False, True])
def test_t5_has_its_buckets_at_any_distance(length: int, decoder: bool) -> None:
    from gallery.t5_attention import buckets

    distance = torch.arange(-length, length + 1)
    expected = [formulas.t5_bucket(one, decoder=decoder) for one in distance.tolist()]
    assert buckets(distance, 32, 128, causal=decoder).tolist() == expected


def test_t5_has_its_decoder_with_all_buckets_behind() -> None:
    module, length = build("t5_attention", causal=True).double(), 40
    allowed = torch.ones(1, 1, length, length).tril()
    x = tokens(torch.float64, 1, length, EMBED)
    compare(module, module, lambda x: formulas.t5_attention(module, x, allowed, decoder=True), x)
    assert torch.equal(module(x, mask=ch.Causal()), module(x))


# Sides that windows divide and not, that are smaller than a window, and just one.
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (3, 9), (4, 4), (1, 6)])
def test_swin_is_its_formula(shifted: bool, shape: tuple[int, int]) -> None:
    module = build("swin_windows", side=4, shifted=shifted).double()
    compare(module, module, lambda image: formulas.swin_windows(module, image), tokens(torch.float64, 2, *shape, EMBED))


def test_swin_takes_windows_of_an_odd_side() -> None:
    module = build("swin_windows", side=5, shifted=True).double()
    image = tokens(torch.float64, 1, 7, 11, EMBED)
    torch.testing.assert_close(module(image), formulas.swin_windows(module, image), atol=EXACT, rtol=EXACT)


def test_swin_masks_where_there_are_no_numbers() -> None:
    module = build("swin_windows", side=4, shifted=True).to("meta")
    assert module(torch.zeros(1, 7, 9, EMBED, device="meta")).is_meta


def test_swin_sees_no_opposite_edge_and_trains() -> None:
    module, image = build("swin_windows", side=4, shifted=True), tokens(torch.float32, 2, 8, 8, EMBED)
    before = module(image)
    other = image.clone()
    other[:, :2] += 1.0
    changed = (module(other) - before).abs().amax(dim=(0, 2, 3)) > 0
    assert changed.tolist() == [True] * 2 + [False] * 6
    first, last = steps(module, image, image.mean(dim=(1, 2), keepdim=True).expand_as(image) + 0.5 * image)
    assert last < 0.6 * first


def test_the_resampler_is_its_formula() -> None:
    module = build("perceiver_resampler", num_latents=5, input_dim=6).double()
    x, lengths = tokens(torch.float64, 2, LENGTH, 6), torch.tensor([LENGTH, 4])
    real = torch.arange(LENGTH) < lengths[:, None]
    output = module(x, mask=ch.Padding(lengths))
    assert output.shape == (2, 5, EMBED)
    mask = ch.Padding(lengths)
    compare(module, lambda x: module(x, mask=mask), lambda x: formulas.perceiver_resampler(module, x, real), x)
    assert torch.equal(output, module(x.masked_fill(~real[..., None], 7.0), mask=ch.Padding(lengths)))
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module(x[:, order]), module(x), atol=EXACT, rtol=EXACT)


def test_the_resampler_trains() -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    target = x.mean(dim=1, keepdim=True).expand(-1, 8, -1)
    before, after = steps(build("perceiver_resampler"), x, target, mask=ch.Padding(torch.full((8,), LENGTH)))
    assert after < 0.6 * before
