"""clearhead doctor: the machine, the installation, the backends, and a quick measured rate."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.doctor import Diagnosis

__all__ = ["command"]


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what this machine and this installation can do, and what is missing.

    Looks at the processor, torch, threads, backends, extras and a compiler, and measures for a few seconds.
    """
    from clearhead.doctor import diagnose

    found = diagnose()
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 140)
    for title, lines in _sections(found):
        console.print(title, style="bold")
        for name, text in lines:
            console.print(f"  {name:<14} {text}", soft_wrap=True)
    _backends(console, found)
    _rates(console, found)
    _projections(console, found)
    _table(console, found)
    console.print(found.verdict, soft_wrap=True)


def _sections(found: Diagnosis) -> list[tuple[str, list[tuple[str, str]]]]:
    machine, threads = found.machine, found.threads
    memory = machine["memory"]
    return [
        (
            "machine",
            [
                ("system", f"{machine['system']}, {machine['architecture']}"),
                ("processor", f"{machine['processor']}, {machine['cores']} usable cores"),
                ("memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
                ("instructions", ", ".join(machine["instructions"]) or "none of those that matter are known"),
                ("accelerators", ", ".join(machine["accelerators"]) or "none"),
            ],
        ),
        (
            "software",
            [
                *((name, version) for name, version in found.versions.items()),
                ("torch build", _build(found.torch)),
                ("threads", f"{threads['intra_op']} within an operation, {threads['inter_op']} between"),
                ("variables", ", ".join(f"{k}={v}" for k, v in threads["variables"].items()) or "none set"),
                ("CPU kernels", found.kernels),
                ("compiler", "none" if found.compiler is None else " ".join(found.compiler.values())),
            ],
        ),
        ("extras", [(extra, _packages(extra, packages)) for extra, packages in found.extras.items()]),
    ]


def _build(torch: Any) -> str:
    parts = [f"CPU kernels {torch['cpu_capability']}"]
    parts += [name if torch[key] else f"no {name}" for key, name in (("mkl", "MKL"), ("onednn", "oneDNN"))]
    cuda = torch["cuda"]
    parts.append("no CUDA" if cuda is None else f"CUDA {cuda}{'' if torch['cuda_usable'] else ', no device'}")
    return ", ".join(parts)


def _packages(extra: str, packages: Any) -> str:
    parts = [f"{name} {version or 'absent'}" for name, version in packages.items()]
    absent = any(version is None for version in packages.values())
    return ", ".join(parts) + (f"  (install clearhead[{extra}])" if absent else "")


def _backends(console: Console, found: Diagnosis) -> None:
    from rich.table import Table

    first = next(iter(found.backends.values()))
    table = Table(title="backends, in the order in which 'auto' asks them", title_justify="left")
    table.add_column("")
    for name in found.backends:
        table.add_column(name)
    for fact in first:
        table.add_row(fact, *(row[fact] for row in found.backends.values()))
    console.print(table)


def _rates(console: Console, found: Diagnosis) -> None:
    console.print("measured, GFLOP/s", style="bold")
    for rate in found.rates:
        speed = f"{rate.gflops:,.0f}" if rate.gflops is not None else f"not run: {rate.reason}"
        console.print(f"  {rate.what + ' ' + rate.dtype:<49} {speed}", soft_wrap=True)


def _projections(console: Console, found: Diagnosis) -> None:
    console.print(f"chosen by the table below for {found.processor}", style="bold", soft_wrap=True)
    for choice in found.projections:
        paths = f"{choice.path:<8} narrow {choice.narrow}, few rows {choice.few_rows}"
        console.print(f"  {choice.kind:<16} {choice.dtype:<8} {paths} ({choice.reason})", soft_wrap=True)
    for row in found.attentions:
        console.print(f"  {'attention':<16} {row['dtype']:<8} {row['choice']} ({row['reason']})", soft_wrap=True)


def _table(console: Console, found: Diagnosis) -> None:
    from rich.table import Table

    title = "the table: forward, input gradient and weight gradient of linear layers; attention; first match counts"
    table = Table(title=title, title_justify="left")
    for column in found.table[0]:
        table.add_column(column)
    for row in found.table:
        table.add_row(*row.values())
    console.print(table)
