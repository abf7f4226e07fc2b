"""DICOM (.dcm): one Enhanced MR image of all slices and times, as 16-bit shades with a slope. Written by pydicom.

Source: DICOM PS3.3, A.36.2 (Enhanced MR Image IOD) and C.7.6.16 (functional groups). The patient and the study are left
empty: raw data in ISMRMRD, BART or npz does not carry them reliably. Identifiers are new in each file.
"""

from __future__ import annotations

import io
import math
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import __version__
from pipeline.config import brief
from pipeline.errors import InputError, MillraceError, ParameterError
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageReader, ImageWriter, Region
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.confinement import by_descriptor
from pipeline.storage.partial import Opening

ENHANCED_MR = "1.2.840.10008.5.1.4.1.1.4.1"
_EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
_SHADES = 65535
_LARGEST_BYTES = (1 << 32) - 2  # of an element
_LONGEST_AXIS = 65535
_TYPE = ["DERIVED", "PRIMARY", "VOLUME", "NONE"]


class Dicom(SeriesFormat):
    """Magnitudes with a known field of view."""

    name = "DICOM"
    suffixes = (".dcm",)
    windowed = True

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        pydicom_for(path)
        if header.dtype.kind == "c":
            return f"{path}: DICOM holds magnitudes; choose .nii for complex values"
        if header.affine is None:
            return f"{path}: DICOM needs the field of view, which the input does not state; choose .nii"
        if 2 * math.prod(header.shape) > _LARGEST_BYTES or max(header.shape) > _LONGEST_AXIS:
            return f"{path}: one DICOM file holds 4 GiB and {_LONGEST_AXIS:,} along an axis; choose .nii"
        return None

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return DicomWriter(path, header, opening)

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        return DicomReader(path, header)


class DicomWriter(SpooledWriter):
    """Scales and writes frame by frame, once all images are present."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        super().__init__(path, header.image, opening)
        self._series = header

    def _encoded(self) -> Iterator[bytes]:
        brightest = max(float(frame.max(initial=0)) for frame in self._frames())
        slope = float(f"{brightest / _SHADES:.9e}") or 1.0
        yield _head(self._series, slope, brightest)
        for frame in self._frames():
            yield np.clip(np.rint(frame.astype(np.float64) / slope), 0, _SHADES).astype("<u2").tobytes()

    def _frames(self) -> Iterator[NDArray[np.float32]]:
        times, slices, rows, columns = self.header.shape
        for time in range(times):
            for place in range(slices):
                frame = np.empty((1, 1, rows, columns), np.float32)
                region = Region((time, place, 0, 0), (time + 1, place + 1, rows, columns))
                self._samples.read(self._scratch, region, frame)
                yield frame


class DicomReader(ArrayReader):
    """half_unit: by how much values are rounded, to shades and then to float32."""

    def __init__(self, path: Path, header: SeriesHeader) -> None:
        pydicom = pydicom_for(path)
        try:
            with by_descriptor(path) as name:
                found = pydicom.dcmread(name, stop_before_pixels=True)
            shared = found.SharedFunctionalGroupsSequence[0]
            slope = float(shared.PixelValueTransformationSequence[0].RescaleSlope)
            frames = (int(found.NumberOfFrames), int(found.Rows), int(found.Columns))
        except Exception as error:  # pydicom's are of many kinds, OSError without a number among them
            if isinstance(error, MillraceError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            fault = brief(" ".join(str(error).split()))
            raise InputError(f"{path}: damaged, or not a DICOM file of MR images ({fault}); make it again") from error
        times, slices, rows, columns = header.shape
        offset = path.stat().st_size - 2 * math.prod(header.shape)
        if frames != (times * slices, rows, columns) or offset < 0:
            raise InputError(f"{path}: holds {frames[0]} frames of {frames[1]} × {frames[2]}; make it again")
        shades = file_array(path, np.dtype("<u2"), header.shape, offset=offset)
        super().__init__(path, header.image, _Scaled(shades, slope))
        self.half_unit = 0.51 * slope


class _Scaled:
    """An array of shades as the values that they stand for."""

    dtype = np.dtype(np.float32)

    def __init__(self, shades: NDArray[Any], slope: float) -> None:
        self.shape, self._shades, self._slope = shades.shape, shades, slope

    def __getitem__(self, where: Any) -> NDArray[np.float32]:
        return np.asarray(self._shades[where] * self._slope, np.float32)


def pydicom_for(path: Path) -> Any:
    try:
        import pydicom
    except ImportError as error:
        raise ParameterError(f"{path}: DICOM needs pydicom: pip install pydicom") from error
    return pydicom


def _head(header: SeriesHeader, slope: float, brightest: float) -> bytes:
    """The file up to the first shade."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.filewriter import dcmwrite

    meta = FileMetaDataset()
    _set(
        meta,
        MediaStorageSOPClassUID=ENHANCED_MR,
        MediaStorageSOPInstanceUID=_uid(),
        TransferSyntaxUID=_EXPLICIT_LITTLE,
        ImplementationClassUID=_IMPLEMENTATION,
    )
    file = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    _describe(file, header)
    file.SharedFunctionalGroupsSequence = [_shared(header, slope, brightest)]
    file.PerFrameFunctionalGroupsSequence = list(_frames_of(header))
    buffer = io.BytesIO()
    dcmwrite(buffer, file, enforce_file_format=True)
    nbytes = 2 * math.prod(header.shape)
    # Pixel Data, the last element: its tag, OW, two reserved bytes and the length.
    return buffer.getvalue() + b"\xe0\x7f\x10\x00OW\0\0" + nbytes.to_bytes(4, "little")


_IMPLEMENTATION = "2.25." + str(uuid.uuid5(uuid.NAMESPACE_URL, "millrace").int)


def _uid() -> str:
    return f"2.25.{uuid.uuid4().int}"


def _set(dataset: Any, **values: Any) -> Any:
    for keyword, value in values.items():
        setattr(dataset, keyword, value)
    return dataset


def _item(**values: Any) -> Any:
    from pydicom.dataset import Dataset

    return _set(Dataset(), **values)


def _describe(file: Any, header: SeriesHeader) -> None:
    """All but the functional groups and the pixels."""
    times, slices, rows, columns = header.shape
    now, organization = datetime.now(UTC), _uid()
    date, time = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    _set(
        file,
        SOPClassUID=ENHANCED_MR, SOPInstanceUID=file.file_meta.MediaStorageSOPInstanceUID,
        SpecificCharacterSet="ISO_IR 192", PatientPosition="",
        ContentQualification="RESEARCH", ApplicableSafetyStandardAgency="IEC",
        PatientName="", PatientID="", PatientBirthDate="", PatientSex="",
        StudyInstanceUID=_uid(), StudyDate=date, StudyTime=time, ReferringPhysicianName="", StudyID="",
        AccessionNumber="", Modality="MR", SeriesInstanceUID=_uid(), SeriesNumber=1,
        SeriesDescription=header.title[:64],
        FrameOfReferenceUID=_uid(), PositionReferenceIndicator="",
        Manufacturer="Millrace", ManufacturerModelName="Millrace", DeviceSerialNumber="0", SoftwareVersions=__version__,
        InstanceNumber=1, ContentDate=date, ContentTime=time, NumberOfFrames=times * slices,
        ImageType=_TYPE, AcquisitionContextSequence=[],
        SamplesPerPixel=1, PhotometricInterpretation="MONOCHROME2", Rows=rows, Columns=columns,
        BitsAllocated=16, BitsStored=16, HighBit=15, PixelRepresentation=0,
        BurnedInAnnotation="NO", LossyImageCompression="00", PresentationLUTShape="IDENTITY",
        **_common(),
    )  # fmt: skip
    file.DimensionOrganizationSequence = [_item(DimensionOrganizationUID=organization)]
    groups = {0x00209057: "In-Stack Position", 0x00209128: "Temporal Position"}
    file.DimensionIndexSequence = [
        _item(
            DimensionOrganizationUID=organization,
            DimensionIndexPointer=tag,
            FunctionalGroupPointer=0x00209111,
            DimensionDescriptionLabel=label,
        )
        for tag, label in groups.items()
    ]


def _common() -> dict[str, str]:
    """Attributes that the image and its frames share."""
    return {
        "PixelPresentation": "MONOCHROME",
        "VolumetricProperties": "VOLUME",
        "VolumeBasedCalculationTechnique": "NONE",
        "ComplexImageComponent": "MAGNITUDE",
        "AcquisitionContrast": "UNKNOWN",
    }


def _directions(header: SeriesHeader) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Unit vectors along x, y and z in DICOM's axes (left, posterior, superior), and the spacing in mm."""
    assert header.affine is not None, "refused without"
    columns = np.diag([-1.0, -1.0, 1.0]) @ header.affine[:3, :3]
    lengths = np.linalg.norm(columns, axis=0)
    return columns / lengths, lengths


def _shared(header: SeriesHeader, slope: float, brightest: float) -> Any:
    axes, (x, y, z) = _directions(header)
    low, high = header.window or (0.0, brightest or 1.0)
    whole = _item(CodeValue="38266002", CodingSchemeDesignator="SCT", CodeMeaning="Entire body")
    return _item(
        PixelMeasuresSequence=[
            _item(PixelSpacing=[_decimal(y), _decimal(x)], SliceThickness=_decimal(z), SpacingBetweenSlices=_decimal(z))
        ],
        PlaneOrientationSequence=[
            _item(ImageOrientationPatient=[_decimal(each) for each in (*axes[:, 0], *axes[:, 1])])
        ],
        FrameAnatomySequence=[_item(FrameLaterality="U", AnatomicRegionSequence=[whole])],
        MRImageFrameTypeSequence=[_item(FrameType=_TYPE, **_common())],
        PixelValueTransformationSequence=[_item(RescaleIntercept="0", RescaleSlope=f"{slope:.9e}", RescaleType="US")],
        FrameVOILUTSequence=[_item(WindowCenter=_decimal((low + high) / 2), WindowWidth=_decimal(high - low))],
    )


def _frames_of(header: SeriesHeader) -> Iterator[Any]:
    assert header.affine is not None, "refused without"
    times, slices, *_ = header.shape
    for time in range(times):
        for place in range(slices):
            corner = header.affine @ np.array([0, 0, place, 1.0])
            position = [_decimal(-corner[0]), _decimal(-corner[1]), _decimal(corner[2])]
            yield _item(
                FrameContentSequence=[
                    _item(
                        StackID="1",
                        InStackPositionNumber=place + 1,
                        TemporalPositionIndex=time + 1,
                        DimensionIndexValues=[place + 1, time + 1],
                    )
                ],
                PlanePositionSequence=[_item(ImagePositionPatient=position)],
            )


def _decimal(value: float) -> str:
    """A decimal string of at most 16 characters."""
    return f"{value + 0.0:.9g}"
