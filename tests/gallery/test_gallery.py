"""Every variant: its paper's formula in float64, a few steps of training, the laws that apply, and its 30 lines."""

from __future__ import annotations

import ast
import importlib
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.verify import verify
from tests.gallery import formulas
from tests.gallery.formulas import SEQUENCES

FOLDER = Path(__file__).parents[2] / "gallery"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
OTHERS = ("perceiver_resampler", "swin_windows")
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


def test_the_gallery_is_what_is_tested() -> None:
    assert {path.stem for path in FILES} == {*SEQUENCES, *OTHERS}


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
        part for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clear")
        for part in (node.module or "").split(".")
    }  # fmt: skip
    assert named <= {"clearhead", "nn"}
    docstring = ast.get_docstring(tree) or ""
    assert "Paper" in docstring
    assert "section" in docstring


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_formula(name: str, causal: bool) -> None:
    module = build(name).double()
    x, reference = tokens().requires_grad_(), tokens().requires_grad_()
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    output = module(x, mask=ch.Causal() if causal else None)
    expected = SEQUENCES[name](module, reference, allowed.tril() if causal else allowed)
    torch.testing.assert_close(output, expected, atol=EXACT, rtol=EXACT)
    weight = torch.randn_like(output)
    ours, theirs = (
        torch.autograd.grad((each * weight).sum(), [start, *module.parameters()])
        for each, start in ((output, x), (expected, reference))
    )
    for (own_name, _), got, wanted in zip([("x", x), *module.named_parameters()], ours, theirs, strict=True):
        assert got is not None, own_name
        torch.testing.assert_close(got, wanted, atol=100 * EXACT, rtol=100 * EXACT, msg=own_name)


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
    "shape and dtype", "inputs unchanged", "no leak from the future", "no leak in gradients", "batch invariance",
    "determinism",
)  # fmt: skip


def as_attention(name: str) -> Callable[..., Tensor]:
    """A module as a function of query, key and value: their heads side by side are its tokens."""
    built: dict[tuple[int, int, torch.dtype], nn.Module] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: ch.Mask | None = None, query_offset: int = 0):
        heads, width = query.shape[1], query.shape[3]
        if (key.shape, query_offset) != (query.shape, 0) or value.shape[:3] != query.shape[:3] or width % 4:
            raise NotImplementedError("self-attention of whole sequences, of heads whose halves are even")
        x = torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], dim=-1)
        place = (x.shape[-1], heads, query.dtype)
        if place not in built:
            built[place] = build(name, x.shape[-1], heads).to(query.dtype)
        output = built[place](x, mask=mask)[..., : heads * value.shape[3]]
        return output.unflatten(-1, (heads, -1)).transpose(1, 2)

    return attention


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_laws_that_apply(name: str) -> None:
    report = verify(as_attention(name), signature="clearhead", laws=LAWS, examples=0)
    assert report.ok, str(report)
    held = {finding.law for finding in report.findings if finding.status == "holds"}
    assert held == set(LAWS), str(report)


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


def test_sinks_take_a_window() -> None:
    module, x = build("learned_sinks", window=3).double(), tokens()
    near = torch.ones(LENGTH, LENGTH).triu(-2)[None, None]
    expected = formulas.learned_sinks(module, x, near)
    torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


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
def test_t5_has_its_buckets_at_any_distance(length: int) -> None:
    from gallery.t5_attention import buckets

    distance = torch.arange(-length, length + 1)
    assert buckets(distance, 32, 128).tolist() == [formulas.t5_bucket(one) for one in distance.tolist()]


@pytest.mark.parametrize("shifted", [False, True])
def test_swin_is_its_formula(shifted: bool) -> None:
    module = build("swin_windows", side=4, shifted=shifted).double()
    image = tokens(torch.float64, 2, 8, 12, EMBED)
    torch.testing.assert_close(module(image), formulas.swin_windows(module, image), atol=EXACT, rtol=EXACT)


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
    torch.testing.assert_close(output, formulas.perceiver_resampler(module, x, real), atol=EXACT, rtol=EXACT)
    assert torch.equal(output, module(x.masked_fill(~real[..., None], 7.0), mask=ch.Padding(lengths)))
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module(x[:, order]), module(x), atol=EXACT, rtol=EXACT)


def test_the_resampler_trains() -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    target = x.mean(dim=1, keepdim=True).expand(-1, 8, -1)
    before, after = steps(build("perceiver_resampler"), x, target, mask=ch.Padding(torch.full((8,), LENGTH)))
    assert after < 0.6 * before
