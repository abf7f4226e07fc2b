"""Every field of every kind of input in every kind of output: files written and read by other people's libraries.

A field is either in the result, as another library reads it, or it is named before the run; none is made up.
Those libraries are imported where they are used: every process of a test run would import them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image, ImageCms, PngImagePlugin

from pipeline.formats import image as images
from pipeline.formats.image.base import Region
from pipeline.formats.image.metadata import imagej
from pipeline.workloads.common.crop import RegionParameters
from tests.images import read_image

SIZES = {"T": 2, "C": 3, "Z": 5, "Y": 13, "X": 17, "S": 3}
METRES: dict[Any, float] = {
    2: 0.0254,
    "in": 0.0254,
    "inch": 0.0254,
    3: 0.01,
    "cm": 0.01,
    "centimeter": 0.01,
    "m": 1.0,
    "meter": 1.0,
    "µm": 1e-6,
    "micron": 1e-6,
    "micrometer": 1e-6,
    "nm": 1e-9,
    "nanometer": 1e-9,
}
NAMES, COLOURS = ("DAPI", "007", 'a<b & "c"'), ("0000FF", "00FF00", "FF8000")
STEPS = {"Z": 0.7, "Y": 0.3, "X": 0.25}  # micrometres
INTERVAL_S = 2.5
DATE = datetime(2024, 2, 29, 13, 7, 11)
TEXT = "Leaf, 63×; section 7\nfixed < 2 h & stained"
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
TAGS = {315: "A. Person", 33432: "CC0"}
OME = "Instrument, ObjectiveSettings, Plane, EmissionWavelength of the OME-XML"
MARKS = "ROI, Overlays, Properties of ImageJ"
PNG_TEXTS = {
    "Title": "Leaf 7", "Description": "Leaf, 63×; section 7\nfixed < 2 h & stained", "Author": "A. Person",
    "Copyright": "CC0", "Creation Time": "Thu, 29 Feb 2024 13:07:11", "Comment": "seen twice", "Warning": "stained",
    "Software": "a camera",
}  # fmt: skip
IMAGEJ_MARKS = {"ROI": b"Iout selection", "Overlays": [b"Iout one", b"Iout two"], "Properties": {"stain": "H&E"}}
RANGES = ((10.0, 900.5), (0.0, 40_000.0), (7.0, 8.0))
TITLE = "Leaf 7"
XMP = "<x:xmpmeta xmlns:x='adobe:ns:meta/'><!-- 63× --></x:xmpmeta>".encode()

Fields = dict[str, Any]
Told = tuple[np.ndarray, Fields]  # the samples in the order T, C, Z, Y, X, S of the axes, and the fields


def samples_of(axes: str) -> np.ndarray:
    shape = [SIZES[letter] for letter in axes]
    high, dtype = (256, np.uint8) if "S" in axes else (60_000, np.uint16)
    return np.random.default_rng(len(axes)).integers(1, high, shape, dtype=dtype)


def sized(axes: str) -> Fields:
    """The sizes, names and colours of `STEPS` and so on, as far as the axes have them."""
    found: Fields = {"pixel size": [STEPS["Y"] * 1e-6, STEPS["X"] * 1e-6]}
    found |= {"Z step": STEPS["Z"] * 1e-6} if "Z" in axes else {}
    found |= {"time increment": INTERVAL_S} if "T" in axes else {}
    return found | ({"channel names": NAMES, "channel colours": COLOURS} if "C" in axes else {})


# Inputs, each written by another library.


def by_ome(path: Path, axes: str) -> Fields:
    """A microscope's file, with an objective, wavelengths and the times of planes."""
    import ome_types.model as ome

    counts = {letter: SIZES[letter] if letter in axes else 1 for letter in "TCZ"}
    colours = COLOURS[: counts["C"]]
    channels = [
        ome.Channel(name=name, color=f"#{colour}", emission_wavelength=450 + n, samples_per_pixel=1)
        for n, (name, colour) in enumerate(zip(NAMES, colours, strict=False))
    ]
    if "S" in axes:
        channels = [ome.Channel(samples_per_pixel=3, emission_wavelength=450)]
    if "C" not in axes and "S" not in axes:
        channels = [ome.Channel(emission_wavelength=450)]
    planes = [
        ome.Plane(the_t=t, the_c=c, the_z=z, delta_t=10.0 * t + z, position_x=4.5)
        for t in range(counts["T"])
        for c in range(counts["C"])
        for z in range(counts["Z"])
    ]
    pixels = ome.Pixels(
        dimension_order="XYZCT", type="uint8" if "S" in axes else "uint16", size_x=17, size_y=13,
        size_z=counts["Z"], size_t=counts["T"], size_c=3 if "S" in axes else counts["C"],
        physical_size_x=250, physical_size_x_unit="nm", physical_size_y=0.3, physical_size_z=0.7,
        time_increment=2500, time_increment_unit="ms", channels=channels, planes=planes,
        tiff_data_blocks=[ome.TiffData(plane_count=len(planes))],
    )  # fmt: skip
    objective = ome.Objective(id="Objective:1", lens_na=1.4, nominal_magnification=63)
    image = ome.Image(
        id="Image:0", name=TITLE, pixels=pixels, description=TEXT, acquisition_date=DATE,
        objective_settings=ome.ObjectiveSettings(id="Objective:1", refractive_index=1.515),
        instrument_ref=ome.InstrumentRef(id="Instrument:0"),
    )  # fmt: skip
    known = ome.OME(instruments=[ome.Instrument(id="Instrument:0", objectives=[objective])], images=[image])
    tifffile.imwrite(
        path, samples_of(axes), description=known.to_xml().encode(), metadata=None,
        photometric="rgb" if "S" in axes else "minisblack",
        extratags=[(tag, 2, 0, text, True) for tag, text in TAGS.items()],
    )  # fmt: skip
    wavelengths = tuple(450.0 + n for n in range(len(channels)))
    return sized(axes) | {
        "image name": TITLE, "description": TEXT, "acquisition date": DATE, "Artist, Copyright": TAGS,
        OME: (1.4, 63.0, 1.515, wavelengths, [(*divmod(n, counts["Z"]), 4.5) for n in range(len(planes))]),
    }  # fmt: skip


def by_imagej(path: Path, axes: str) -> Fields:
    tables = [np.outer(list(bytes.fromhex(each)), np.arange(256) / 255).round().astype(np.uint8) for each in COLOURS]
    known: dict[str, Any] = {"unit": "micron", "spacing": STEPS["Z"], "finterval": INTERVAL_S, "Info": TEXT}
    known |= IMAGEJ_MARKS
    labels: tuple[str, ...] = ()
    if "C" in axes:
        known |= {"LUTs": tables, "Labels": NAMES * (SIZES["T"] * SIZES["Z"] if "T" in axes else 1)}
        known |= {"Ranges": [end for ends in RANGES for end in ends]}
    elif "S" not in axes:
        known |= {"min": RANGES[0][0], "max": RANGES[0][1]}
        labels = tuple(f"slice {n}" for n in range(SIZES["Z"])) if "Z" in axes else ()
        known |= {"Labels": labels} if labels else {}
    pages = "".join(letter for letter in "TZC" if letter in axes) + axes[axes.index("Y") :]
    tifffile.imwrite(
        path, samples_of(axes).transpose([axes.index(letter) for letter in pages]), imagej=True,
        resolution=(1 / STEPS["X"], 1 / STEPS["Y"]), byteorder=">", metadata={"axes": pages, **known},
    )  # fmt: skip
    shown = list(RANGES if "C" in axes else RANGES[:1])
    found = sized(axes) | {"description": TEXT, MARKS: IMAGEJ_MARKS, "display settings": shown}
    return found | ({"labels of planes": labels} if labels else {})


def by_zarr(path: Path, axes: str, version: str) -> Fields:
    units, kinds = {"T": "second"} | dict.fromkeys("ZYX", "micrometer"), {"T": "time", "C": "channel"}
    steps, first = STEPS | {"T": INTERVAL_S}, {"Y": 7.5, "X": -2.25}
    stated = [
        {"name": each.lower(), "type": kinds.get(each, "space")} | ({"unit": units[each]} if each in units else {})
        for each in axes
    ]
    placed = [
        {"type": "scale", "scale": [steps.get(letter, 1.0) for letter in axes]},
        {"type": "translation", "translation": [first.get(letter, 0.0) for letter in axes]},
    ]
    image: Any = {"name": TITLE, "axes": stated, "datasets": [{"path": "s0", "coordinateTransformations": placed}]}
    window = {"min": 0, "max": 65535, "start": 10, "end": 900}
    omero = {"channels": [{"label": n, "color": c, "window": window} for n, c in zip(NAMES, COLOURS, strict=True)]}
    attributes: dict[str, Any] = {"multiscales": [image]} | ({"omero": omero} if "C" in axes else {})
    if version == "0.4":
        image["version"] = "0.4"
        group = zarr.create_group(str(path), zarr_format=2, attributes=attributes)
    else:
        group = zarr.create_group(str(path), attributes={"ome": {"version": "0.5", **attributes}})
    samples = samples_of(axes)
    group.create_array("s0", shape=samples.shape, chunks=(*(1,) * (len(axes) - 2), 13, 17), dtype="uint16")[...] = (
        samples
    )
    display = {"display settings": [(10, 900)] * 3} if "C" in axes else {}
    return sized(axes) | {"image name": TITLE, "position": [first[letter] * 1e-6 for letter in "YX"]} | display


def by_plain_tiff(path: Path, axes: str) -> Fields:
    with tifffile.TiffWriter(path) as file:
        for n, plane in enumerate(samples_of(axes) if "Z" in axes else [samples_of(axes)]):
            extra: list[Any] = [(tag, 2, 0, text, True) for tag, text in TAGS.items()] if n == 0 else []
            extra += [(700, 1, len(XMP), XMP, True)] if n == 0 else []
            file.write(
                plane, photometric="rgb" if "S" in axes else "minisblack", metadata=None, contiguous=False,
                resolution=(300, 150), resolutionunit="INCH", iccprofile=PROFILE, datetime=DATE,
                description=TEXT.encode() if n == 0 else None, extratags=[*extra, (274, 3, 1, 3, True)],
            )  # fmt: skip
    return {
        "pixel size": [0.0254 / 150, 0.0254 / 300], "description": TEXT, "acquisition date": DATE,
        "Artist, Copyright": TAGS, "colour profile": PROFILE, "orientation": 3, "XMP": XMP,
    }  # fmt: skip


def by_tifffile(path: Path, axes: str) -> Fields:
    """tifffile's own kind, whose JSON names the axes."""
    tifffile.imwrite(
        path, samples_of(axes), photometric="rgb" if "S" in axes else "minisblack", metadata={"axes": axes},
        resolution=(40_000, 1e6 / 30), resolutionunit="CENTIMETER", datetime=DATE,
    )  # fmt: skip
    return {"pixel size": [0.3e-6, 0.25e-6], "acquisition date": DATE}


def by_rasterio(path: Path, axes: str) -> Fields:
    import rasterio
    from rasterio.transform import from_origin

    samples, place = samples_of(axes), from_origin(500_000, 4_600_000, 10, 20)
    count = SIZES["S"] if "S" in axes else 1
    with rasterio.open(
        path, "w", driver="GTiff", width=17, height=13, count=count, dtype=samples.dtype, crs="EPSG:32633",
        transform=place, nodata=7, interleave="pixel", photometric="RGB" if count == 3 else "MINISBLACK",
    ) as file:  # fmt: skip
        file.write(samples.reshape(13, 17, count).transpose(2, 0, 1))
        file.update_tags(TIFFTAG_DATETIME=f"{DATE:%Y:%m:%d %H:%M:%S}", TIFFTAG_IMAGEDESCRIPTION="Fields in spring")
        file.update_tags(TIFFTAG_ARTIST=TAGS[315], TIFFTAG_COPYRIGHT=TAGS[33432])
    return {
        "georeference": (place, "EPSG:32633"), "nodata value": 7, "acquisition date": DATE,
        "description": "Fields in spring", "Artist, Copyright": TAGS,
    }  # fmt: skip


def by_pillow(path: Path, axes: str) -> Fields:
    texts = PngImagePlugin.PngInfo()
    for keyword, text in PNG_TEXTS.items():
        texts.add_itxt(keyword, text) if "\n" in text else texts.add_text(keyword, text, zip="Comment" in keyword)
    Image.fromarray(samples_of(axes)).save(path, dpi=(300, 150), icc_profile=PROFILE, pnginfo=texts)
    return {
        "pixel size": [0.0254 / 150, 0.0254 / 300], "colour profile": PROFILE, "image name": TITLE,
        "description": TEXT, "acquisition date": DATE, "Artist, Copyright": TAGS,
        "Comment, Warning of the PNG": ("seen twice", "stained"),
    }  # fmt: skip


INPUTS: dict[str, tuple[Callable[[Path, str], Fields], list[str]]] = {
    "in.ome.tif": (by_ome, ["YX", "YXS", "CYX", "ZYX", "TCZYX"]),
    "imagej.tif": (by_imagej, ["YX", "CYX", "ZYX", "TCZYX"]),
    "v04.zarr": (lambda path, axes: by_zarr(path, axes, "0.4"), ["YX", "CYX", "TCZYX"]),
    "v05.zarr": (lambda path, axes: by_zarr(path, axes, "0.5"), ["YX", "ZYX", "TCZYX"]),
    "plain.tif": (by_plain_tiff, ["YX", "YXS", "ZYX"]),
    "shaped.tif": (by_tifffile, ["YX", "YXS", "TZYX"]),
    "geo.tif": (by_rasterio, ["YX", "YXS"]),
    "photo.png": (by_pillow, ["YX", "YXS"]),
}


# Outputs, each read by another library.


def becomes_ome(output: str, source: str, axes: str) -> bool:
    more = source == "in.ome.tif" or ("Z" in axes and source == "v05.zarr")
    return output.endswith(".ome.tif") or more or (source != "imagej.tif" and bool({"T", "C"} & set(axes)))


def told_by_tiff(path: Path, source: str, axes: str) -> Told:
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        stored = file.series[0].axes.replace("I", "Z")  # pages without a description
        samples = file.asarray()
        tags = {tag.code: tag.value for tag in page.tags}
        imagej, is_ome = file.imagej_metadata, file.is_ome
        assert page.photometric == (2 if "S" in axes else 1)
        assert not page.extrasamples
    order = [stored.index(letter) for letter in axes if letter in stored]
    assert len(order) == samples.ndim, (stored, axes)
    fields: Fields = {}
    if 296 in tags and tags[296] != 1:
        size = [tags[tag][1] / tags[tag][0] * METRES[int(tags[296])] for tag in (283, 282)]
        fields["pixel size"] = size
    if 306 in tags:
        fields["acquisition date"] = datetime.strptime(tags[306], "%Y:%m:%d %H:%M:%S")
    fields |= {"Artist, Copyright": {tag: tags[tag] for tag in TAGS if tag in tags}} if TAGS.keys() & tags else {}
    fields |= {"colour profile": tags[34675]} if 34675 in tags else {}
    fields |= {"XMP": tags[700]} if 700 in tags else {}
    fields |= {"orientation": tags[274]} if tags.get(274, 1) != 1 else {}
    if 34735 in tags:
        import rasterio

        with rasterio.open(path) as raster:
            fields |= {"georeference": (raster.transform, str(raster.crs)), "nodata value": raster.nodata}
    assert is_ome == becomes_ome(path.name, source, axes)
    if is_ome:
        fields |= told_by_ome_types(path, fields)
    elif imagej is not None:
        fields |= told_by_imagej_description(imagej, tags)
    elif 270 in tags:
        fields["description"] = tags[270]
    return samples.transpose(order), fields


def told_by_ome_types(path: Path, of_tags: Fields) -> Fields:
    import ome_types

    known = ome_types.from_tiff(path, validate=False)
    (image,) = known.images
    pixels, fields = image.pixels, Fields()
    if pixels.physical_size_x is not None:
        sizes = [pixels.physical_size_y * METRES[pixels.physical_size_y_unit.value],
                 pixels.physical_size_x * METRES[pixels.physical_size_x_unit.value]]  # fmt: skip
        assert of_tags.get("pixel size", sizes) == pytest.approx(sizes, rel=1e-6)
        fields["pixel size"] = sizes
    if pixels.physical_size_z is not None and pixels.size_z > 1:
        fields["Z step"] = pixels.physical_size_z * METRES[pixels.physical_size_z_unit.value]
    if pixels.time_increment is not None and pixels.size_t > 1:
        fields["time increment"] = pixels.time_increment * {"ms": 1e-3, "s": 1}[pixels.time_increment_unit.value]
    if any(channel.name for channel in pixels.channels):
        fields["channel names"] = tuple(channel.name for channel in pixels.channels)
    if "Color=" in known.to_xml() and len(pixels.channels) > 1:
        fields["channel colours"] = tuple(
            "".join(f"{part:02X}" for part in channel.color.as_rgb_tuple(alpha=False)) for channel in pixels.channels
        )
    fields |= {"description": image.description} if image.description is not None else {}
    fields |= {"acquisition date": image.acquisition_date} if image.acquisition_date is not None else {}
    if known.instruments:
        (objective,), setting = known.instruments[0].objectives, image.objective_settings
        assert setting.id == objective.id
        assert image.instrument_ref.id == known.instruments[0].id
        order = sorted((each.the_t, each.the_c, each.the_z) for each in pixels.planes)
        assert order == list(np.ndindex(pixels.size_t, len(pixels.channels), pixels.size_z))
        planes = [
            (each.the_t * len(pixels.channels) + each.the_c, each.the_z, each.position_x) for each in pixels.planes
        ]
        assert all(each.delta_t == 10 * each.the_t + each.the_z for each in pixels.planes)
        wavelengths = tuple(channel.emission_wavelength for channel in pixels.channels)
        lens = objective.lens_na, objective.nominal_magnification, setting.refractive_index
        fields[OME] = (*lens, wavelengths, planes)
    return fields | ({} if image.name == "out" else {"image name": image.name})


def told_by_imagej_description(said: Fields, tags: dict[int, Any]) -> Fields:
    fields: Fields = {}
    if 282 in tags and said.get("unit"):
        fields["pixel size"] = [tags[tag][1] / tags[tag][0] * METRES[said["unit"]] for tag in (283, 282)]
    fields |= {"Z step": said["spacing"] * METRES[said["unit"]]} if said.get("slices", 1) > 1 else {}
    fields |= {"time increment": said["finterval"]} if said.get("frames", 1) > 1 else {}
    fields |= {"description": said["Info"]} if "Info" in said else {}
    if "LUTs" in said:
        assert said["mode"] == "composite"
        fields["channel colours"] = tuple("".join(f"{part:02X}" for part in table[:, 255]) for table in said["LUTs"])
    if "channels" in said:
        fields["channel names"] = tuple(said["Labels"][:3])
        assert tuple(said["Labels"]) == fields["channel names"] * (len(said["Labels"]) // 3)
        fields["display settings"] = list(zip(said["Ranges"][::2], said["Ranges"][1::2], strict=True))
        assert (said["min"], said["max"]) == fields["display settings"][0]
    else:
        fields |= {"labels of planes": tuple(said["Labels"])} if "Labels" in said else {}
        fields["display settings"] = [(said["min"], said["max"])]
    return fields | {MARKS: {key: said[key] for key in IMAGEJ_MARKS}}


def told_by_zarr(path: Path, source: str, axes: str) -> Told:
    import ome_zarr_models
    from ome_zarr_models.common.omero import Omero

    group = zarr.open_group(str(path), mode="r")
    known = ome_zarr_models.open_ome_zarr(group).ome_attributes
    (image,) = known.multiscales
    letters = "".join(axis.name.upper() for axis in image.axes)
    samples = group[image.datasets[0].path][...]
    placed = dict(zip(letters, image.datasets[0].coordinateTransformations[0].scale, strict=True))
    units = {axis.name.upper(): axis.unit for axis in image.axes}
    assert letters == "".join(letter for letter in "TCZYX" if letter in axes.replace("S", "C"))
    fields: Fields = {}
    if units["X"] is not None:
        fields["pixel size"] = [placed[letter] * METRES[units[letter]] for letter in "YX"]
    fields |= {"Z step": placed["Z"] * METRES[units["Z"]]} if units.get("Z") else {}
    if units.get("T"):
        fields["time increment"] = placed["T"] * {"second": 1, "millisecond": 1e-3}[units["T"]]
    first = image.datasets[0].coordinateTransformations[1:]
    if first:
        moved = dict(zip(letters, first[0].translation, strict=True))
        fields["position"] = [moved[letter] * METRES[units[letter]] for letter in "YX"]
    omero = group.attrs["ome"].get("omero")
    if omero is not None:
        described = Omero.model_validate(omero).channels
        if "C" in axes:
            fields["channel names"] = tuple(channel.label for channel in described)
            fields["channel colours"] = tuple(channel.color for channel in described)
        if source.endswith((".zarr", "imagej.tif")):
            fields["display settings"] = [(channel.window.start, channel.window.end) for channel in described]
            assert all((channel.window.min, channel.window.max) == (0, 65535) for channel in described)
    fields |= {} if image.name == "out" else {"image name": image.name}
    return (np.moveaxis(samples, 0, -1) if "S" in axes else samples), fields


def told_by_pillow(path: Path, source: str, axes: str) -> Told:
    with Image.open(path) as file:
        fields = {"colour profile": file.info["icc_profile"]} if "icc_profile" in file.info else {}
        if "dpi" in file.info:
            fields["pixel size"] = [0.0254 / each for each in reversed(file.info["dpi"])]
        texts = file.text  # type: ignore[attr-defined]
        assert "Software" not in texts
        fields |= {"image name": texts["Title"]} if "Title" in texts else {}
        fields |= {"description": texts["Description"]} if "Description" in texts else {}
        if "Author" in texts:
            fields["Artist, Copyright"] = {315: texts["Author"], 33432: texts["Copyright"]}
        if "Creation Time" in texts:
            stated = texts["Creation Time"]
            is_iso = "T" in stated[1:]
            fields["acquisition date"] = datetime.fromisoformat(stated) if is_iso else parsedate_to_datetime(stated)
        fields |= {"XMP": texts["XML:com.adobe.xmp"].encode()} if "XML:com.adobe.xmp" in texts else {}
        if "Comment" in texts:
            fields["Comment, Warning of the PNG"] = texts["Comment"], texts["Warning"]
        return np.array(file), fields


_OF_TIFF = {"Artist, Copyright", "georeference", "nodata value", "orientation", OME, MARKS, "labels of planes"}
_TEXTS = {"XMP", "description", "acquisition date", "colour profile", "Comment, Warning of the PNG"}
OUTPUTS: dict[str, tuple[Any, set[str]]] = {
    "out.ome.tif": (told_by_tiff, {"position", "display settings", MARKS, "labels of planes",
                                   "Comment, Warning of the PNG"}),
    "out.tif": (told_by_tiff, {"position", "display settings", "image name", "Comment, Warning of the PNG"}),
    "out.zarr": (told_by_zarr, _OF_TIFF | _TEXTS),
    "out.png": (told_by_pillow, (_OF_TIFF | {"position", "display settings"}) - {"Artist, Copyright"}),
    "out.npy": (lambda path, source, axes: (np.load(path), {}), _OF_TIFF | _TEXTS | {
                "pixel size", "Z step", "time increment", "position", "channel names", "channel colours",
                "display settings", "image name"}),
}  # fmt: skip


REFUSED = {  # by axes
    "out.png": ({"CYX", "ZYX", "TZYX", "TCZYX"}, "PNG holds one image of rows and columns"),
    "out.npy": ({"CYX", "TZYX", "TCZYX"}, "npy holds axes YX, YXS, ZYX, ZYXS, not"),
}


@pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")  # rasterio's use of affine
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("source", "axes"), [(name, axes) for name, (_, each) in INPUTS.items() for axes in each])
def test_every_field_is_in_the_result_or_named(tmp_path: Path, source: str, axes: str, output: str) -> None:
    from rasterio.errors import NotGeoreferencedWarning

    told_by, lost = OUTPUTS[output]
    stated = INPUTS[source][0](tmp_path / source, axes)
    with images.open_image(tmp_path / source) as reader:
        header = reader.header
    target = tmp_path / output
    refusal = images.format_for_output(target).refusal(header, target)
    refused, words = REFUSED.get(output, ((), ""))
    if axes in refused:
        assert refusal is not None
        assert words in refusal
        return
    assert refusal is None
    samples = read_image(tmp_path / source)
    np.testing.assert_array_equal(samples, samples_of(axes), strict=True)
    writer = images.create_image(target, header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    lost = lost & stated.keys()
    if output == "out.tif":  # OME-XML holds a name, ImageJ's tags hold what is shown
        lost = lost - ({"image name"} if becomes_ome(output, source, axes) else set())
        lost = lost - ({"display settings"} if source == "imagej.tif" else set())
    named = images.not_kept(header, target)
    assert set((named or "").split(", ")) == set(", ".join(lost).split(", "))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        found, fields = told_by(target, source, axes)
    np.testing.assert_array_equal(found, samples, strict=True)
    assert fields.keys() == stated.keys() - lost
    coarse = "png" in source + output  # which counts whole pixels in a metre
    for name, value in fields.items():
        expected = stated[name]
        if name in ("pixel size", "Z step", "time increment", "position"):
            expected = pytest.approx(expected, rel=1e-4 if coarse else 1e-7)
        assert value == expected
    if output in ("out.ome.tif", "out.zarr"):  # and back, in the same units
        with images.open_image(target) as reader:
            again = reader.header.calibration
        assert again.channels == header.calibration.channels
        for letter in set(axes) & header.calibration.steps.keys():
            assert again.steps[letter].unit == header.calibration.steps[letter].unit


def copied(source: Path, target: Path, crop: str | None = None) -> str | None:
    """Writes a part of an image; returns what the target does not keep."""
    with images.open_image(source) as reader:
        part = RegionParameters(crop=crop).part(reader, source)
        samples = np.empty(part.header.shape, part.header.dtype)
        part.read(Region.whole(samples.shape), samples)
        writer = images.create_image(target, part.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return images.not_kept(part.header, target)


def test_a_part_has_the_ome_xml_of_its_channels_and_planes(tmp_path: Path) -> None:
    import ome_types
    import ome_types.model as ome

    by_ome(tmp_path / "a.ome.tif", "TCZYX")
    whole = ome_types.from_tiff(tmp_path / "a.ome.tif")
    foreign = "<XMLAnnotation ID='Annotation:0'><Value><note xmlns=''>of no namespace</note></Value></XMLAnnotation>"
    notes = f"<StructuredAnnotations>{foreign}</StructuredAnnotations>"
    schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    whole.structured_annotations = ome_types.from_xml(f"<OME xmlns='{schema}'>{notes}</OME>").structured_annotations
    whole.rois = [ome.ROI(id="ROI:0", union=[ome.Point(x=1, y=2)])]
    whole.images[0].roi_refs = [ome.ROIRef(id="ROI:0")]
    tifffile.tiffcomment(tmp_path / "a.ome.tif", whole.to_xml().encode())
    lost = "position, ROI of the OME-XML"
    assert copied(tmp_path / "a.ome.tif", tmp_path / "b.ome.tif", "C=1:3,Z=2:5,T=1:2,X=3:11") == lost
    made = ome_types.from_tiff(tmp_path / "b.ome.tif")
    (image,) = made.images
    pixels = image.pixels
    assert (pixels.size_t, pixels.size_c, pixels.size_z, pixels.size_y, pixels.size_x) == (1, 2, 3, 13, 8)
    assert [(each.name, each.emission_wavelength) for each in pixels.channels] == [("007", 451), (NAMES[2], 452)]
    places = [(each.the_t, each.the_c, each.the_z) for each in pixels.planes]
    assert sorted(places) == list(np.ndindex(1, 2, 3))
    assert all(each.delta_t == 10 + 2 + each.the_z for each in pixels.planes)
    assert not made.rois
    assert not image.roi_refs
    assert made.instruments == whole.instruments
    assert made.structured_annotations == whole.structured_annotations
    assert copied(tmp_path / "a.ome.tif", tmp_path / "c.ome.tif") is None
    assert ome_types.from_tiff(tmp_path / "c.ome.tif").rois == whole.rois


def test_a_part_of_an_imagej_stack_has_its_labels_and_display_ranges(tmp_path: Path) -> None:
    labels = [f"t{t} z{z} c{c}" for t in range(2) for z in range(5) for c in range(3)]  # in ImageJ's order
    known = {"Labels": labels, "Ranges": [end for ends in RANGES for end in ends], **IMAGEJ_MARKS}
    pages = samples_of("TCZYX").transpose(0, 2, 1, 3, 4)
    tifffile.imwrite(tmp_path / "a.tif", pages, imagej=True, metadata={"axes": "TZCYX", **known})
    assert copied(tmp_path / "a.tif", tmp_path / "b.tif", "C=0:3:2,Z=1:3,T=1:2") == "ROI, Overlays of ImageJ"
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        said = file.imagej_metadata
    assert said["Labels"] == [f"t1 z{z} c{c}" for z in (1, 2) for c in (0, 2)]
    assert said["Ranges"] == (*RANGES[0], *RANGES[2])
    assert (said["min"], said["max"], said["Properties"]) == (*RANGES[0], IMAGEJ_MARKS["Properties"])
    assert not {"ROI", "Overlays"} & said.keys()  # they are at places in the whole image
    assert "labels of planes" in str(copied(tmp_path / "a.tif", tmp_path / "c.zarr"))


@pytest.mark.parametrize("source", ["a.tif", "a.zarr"])
def test_a_derivative_is_not_shown_as_its_input(tmp_path: Path, source: str) -> None:
    by_imagej(tmp_path / "a.tif", "CYX")
    copied(tmp_path / "a.tif", tmp_path / "a.zarr")
    with images.open_image(tmp_path / source) as reader:
        header = reader.header.of_other_values(np.dtype(np.float32))
    assert header.dtype == np.float32
    assert "display" not in str(images.not_kept(header, tmp_path / "b.npy"))
    images.create_image(tmp_path / "b.zarr", header).publish()
    shown = zarr.open_group(str(tmp_path / "b.zarr"), mode="r").attrs["ome"]["omero"]["channels"]
    assert [each["window"] for each in shown] == [{"min": 0, "max": 1, "start": 0, "end": 1}] * 3
    assert [each["label"] for each in shown] == list(NAMES)


@pytest.mark.parametrize("said", ["min=5\nmax=5\n", "min=nan\nmax=3\n", "min=low\nmax=3\n", "max=3\n"])
def test_a_display_range_that_shows_nothing_is_left_out(said: str) -> None:
    assert imagej.display_range(f"ImageJ=1.54\n{said}") == ()


def test_ome_xml_of_an_older_schema_is_rewritten_and_the_loss_named(tmp_path: Path) -> None:
    import ome_types

    by_ome(tmp_path / "a.ome.tif", "CYX")
    older = tifffile.tiffcomment(tmp_path / "a.ome.tif").replace("OME/2016-06", "OME/2015-01")
    tifffile.tiffcomment(tmp_path / "a.ome.tif", older.encode())
    assert copied(tmp_path / "a.ome.tif", tmp_path / "b.ome.tif") == OME
    made = ome_types.from_tiff(tmp_path / "b.ome.tif")
    assert not made.instruments
    assert made.images[0].description == TEXT
    assert [each.name for each in made.images[0].pixels.channels] == list(NAMES)


@pytest.mark.parametrize("text", ["µ in Latin-1".encode("latin-1"), "µ in UTF-8".encode()])
def test_text_of_any_usual_encoding(tmp_path: Path, text: bytes) -> None:
    date: Any = [(306, 2, 0, "    :  :  ", True)]
    tifffile.imwrite(tmp_path / "a.tif", samples_of("YX"), description=text, metadata=None, extratags=date)
    copied(tmp_path / "a.tif", tmp_path / "b.tif")
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert file.pages[0].description == f"µ{text.decode('latin-1')[text.index(b' ') :]}"
        assert 306 not in {tag.code for tag in file.pages[0].tags}
