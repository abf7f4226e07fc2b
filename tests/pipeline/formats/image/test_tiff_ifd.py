"""TIFF's directories, of bytes made here: each bound at the last value that is allowed and the first that is not."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import tifffile

from pipeline.formats.image.tiff import ifd
from pipeline.formats.image.tiff.ifd import Directory, Encoding, Tag, read_directories
from pipeline.storage.positional import PositionalFile
from tests.pipeline.formats.image.contract import input_error

CLASSIC, BIG = Encoding("<", big=False), Encoding("<", big=True)
ENCODINGS = [Encoding(order, big=big) for order in "<>" for big in (False, True)]
# Field types of whole numbers without sign, and how struct spells them; bytes of a value of the others, and of all.
WHOLE = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
OTHERS = {2: 1, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 17: 8}
WIDTHS = OTHERS | {kind: struct.calcsize(code) for kind, code in WHOLE.items()}
Entry = tuple[int, int, int, bytes]  # tag, field type, count, values
WIDTH = (Tag.IMAGE_WIDTH, 3, 1, b"\x07\x00")


def made(pages: Sequence[Sequence[Entry]], encoding: Encoding = CLASSIC, after_last: int | None = None) -> bytes:
    """A file of these directories, one behind the other, each before those of its values that do not fit into it.

    after_last : index of the page to which the last one's link leads; None: to no other
    """

    def pack(codes: str, *values: int | bytes) -> bytes:
        return struct.pack(encoding.order + codes, *values)

    offset, room, count = ("Q", 8, "Q") if encoding.big else ("I", 4, "H")
    order = b"MM" if encoding.order == ">" else b"II"
    start = pack("2sHHH", order, 43, 8, 0) if encoding.big else pack("2sH", order, 42)
    offsets, blocks = [len(start) + room], []
    for entries in pages:
        fields, behind = pack(count, len(entries)), b""
        end = offsets[-1] + len(fields) + len(entries) * (4 + 2 * room) + room
        for tag, kind, values, content in entries:
            inside = len(content) <= room
            value = content if inside else pack(offset, end + len(behind))
            behind += b"" if inside else content
            fields += pack(f"HH{offset}{room}s", tag, kind, values, value)
        blocks.append((fields, behind))
        offsets.append(end + len(behind))
    links = [*offsets[1:-1], 0 if after_last is None else offsets[after_last]]
    body = (fields + pack(offset, link) + behind for (fields, behind), link in zip(blocks, links, strict=True))
    return start + pack(offset, offsets[0]) + b"".join(body)


def read(path: Path, data: bytes) -> list[Directory]:
    path.write_bytes(data)
    return read_directories(PositionalFile(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.tif"


# The chain


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pages_in_the_order_of_their_links(path: Path, encoding: Encoding) -> None:
    width = struct.Struct(encoding.order + "I")
    found = read(path, made([[(Tag.IMAGE_WIDTH, 4, 1, width.pack(70 + page))] for page in range(3)], encoding))
    assert [(page.index, page.number(Tag.IMAGE_WIDTH)) for page in found] == [(0, 70), (1, 71), (2, 72)]
    assert {page.encoding for page in found} == {encoding}


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_a_link_back_is_refused(path: Path, earlier: int) -> None:
    with input_error(path, f"page 3: its directory at byte {8 + 18 * earlier} is that of an earlier page: a loop"):
        read(path, made([[WIDTH]] * 3, after_last=earlier))


def test_as_many_pages_as_allowed_and_one_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ifd, "MAX_PAGES", 3)
    assert len(read(path, made([[WIDTH]] * 3))) == 3
    with input_error(path, "more than 3 pages; split the file"):
        read(path, made([[WIDTH]] * 4))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_directory_may_end_with_the_file_and_not_behind_it(path: Path, encoding: Encoding) -> None:
    data, head = made([[WIDTH]], encoding), 8 + 8 * encoding.big
    assert len(read(path, data)) == 1
    with input_error(path, f"page 0: its directory is cut off at byte {len(data) - 1};"):
        read(path, data[:-1])
    with input_error(path, f"page 0: its directory is cut off at byte {head + encoding.entry_count.size};"):
        read(path, data[: head + encoding.entry_count.size])
    short = head + encoding.entry_count.size - 1
    with input_error(path, f"page 0: its directory lies at byte {head}, but the file ends at {short};"):
        read(path, data[:short])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("count", [85, 4096])
def test_a_directory_longer_than_one_read(path: Path, encoding: Encoding, count: int) -> None:
    width = (Tag.IMAGE_WIDTH, 1, 1, b"\x09")
    data = made([[(1000, 1, 1, b"\0")] * (count - 1) + [width]] * 2, encoding)
    assert [page.number(Tag.IMAGE_WIDTH) for page in read(path, data)] == [9, 9]
    with input_error(path, f"page 1: its directory is cut off at byte {len(data) - 1:,};"):
        read(path, data[:-1])


@pytest.mark.parametrize("count", [0, 4097])
def test_directories_of_no_tags_or_too_many(path: Path, count: int) -> None:
    with input_error(path, f"page 0: its directory declares {count:,} tags; the file is damaged"):
        read(path, made([[WIDTH] * count]))


def test_of_a_tag_that_is_there_twice_the_first_counts(path: Path) -> None:
    (page,) = read(path, made([[WIDTH, (Tag.IMAGE_WIDTH, 3, 1, b"\x08\x00")]]))
    assert page.number(Tag.IMAGE_WIDTH) == 7


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "not a TIFF: it begins with b'';"),
        (b"IM*\0\x08\0\0\0", "not a TIFF: it begins with b'IM*\\x00';"),
        (b"II*\0\x08\0\0", "not a TIFF: it begins with b'II*\\x00';"),
        (b"II*\0\0\0\0\0", "a TIFF without any page; its writer did not finish"),
        (b"II+\0\x08\0\0\0" + bytes(8), "a TIFF without any page; its writer did not finish"),
        (b"II+\0\x08\0\0\0" + bytes(7), "TIFF version 43 is neither"),
        (b"II+\0\x04\0\0\0" + bytes(8), "TIFF version 43 is neither"),
        (b"MM\0+\0\x08\0\x01" + bytes(8), "TIFF version 43 is neither"),
        (b"MM\0,\0\x08\0\0" + bytes(8), "TIFF version 44 is neither"),
    ],
)
def test_what_a_file_may_begin_with(path: Path, start: bytes, words: str) -> None:
    with input_error(path, words):
        read(path, start)


# The tags


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_numbers_of_every_type(path: Path, encoding: Encoding, kind: int, count: int) -> None:
    """Within the directory, or at its offset: up to the last byte of the file."""
    code = encoding.order + WHOLE[kind]
    values = [(1 << 8 * struct.calcsize(code) - 1) - 1 - number for number in range(count)]
    tag = Tag.STRIP_OFFSETS
    data = made([[(tag, kind, count, b"".join(struct.pack(code, value) for value in values))]], encoding)
    (page,) = read(path, data)
    assert tag in page
    assert page.number(tag) == page.number(tag, 5) == values[0]
    assert [page.numbers(tag, wanted).tolist() for wanted in (0, 1, count)] == [[], values[:1], values]
    assert page.all_numbers(tag, count - 1) == tuple(values[:-1])
    assert page.all_numbers(tag, count + 1) == tuple(values)
    with input_error(path, "page 0, tag StripOffsets:", f"but {count + 1} are needed; export the file again"):
        page.numbers(tag, count + 1)
    if count * struct.calcsize(code) > encoding.offset.size:
        (page,) = read(path, data[:-1])
        end = f"to {len(data):,}, but the file ends at {len(data) - 1:,}; the file is truncated or damaged"
        with input_error(path, "page 0, tag StripOffsets:", end):
            page.numbers(tag, 1)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_types_are_no_whole_numbers(path: Path, kind: int) -> None:
    (page,) = read(path, made([[(Tag.IMAGE_WIDTH, kind, 1, bytes(OTHERS[kind]))]]))
    with input_error(path, f"tag ImageWidth: has field type {kind} where whole numbers belong"):
        page.number(Tag.IMAGE_WIDTH)


@pytest.mark.parametrize("encoding", [CLASSIC, BIG])
def test_numbers_beyond_any_file(path: Path, encoding: Encoding) -> None:
    values = struct.pack("<QQ", 1, 1 << 63)
    (page,) = read(path, made([[(Tag.TILE_OFFSETS, 16, 2, values)]], encoding))
    with input_error(path, f"tag TileOffsets: holds {1 << 63}, beyond any file"):
        page.numbers(Tag.TILE_OFFSETS, 2)
    assert page.numbers(Tag.TILE_OFFSETS, 1).tolist() == [1]


def test_tags_that_are_missing(path: Path) -> None:
    (page,) = read(path, made([[WIDTH]]))
    assert Tag.SOFTWARE not in page
    assert page.number(Tag.SAMPLES_PER_PIXEL, 1) == 1
    assert page.number(Tag.SAMPLES_PER_PIXEL, 0) == 0
    assert page.all_numbers(Tag.EXTRA_SAMPLES, 3) == ()
    assert (page.blob(Tag.ICC_PROFILE), page.text(Tag.IMAGE_DESCRIPTION), page.rational(Tag.X_RESOLUTION)) == (
        b"",
        "",
        None,
    )
    for asked in (lambda: page.number(Tag.IMAGE_LENGTH), lambda: page.numbers(Tag.IMAGE_LENGTH, 1)):
        with input_error(path, "page 0, tag ImageLength: is missing; the file is damaged"):
            asked()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_fractions(path: Path, encoding: Encoding) -> None:
    fraction = struct.pack(encoding.order + "II", 300, 7)
    entries = [
        (Tag.X_RESOLUTION, 5, 1, fraction),
        (Tag.Y_RESOLUTION, 5, 2, fraction * 2),
        (Tag.SOFTWARE, 10, 1, fraction),
    ]
    (page,) = read(path, made([entries], encoding))
    assert [page.rational(tag) for tag, *_ in entries] == [(300, 7), None, None]


@pytest.mark.parametrize("encoding", [CLASSIC, BIG])
@pytest.mark.parametrize(("kind", "width"), [*WIDTHS.items(), (99, 1)])
def test_bytes_of_every_type(path: Path, encoding: Encoding, kind: int, width: int) -> None:
    for count in (1, 3, 4, 5, 8, 9):
        content = bytes(range(1, count * width + 1))
        (page,) = read(path, made([[(Tag.ICC_PROFILE, kind, count, content)]], encoding))
        assert page.blob(Tag.ICC_PROFILE) == content


def test_text(path: Path) -> None:
    (page,) = read(path, made([[(Tag.IMAGE_DESCRIPTION, 2, 12, b" 5 \xc2\xb5m\xff \0junk"[:12])]]))
    assert page.text(Tag.IMAGE_DESCRIPTION) == "5 µm\N{REPLACEMENT CHARACTER}"


def test_as_much_text_as_allowed_and_one_byte_more(path: Path) -> None:
    for nbytes in (1 << 26, (1 << 26) + 1):
        path.write_bytes(made([[(Tag.JPEG_TABLES, 7, nbytes, b"12345")]]))
        os.truncate(path, 26 + nbytes)
        (page,) = read_directories(PositionalFile(path))
        if nbytes == 1 << 26:
            assert len(page.blob(Tag.JPEG_TABLES)) == nbytes
    with input_error(path, "tag JPEGTables: declares 67,108,865 bytes, more than 67,108,864; remove the tag"):
        page.blob(Tag.JPEG_TABLES)


def test_a_file_that_shrinks_while_it_is_read(path: Path) -> None:
    (page,) = read(path, made([[(Tag.STRIP_OFFSETS, 4, 2, bytes(range(8)))]]))
    os.truncate(path, 26 + 7)
    assert page.numbers(Tag.STRIP_OFFSETS, 1).tolist() == [0x03020100]
    with input_error(path, "tag StripOffsets: its values are gone; the file shrank"):
        page.numbers(Tag.STRIP_OFFSETS, 2)


def test_tags_have_the_numbers_and_names_of_the_standard() -> None:
    """tifffile has another name for one of them alone."""
    names = {tag: tag.title.replace("ICCProfile", "InterColorProfile") for tag in Tag}
    assert {tifffile.TIFF.TAGS[name]: name for name in names.values()} == names
