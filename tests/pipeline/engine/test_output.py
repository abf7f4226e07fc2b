"""What is noted of written chunks, and how it reaches another process; audits with a tolerance of 0."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import metrics
from pipeline.engine.output import Output
from pipeline.engine.run import _count_audit
from pipeline.formats.image.base import Region
from pipeline.workloads.protocol import Audit, Chunk, random_places

SHAPE = (7, 11)


class Places:
    """A reference that wants every place of a few, and compares with the number of the place in the image."""

    places = random_places(SHAPE, 20)

    def audit(self, which, written):
        expected = [np.ravel_multi_index(self.places[each], SHAPE) for each in which]
        return Audit(
            samples=len(which), worst_error=float(np.abs(written - expected).max()), tolerance=0, unit="values"
        )


class Job:
    """An image whose samples are their numbers; it notes the sum of each chunk."""

    def __init__(self):
        self.written, self.sums = np.zeros(SHAPE, np.int64), {}
        self.closed = 0

    def sink(self, opening):
        return self

    def reference(self):
        return Places

    def write(self, region, samples):
        self.written[region.slices] = samples

    def note(self, chunk, outputs):
        total = int(outputs[0].sum())
        self.sums[chunk.index] = total
        return lambda: total

    def add_note(self, chunk, note):
        self.sums[chunk] = int(note)

    def discard(self):
        pass

    def close(self):
        self.closed += 1


Places = Places()


def output_of(job):
    output = Output(SimpleNamespace(name="numbers", unit="samples"), job)
    output.open()
    return output


def write(output, row):
    region = Region((row, 0), (row + 1, SHAPE[1]))
    chunk = Chunk(index=row, region=region, halo=((0, 0),) * 2, inputs=(), outputs=(), work=1)
    output.write(chunk, [np.arange(row * SHAPE[1], (row + 1) * SHAPE[1]).reshape(1, -1)])


def test_notes_of_another_process_complete_the_audit():
    here, there = output_of(Job()), output_of(Job())
    for row in range(SHAPE[0]):
        write(here if row % 2 else there, row)
    told = json.loads(json.dumps(there.take_notes(range(SHAPE[0]))))
    assert there.take_notes(range(SHAPE[0])) == {}
    here.add_notes(told)
    here.add_notes(told)  # a worker that died may have told them already
    audit = here.audit()
    assert (audit.samples, audit.worst_error, audit.tolerance) == (len(Places.places), 0.0, 0)
    assert here.job.sums == {row: sum(range(row * 11, row * 11 + 11)) for row in range(SHAPE[0])}


def test_notes_are_those_of_the_chunks_asked_for():
    output = output_of(Job())
    for row in range(3):
        write(output, row)
    assert sorted(output.take_notes([1])) == ["1"]
    assert sorted(output.take_notes([0, 1, 2])) == ["0", "2"]


def test_a_new_cut_forgets_what_was_noted():
    output = output_of(Job())
    write(output, 0)
    output.forget()
    assert output.take_notes([0]) == {}
    write(output, 1)
    assert output.audit().samples == len([place for place in Places.places if place[0] == 1])


@pytest.mark.parametrize(
    "notes",
    [{"0": {"values": [[99, 1.0]], "note": None}}, {"0": {"values": [["x", 1]], "note": None}}, {"0": {}}, {"0": 3}],
    ids=["no such place", "no number", "nothing", "no object"],
)
def test_damaged_notes_are_refused(notes):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        output_of(Job()).add_notes(notes)


@pytest.mark.parametrize(
    ("worst", "tolerance", "ratio"), [(0.0, 0, 0.0), (1e-9, 0, math.inf), (math.nan, 1, math.inf), (1.0, 4, 0.25)]
)
def test_the_ratio_of_an_audit_has_no_division_by_zero(worst, tolerance, ratio):
    _count_audit(SimpleNamespace(name="smooth"), worst, tolerance)
    assert metrics.audit_error_ratio.labels("smooth").value == ratio
