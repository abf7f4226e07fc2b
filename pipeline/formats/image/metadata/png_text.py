"""The text chunks of a PNG: read as notes that other formats hold too, and written.

Source: https://www.w3.org/TR/png-3/, sections 11.3.3 (tEXt, zTXt, iTXt) and 11.3.3.1 (keywords).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime

from pipeline.formats.image.metadata.notes import Notes, PngText, date_of, text_of

KEPT = {"name", "description", "acquired", "png", "xmp", "Artist", "Copyright"}  # of `Notes.facts`
KINDS = (b"tEXt", b"zTXt", b"iTXt")
_TITLE, _DESCRIPTION, _COMMENT, _DATE = "Title", "Description", "Comment", "Creation Time"
_TAGS = {"Author": 315, "Copyright": 33432}
_XMP = "XML:com.adobe.xmp"
_SOFTWARE = "Software"  # is true of the input alone
_LONGEST_BYTES = 4 << 20  # of a text, decompressed


def read(chunks: Sequence[tuple[bytes, bytes]]) -> Notes:
    """`chunks`: kind and data of each. Texts that cannot be read are left out."""
    found, texts = [], dict[str, str]()
    for kind, data in chunks:
        keyword, text = data.partition(b"\0")[0].decode("latin-1"), _text(kind, data)
        if text is not None and keyword != _SOFTWARE:
            found.append(PngText(keyword, kind, data))
            texts.setdefault(keyword, text)
    description = _DESCRIPTION if _DESCRIPTION in texts else _COMMENT
    acquired = date_of(texts.get(_DATE, "")) or _date_of_mail(texts.get(_DATE, ""))
    held = {_TITLE, description, _XMP, *_TAGS} | ({_DATE} if acquired is not None else set())
    return Notes(
        name=texts.get(_TITLE, ""),
        description=texts.get(description, ""),
        acquired=acquired,
        tags={tag: texts[keyword].encode() + b"\0" for keyword, tag in _TAGS.items() if texts.get(keyword)},
        xmp=texts.get(_XMP, "").encode(),
        png=tuple(found),
        png_alone=tuple(dict.fromkeys(each.keyword for each in found if each.keyword not in held)),
    )


def written(notes: Notes) -> list[tuple[bytes, bytes]]:
    """Kind and data of the chunks: the input's if it is a PNG."""
    if notes.png:
        return [(each.kind, each.data) for each in notes.png]
    texts = {_TITLE: notes.name, _DESCRIPTION: notes.description}
    texts |= {keyword: text_of(notes.tags[tag]) for keyword, tag in _TAGS.items() if tag in notes.tags}
    texts |= {_XMP: text_of(notes.xmp)}
    texts |= {} if notes.acquired is None else {_DATE: notes.acquired.isoformat()}
    return [_chunk(keyword, text.replace("\0", "")) for keyword, text in texts.items() if text]


def _chunk(keyword: str, text: str) -> tuple[bytes, bytes]:
    if keyword != _XMP and text.isascii():
        return b"tEXt", keyword.encode() + b"\0" + text.encode()
    return b"iTXt", keyword.encode() + b"\0\0\0\0\0" + text.encode()


def _text(kind: bytes, data: bytes) -> str | None:
    """None if it is damaged, or too long."""
    body = data.partition(b"\0")[2]
    try:
        if kind == b"tEXt":
            return body.decode("latin-1")
        if kind == b"zTXt":
            return _inflated(body[1:]).decode("latin-1")
        is_compressed, text = body[:1] == b"\1", body[2:].split(b"\0", 2)[2]
        return (_inflated(text) if is_compressed else text).decode()
    except (zlib.error, ValueError, IndexError):
        return None


def _inflated(data: bytes) -> bytes:
    unpack = zlib.decompressobj()
    found = unpack.decompress(data, _LONGEST_BYTES)
    if not unpack.eof:
        raise ValueError("longer than any text, or cut short")
    return found


def _date_of_mail(text: str) -> datetime | None:
    """The date of a text in the form of RFC 1123, which PNG recommends."""
    try:
        return parsedate_to_datetime(text)
    except ValueError:
        return None
