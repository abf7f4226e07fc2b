"""Terminal output: the progress bar, the plan, the devices, the result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from kernels.runtime import compiling
from pipeline.config import format_bytes
from pipeline.engine.devices.discovery import DeviceReport
from pipeline.engine.receipt import verified
from pipeline.errors import counted
from pipeline.workloads.protocol import Chunk, Plan


@dataclass(frozen=True, kw_only=True)
class ProgressBar:
    """Callbacks: for each written chunk, and for a plan that replaces the first."""

    written: Callable[[Chunk], None] = lambda chunk: None
    recut: Callable[[Plan], None] = lambda plan: None


@contextmanager
def status(text: str, *, shown: bool) -> Iterator[None]:
    """A line on stderr about what is done before there is anything to count; it is erased afterwards."""
    if shown:
        # Only one row can be erased.
        room = shutil.get_terminal_size().columns - len(" …") - 1
        click.echo(f"{text[:room]} …", err=True, nl=False)
    try:
        yield
    finally:
        if shown:
            click.echo("\r\x1b[K", err=True, nl=False)


@contextmanager
def progress_bar(
    plan: Plan, title: str, *, shown: bool, note: Callable[[], str] | None = None
) -> Iterator[ProgressBar]:
    """A bar on stderr with bytes done, bytes per second and the time left; call what this yields.

    note : gives further text whenever the bar is drawn, if kernels are not being compiled; in a narrow terminal it
           takes the place of the bar
    """
    if not shown:
        yield ProgressBar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class NoteColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            if compiling.under_way():
                return Text("compiling kernels (once)")
            text = "checking the result" if task.finished else note() if note else ""
            return Text(text, no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    narrow = console.width < 110
    share = 6 if narrow and note else 3

    def whole(most: int | None = None) -> Column:
        return Column(no_wrap=True, max_width=most)

    columns = (
        TextColumn("{task.description}", markup=False, table_column=whole(console.width // share)),
        *(() if narrow and note else (BarColumn(bar_width=8 if narrow else 30),)),
        DownloadColumn(binary_units=True, table_column=whole()),
        TransferSpeedColumn(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        NoteColumn(),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task(title, total=plan.output_bytes)
        yield ProgressBar(
            written=lambda chunk: progress.advance(task, chunk.output_bytes),
            recut=lambda plan: progress.reset(task, total=plan.output_bytes),
        )


@contextmanager
def files_bar(total: int, title: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts files; call what this yields with the number of further files that are done."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TextColumn("files"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """The output of `--dry-run`: input, parameters, device, chunks and memory."""
    image, device = plan["image"], plan["device"]
    shape = " × ".join(map(str, image["shape"]))
    chunk = " × ".join(map(str, plan["chunk_shape"]))
    halos = zip(image["axes"], plan["halo"], strict=True)
    halo = ", ".join(f"{letter} {before}+{after}" for letter, (before, after) in halos)
    told = ("shape", "axes", "dtype", "file_bytes")
    further = [f"{name} {_value(value)}" for name, value in image.items() if name not in told]
    ring = f"{counted(plan['slots'], 'slot')}, {format_bytes(plan['ring_bytes'])} in all"
    if "codec_bytes" in plan:
        ring += f" (on the GPU too, and up to {format_bytes(plan['codec_bytes'])} there for codecs)"
    asked = ", ".join(f"{name} {_value(value)}" for name, value in plan["parameters"].items())
    return [
        f"{plan['workload']} {plan['input']} → {plan['output']}",
        f"  parameters   {asked}",
        f"  image        {shape} ({image['axes']}), {image['dtype']}",
        *([f"               {', '.join(further)}"] if further else []),
        f"  device       {device['name']} ({device['model']})",
        f"  chunks       {plan['chunks']:,} of {chunk}, halo {halo}",
        f"  reads        {format_bytes(plan['read_bytes'])}",
        f"  writes       {format_bytes(image.get('file_bytes', plan['written_bytes']))}",
        f"  memory       {ring}, and up to 300 MB for the program itself",
    ]


def result_line(receipt: Mapping[str, Any]) -> str:
    """One line at the end of a run."""
    seconds, audit = receipt["wall_seconds"], receipt["audit"]
    rate = format_bytes((receipt["read_bytes"] + receipt["written_bytes"]) / max(seconds, 1e-9))
    halved = f" (halved {counted(receipt['halvings'], 'time')} to fit the device)" if receipt["halvings"] else ""
    filtered = receipt["image"].get("filtered along")
    axes = f", filtered along {filtered}" if filtered else ""
    return (
        f"{receipt['output']}: {counted(receipt['chunks'], 'chunk')}{halved} on {receipt['device']['name']} "
        f"in {seconds:.2f} s ({rate}/s in and out){axes}; {verified(audit)}"
    )


def published_before_line(receipt: Mapping[str, Any]) -> str:
    """Replaces `result_line` if a resumed run finds nothing left to compute."""
    return f"{receipt['output']}: complete: an earlier run of this job had published it before it was killed"


def device_lines(reports: Sequence[DeviceReport]) -> list[str]:
    """One line for each device; `--device auto` takes the first."""
    lines = []
    for number, report in enumerate(reports):
        state = f"not usable: {report.obstacle}" if report.obstacle else "usable"
        preferred = " (auto)" if number == 0 else ""
        lines.append(f"{report.name:8} {report.description}: {state}{preferred}")
    return lines


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
