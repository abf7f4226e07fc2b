"""The formats of MRI image series, which the output's suffix selects; each is imported on first use."""

from __future__ import annotations

from pathlib import Path

from pipeline.formats import unsupported_output
from pipeline.formats.image.base import ImageReader
from pipeline.formats.series.base import SeriesFormat, SeriesHeader


def series_format_for_output(path: Path) -> SeriesFormat:
    """The format that the suffix selects. OutputError if there is none."""
    from pipeline.formats.series.bart import BartSeries
    from pipeline.formats.series.dicom import Dicom
    from pipeline.formats.series.nifti import Nifti
    from pipeline.formats.series.npy import NpySeries
    from pipeline.formats.series.png import PngSeries
    from pipeline.formats.series.zarr import ZarrSeries

    formats: tuple[SeriesFormat, ...] = (Nifti(), BartSeries(), NpySeries(), ZarrSeries(), Dicom(), PngSeries())
    for form in formats:
        if path.name.lower().endswith(form.suffixes):
            return form
    raise unsupported_output(path, "MRI image format", [suffix for form in formats for suffix in form.suffixes])


def open_series(path: Path, header: SeriesHeader) -> ImageReader:
    """Read a series of that header again: regions [time, z, y, x]; a .cfl is always complex. InputError if damaged."""
    return series_format_for_output(path).open(path, header)
