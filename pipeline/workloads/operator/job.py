"""One job of an operator, or of several in a chain: the functions, called with each chunk's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.rank.task import SYMMETRIC
from pipeline.codecs.packed import PackedBlocks
from pipeline.errors import OutputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.storage.partial import Callback, Opening, no_callback
from pipeline.workloads.common.crop import CroppedReader, cropped_axes
from pipeline.workloads.common.halo import pack_with_borders, read_with_borders
from pipeline.workloads.common.image_plan import grown, plan_image, remarks, within
from pipeline.workloads.common.samples import module_of
from pipeline.workloads.operator.audit import RecomputedAudit, ReferenceAudit
from pipeline.workloads.operator.edges import Edges
from pipeline.workloads.operator.parameters import OperatorParameters
from pipeline.workloads.operator.step import Definition, Step
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import ArraySpec, Budget, Chunk, JobSpec, JobSummary, Plan, Sink

Reach = list[tuple[int, int]]  # samples before and after along each axis


class OperatorJob:
    """Each chunk is computed on its own from a read that includes its halo.

    Each of several steps computes what the next ones look at, and beyond the image's edges the border mode extends its
    result like an image of its own: the bits are those of the steps run one after the other.
    """

    def __init__(
        self,
        spec: JobSpec,
        definition: Definition,
        parameters: OperatorParameters,
        steps: Callable[[ImageHeader], Sequence[Step]],
        kept: tuple[int, Path] | None = None,
    ) -> None:
        """
        definition : the audit's: name, tolerance, and the reference of an only step
        steps      : of an input of that header
        kept       : a step's index, and the file that its result is written to as well
        """
        self.spec, self.definition, self._parameters, self._kept = spec, definition, parameters, kept
        self._kept_sink: Sink | None = None
        self._known_halos: dict[tuple[bool, ...], list[Reach]] = {}
        images.format_for_output(spec.output, parameters.storage)
        self._reader = images.open_image(spec.input)
        try:
            refuse_same_file(spec)
            if kept is not None:
                refuse_same_file(replace(spec, output=kept[1]))
            self._reader = parameters.part(self._reader, spec.input)
            self._image = self._reader.whole if isinstance(self._reader, CroppedReader) else self._reader
            self._steps = steps(self._reader.header)
            for step in self._steps:
                step.whole_shape = self._image.header.shape
            self.header = self._steps[-1].header
            for path, header in self._written():
                refusal = images.format_for_output(path, parameters.storage).refusal(header, path)
                if refusal is not None:
                    raise OutputError(refusal)
            self.axes = tuple(dict.fromkeys(axis for step in self._steps for axis in step.axes))
            along = {self.header.axes[axis] for axis in self.axes} & (parameters.chosen - set("ZYX"))
            if along:
                raise ParameterError(f"{definition.name} works along {min(along)}, so it takes no part of that axis")
            audit = RecomputedAudit if definition.reference is None else ReferenceAudit
            self._audit: RecomputedAudit | ReferenceAudit = audit(self)
        except BaseException:
            self._reader.close()
            raise

    @property
    def summary(self) -> JobSummary:
        header, written = self.header, sum(header.nbytes for _, header in self._written())
        said = remarks(self.axes, header, self.spec.output)
        for number, step in enumerate(self._steps, 1):
            prefix = "" if len(self._steps) == 1 else f"step {number}, "
            said |= {f"{prefix}{key}": value for key, value in step.remarks.items()}
        return JobSummary(
            shape=header.shape, axes=header.axes, dtype=header.dtype.name, nbytes=self._reader.header.nbytes + written,
            remarks=said,
        )  # fmt: skip

    @property
    def work_ratio(self) -> float:
        """Between the steps of a chain, a result, and the part of it that the next one looks at, count too."""
        first, last = self._reader.header.dtype.itemsize, self.header.dtype.itemsize
        between = [step.header.dtype.itemsize for step in self._steps[:-1]]
        held = (2 * given + made for given, made in pairwise([0, *between, 0]))
        work = max(step.work_bytes + more for step, more in zip(self._steps, held, strict=True))
        return work / (first + last)

    def plan(self, budget: Budget) -> Plan:
        if self._kept is not None:
            share = 1 - self._kept_header.nbytes / self.summary.nbytes
            budget = replace(
                budget, budget_bytes=int(budget.budget_bytes * share), target_bytes=int(budget.target_bytes * share)
            )
        plan = plan_image(
            self._reader, self.spec, budget, self._reach, header=self.header, whole=self._whole,
            padded=self._padded, storage=self._parameters.storage, also=self._written()[1:],
        )  # fmt: skip
        if self._kept is not None:
            dtype = self._kept_header.dtype
            chunks = (
                replace(chunk, outputs=(*chunk.outputs, ArraySpec(chunk.region.shape, dtype))) for chunk in plan.chunks
            )
            plan = replace(plan, chunks=tuple(chunks))
        self._audit.begin(len(plan.chunks))
        return plan

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def sink(self, opening: Opening) -> Sink:
        made = [
            images.create_image(path, header, opening, self._parameters.storage) for path, header in self._written()
        ]
        if self._kept is None:
            return made[0]
        self._kept_sink = made[1]
        return _Both(made[0], made[1])

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        self._read(self._held(chunk.region), inputs[0])

    @property
    def packs(self) -> bool:
        return self._reader.packs

    def read_packed(self, chunk: Chunk, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        asked, region = self._parameters, self._held(chunk.region)
        return pack_with_borders(self._image, region, asked.mode, asked.cval, memory)

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        self._apply(inputs[0], chunk.region, outputs, stream)
        self._audit.computed_with(module_of(inputs[0]))

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        if self._kept_sink is not None:
            self._kept_sink.write(chunk.region, outputs[1])
        return self._audit.note(chunk, outputs[0])

    def add_note(self, chunk: int, note: Any) -> None:
        self._audit.add_note(chunk, note)

    def reference(self) -> RecomputedAudit | ReferenceAudit:
        return self._audit

    def close(self) -> None:
        self._reader.close()

    # For the audit

    def around(self, region: Region) -> Region:
        """The region, or the whole image along axes that are never cut, or shorter than the region with its halo."""
        held = grown(region, self._reach).shape
        whole = [
            axis in self._whole or (axis not in self._padded and n >= length)
            for axis, (n, length) in enumerate(zip(held, self.header.shape, strict=True))
        ]
        return Region(
            tuple(0 if each else start for each, start in zip(whole, region.start, strict=True)),
            tuple(n if each else stop for each, stop, n in zip(whole, region.stop, self.header.shape, strict=True)),
        )

    def samples(self, region: Region) -> NDArray[Any]:
        """The input of a region, with what its computation looks at."""
        return self._read_new(self._held(region))

    def windows(self, region: Region) -> NDArray[Any]:
        """The input of a region, with its halo along all axes."""
        return self._read_new(grown(self._moved(region), self._reach))

    def computed(self, samples: Any, region: Region) -> Any:
        """The result for a region, of its input with halo, on the device where that is."""
        out = module_of(samples).empty(region.shape, self.header.dtype)
        self._apply(samples, region, [out], None)
        return out

    @property
    def tolerance(self) -> float | None:
        """The audit's tolerance, as declared."""
        declared = self.definition.tolerance
        if not callable(declared):
            return declared
        return declared(self.header.dtype, self._steps[0].parameters, len(self.axes))

    def defined(self, samples: NDArray[np.float64], region: Region) -> NDArray[np.float64]:
        """As `computed`, by the reference of the only step."""
        assert self.definition.reference is not None
        out = np.empty(region.shape, np.float64)
        self._steps[0].apply(self.definition.reference, samples, self._moved(region), out)
        return out

    # Files

    def _written(self) -> list[tuple[Path, ImageHeader]]:
        """The outputs: the result, and that of the step that is kept."""
        kept = [] if self._kept is None else [(self._kept[1], self._kept_header)]
        return [(self.spec.output, self.header), *kept]

    @property
    def _kept_header(self) -> ImageHeader:
        assert self._kept is not None
        return self._steps[self._kept[0]].header

    def _read(self, held: Region, out: NDArray[Any]) -> None:
        read_with_borders(self._image, held, self._parameters.mode, self._parameters.cval, out)

    def _read_new(self, held: Region) -> NDArray[Any]:
        samples = np.empty(held.shape, self._reader.header.dtype)
        self._read(held, samples)
        return samples

    # Steps

    @cached_property
    def _whole(self) -> set[int]:
        """The axes that are never cut."""
        if self._parameters.mode == "wrap" and any(step.is_anchored for step in self._steps[:-1]):
            # What depends on absolute positions does not go on beyond the edge as it is on the other side.
            return set(self.axes)
        return {axis for axis in self.axes if self.header.axes[axis] in "CS"}

    @cached_property
    def _padded(self) -> set[int]:
        """The axes along which blocks have a halo even if they are not cut: those of a part of the image, which goes on
        around it, and all if a function does not apply the border mode itself."""
        extends = all(step.definition.extends for step in self._steps)
        return cropped_axes(self._reader) if extends else set(range(len(self.header.shape)))

    def _moved(self, region: Region) -> Region:
        """The region by its place in the whole image."""
        return self._reader.moved(region) if isinstance(self._reader, CroppedReader) else region

    def _spanned(self, region: Region) -> tuple[bool, ...]:
        """Along which axes a region's block is the whole image, without a halo."""
        whole = zip(region.shape, self.header.shape, strict=True)
        return tuple(axis not in self._padded and n == length for axis, (n, length) in enumerate(whole))

    def _halos(self, spanned: tuple[bool, ...]) -> list[Reach]:
        """For each step, what it and later steps look at; zeros at the end. Chains look as far before as after, since
        beyond an edge a mirror shows the samples on this side of it."""
        if spanned not in self._known_halos:
            halos = [[(0, 0)] * len(spanned)]
            for step in reversed(self._steps):
                own = step.halo if len(self._steps) == 1 else [(max(sides),) * 2 for sides in step.halo]
                own = _without(own, spanned)
                halos.insert(0, [(a + c, b + d) for (a, b), (c, d) in zip(own, halos[0], strict=True)])
            self._known_halos[spanned] = halos
        return self._known_halos[spanned]

    @property
    def _reach(self) -> Reach:
        """What all steps look at, along every axis."""
        return self._halos((False,) * len(self.header.shape))[0]

    def _held(self, region: Region) -> Region:
        """The region with its halo, by its place in the whole image."""
        return grown(self._moved(region), self._halos(self._spanned(region))[0])

    def _apply(self, samples: Any, region: Region, outputs: Sequence[Any], stream: Any) -> None:
        """Fill the outputs from a region's input with its halo, step by step."""
        xp, asked = module_of(samples), self._parameters
        spanned, held = self._spanned(region), self._held(region)  # what `samples` covers
        halos, region = self._halos(spanned), self._moved(region)
        for index, step in enumerate(self._steps):
            wanted = grown(region, halos[index + 1])
            looked_at = grown(wanted, _without(step.halo, spanned))
            is_last = index == len(self._steps) - 1
            out = outputs[0] if is_last else xp.empty(wanted.shape, step.header.dtype)
            block = xp.ascontiguousarray(samples[within(looked_at, held)])
            step.apply(step.definition.function, block, wanted, out, stream)
            if not is_last:
                edges = Edges(
                    first=wanted.start, halo=halos[index + 1], shape=step.whole_shape, mode=asked.mode, cval=asked.cval
                )
                if asked.mode not in SYMMETRIC or not step.is_symmetric:
                    edges.extend(out, range(out.ndim))
                if self._kept is not None and index == self._kept[0] and len(outputs) > 1:
                    outputs[1][...] = out[within(region, wanted)]
            samples, held = out, wanted


def _without(halo: Reach, spanned: tuple[bool, ...]) -> Reach:
    return [(0, 0) if each else sides for each, sides in zip(spanned, halo, strict=True)]


class _Both:
    """Two outputs that are published together; `write` fills the first."""

    def __init__(self, first: Sink, second: Sink) -> None:
        self._first, self._second = first, second

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        self._first.write(region, samples)

    def flush(self) -> None:
        self._second.flush()
        self._first.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        self._second.publish()
        self._first.publish(on_sealed)

    def keep(self) -> None:
        self._second.keep()
        self._first.keep()

    def discard(self) -> None:
        self._second.discard()
        self._first.discard()
