"""Every variant: its paper's formula in float64, a few steps of training, the laws that apply, and its 30 lines."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.verify import verify
from tests.gallery.cases import (
    ALL,
    CAUSAL,
    EMBED,
    EXACT,
    FILES,
    FORMULAS,
    IMAGES,
    LENGTH,
    MASKED,
    SETS,
    STATES,
    UNMASKED,
    WHOLE,
    build,
    compare,
    some_input,
    steps,
    tiered,
    tokens,
)  # fmt: skip


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FILES} == set(ALL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_at_most_thirty_lines_of_code_on_public_pieces(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    documented = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    docstrings = {line for one in documented for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    with path.open("rb") as file:
        no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        no_code |= {tokenize.ENDMARKER, tokenize.ENCODING}
        code = {token.start[0] for token in tokenize.tokenize(file.readline) if token.type not in no_code}
    assert len(code - docstrings) <= 30
    modules = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clear")
    }
    assert modules <= {"clearhead", "clearhead.nn", "clearhead.linear"}
    docstring = ast.get_docstring(tree) or ""
    assert "Paper" in docstring
    assert "section" in docstring
    example = doctest.testmod(importlib.import_module(f"gallery.{path.stem}"))
    assert example.attempted > 0
    assert example.failed == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_has_its_page_picture_and_rows(path: Path) -> None:
    pages = path.parents[1] / "docs" / "gallery"
    page = (pages / f"{path.stem}.md").read_text(encoding="utf-8")
    assert f"../../gallery/{path.stem}.py" in page
    assert f"images/{path.stem}.svg" in page
    assert (pages / "images" / f"{path.stem}.svg").is_file()
    assert f"({path.stem}.md)" in (pages / "index.md").read_text(encoding="utf-8")
    assert f"({path.stem}.py)" in (path.parent / "README.md").read_text(encoding="utf-8")
    # A module and its page cite the same papers.
    source = path.read_text(encoding="utf-8")
    assert set(re.findall(r"arXiv:\d{4}\.\d{5}", source)) == set(re.findall(r"arXiv:\d{4}\.\d{5}", page))


CASES = [
    *((name, False) for name in (*MASKED, *WHOLE) if name not in CAUSAL),
    *((name, True) for name in (*MASKED, *UNMASKED)),
]


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_the_formula(name: str, causal: bool) -> None:
    module = build(name).double()
    allowed = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.float64)
    allowed = allowed.tril() if causal else allowed
    options = {"mask": ch.Causal()} if causal and name in MASKED else {}
    compare(module, lambda x: module(x, **options), lambda x: FORMULAS[name](module, x, allowed), tokens())


@pytest.mark.parametrize("name", MASKED)
def test_padding_is_as_if_it_were_not_there(name: str) -> None:
    module, x = build(name).double(), tokens()
    x[1, 5:] = 99.0
    output = module(x, mask=ch.Causal() & ch.Padding([LENGTH, 5]))
    torch.testing.assert_close(output[1:, :5], module(x[1:, :5], mask=ch.Causal()), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", FORMULAS)
def test_it_trains(name: str) -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    target = x.cumsum(dim=1) / torch.arange(1.0, LENGTH + 1)[:, None]
    if name in WHOLE:
        target = x.mean(dim=1, keepdim=True) + 0.5 * x
    before, last = steps(build(name), x, target, **({"mask": ch.Causal()} if name in MASKED else {}))
    assert last < 0.6 * before


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
# Images and sets take no causal mask, and others do not read all tokens where there is no mask.
NOT_OF = {
    **{name: {"no leak from the future", "no leak in gradients", "NaN is shown"} for name in (*IMAGES, *WHOLE)},
    **{name: {"no leak from the future", "no leak in gradients"} for name in ("induced_set_attention",)},
    **{name: {"NaN is shown"} for name in (*CAUSAL, "longformer_attention", "big_bird_attention")},
}
#: Sequences of the laws are longer than those of other tests.
LONGER = {"big_bird_attention": {"max_len": 512}, "linformer": {"max_len": 512}}


#: Of masks, these take no rows of booleans.
CAUSAL_ALONE = (*UNMASKED, "performer", "longformer_attention")


def as_attention(name: str) -> Callable[..., Tensor]:
    """A module as a function of query, key and value: their heads side by side are its tokens."""
    built: dict[tuple[int, int, int, torch.dtype], nn.Module] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: ch.Mask | None = None, query_offset: int = 0):
        heads, width = query.shape[1], query.shape[3]
        if (key.shape, query_offset) != (query.shape, 0) or value.shape[:3] != query.shape[:3] or width % 4:
            raise NotImplementedError("self-attention of whole sequences, of heads whose halves are even")
        if mask is not None and name in (*IMAGES, *WHOLE):
            raise NotImplementedError("takes no mask")
        if mask is not None and name == "induced_set_attention":
            raise NotImplementedError("its learned points have no order")
        if mask is not None and type(mask) is not ch.Causal and name in CAUSAL_ALONE:
            raise NotImplementedError("causal alone")
        x = torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], dim=-1)
        # As many latents as tokens, so that a causal mask fits: the first latent reads the first token, and so on.
        options = {"num_latents": x.shape[1]} if name == "perceiver_resampler" else LONGER.get(name, {})
        place = (x.shape[1], x.shape[-1], heads, query.dtype)
        if place not in built:
            built[place] = build(name, x.shape[-1], heads, **options).to(query.dtype)
        # To windows and axes, a sequence is an image of one column.
        inputs = {} if mask is None or name in UNMASKED else {"mask": mask}
        output = built[place](x[:, :, None])[:, :, 0] if name in IMAGES else built[place](x, **inputs)
        output = output[..., : heads * value.shape[3]]
        return output.unflatten(-1, (heads, -1)).transpose(1, 2)

    return attention


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", tiered(ALL))
def test_the_laws_that_apply(name: str) -> None:
    laws = set(LAWS) - NOT_OF.get(name, set())
    report = verify(as_attention(name), signature="clearhead", laws=laws, examples=0)
    assert report.ok, str(report)
    assert {finding.law for finding in report.findings if finding.status == "holds"} == laws, str(report)


@pytest.mark.parametrize("name", CAUSAL)
def test_nan_is_shown_where_its_token_is_read(name: str) -> None:
    module, x = build(name).double(), tokens()
    clean = module(x)
    x[0, 6] = float("nan")
    if name in ("gated_delta_net", "mamba2"):
        with pytest.raises(ch.ShapeError, match="log_gate must be finite"):
            module(x)
        return
    output = module(x)
    assert output[0, 6].isnan().all()
    torch.testing.assert_close(output[1], clean[1], atol=EXACT, rtol=EXACT)
    if name not in STATES:
        torch.testing.assert_close(output[0, :6], clean[0, :6], atol=EXACT, rtol=EXACT)


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


@pytest.mark.parametrize("name", ALL)
def test_any_sizes_and_a_copy(name: str) -> None:
    module, (x, options) = build(name), some_input(name)
    output = module(x, **options)
    assert module(x[:0], **options).shape == (0, *output.shape[1:])
    torch.testing.assert_close(module(x[:1], **options), output[:1])
    if name in MASKED or name in UNMASKED:
        assert module(x[:, :0], **options).shape == x[:, :0].shape
        torch.testing.assert_close(module(x[:, :1], **options), output[:, :1])
    elif name in (*SETS, "linformer"):
        assert module(x[:, :0]).isfinite().all()
    other = build(name)
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x, **options), output)


#: Variants for the compiler in `make test`: a recurrence, a choice of blocks, windows of images, and latents.
COMPILED = ("gated_delta_net", "native_sparse_attention", "swin_windows", "perceiver_resampler")


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_the_compiler_gives_the_same(name: str) -> None:
    module, (x, options) = build(name), some_input(name)
    # Reformer's buckets have as many tokens as the data say.
    fullgraph = name != "reformer_attention"
    compiled = torch.compile(module, fullgraph=fullgraph, backend="eager")
    torch.testing.assert_close(compiled(x, **options), module(x, **options))
