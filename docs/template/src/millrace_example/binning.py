"""Binning as a full workload: `millrace run bin IN OUT --factor 4` writes the mean of each 4 × 4 pixels."""

from dataclasses import replace

import numpy as np
from pydantic import Field

from pipeline import workloads
from pipeline.errors import AuditError, InputError, ParameterError
from pipeline.formats.image import Region, create_image, format_for_output, open_image
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import ArraySpec, Audit, Chunk, JobSummary, Plan, random_places


class Bin:
    name, summary, unit = "bin", "Shrink an image: each pixel is the mean of several.", "pixels"
    check_output = staticmethod(format_for_output)

    class Parameters(workloads.Parameters):
        factor: int = Field(2, ge=1, le=64, description="pixels along each side of a bin")

    def open(self, spec):
        return BinJob(spec)


class BinJob:
    def __init__(self, spec):
        refuse_same_file(spec)
        self.spec, self.factor, self.reader = spec, spec.parameters.factor, open_image(spec.input)
        source = self.reader.header
        self.shape = (*(n // self.factor for n in source.shape[:2]), *source.shape[2:])
        self.header = replace(source, shape=self.shape, dtype=np.dtype(np.float32), maxval=None)
        self.summary = JobSummary(shape=self.shape, axes=source.axes, dtype="float32", nbytes=source.nbytes)
        self.places = random_places(self.shape, 100) if 0 not in self.shape else None
        if not source.axes.startswith("YX") or self.places is None:
            self.close()
            raise InputError(f"{spec.input}: bin takes images of {self.factor} rows and columns or more, no volumes")

    def plan(self, budget):
        rows, others, source, cut = self.shape[0], self.shape[1:], self.reader.header, []
        row_bytes = self.header.nbytes // rows + source.nbytes // source.shape[0] * self.factor  # of bins
        if row_bytes > budget.budget_bytes:
            raise ParameterError(f"--memory is too small for a row of bins of {self.spec.input}: raise it")
        for first in range(0, rows, step := max(1, budget.target_bytes // row_bytes)):
            region = Region((first, *[0] * len(others)), (min(first + step, rows), *others))
            pixels, halo = ArraySpec(self._pixels(region).shape, source.dtype), ((0, 0),) * len(self.shape)
            bins, work = ArraySpec(region.shape, self.header.dtype), int(np.prod(pixels.shape))
            cut.append(Chunk(index=len(cut), region=region, halo=halo, inputs=(pixels,), outputs=(bins,), work=work))
        return Plan(chunks=tuple(cut))

    def _pixels(self, region):
        return Region(*((at[0] * self.factor, at[1] * self.factor, *at[2:]) for at in (region.start, region.stop)))

    def sink(self, opening):
        return create_image(self.spec.output, self.header, opening)

    def read(self, chunk, inputs):
        self.reader.read(self._pixels(chunk.region), inputs[0])

    def compute(self, chunk, inputs, outputs, stream):  # NumPy arrays, or CuPy arrays on the stream
        rows, columns, *channels = outputs[0].shape
        pixels = inputs[0].reshape(rows, self.factor, columns, self.factor, *channels)
        outputs[0][...] = pixels.mean(axis=(1, 3), dtype=np.float32)

    def reference(self):
        return self  # has `places` and `audit`

    def audit(self, which, written):
        worst, tolerance = 0.0, 1e-5  # of the largest pixel: at most 64 × 64 are added in float32
        for place, value in zip(self.places[which].tolist(), written, strict=True):
            region = self._pixels(Region(tuple(place), tuple(at + 1 for at in place)))
            self.reader.read(region, pixels := np.empty(region.shape, self.reader.header.dtype))
            error = float(abs(value - pixels.mean(dtype=np.float64)) / (np.abs(pixels.astype(np.float64)).max() or 1))
            if not error <= tolerance:
                raise AuditError(f"audit failed at {place}: off by {error:g}", worst_error=error, tolerance=tolerance)
            worst = max(worst, error)
        return Audit(samples=len(which), worst_error=worst, tolerance=tolerance, unit="of the largest pixel")

    def close(self):
        self.reader.close()
