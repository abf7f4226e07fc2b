"""Where a result's receipt and ledger are, and outputs that would overwrite an input."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

from pipeline.errors import OutputError
from pipeline.storage.confinement import resolved
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import partial_path, samples_path
from pipeline.storage.writable import writing
from pipeline.workloads.protocol import JobSpec, Workload, WritesMore


def receipt_path(output: Path) -> Path:
    """Where the receipt of a result lies."""
    return output.with_name(output.name + ".receipt.json")


def ledger_path(output: Path) -> Path:
    """The folder that lists the finished chunks of an unfinished result."""
    return output.with_name(output.name + ".ledger")


def version_of(path: Path) -> str:
    """A file's name, size and time: what tells it from a later one."""
    try:
        found = path.stat()
    except OSError:
        return str(path)
    written = datetime.fromtimestamp(found.st_mtime, UTC).isoformat(timespec="milliseconds")
    return f"{path} ({found.st_size:,} bytes of {written})"


def refuse_long_name(output: Path) -> None:
    """OutputError where its folder takes no name as long as those of an output and of what lies beside it; also for an
    object that is no Zarr."""
    if isinstance(output, ObjectPath):
        if output.suffix.lower() != ".zarr":
            raise OutputError(f"{output}: only Zarr is written to an object store; end the name with .zarr")
        return
    with writing(output):
        for path in (receipt_path(output), partial_path(samples_path(output))):
            try:
                path.lstat()
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    raise


def refuse_existing(output: Path) -> None:
    """OutputError if there is a result of that name already, for jobs that keep it. Object stores refuse it anyway."""
    if os.path.lexists(output):
        raise OutputError(f"{output}: exists, and --no-clobber keeps it; choose another name, or remove it")


def refuse_existing_results(workload: Workload, spec: JobSpec) -> None:
    """The same for every result of a job."""
    for each in (spec.output, *(workload.beside(spec) if isinstance(workload, WritesMore) else ())):
        refuse_existing(each)


def refuse_same_file(spec: JobSpec) -> None:
    """OutputError where writing the output, its partial file or its receipt would touch the input, by any name.

    Also where its folder does not take these names, or does not let this user look.
    """
    refuse_long_name(spec.output)
    source, final = resolved(spec.input), resolved(spec.output)
    partial = (partial_path(final), partial_path(samples_path(final)))
    with writing(spec.output):
        for written in (final, *partial, receipt_path(spec.output), ledger_path(final)):
            if _is_same(source, written):
                way = "" if written == final else f"written by way of {written}, "
                raise OutputError(f"{spec.output} is {way}the input itself: name another output")
        if source.is_relative_to(final) or final.is_relative_to(source):
            raise OutputError(f"{spec.output} and the input {spec.input} lie one within the other: name another output")
        if receipt_path(spec.output).is_dir():
            raise OutputError(f"{receipt_path(spec.output)} is a folder where the receipt belongs: name another output")


def _is_same(one: Path, other: Path) -> bool:
    # If the input cannot be examined, opening it reports that.
    return one == other or (os.path.exists(one) and other.exists() and one.samefile(other))  # noqa: PTH110
