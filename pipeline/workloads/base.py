"""What a job of one kind means: its parameters, its plan, and how one chunk is read, computed and written."""

from __future__ import annotations

import errno
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from pipeline.errors import OutputError
from pipeline.formats.image.base import Region
from pipeline.storage.partial import Callback, Opening, no_callback, partial_path, samples_path
from pipeline.storage.writable import writing

# The x of 3x5, which may stand for a comma; not that of a word, which is told back as it was given.
BETWEEN_NUMBERS = re.compile(r"(?<=\d)\s*x\s*(?=\d)")


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One piece of a job. Everything about it is known before a byte is read.

    region  : the part of the output that it computes; the chunks' regions cover the output exactly once
    halo    : samples before and after the region along each axis that its input holds besides
    inputs  : the arrays that `Workload.read` fills
    outputs : the arrays that `Workload.compute` fills
    work    : how much there is to do, in the workload's unit (pixels, pairs, samples)
    """

    index: int
    region: Region
    halo: tuple[tuple[int, int], ...]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    work: int

    @cached_property
    def input_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.inputs)

    @cached_property
    def output_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.outputs)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chunks of a job, in the order in which they are read. The same job and budget give the same plan."""

    chunks: tuple[Chunk, ...]

    @cached_property
    def input_bytes(self) -> int:
        return sum(chunk.input_bytes for chunk in self.chunks)

    @cached_property
    def output_bytes(self) -> int:
        return sum(chunk.output_bytes for chunk in self.chunks)


class Parameters(BaseModel):
    """Base of every workload's parameters: frozen, no unknown fields; it makes the command's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true and false for the numbers 1 and 0; whoever sends one for a number meant something else."""
        of_truth = info.field_name is not None and cls.model_fields[info.field_name].annotation is bool
        several = value if isinstance(value, tuple | list) else (value,)
        for each in () if of_truth else several:
            if isinstance(each, bool):
                raise ValueError(f"is not {str(each).lower()}; give a number or text")
        return value

    @property
    def further_files(self) -> Iterator[Path]:
        """Inputs besides the main one."""
        return iter(())

    def in_force(self) -> dict[str, Any]:
        """What decides the result, defaults included, ready for JSON: for the plan and the receipt."""
        return self.model_dump(mode="json", exclude_none=True)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user asked for."""

    workload: str
    input: Path
    output: Path
    parameters: Parameters


class Workload(ABC):
    """One job of one kind, from its spec to its published output.

    The constructor reads headers alone and refuses what cannot be done; `start` opens the output for writing. `read`
    and `write` are called from several threads at once, for different chunks.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    unit: ClassVar[str]
    Parameters: ClassVar[type[Parameters]]

    spec: JobSpec
    # Bytes that the job reads and writes in all, halos not counted.
    job_bytes: int

    @classmethod
    def begun(cls, spec: JobSpec) -> AbstractContextManager[None]:
        """While devices or workers are started: begin, for the constructor to find, what takes long and needs neither.

        It begins when this is entered, and comes to nothing where no workload of the same spec is made inside.
        """
        return nullcontext()

    @classmethod
    def modules(cls, spec: JobSpec) -> Sequence[str]:
        """What its processes import besides, and takes them long: worker processes may have it when they start."""
        return ()

    @classmethod
    @abstractmethod
    def refuse_output(cls, output: Path) -> None:
        """OutputError where no result of this kind can be stored under that name, whatever the input will be."""

    @abstractmethod
    def __init__(self, spec: JobSpec) -> None: ...

    @abstractmethod
    def plan(self, budget_bytes: int, target_bytes: int) -> Plan:
        """Cut the job into chunks whose arrays take about `target_bytes` each, and never more than `budget_bytes`.

        Raises ParameterError where not even the smallest chunk fits.
        """

    @abstractmethod
    def hold_at_most(self, budget_bytes: int) -> int:
        """Keep no more host memory than this besides the chunks, where that can be; returns what may be kept."""

    @abstractmethod
    def start(self, opening: Opening = Opening.NEW) -> None:
        """Create the output's partial file, take over an interrupted run's, or join another process's."""

    @abstractmethod
    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        """Fill the chunk's input arrays (host memory)."""

    @abstractmethod
    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        """Fill the outputs from the inputs: NumPy arrays (stream None) or CuPy arrays on the given stream."""

    @abstractmethod
    def write(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> None:
        """Store the chunk's output arrays (host memory) in the partial output."""

    @abstractmethod
    def flush(self) -> None:
        """Make durable what has been written so far."""

    @abstractmethod
    def audit_notes(self) -> Mapping[str, Any]:
        """What `audit` needs of the chunks that this process wrote, ready for JSON."""

    @abstractmethod
    def add_audit_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over the notes of another process, or of an interrupted run."""

    @abstractmethod
    def audit(self) -> Mapping[str, Any]:
        """Some random outputs that were written, computed again in float64 by the plain definition; before `publish`.

        Returns the number of samples, the worst error, what was tolerated and the unit. AuditError where the worst
        is not tolerable.
        """

    @abstractmethod
    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Make the output durable, call `on_sealed`, and give it its final name at once."""

    @abstractmethod
    def keep(self) -> None:
        """Close every file, and leave the partial output for a run that resumes; harmless after `publish`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the partial output and close every file; harmless after `publish`."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The input and output in words and numbers, for the plan and the receipt: shape, axes and dtype of the output,
        and whatever else there is to say."""

    def progress_note(self) -> str:
        """A few words on how far the work has come, for the progress line; empty where bytes say it all."""
        return ""

    def write_preview(self, preview: Path) -> None:
        """Draw the published output as a small PNG; called last, when all else is closed."""
        from pipeline.formats.image.preview import write_preview

        write_preview(self.spec.output, preview)


def receipt_path(output: Path) -> Path:
    """Where the receipt of a result lies."""
    return output.with_name(output.name + ".receipt.json")


def ledger_path(output: Path) -> Path:
    """The folder that says which chunks of an unfinished result are in."""
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
    """OutputError where its folder takes no name as long as those of an output and of what lies beside it."""
    with writing(output):
        for path in (receipt_path(output), partial_path(samples_path(output))):
            try:
                path.lstat()
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    raise


def refuse_same_file(spec: JobSpec) -> None:
    """OutputError where writing the output, its partial file or its receipt would touch the input, by any name.

    Also where its folder does not take these names, or does not let this user look.
    """
    refuse_long_name(spec.output)
    source, final = Path(os.path.realpath(spec.input)), Path(os.path.realpath(spec.output))
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
    # An input that cannot be looked at is named by whoever opens it.
    return one == other or (os.path.exists(one) and other.exists() and one.samefile(other))  # noqa: PTH110
