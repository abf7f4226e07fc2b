"""OME-XML: the calibration in its Pixels element, written as the attributes that tifffile's OmeXml takes, and
everything else it states, which an OME-TIFF result keeps.

Source: OME schema 2016-06. Elements come from a standard XML parser: tifffile's `xml2dict` would turn names such as
007 into numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipeline.formats.image.metadata.calibration import Calibration, Channel, known_channels, known_step, steps_of
from pipeline.formats.image.metadata.units import kind_of, symbol_of, unit_named

_NO_UNIT = "reference frame"
_SCHEMA = "{http://www.openmicroscopy.org/Schemas/OME/2016-06}OME"
_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'
_SIZES = ("SizeX", "SizeY", "SizeZ", "SizeC", "SizeT")
# Elements and attributes that the calibration, the notes or the pages hold; LightPath is empty in most files.
_HELD = {"Image", "Description", "AcquisitionDate", "Pixels", "Channel", "TiffData", "LightPath"}
_HELD |= {"ID", "Name", "Color", "SamplesPerPixel"}
_PLACE = re.compile("[0-9]{1,9}")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def from_xml(root: Element, samples: int) -> Calibration:
    """`samples`: of a page, which OME counts as channels too."""
    pixels = _pixels(_image(root))
    found = {letter: _step(pixels, f"PhysicalSize{letter}", "µm") for letter in "ZYX"}
    channels = tuple(
        Channel(element.get("Name", "").strip(), _colour(element.get("Color")))
        for element in pixels.findall("{*}Channel")
    )
    try:
        count = max(int(pixels.get("SizeC", "1")) // samples, 1)
    except ValueError:
        count = 0
    return Calibration(
        steps_of(T=_step(pixels, "TimeIncrement", "s"), **found), channels=known_channels(channels, count)
    )


def holds(calibration: Calibration) -> set[str]:
    """The facts (`Calibration.facts`) that OME-XML holds of it."""
    kept = {"names", "colours"} | ({"plane", "depth"} if _all_written(calibration, "ZYX") else set())
    return kept | ({"time"} if _all_written(calibration, "T") else set())


def attributes(calibration: Calibration, axes: str, channels: int) -> dict[str, Any]:
    """Attributes of Pixels, and a list of those of each channel."""
    found: dict[str, Any] = {}
    for letter in "ZYX":
        step = calibration.steps.get(letter)
        if step is not None and letter in axes and _is_written(step.unit, letter):
            found[f"PhysicalSize{letter}"] = step.size
            found[f"PhysicalSize{letter}Unit"] = symbol_of(step.unit) if step.unit else _NO_UNIT
    interval = calibration.steps.get("T")
    if interval is not None and interval.unit is not None and _is_written(interval.unit, "T"):
        found |= {"TimeIncrement": interval.size, "TimeIncrementUnit": symbol_of(interval.unit)}
    if len(calibration.channels) == channels:
        described = calibration.channels
        each: dict[str, Any] = {}
        if any(channel.name for channel in described):
            each["Name"] = [text(channel.name) for channel in described]
        if all(channel.colour for channel in described):
            each["Color"] = [_signed(channel.colour) for channel in described if channel.colour]
        if each:
            found["Channel"] = each
    return found


def noted(root: Element) -> tuple[str, str, str]:
    """The image's name, its description and the date of acquisition; empty if they are not stated."""
    image = _image(root)
    described = image.findtext("{*}Description") or "", image.findtext("{*}AcquisitionDate") or ""
    return image.get("Name", "").strip(), *described


def text(words: str) -> str:
    """Words without the characters that XML lacks."""
    return _NOT_IN_XML.sub("", words)


def further(root: Element) -> list[str]:
    """The elements, and attributes of channels, that nothing but OME-XML holds."""
    image = _image(root)
    pixels = _pixels(image)
    channels = pixels.findall("{*}Channel")
    found = [_name(each) for place in (root, image, pixels, *channels) for each in place]
    found += [name for channel in channels for name in channel.attrib]
    return [name for name in dict.fromkeys(found) if name not in _HELD and not name.endswith("Ref")]


def cropped(xml: str, boxes: Mapping[str, range]) -> str:
    """OME-XML of a part of the image, with the samples kept along each axis; regions of interest are left out."""
    root = ElementTree.fromstring(xml)
    image = _image(root)
    pixels = _pixels(image)
    for parent, name in ((root, "ROI"), (image, "ROIRef")):
        for each in parent.findall(f"{{*}}{name}"):
            parent.remove(each)
    for letter, box in boxes.items():
        if letter in "XYZT":
            pixels.set(f"Size{letter}", str(len(box)))
        elif letter == "C":
            pixels.set("SizeC", str(len(box) * len(boxes.get("S", range(1)))))
            for number, channel in enumerate(pixels.findall("{*}Channel")):
                if number not in box:
                    pixels.remove(channel)
    for plane in pixels.findall("{*}Plane"):
        found = {letter: plane.get(f"The{letter}", "0").strip() for letter in boxes if letter in "ZCT"}
        places = {letter: int(place) if _PLACE.fullmatch(place) else -1 for letter, place in found.items()}
        if all(place in boxes[letter] for letter, place in places.items()):
            for letter, place in places.items():
                plane.set(f"The{letter}", str(boxes[letter].index(place)))
        else:
            pixels.remove(plane)
    return _written(root)


def is_current(xml: str) -> bool:
    """Whether OME-XML has the schema that is written here, so that a result can keep it."""
    return ElementTree.fromstring(xml).tag == _SCHEMA


def merged(xml: str, made: str) -> str:
    """An input's OME-XML, with the image as the new file's own, `made`, describes it; that alone if the input's is of
    an older schema or of other sizes."""
    root, own = ElementTree.fromstring(xml), ElementTree.fromstring(made)
    pixels, own_pixels = _pixels(_image(root)), _pixels(_image(own))
    if root.tag != _SCHEMA or any(pixels.get(size, "1") != own_pixels.get(size) for size in _SIZES):
        return made
    root.attrib.update(own.attrib)
    _image(root).attrib.update({"Name": _image(own).get("Name", "")})
    pixels.attrib = {**own_pixels.attrib, "ID": pixels.get("ID", "Pixels:0")}
    channels, own_channels = pixels.findall("{*}Channel"), own_pixels.findall("{*}Channel")
    if len(channels) == len(own_channels):
        for channel, stated in zip(channels, own_channels, strict=True):
            channel.attrib.update({name: value for name, value in stated.attrib.items() if name != "ID"})
    else:
        channels = own_channels
    others = [each for each in pixels if _name(each) not in ("Channel", "TiffData", "BinData", "MetadataOnly")]
    pixels[:] = [*channels, *own_pixels.findall("{*}TiffData"), *others]
    return _written(root)


def _image(root: Element) -> Element:
    """The one image, which `stack` has found."""
    image = root.find("{*}Image")
    assert image is not None, "the stack has one"
    return image


def _pixels(image: Element) -> Element:
    pixels = image.find("{*}Pixels")
    assert pixels is not None, "the stack has them"
    return pixels


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _written(root: Element) -> str:
    # Otherwise the elements would be called ns0:OME and so on, which many readers do not take.
    if root.tag.startswith("{"):
        ElementTree.register_namespace("", root.tag[1:].partition("}")[0])
        for parent in root.iter():
            for child in parent if parent.tag.startswith("{") else ():
                if not child.tag.startswith("{"):  # in annotations
                    child.set("xmlns", "")
    return _DECLARATION + ElementTree.tostring(root, encoding="unicode")


def _all_written(calibration: Calibration, letters: str) -> bool:
    return all(_is_written(calibration.steps[each].unit, each) for each in letters if each in calibration.steps)


def _is_written(unit: str | None, letter: str) -> bool:
    if letter == "T":
        return kind_of(unit) == "time"
    return unit is None or kind_of(unit) == "length"


def _step(pixels: Element, name: str, usual: str) -> Any:
    unit = pixels.get(f"{name}Unit", usual)
    return known_step(pixels.get(name), unit_named(unit))


def _colour(text: str | None) -> str | None:
    """RRGGBB of a signed number of 32 bits, red first, alpha last."""
    try:
        return None if text is None else f"{(int(text) & 0xFFFFFFFF) >> 8:06X}"
    except ValueError:
        return None


def _signed(colour: str) -> int:
    value = int(colour, 16) << 8 | 0xFF
    return value - (1 << 32) if value >= 1 << 31 else value
