"""A job of a list of files: any image workload, with a chunk of several files, of which one may be damaged.

The workload sees an image with the axis N. A file that cannot be read or computed becomes zeros, is left out of the
audit, and is not published; its fault is a note of its chunk, and in the receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, OperatorError, ParameterError, StorageError
from pipeline.formats.image.base import Region
from pipeline.formats.image.file_list import FileList, FileListWriter, ListedFile, is_list, vouch
from pipeline.storage.partial import Opening
from pipeline.workloads.protocol import (
    ArraySpec,
    Audit,
    Budget,
    Chunk,
    HoldsInput,
    JobSpec,
    JobSummary,
    Notes,
    OpenJob,
    Plan,
    Reference,
    Sink,
    Workload,
)

# Small chunks take turns of the interpreter's lock; pinned memory for large ones takes long to allocate: a ring for
# these 0.15 s, three rings of 64 MiB slots 0.65 s (H200, H100).
MOST_CHUNK_BYTES = 32 << 20
LEFT_OUT = "left out"
# Faults of one file.
_FAULTS = (InputError, StorageError, OperatorError)


class NotTogether(ParameterError):
    """These files are to be run one after the other."""


@runtime_checkable
class LeavesOut(Protocol):
    """A job of a list of files, also one that is open in another process."""

    def leave_out(self, numbers: Sequence[int]) -> None: ...


def open_job(workload: Workload, spec: JobSpec) -> OpenJob:
    """The job, opened; of a list of files, one that survives damaged files."""
    if spec.list_sha256 is not None:
        vouch(spec.input, spec.list_sha256)
    job = workload.open(spec)
    return ManyFiles(job) if is_list(spec.input) else job


class ManyFiles:
    """An open job of a list of files. `failed`: why, by the number of the file."""

    def __init__(self, job: OpenJob) -> None:
        self.job, self.spec = job, job.spec
        self.failed: dict[int, str] = {}
        self._reference = _WithoutFailed(job.reference(), self.failed)

    @cached_property
    def _files(self) -> Sequence[ListedFile]:
        return FileList.read(self.spec.input).files

    @property
    def summary(self) -> JobSummary:
        summary = self.job.summary
        failed = {str(number): self.failed[number] for number in sorted(self.failed)}
        return replace(summary, remarks={**summary.remarks, "failed": failed} if failed else summary.remarks)

    def plan(self, budget: Budget) -> Plan:
        """NotTogether if a file would be cut or left out, or a chunk has results besides its samples."""
        target = min(budget.target_bytes, max(MOST_CHUNK_BYTES, 2 * self.summary.nbytes // self.summary.shape[0]))
        plan, one = self.job.plan(replace(budget, target_bytes=target)), self.job.summary.shape[1:]
        left_out = self.summary.shape[0] != len(self._files)
        for chunk in plan.chunks:
            if left_out or len(chunk.outputs) > 1 or chunk.region.shape[1:] != one:
                raise NotTogether(f"{self.spec.input}: these files cannot share chunks; run them one after the other")
        return plan

    def hold_at_most(self, budget_bytes: int) -> int:
        return self.job.hold_at_most(budget_bytes) if isinstance(self.job, HoldsInput) else 0

    def sink(self, opening: Opening) -> Sink:
        sink = self.job.sink(opening)
        assert isinstance(sink, FileListWriter), "results of a list are a list"
        sink.left_out = self.failed
        return sink

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        try:
            self.job.read(chunk, inputs)
        except _FAULTS:
            for part, place in _files_of(chunk):
                with_one = [each[place] for each in inputs]
                self._tried(part, lambda p=part, i=with_one: self.job.read(p, i), with_one)  # type: ignore[misc]

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        try:
            self.job.compute(chunk, inputs, outputs, stream)
        except _FAULTS:
            for part, place in _files_of(chunk):
                source, result = [each[place] for each in inputs], [each[place] for each in outputs]
                self._tried(
                    part,
                    lambda p=part, s=source, r=result: self.job.compute(p, s, r, stream),  # type: ignore[misc]
                    result,
                )

    def _tried(self, part: Chunk, step: Callable[[], None], filled: Sequence[Any]) -> None:
        """A step of one file; zeros if it fails."""
        try:
            step()
        except _FAULTS as error:
            number = part.region.start[0]
            self.failed.setdefault(number, self._of_file(number, part.region, str(error)))
            for each in filled:
                each[...] = 0

    def _of_file(self, number: int, region: Region, text: str) -> str:
        """A fault of a region of the list in terms of the file."""
        path = self._files[number].path
        text = text.replace(str(self.spec.input), path)
        for corner in (region.start, region.stop):
            text = text.replace(str(corner), str(corner[1:]))
        return text if path in text else f"{path}: {text}"

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        first, last = chunk.region.start[0], chunk.region.stop[0]
        failed = {str(number): why for number, why in list(self.failed.items()) if first <= number < last}
        own = self.job.note(chunk, outputs) if isinstance(self.job, Notes) else None
        if not failed and own is None:
            return None
        return lambda: {"failed": failed, "note": None if own is None else own()}

    def add_note(self, chunk: int, note: Any) -> None:
        self.failed.update({int(number): str(why) for number, why in note["failed"].items()})
        if note["note"] is not None and isinstance(self.job, Notes):
            self.job.add_note(chunk, note["note"])

    def reference(self) -> Reference:
        return self._reference

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Do not publish these files."""
        self.failed.update({number: LEFT_OUT for number in numbers if number not in self.failed})

    def close(self) -> None:
        self.job.close()
        vouch(self.spec.input, None)


class _WithoutFailed:
    """A reference that leaves out places in files that failed."""

    def __init__(self, reference: Reference, failed: dict[int, str]) -> None:
        self._reference, self._failed = reference, failed

    @property
    def places(self) -> NDArray[np.int64]:
        return self._reference.places

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        places = self._reference.places
        kept = [place for place, number in enumerate(which) if int(places[number][0]) not in self._failed]
        return self._reference.audit([which[place] for place in kept], written[kept])


def _files_of(chunk: Chunk) -> Iterator[tuple[Chunk, slice]]:
    """Each file's part of the chunk, and its place in the chunk's arrays."""
    region = chunk.region
    for place, number in enumerate(range(region.start[0], region.stop[0])):
        one = Region((number, *region.start[1:]), (number + 1, *region.stop[1:]))
        inputs, outputs = (
            tuple(ArraySpec((1, *each.shape[1:]), each.dtype) for each in specs)
            for specs in (chunk.inputs, chunk.outputs)
        )
        work = chunk.work // region.shape[0]
        yield (
            Chunk(index=chunk.index, region=one, halo=chunk.halo, inputs=inputs, outputs=outputs, work=work),
            slice(place, place + 1),
        )
