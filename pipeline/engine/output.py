"""A job's output while it is written: its chunks, their notes, the audit, and publishing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import stopping
from pipeline.codecs.packed import ChunkForm
from pipeline.formats.image.base import Region
from pipeline.storage.partial import Callback, Opening, no_callback
from pipeline.workloads.protocol import Audit, Chunk, Notes, OpenJob, Sink, TakesPacked, Workload


class Output:
    """Between `open` and `publish`, `keep` or `discard`; `write` may be called from several threads.

    A chunk's notes are its values at the places of the job's reference, and the job's own note (see `Notes`);
    `take_notes` and `add_notes` carry both to other processes and later runs.
    """

    def __init__(self, workload: Workload, job: OpenJob) -> None:
        self.workload = workload
        self.job = job
        self._sink: Sink | None = None
        self._values: dict[int, float] = {}  # by index into the reference's places
        self._notes: dict[int, tuple[dict[int, float], Callable[[], Any] | None]] = {}  # by chunk, until taken
        self._lock = threading.Lock()

    def open(self, opening: Opening = Opening.NEW) -> None:
        """Create the partial output, take over an interrupted run's, or join another process's."""
        with stopping.held():  # an interruption in between would leave a file behind
            self._sink = self.job.sink(opening)

    def chunk_form(self, chunk: Chunk) -> ChunkForm | None:
        """How the output stores the chunk's region, if it takes encoded chunks."""
        return self._sink.chunk_form(chunk.region) if isinstance(self._sink, TakesPacked) else None

    def write(
        self, chunk: Chunk, outputs: Sequence[NDArray[Any]], encoded: Sequence[NDArray[np.uint8]] | None = None
    ) -> None:
        """Store a chunk's output arrays (host memory); `encoded`: the first in the form of `chunk_form`."""
        assert self._sink is not None, "open comes first"
        values = self._audited(chunk.region, outputs[0])
        note = self.job.note(chunk, outputs) if isinstance(self.job, Notes) else None
        if encoded is not None and isinstance(self._sink, TakesPacked):
            self._sink.write_packed(chunk.region, outputs[0], encoded)
        else:
            self._sink.write(chunk.region, outputs[0])
        if values or note is not None:
            with self._lock:
                self._values.update(values)
                self._notes[chunk.index] = values, note

    def flush(self) -> None:
        """Make durable what has been written so far."""
        assert self._sink is not None, "open comes first"
        self._sink.flush()

    def forget(self) -> None:
        """Drop all notes: the job is cut anew, and they are of other regions."""
        with self._lock:
            self._values.clear()
            self._notes.clear()

    def take_notes(self, chunks: Sequence[int]) -> Mapping[str, Any]:
        """The notes of these written chunks, ready for JSON; each is returned only once."""
        with self._lock:
            taken = {chunk: self._notes.pop(chunk) for chunk in chunks if chunk in self._notes}
        return {
            str(chunk): {"values": list(values.items()), "note": None if note is None else note()}
            for chunk, (values, note) in taken.items()
        }

    def add_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over notes that another process or an interrupted run took.

        AttributeError, KeyError, TypeError or ValueError if they are damaged.
        """
        for chunk, noted in notes.items():
            values = {int(which): float(value) for which, value in noted["values"]}
            if not all(0 <= which < len(self.job.reference().places) for which in values):
                raise ValueError("notes of other places")
            if noted["note"] is not None and isinstance(self.job, Notes):
                self.job.add_note(int(chunk), noted["note"])
            with self._lock:
                self._values.update(values)

    def audit(self) -> Audit:
        """Compare the written values with the job's reference. Raises as `Reference.audit`."""
        which = sorted(self._values)
        return self.job.reference().audit(which, np.array([self._values[each] for each in which], np.float64))

    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Make the output durable, call `on_sealed`, and give it its final name at once."""
        assert self._sink is not None, "open comes first"
        self._sink.publish(on_sealed)

    def keep(self) -> None:
        """Leave the partial output for a run that resumes, and close the job; harmless after `publish`."""
        if self._sink is not None:
            self._sink.keep()
        self.job.close()

    def discard(self) -> None:
        """Remove the partial output and close the job; harmless after `publish`, or a second time."""
        if self._sink is not None:
            self._sink.discard()
        self.job.close()

    def _audited(self, region: Region, samples: NDArray[Any]) -> dict[int, float]:
        """The values of a chunk at the audited places inside it."""
        places = self.job.reference().places
        inside = np.all((places >= region.start) & (places < region.stop), axis=1)
        return {int(which): float(samples[tuple(places[which] - region.start)]) for which in np.flatnonzero(inside)}
