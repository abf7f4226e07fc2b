"""ISMRMRD (.h5, .mrd): acquisitions with their headers in one HDF5 data set, an XML header beside it.

Source: https://ismrmrd.readthedocs.io, "ismrmrd.h" and "ismrmrd.xsd" (version 1). The acquisitions contain the
trajectory, for which ISMRMRD defines no unit; Cartesian ones have none, and their steps and centres place them on the
encoded matrix. Noise adjustment scans are separated from image scans; other scans
(dummies, navigators, phase correction, parallel calibration alone) are ignored. Averages and segments add up to one
image; contrasts, sets, phases and repetitions are separate times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.bounded import TooLarge, decode, encoded_limit
from pipeline.errors import InputError, MillraceError, counted
from pipeline.formats.kspace.base import (
    KSpaceHeader,
    KSpaceReader,
    Placement,
    Readouts,
    require_finite_samples,
    require_finite_trajectory,
)
from pipeline.formats.kspace.ismrmrd_header import read_xml
from pipeline.storage.confinement import open_beneath
from pipeline.storage.positional import first_bytes

# Flags are numbered from 1: https://ismrmrd.readthedocs.io, "AcquisitionHeader".
_NOISE = np.uint64(1 << 18)
_NO_IMAGE = np.uint64(sum(1 << (flag - 1) for flag in (23, 24, 26, 27, 28, 29, 30, 31)))
# Siemens and Pulseq set both if a calibration readout is also part of the image.
_CALIBRATION, _AND_IMAGE = np.uint64(1 << 19), np.uint64(1 << 20)
# Slowest first.
_TIMES = ("contrast", "set", "phase", "repetition")
_HEAD_FIELDS = (
    "flags", "number_of_samples", "active_channels", "discard_pre", "discard_post", "center_sample",
    "encoding_space_ref", "trajectory_dimensions", "sample_time_us", "position", "read_dir", "phase_dir", "slice_dir",
    "idx",
)  # fmt: skip
_INDEX_FIELDS = ("kspace_encode_step_1", "kspace_encode_step_2", "slice", *_TIMES)
# A record holds a header of 340 bytes and, outside of it, samples: in a real file they take more than the headers.
_MOST_BYTES_PER_BYTE, _HARMLESS_BYTES = 64, 64 << 20
_PERPENDICULAR = 1e-3
_WHOLE = 1e-3  # of a pixel, as headers round fields of view
# How far rounding may put a sample out of the plane, as a share of the trajectory's extent.
_ROUNDING_SHARE = 1e-3


class Ismrmrd(KSpaceReader):
    """Reads the headers of all acquisitions at once, samples and trajectories on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first_bytes(path)  # reports a wrong path
        with _translated(path):
            import h5py

            # Its own stream: HDF5 shares one open file among a path's readers, and the first to close ends it for all.
            self._stream = os.fdopen(open_beneath(path, os.O_RDONLY), "rb")
            try:
                self._file = h5py.File(self._stream, "r")
            except BaseException:
                self._stream.close()
                raise
        try:
            with _translated(path):
                self._data, xml = self._data_set()
                heads = self._data.fields("head")[...]
            self._check_heads(heads)
            self._heads = heads
            self._xml = read_xml(path, xml)
            calibration_alone = (heads["flags"] & (_CALIBRATION | _AND_IMAGE)) == _CALIBRATION
            images = np.flatnonzero(((heads["flags"] & (_NOISE | _NO_IMAGE)) == 0) & ~calibration_alone)
            self._noise_scans = np.flatnonzero((heads["flags"] & _NOISE) != 0)
            if images.size == 0:
                raise InputError(
                    f"{path}: holds {counted(len(heads), 'acquisition')}, none of an image; export those of images too"
                )
            self._check_images(images)
            self._group(images)
            self.header = self._make_header(images)
        except BaseException:
            self.close()
            raise

    # Headers

    def _data_set(self) -> tuple[Any, bytes]:
        import h5py

        def is_raw(group: Any) -> bool:
            return isinstance(group, h5py.Group) and "data" in group and "xml" in group

        found = [name for name in self._file if is_raw(self._file.get(name))]
        chosen = "dataset" if "dataset" in found else found[0] if len(found) == 1 else None
        if chosen is None:
            what = f"several: {', '.join(found)}; leave one" if found else "no group with xml and data; is it ISMRMRD?"
            raise InputError(f"{self.path}: holds {what}")
        stored = self._file[chosen]["data"], self._file[chosen]["xml"]
        if any(isinstance(part, h5py.Dataset) and (part.external or part.is_virtual) for part in stored):
            raise InputError(f"{self.path}: keeps {chosen} in other files; write it as one file (h5repack)")
        data, header = stored
        names = data.dtype.names or ()
        if data.ndim != 1 or not {"head", "traj", "data"} <= set(names) or data.shape[0] == 0:
            raise InputError(f"{self.path}: {chosen}/data holds no acquisitions (head, traj, data); export it again")
        for part in stored:
            self._refuse_inflating(part)
        xml = header[()]
        if isinstance(xml, np.ndarray):
            xml = xml.reshape(-1)[0]
        return data, xml.encode() if isinstance(xml, str) else bytes(xml)

    def _refuse_inflating(self, data: Any) -> None:
        """Refuse a data set whose numbers, or those of a chunk, take far more memory than the file holds bytes.

        HDF5 reads chunks that are not stored as zeros, and inflates the others without bound.
        """
        from h5py import h5z

        where = f"{self.path}: {data.name}"
        file_bytes = os.fstat(self._stream.fileno()).st_size
        of_chunk = math.prod(data.chunks or (0,)) * data.dtype.itemsize
        declared = max((data.size or 0) * data.dtype.itemsize, of_chunk)
        if declared > max(_MOST_BYTES_PER_BYTE * file_bytes, _HARMLESS_BYTES):
            raise InputError(
                f"{where} declares {declared:,} bytes, which the file of {file_bytes:,} cannot hold; copy or export it "
                "again"
            )
        properties = data.id.get_create_plist()
        filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
        if len(set(filters)) < len(filters):
            raise InputError(f"{where} is compressed twice; write it again (h5repack)")
        if h5z.FILTER_DEFLATE not in filters:
            return
        # Before it come only filters that keep the size; Fletcher's adds four bytes.
        corners: list[tuple[int, ...]] = []
        data.id.chunk_iter(lambda info: corners.append(info.chunk_offset))
        for corner in corners:
            skipped, stored = data.id.read_direct_chunk(corner)
            if skipped & (1 << filters.index(h5z.FILTER_DEFLATE)):
                continue
            try:
                decode("zlib", stored, encoded_limit(of_chunk))
            except TooLarge as exc:
                raise InputError(f"{where}, chunk {corner[0]}: {exc}; copy or export it again") from exc

    def _check_heads(self, heads: NDArray[Any]) -> None:
        names, index = heads.dtype.names or (), heads.dtype["idx"].names if "idx" in (heads.dtype.names or ()) else ()
        missing = [name for name in _HEAD_FIELDS if name not in names]
        missing += [name for name in _INDEX_FIELDS if name not in (index or ())]
        if missing:
            raise InputError(f"{self.path}: the acquisitions' headers lack {', '.join(missing)}: is it ISMRMRD 1?")

    def _check_images(self, images: NDArray[np.intp]) -> None:
        """Require that all acquisitions of images share one encoding and number of coils, and have a trajectory."""
        heads = self._heads[images]
        for field, what in (
            ("active_channels", "their number of coils"),
            ("encoding_space_ref", "their encoding space"),
            ("trajectory_dimensions", "the columns of their trajectory"),
        ):
            odd = np.flatnonzero(heads[field] != heads[field][0])
            if odd.size:
                raise InputError(
                    f"{self.path}: acquisitions differ in {what}: {images[odd[0]]} has {heads[field][odd[0]]}, "
                    f"{images[0]} has {heads[field][0]}; all of one file must agree: split it"
                )
        named, there = int(heads["encoding_space_ref"][0]), len(self._xml.encodings)
        if 0 < there <= named:
            raise InputError(
                f"{self.path}: its acquisitions refer to encoding {named}, counted from 0, but its XML header has "
                f"{counted(there, 'encoding')}; export it again"
            )
        if heads["active_channels"][0] == 0:
            raise InputError(f"{self.path}: its acquisitions have no coils; export it again")
        self._kept: int | None = None
        self._cartesian = heads["trajectory_dimensions"][0] == 0 and self._xml.trajectory.lower() == "cartesian"
        if self._cartesian:
            self._check_grid(images)
        elif heads["trajectory_dimensions"][0] not in (2, 3):
            raise InputError(
                f"{self.path}: the acquisitions hold no trajectory of 2 or 3 columns but "
                f"{heads['trajectory_dimensions'][0]} "
                f"(the header states '{self._xml.trajectory}'): store each sample's k-space position with them"
            )
        kept = heads["number_of_samples"].astype(int) - heads["discard_pre"] - heads["discard_post"]
        if (kept < 1).any():
            raise InputError(
                f"{self.path}: acquisition {images[np.argmax(kept < 1)]} discards all of its samples; leave it out"
            )

    def _check_grid(self, images: NDArray[np.intp]) -> None:
        """Require an encoding whose matrix holds every step, so that each readout has its place on the grid.

        `_kept`: the samples of a readout without its oversampling, if all readouts are whole.
        """
        heads = self._heads[images]
        encoding = self._xml.encoding(int(heads["encoding_space_ref"][0]))
        if encoding is None:
            raise InputError(f"{self.path}: Cartesian, but its XML header has no encoding; export it again")
        for axis, (name, centre) in enumerate((("1", encoding.centre_1), ("2", encoding.centre_2)), start=1):
            steps = heads["idx"][f"kspace_encode_step_{name}"].astype(int) - centre
            n = encoding.encoded_matrix[axis]
            odd = np.flatnonzero((steps < -(n // 2)) | (steps >= n - n // 2))
            if odd.size:
                raise InputError(
                    f"{self.path}: acquisition {images[odd[0]]} has step {steps[odd[0]] + centre} of phase encoding "
                    f"{name}, beyond the encoded matrix of {n} around {centre}; correct the header, or export it again"
                )
        n = encoding.encoded_matrix[0]
        kept = n * encoding.recon_fov_mm[0] / encoding.encoded_fov_mm[0]
        whole = (heads["number_of_samples"] == n) & (heads["center_sample"] == n // 2)
        whole &= (heads["discard_pre"] == 0) & (heads["discard_post"] == 0)
        if whole.all() and kept < n and abs(kept - round(kept)) < _WHOLE and (n - round(kept)) % 2 == 0:
            self._kept = round(kept)

    def _group(self, images: NDArray[np.intp]) -> None:
        """Group the acquisitions by time and slice, in the file's order."""
        index = self._heads["idx"][images]
        times = np.stack([index[name].astype(np.int64) for name in _TIMES], axis=1)
        self._times, of_time = np.unique(times, axis=0, return_inverse=True)
        self._slices, of_slice = np.unique(index["slice"], return_inverse=True)
        order = np.lexsort((images, of_slice, of_time.reshape(-1)))
        keys = of_time.reshape(-1)[order] * len(self._slices) + of_slice[order]
        starts = np.searchsorted(keys, np.arange(len(self._times) * len(self._slices) + 1))
        self._groups = [images[order][a:b] for a, b in pairwise(starts)]
        for number, group in enumerate(self._groups):
            time, slice_ = divmod(number, len(self._slices))
            what = f"slice {self._slices[slice_]} at {self._time_name(time)}"
            if group.size == 0:
                raise InputError(f"{self.path}: {what} has no acquisitions: every slice must have each time; split it")
            heads = self._heads[group]
            lengths = heads["number_of_samples"].astype(int) - heads["discard_pre"] - heads["discard_post"]
            if (lengths != lengths[0]).any():
                odd = int(np.argmax(lengths != lengths[0]))
                raise InputError(
                    f"{self.path}: {what}: acquisition {group[odd]} has {counted(lengths[odd], 'sample')}, acquisition "
                    f"{group[0]} {lengths[0]}; readouts of one image must be of one length"
                )

    def _time_name(self, time: int) -> str:
        varied = [name for axis, name in enumerate(_TIMES) if len(np.unique(self._times[:, axis])) > 1] or [
            "repetition"
        ]
        return ", ".join(f"{name} {self._times[time][_TIMES.index(name)]}" for name in varied)

    def _make_header(self, images: NDArray[np.intp]) -> KSpaceHeader:
        first, xml = self._heads[images[0]], self._xml
        encoding = xml.encoding(int(first["encoding_space_ref"]))
        columns = int(first["trajectory_dimensions"])
        planes = encoding.recon_matrix[2] if encoding is not None else 1
        steps_2 = np.unique(self._heads["idx"]["kspace_encode_step_2"][images])
        # The third column of a 2-D encoding is 0 or holds weights: it is not a direction.
        dimensions = 3 if columns == 3 and (encoding is None or planes > 1) else 2
        if self._cartesian and encoding is not None:
            dimensions = 3 if encoding.encoded_matrix[2] > 1 else 2
        self._stacked = columns == 2 and len(steps_2) > 1
        if self._stacked:
            dimensions = 3
            self._centre_2 = encoding.centre_2 if encoding and encoding.states_centre_2 else (int(steps_2[-1]) + 1) // 2
        if dimensions == 3 and len(self._slices) > 1:
            raise InputError(f"{self.path}: {len(self._slices)} slabs of three dimensions; split it into one a file")
        matrix = encoded = share = fov = None
        if encoding is not None:
            matrix, fov = encoding.recon_matrix[:dimensions], encoding.recon_fov_mm
            share = tuple(r / e for r, e in zip(fov[:dimensions], encoding.encoded_fov_mm, strict=False))
            encoded = tuple(n * s for n, s in zip(encoding.encoded_matrix, share, strict=False))
        dwells = np.unique(self._heads["sample_time_us"][images])
        dwell = float(dwells[0]) if len(dwells) == 1 else 0.0
        return KSpaceHeader(
            coils=int(first["active_channels"]),
            dimensions=dimensions,
            times=len(self._times),
            slices=len(self._slices),
            units="cycles/fov" if self._cartesian else xml.units,
            matrix=matrix,
            fov_mm=fov,
            encoded=encoded,
            encoded_fov=share,
            dwell_us=dwell if np.isfinite(dwell) and dwell > 0 else None,
            plane_steps=self._stacked,
            cartesian=self._cartesian,
            placements=self._placements(),
            time_names=tuple(self._time_name(time) for time in range(len(self._times))),
        )

    def _placements(self) -> tuple[Placement, ...]:
        """The placement of each slice, from its first acquisition; empty if the directions are not perpendicular.
        They are normalised first, since files may store few digits."""
        found = []
        for slice_ in range(len(self._slices)):
            head = self._heads[self._groups[slice_][0]]
            directions = np.array([head["read_dir"], head["phase_dir"], head["slice_dir"]], np.float64)
            position = np.array(head["position"], np.float64)
            lengths = np.linalg.norm(directions, axis=1, keepdims=True)
            directions = np.divide(directions, lengths, out=np.zeros((3, 3)), where=lengths > 0)
            right = np.abs(directions @ directions.T - np.eye(3)).max() <= _PERPENDICULAR
            if not (right and np.isfinite(position).all()):
                return ()
            x, y, z = position.tolist()
            found.append(Placement(position=(x, y, z), directions=tuple(tuple(row) for row in directions.tolist())))
        return tuple(found)

    # Samples

    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        group = self._groups[time * len(self._slices) + slice_]
        if self._kept is not None:
            return len(group), self._kept
        head = self._heads[group[0]]
        return len(group), int(head["number_of_samples"]) - int(head["discard_pre"]) - int(head["discard_post"])

    def _grid_points(self, readouts: Readouts) -> NDArray[np.float64]:
        """Cycles per encoded field of view, by each acquisition's steps."""
        acquisitions = self._acquisitions(readouts)
        encoding = self._xml.encoding(int(self._heads[acquisitions[0]]["encoding_space_ref"]))
        assert encoding is not None, "checked on opening"
        found = []
        for acquisition in acquisitions:
            head = self._heads[acquisition]
            samples, cut = self._cut(acquisition)
            along: NDArray[Any] = np.arange(samples)[cut] - int(head["center_sample"])
            if self._kept is not None:
                share = encoding.recon_fov_mm[0] / encoding.encoded_fov_mm[0]
                along = (np.arange(self._kept) - self._kept // 2) / share
            steps = [
                float(int(head["idx"][f"kspace_encode_step_{axis}"]) - centre)
                for axis, centre in ((1, encoding.centre_1), (2, encoding.centre_2))
            ]
            columns = [np.full(len(along), step) for step in steps[: self.header.dimensions - 1]]
            found.append(np.column_stack([along, *columns]))
        return np.stack(found).astype(np.float64, copy=False)

    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        if self._cartesian:
            return self._grid_points(readouts)
        columns = self._columns(readouts)
        points = columns[..., : self.header.dimensions]
        if self.header.dimensions == 2 and columns.shape[2] == 3:
            self._refuse_direction(columns, self._acquisitions(readouts))
        if self._stacked:
            steps = self._heads["idx"]["kspace_encode_step_2"][self._acquisitions(readouts)].astype(np.float64)
            heights = np.broadcast_to((steps - self._centre_2)[:, None, None], (*points.shape[:2], 1))
            points = np.concatenate([points, heights], axis=2)
        if self.header.dimensions == 3 and columns.shape[2] == 2 and not self._stacked:
            raise InputError(f"{self.path}: its trajectory has two columns, but its matrix has three axes")
        return np.ascontiguousarray(points)

    def _refuse_direction(self, columns: NDArray[np.float64], acquisitions: NDArray[np.intp]) -> None:
        """Refuse a third column that is neither 0 nor weights: samples of a volume would add up to one plane."""
        third = columns[..., 2]
        odd = np.flatnonzero(third.min(axis=1) < -_ROUNDING_SHARE * np.abs(columns[..., :2]).max())
        if odd.size:
            raise InputError(
                f"{self.path}: acquisition {acquisitions[odd[0]]}: the third column of its trajectory reaches "
                f"{third[odd[0]].min():.4g}, so that it is a direction, but the header's reconSpace has one plane; "
                "write its planes there, or leave out the column"
            )

    def density(self, readouts: Readouts) -> NDArray[np.float32] | None:
        """The third column of a 2-D trajectory, if its values can be weights."""
        if (
            self._cartesian
            or self.header.dimensions != 2
            or int(self._heads["trajectory_dimensions"][self._groups[0][0]]) != 3
        ):
            return None
        weights = self._columns(readouts)[..., 2]
        return weights.astype(np.float32) if (weights >= 0).all() and (weights > 0).any() else None

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        coils = self.header.coils
        acquisitions = self._acquisitions(readouts)
        for place, (acquisition, values) in enumerate(
            zip(acquisitions, self._records("data", acquisitions), strict=True)
        ):
            samples, cut = self._cut(acquisition)
            if values.size != 2 * coils * samples:
                raise InputError(
                    f"{self.path}: acquisition {acquisition} holds {counted(values.size, 'number')} where its header "
                    f"promises {counted(coils, 'coil')} × {counted(samples, 'sample')} (real and imaginary); it is "
                    "damaged; copy it again"
                )
            line = np.asarray(values, np.float32).view(np.complex64).reshape(coils, samples)[:, cut]
            out[:, place] = line if self._kept is None else _without_oversampling(line, self._kept)
        require_finite_samples(self.path, out, _numbered(acquisitions))

    def noise(self) -> NDArray[np.complex64] | None:
        found = []
        coils = self.header.coils
        for acquisition, values in zip(self._noise_scans, self._records("data", self._noise_scans), strict=True):
            declared = int(self._heads["active_channels"][acquisition])
            if declared != coils or values.size == 0 or values.size % (2 * coils):
                raise InputError(
                    f"{self.path}: the noise scan, acquisition {acquisition}, holds {counted(values.size, 'number')} "
                    f"of {counted(declared, 'coil')}, but the images have {coils}; --prewhiten no does without it"
                )
            samples = np.asarray(values, np.float32).view(np.complex64).reshape(coils, -1)
            head = self._heads[acquisition]
            # Not below 0, which would count from the end: a scan may discard more samples than it holds.
            samples = samples[:, int(head["discard_pre"]) : max(samples.shape[1] - int(head["discard_post"]), 0)]
            if not np.isfinite(samples).all():
                raise InputError(
                    f"{self.path}: the noise scan, acquisition {acquisition}, is not finite; --prewhiten no does "
                    "without it"
                )
            found.append(samples)
        return np.concatenate(found, axis=1) if found else None

    def close(self) -> None:
        self._file.close()
        self._stream.close()

    def _acquisitions(self, readouts: Readouts) -> NDArray[np.intp]:
        group = self._groups[readouts.time * len(self._slices) + readouts.slice]
        return np.asarray(group[readouts.first : readouts.stop])

    def _cut(self, acquisition: Any) -> tuple[int, slice]:
        """The number of samples stored, and the slice of those not discarded."""
        head = self._heads[acquisition]
        samples = int(head["number_of_samples"])
        return samples, slice(int(head["discard_pre"]), samples - int(head["discard_post"]))

    def _columns(self, readouts: Readouts) -> NDArray[np.float64]:
        """(readouts, samples, columns) as they are stored."""
        columns = int(self._heads["trajectory_dimensions"][self._groups[0][0]])
        acquisitions = self._acquisitions(readouts)
        found = []
        for acquisition, values in zip(acquisitions, self._records("traj", acquisitions), strict=True):
            samples, cut = self._cut(acquisition)
            if values.size != samples * columns:
                raise InputError(
                    f"{self.path}: acquisition {acquisition} holds a trajectory of {counted(values.size, 'number')} "
                    f"where its header promises {counted(samples, 'sample')} × {columns}; it is damaged; copy it again"
                )
            found.append(np.asarray(values, np.float64).reshape(samples, columns)[cut])
        points = np.stack(found)
        require_finite_trajectory(self.path, points, _numbered(acquisitions))
        return points

    def _records(self, field: str, acquisitions: NDArray[np.intp]) -> Iterator[NDArray[Any]]:
        """One field of the acquisitions, in one read if they are evenly spaced."""
        if len(acquisitions) == 0:
            return
        steps = np.unique(np.diff(acquisitions))
        with _translated(self.path):
            if len(acquisitions) == 1 or (len(steps) == 1 and steps[0] > 0):
                step = int(steps[0]) if len(acquisitions) > 1 else 1
                even = slice(int(acquisitions[0]), int(acquisitions[-1]) + 1, step)
                records = list(self._data.fields(field)[even])
            else:
                records = [self._data.fields(field)[int(acquisition)] for acquisition in acquisitions]
        yield from records


def _without_oversampling(line: NDArray[Any], kept: int) -> NDArray[Any]:
    """k-space (coils, n), centred at n // 2, of the middle `kept` of n pixels."""
    pixels = np.fft.fftshift(np.fft.ifft(np.fft.ifftshift(line, axes=1), axis=1), axes=1)
    first = line.shape[1] // 2 - kept // 2
    middle = np.fft.ifftshift(pixels[:, first : first + kept], axes=1)
    return np.fft.fftshift(np.fft.fft(middle, axis=1), axes=1)


def _numbered(acquisitions: NDArray[np.intp]) -> Callable[[int], str]:
    return lambda place: f"acquisition {acquisitions[place]}"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate HDF5's errors for a damaged file to InputError."""
    try:
        yield
    except MillraceError:
        raise
    except Exception as exc:  # damage raises OSError, KeyError, RuntimeError, ValueError and others
        said = " ".join(str(exc).split())
        if "truncated file" in said:
            raise InputError(f"{path}: truncated: the file ends before its HDF5 data does; copy it again") from exc
        detail = f" ({said[:160]})" if said else ""
        raise InputError(
            f"{path}: not an HDF5 file of raw MRI data, or damaged{detail}; copy or export it again"
        ) from exc
