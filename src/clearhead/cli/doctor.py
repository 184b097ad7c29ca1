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
    """Show what this machine and this installation support, and what is missing.

    Checks the processor, torch, threads, backends, extras and a compiler, and measures speed for a few seconds.
    """
    from clearhead.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 140)
    for title, lines in _sections(diagnosis):
        console.print(title, style="bold")
        for name, text in lines:
            console.print(f"  {name:<14} {text}", soft_wrap=True)
    _backends(console, diagnosis)
    _rates(console, diagnosis)
    _projections(console, diagnosis)
    _table(console, diagnosis)
    console.print(diagnosis.verdict, soft_wrap=True)


def _sections(diagnosis: Diagnosis) -> list[tuple[str, list[tuple[str, str]]]]:
    machine, threads = diagnosis.machine, diagnosis.threads
    memory = machine["memory"]
    return [
        (
            "machine",
            [
                ("system", f"{machine['system']}, {machine['architecture']}"),
                ("processor", f"{machine['processor']}, {machine['cores']} usable cores"),
                ("memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
                ("instructions", ", ".join(machine["instructions"]) or "none that affect attention"),
                ("accelerators", ", ".join(machine["accelerators"]) or "none"),
            ],
        ),
        (
            "software",
            [
                *((name, version) for name, version in diagnosis.versions.items()),
                ("torch build", _build(diagnosis.torch)),
                ("threads", f"{threads['intra_op']} within an operation, {threads['inter_op']} between"),
                ("variables", ", ".join(f"{k}={v}" for k, v in threads["variables"].items()) or "none set"),
                ("CPU kernels", diagnosis.kernels),
                ("compiler", "none" if diagnosis.compiler is None else " ".join(diagnosis.compiler.values())),
            ],
        ),
        ("extras", [(extra, _packages(extra, packages)) for extra, packages in diagnosis.extras.items()]),
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


def _backends(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table

    first = next(iter(diagnosis.backends.values()))
    table = Table(title="backends, in the order in which 'auto' tries them", title_justify="left")
    table.add_column("")
    for name in diagnosis.backends:
        table.add_column(name)
    for fact in first:
        table.add_row(fact, *(row[fact] for row in diagnosis.backends.values()))
    console.print(table)


def _rates(console: Console, diagnosis: Diagnosis) -> None:
    console.print("measured, GFLOP/s", style="bold")
    for rate in diagnosis.rates:
        speed = f"{rate.gflops:,.0f}" if rate.gflops is not None else f"not run: {rate.reason}"
        console.print(f"  {rate.what + ' ' + rate.dtype:<49} {speed}", soft_wrap=True)


def _projections(console: Console, diagnosis: Diagnosis) -> None:
    console.print(f"chosen by the table below for {diagnosis.processor}", style="bold", soft_wrap=True)
    for choice in diagnosis.projections:
        paths = f"{choice.path:<8} narrow {choice.narrow}, few rows {choice.few_rows}"
        console.print(f"  {choice.kind:<16} {choice.dtype:<8} {paths} ({choice.reason})", soft_wrap=True)
    for row in diagnosis.attentions:
        console.print(f"  {'attention':<16} {row['dtype']:<8} {row['choice']} ({row['reason']})", soft_wrap=True)


def _table(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table

    title = "the table: forward, input gradient and weight gradient of linear layers; attention; first match counts"
    table = Table(title=title, title_justify="left")
    for column in diagnosis.table[0]:
        table.add_column(column)
    for row in diagnosis.table:
        table.add_row(*row.values())
    console.print(table)
