"""The contract between the engine and the kinds of job.

A `Workload` stands for one kind of job and opens jobs; an `OpenJob` knows one job: its chunks, how a chunk is read and
computed, where it is written, and what the result is compared with. The engine owns everything else: files, threads,
progress, resuming, auditing, receipts, publishing.

What only some jobs can do is a small protocol of its own (`HoldsInput`, `NeedsWorkspace`, `KeepsIterates`, `Notes`,
`Previews`, `Prefetches`, `Progress`, `ReadsResult`, `KnowsEveryPlace`; for gangs `pipeline.workloads.gang_protocols`).
The engine looks for its methods on the object; nothing is registered.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from pipeline.codecs.packed import ChunkForm, PackedBlocks
from pipeline.formats.image.base import ImageReader, Region
from pipeline.storage.confinement import Confinement
from pipeline.storage.partial import Callback, Opening, no_callback

# The x of 3x5, which may stand for a comma; an x within a word stays as it is.
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
    halo    : samples that its input holds before and after the region along each axis
    inputs  : the arrays that `OpenJob.read` fills
    outputs : the arrays that `OpenJob.compute` fills; the first is the region of the output
    work    : the amount of work, in the workload's unit (pixels, pairs, samples)
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
    """The chunks of a job, in the order in which they are read. The same job and budget give the same plan.

    read_bytes : bytes of input that the chunks read in all; None: the sum of their input arrays
    """

    chunks: tuple[Chunk, ...]
    read_bytes: int | None = None

    @cached_property
    def input_bytes(self) -> int:
        return sum(chunk.input_bytes for chunk in self.chunks) if self.read_bytes is None else self.read_bytes

    @cached_property
    def output_bytes(self) -> int:
        return sum(chunk.output_bytes for chunk in self.chunks)

    def without(self, done: set[int]) -> Plan | None:
        """The plan without the chunks of these numbers; None if nothing is left."""
        left = tuple(chunk for chunk in self.chunks if chunk.index not in done)
        if len(left) == len(self.chunks):
            return self
        share = None if self.read_bytes is None else self.read_bytes * len(left) // len(self.chunks)
        return Plan(chunks=left, read_bytes=share) if left else None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory of one chunk, input and output together, in bytes.

    target_bytes : the size to aim at
    budget_bytes : the size never to exceed
    """

    budget_bytes: int
    target_bytes: int


class Parameters(BaseModel):
    """Base of every workload's parameters: frozen, without unknown fields. Its fields are the command's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false for numbers, which Python would take for 1 and 0."""
        is_bool = info.field_name is not None and cls.model_fields[info.field_name].annotation is bool
        several = value if isinstance(value, tuple | list) else (value,)
        for each in () if is_bool else several:
            if isinstance(each, bool):
                raise ValueError(f"is not {str(each).lower()}; give a number or text")
        return value

    @property
    def further_files(self) -> Iterator[Path]:
        """Inputs besides the main one."""
        return iter(())

    def in_force(self) -> dict[str, Any]:
        """The values that decide the result, defaults included, ready for JSON: for the plan and the receipt."""
        return self.model_dump(mode="json", exclude_none=True)

    def request(self) -> dict[str, Any]:
        """What was given, as the class itself takes it, ready for JSON: by it `verify` opens the job again."""
        given = self.model_dump(exclude_defaults=True)
        # A symbolic link stays one.
        paths = {name: os.path.abspath(value) for name, value in given.items() if isinstance(value, Path)}  # noqa: PTH100
        return self.model_dump(mode="json", exclude_defaults=True, by_alias=True) | paths


_Parameters = Parameters  # for classes that have an attribute of that name


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job as the user asks for it.

    confinement : of a service's job: its paths may not lead out of these folders, in any process that receives the spec
    list_sha256 : of a service's job of a list of files: the SHA-256 of the list, which the service has made
    """

    workload: str
    input: Path
    output: Path
    parameters: Parameters
    confinement: Confinement | None = None
    list_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """What a job makes: the shape, axes and dtype of its output, its bytes, and remarks for the plan and the receipt.

    nbytes  : bytes that the job reads and writes in all, without halos
    remarks : further facts by name, ready for JSON; some are known only once chunks are written
    """

    shape: tuple[int, ...]
    axes: str
    dtype: str
    nbytes: int
    remarks: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """For the plan and the receipt, ready for JSON."""
        return {"shape": list(self.shape), "axes": self.axes, "dtype": self.dtype, **self.remarks}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit that passed.

    samples     : compared values
    worst_error : in `unit`
    tolerance   : the largest error that passes, 0 or more
    """

    samples: int
    worst_error: float
    tolerance: float
    unit: str
    rms_error: float | None = None

    def describe(self) -> dict[str, Any]:
        """For the receipt, ready for JSON."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Reference(Protocol):
    """What a result is compared with before it is published: its definition in float64.

    places : int64 (n, axes), the samples of the output whose written values `audit` wants; may be empty
    """

    @property
    def places(self) -> NDArray[np.int64]: ...

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        """Compare the written values of the places of these numbers with the definition.

        Raises AuditError if an error exceeds the tolerance or is NaN, InputError if an input makes it impossible.
        """


def random_places(shape: tuple[int, ...], count: int) -> NDArray[np.int64]:
    """At most `count` different places in an output of that shape, (n, axes): the same ones for the same shape."""
    draw = random.Random(0)  # NumPy's would be loaded first, and by np.unique masked arrays
    return np.array(sorted({tuple(draw.randrange(size) for size in shape) for _ in range(count)}), np.int64)


class Sink(Protocol):
    """An output in the making; an `ImageWriter` is one. `write` is called from several threads, on disjoint regions."""

    def write(self, region: Region, samples: NDArray[Any]) -> None: ...

    def flush(self) -> None:
        """Make durable what has been written so far."""

    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Make everything durable, call `on_sealed`, and give the output its final name at once."""

    def keep(self) -> None:
        """Close, and leave the partial output for a run that resumes; harmless after `publish`."""

    def discard(self) -> None:
        """Remove the partial output; harmless after `publish`, or a second time."""


@runtime_checkable
class TakesPacked(Sink, Protocol):
    """A sink that stores chunks as a device encodes them."""

    def chunk_form(self, region: Region) -> ChunkForm | None:
        """How it stores that region; None if `write` must be called."""

    def write_packed(self, region: Region, samples: NDArray[Any], chunks: Sequence[NDArray[np.uint8]]) -> None:
        """Instead of `write`: `chunks` are the region's, encoded, in the order of the form's origins."""


class OpenJob(Protocol):
    """One job, opened: its input's headers are read and checked. `read` is called from several threads at once."""

    spec: JobSpec

    @property
    def summary(self) -> JobSummary: ...

    def plan(self, budget: Budget) -> Plan:
        """Cut the job into chunks. Raises ParameterError if not even the smallest chunk fits the budget."""

    def sink(self, opening: Opening) -> Sink:
        """Create the partial output, take over an interrupted run's, or join another process's."""

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        """Fill the chunk's input arrays (host memory)."""

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        """Fill the outputs from the inputs: NumPy arrays (`stream` None) or CuPy arrays on the given stream."""

    def reference(self) -> Reference:
        """The same object on every call."""

    def close(self) -> None:
        """Close the inputs; harmless a second time."""


class Workload(Protocol):
    """One kind of job; the registry holds one instance of each.

    May also have `examples`: strings of arguments (INPUT OUTPUT and options) that the command's help shows.
    """

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One sentence, for the command's help."""

    @property
    def unit(self) -> str:
        """What `Chunk.work` counts."""

    @property
    def Parameters(self) -> type[_Parameters]: ...  # noqa: N802 - a class

    def check_output(self, path: Path) -> None:
        """Raises OutputError if no result of this kind can have that name, for any input."""

    def open(self, spec: JobSpec) -> OpenJob:
        """Read headers only, and refuse what cannot be done. Raises UserError."""


@runtime_checkable
class WritesMore(Protocol):
    """A workload whose jobs may have other results, beside their output."""

    def beside(self, spec: JobSpec) -> Sequence[Path]: ...


# Optional capabilities of an open job


@runtime_checkable
class HoldsInput(Protocol):
    """A job that keeps input in memory besides its chunks."""

    def hold_at_most(self, budget_bytes: int) -> int:
        """Keep no more host memory than this if possible; returns how much may be kept."""


@runtime_checkable
class NeedsWorkspace(Protocol):
    """A job that computes with memory besides its chunks."""

    def workspace_bytes(self, memory_bytes: int) -> int:
        """Bytes that it takes of this much memory; some is left for chunks."""


@runtime_checkable
class StatesWork(Protocol):
    """A job whose `compute` makes arrays of its own, on the device."""

    @property
    def work_ratio(self) -> float:
        """Their bytes for each byte of the chunk, input and output together."""


@runtime_checkable
class StatesDeviceMemory(Protocol):
    """A job that states how much of a GPU's memory it takes, and is kept to it."""

    @property
    def device_bytes(self) -> int:
        """Bytes at most, besides the ring's."""


@runtime_checkable
class ReadsPacked(Protocol):
    """A job of one input array, whose file may hold it in blocks that a device decodes."""

    @property
    def packs(self) -> bool:
        """Whether it does."""

    def read_packed(self, chunk: Chunk, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        """Instead of `read`: gather the encoded blocks in `memory`; None if `read` must be called. Raises as `read`."""


class IterateStore(Protocol):
    """Where the state of a chunk's iterations survives the process; may be used from several threads."""

    def saved(self, chunk: int) -> Mapping[str, NDArray[Any]] | None:
        """The state that an interrupted run of the same job saved; None if there is none."""

    def due(self, chunk: int) -> bool:
        """Whether the chunk's state should be saved now."""

    def save(self, chunk: int, state: Mapping[str, Any]) -> None:
        """Save arrays of the host or the device by name, in place of earlier ones."""


@runtime_checkable
class KeepsIterates(Protocol):
    """A job whose chunks iterate for long and can go on from a saved state."""

    def keep_iterates(self, store: IterateStore) -> None:
        """Called before chunks are computed."""


@runtime_checkable
class Notes(Protocol):
    """A job that keeps a note of each written chunk, from every process that writes."""

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        """Look at a chunk's outputs (host memory) before they are written. Called from several threads.

        Returns a function that makes the chunk's note, what other processes and a resumed run must know of it, ready
        for JSON; it is called only if some do. None: they need not know.
        """

    def add_note(self, chunk: int, note: Any) -> None:
        """Take over the note of a chunk that another process, or an interrupted run, wrote.

        A chunk's note may come twice. KeyError, TypeError or ValueError if it is damaged.
        """


@runtime_checkable
class Previews(Protocol):
    """A job that draws its own preview; of others, the published output is drawn as an image."""

    def write_preview(self, preview: Path) -> None:
        """Draw the result as a small PNG; called after `close`."""


@runtime_checkable
class Progress(Protocol):
    """A job that can say more of its progress than bytes."""

    def progress_note(self) -> str:
        """A few words for the progress line."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A job's published output, open for reading, and what `verify` must know to compare chunks with it.

    reader    : its regions are those of the chunks
    stored    : what the output holds of a chunk's first output array
    half_unit : by how much a text format may have rounded each of these values; None: it holds every bit
    tolerance : by how much floats may differ when computed again, relative to the chunk's largest magnitude; None:
                twice the tolerance of the job's audit
    """

    reader: ImageReader
    stored: Callable[[NDArray[Any]], NDArray[Any]] = lambda samples: samples
    half_unit: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
    tolerance: float | None = None


@runtime_checkable
class ReadsResult(Protocol):
    """A job that reads its published output back; the output of any other is opened as an image."""

    def result(self) -> Result:
        """Raises InputError if the output is missing, damaged, or of another shape or dtype."""


# Optional capability of a reference


@runtime_checkable
class KnowsEveryPlace(Reference, Protocol):
    """A reference that can define any sample of the output, not only those at its own places."""

    def at(self, places: NDArray[np.int64]) -> Reference:
        """The same definition at other places, int64 (n, axes). Call it once chunks have been computed."""


# Optional capability of a workload


@runtime_checkable
class Prefetches(Protocol):
    """A workload whose jobs take long to open."""

    def prefetch(self, spec: JobSpec) -> AbstractContextManager[None]:
        """Start slow preparation while devices or workers start; cancel it if no such job is opened inside."""

    def modules(self, spec: JobSpec) -> Sequence[str]:
        """Modules that take long to import and that worker processes may import as they start."""
