"""clearhead view: a model's attention on a text, as one page with every weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.reading import checked_text, layers_of, read_text
from clearhead.errors import DataError
from clearhead.readers import read_ids, reader_of

__all__ = ["command"]

_FUNCTION = "view"


def command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FILE",
            help="Run folder of clearhead train, folder of a Hugging Face model with its tokenizer, or a page written "
            "earlier.",
        ),
    ],
    text: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to read, UTF-8.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write, one HTML file.")] = Path("attention.html"),
    layer: Annotated[
        list[str] | None, typer.Option(help="Only this layer: number, name or glob such as '*.0.*'. Repeatable.")
    ] = None,
    head: Annotated[list[int] | None, typer.Option(help="Only this head of each layer. Repeatable.")] = None,
    values: Annotated[
        bool | None,
        typer.Option(help="Store the value vectors, for weighted values and their sum; by default on small pages."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading; by default the model and the text.")] = None,
) -> None:
    """Write a page that shows what each head of a trained model attends to, with every weight.

    The page is one HTML file that works without a network. If the text is longer than the model's limit, the page
    shows its first part, and a message says so. Nothing is downloaded.

        clearhead train lm --data plays.txt --out runs/plays
        clearhead view runs/plays --text "Enter the king" --out king.html
        clearhead view runs/plays --file plays.txt --layer 0 --head 1
        clearhead view king.html --out king-again.html    # an older page, with this version's viewer
    """
    if out.is_dir():
        raise DataError.about(_FUNCTION, "--out", must="be a file", got=f"the folder {out}", then="Add a name.")
    from clearhead.train.files import check_writable

    check_writable(out, function=_FUNCTION, argument="--out")
    title = None if title is None else checked_text(_FUNCTION, "--title", title)
    if model.is_file():
        others = {"--text": text, "--file": file, "--layer": layer, "--head": head, "--values": values}
        _rewrite_page(model, out, title, others)
        return
    import torch

    from clearhead.inspector import view
    from clearhead.observe import trace

    written = read_text(_FUNCTION, text, file)
    reader = reader_of(_FUNCTION, model)
    ids = read_ids(_FUNCTION, reader, written)
    part = reader.framed(ids[: reader.limit])
    with torch.no_grad(), trace(reader.model, layers=layers_of(layer), keep="all") as traced:
        reader.run(torch.tensor([part]))
    heading = title or f"{model.name or model}: {' '.join(written.split())[:60]}"
    page = view(traced, tokens=reader.words(part), heads=head, values=values, title=heading)
    page.save(out)
    if len(ids) > reader.limit:
        typer.echo(f"the first {reader.limit:,} of {len(ids):,} tokens, the model's limit", err=True)
    typer.echo(f"wrote {out}: {len(part):,} tokens, {page!r}")


def _rewrite_page(page_file: Path, out: Path, title: str | None, others: Mapping[str, object]) -> None:
    """Write an earlier page again with this version's viewer."""
    from clearhead.inspector import Page

    for name, value in others.items():
        if value not in (None, []):
            raise DataError.about(
                _FUNCTION,
                name,
                must="be left out with a page",
                got=repr(value)[:80],
                then="A page already contains its text and layers.",
            )
    page = Page.open(page_file)
    if title is not None:
        page = Page({**page.data, "title": title})
    page.save(out)
    typer.echo(f"wrote {out}: {page!r}")
