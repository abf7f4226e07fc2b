"""`millrace kernels`: lists the operations and measures their ladders on this machine's GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.help import Group
from pipeline.cli.local import FILE_PATH
from pipeline.cli.stdout import say
from pipeline.errors import DeviceError, DeviceUnavailable, OutputError, ParameterError, counted

if TYPE_CHECKING:
    from kernels.runtime.measure import DeviceFacts, LadderResult, Rung

GIGA = 1e9
UNITS = {"copy": "GB/s", "read": "GB/s", "fma": "GFMA/s", "roots": "Groots/s"}


@click.group(name="kernels", cls=Group, invoke_without_command=True)
@click.pass_context
def kernels_group(context: click.Context) -> None:
    """List Millrace's kernels; `bench` measures them step by step."""
    if context.invoked_subcommand is None:
        say("\n".join(operation_lines()))


@kernels_group.command(name="bench")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="measure every operation")
@click.option("--plot", type=FILE_PATH, metavar="FILE", help="draw the ladders into this SVG file")
@click.option(
    "--report", type=FILE_PATH, metavar="FILE", help="write one self-contained HTML page with tables and plots"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def bench(name: str | None, every: bool, plot: Path | None, report: Path | None, as_json: bool) -> None:
    """Measure the ladder of one operation, from a naive kernel to the one in production.

    Reports for each rung: time, GB/s or GFLOP/s, the fraction of a limit measured in the same run, occupancy
    (registers, shared memory, active warps), and the bottleneck. Needs a GPU.
    """
    operations = _chosen(name, every)
    _check_output("--plot", plot, ".svg")
    _check_output("--report", report, ".html")
    _require_gpu()
    device, results = _measured(operations, shown=not as_json)
    if as_json:
        from pipeline.engine.receipt import to_json

        say(to_json(_plain({"device": device, "ladders": results})))
    if plot is not None:
        from pipeline.cli.kernels_report import plots

        _write(plot, plots(results))
    if report is not None:
        from pipeline.cli.kernels_report import page

        _write(report, page(device, results, _summaries()))
    failed = [f"{result.operation} ({result.ladder}): {what}: {why}" for result in results
              for what, why in result.failures.items()]  # fmt: skip
    if failed:
        raise DeviceError(f"{counted(len(failed), 'rung')} could not be measured; the first: {failed[0]}")


def operation_lines() -> list[str]:
    """Two lines per operation: its name with the first line of its description, and its rungs."""
    lines = []
    for name, summary in _summaries().items():
        lines += [f"{name:14} {summary}", f"{'':14}   {' · '.join(_variants(name))}"]
    return lines


def _summaries() -> dict[str, str]:
    import kernels

    described = {name: (kernels.get(name).__doc__ or "").strip() for name in kernels.names()}
    return {name: " ".join(text.split("\n\n")[0].split()).rstrip(".") for name, text in described.items()}


def _variants(name: str) -> list[str]:
    from kernels.runtime.operations import cuda_module

    return list(getattr(cuda_module(name), "VARIANTS", ()))


def _chosen(name: str | None, every: bool) -> list[str]:
    import kernels
    from kernels.runtime.measure import ladders_of

    if every == (name is not None):
        raise ParameterError("kernels bench: name one operation, or pass --all (millrace kernels lists them)")
    if name is None:
        return [each for each in kernels.names() if ladders_of(each)]
    if name not in kernels.names():
        raise ParameterError(f"kernels bench: no operation named {name!r}; there are {', '.join(kernels.names())}")
    if not ladders_of(name):
        raise ParameterError(f"kernels bench: {name} has no ladder to measure")
    return [name]


def _check_output(option: str, path: Path | None, suffix: str) -> None:
    """Refuses a file that cannot be written, before minutes of measuring."""
    if path is None:
        return
    if path.suffix.lower() != suffix:
        raise OutputError(f"{option} {path}: the file is {suffix[1:].upper()}; name it *{suffix}")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")


def _require_gpu() -> None:
    from pipeline.engine.devices.discovery import discover, usable_gpus

    if usable_gpus():
        return
    obstacles = [report.obstacle for report in discover() if report.obstacle]
    raise DeviceUnavailable(f"kernels bench needs a GPU: {obstacles[0]}; millrace devices lists the devices found")


def _measured(operations: list[str], *, shown: bool) -> tuple[DeviceFacts, list[LadderResult]]:
    from kernels.runtime.measure import DeviceFacts, measure

    device, results = None, []
    for found in measure(operations):
        if isinstance(found, DeviceFacts):
            device = found
        else:
            results.append(found)
        if shown:
            for line in device_lines(found) if isinstance(found, DeviceFacts) else ladder_lines(found):
                say(line)
    assert device is not None
    return device, results


def device_lines(device: DeviceFacts) -> list[str]:
    """The device and its measured limits."""
    limits = ", ".join(f"{name} {rate / GIGA:,.0f} {UNITS[name]}" for name, rate in device.limits.items())
    return [f"{device.model}, CUDA driver {device.driver}, {device.measured}", f"limits: {limits}"]


def ladder_lines(result: LadderResult) -> Iterator[str]:
    """The table of one ladder."""
    from kernels.runtime.measure import unpaid

    limit = f"{result.limit}, {result.limit_per_s / GIGA:,.0f} {UNITS[result.limit]}"
    yield f"\n{result.operation}: {result.ladder} (limit: {limit})"
    rates = f"{'ms':>11}{'GB/s':>9} {'GFLOP/s':>12}{'of limit':>10}"
    yield f"  {'':24}{rates}  {'warps':>6}{'regs':>6}{'shared':>8}  bound by"
    for rung in (*result.rungs, *result.libraries):
        yield _rung_line(rung, bound=rung.name == result.bound_rung)
    for what, why in (*result.failures.items(), *result.missing.items()):
        yield f"  {what}: not measured: {' '.join(why.split())}"
    for sentence in unpaid(result):
        yield f"  does not pay here: {sentence}"


def _rung_line(rung: Rung, *, bound: bool) -> str:
    filled = rung.occupancy
    where = (
        f"{filled.active_warps:>3}/{filled.most_warps:<2}{filled.registers:>6}{filled.shared_bytes:>8}"
        if filled
        else ""
    )
    rates = f"{rung.bytes_per_s / GIGA:>9,.0f} {rung.flops_per_s / GIGA:>12,.1f}{rung.fraction:>10.3f}"
    return f"  {rung.name:24}{1e3 * rung.seconds:>11.4f}{rates}  {where:20}  {'(upper bound)' if bound else rung.bound}"


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}; name a file that can be written") from error
    click.echo(f"{path} written", err=True)
