"""Reading a gzip file by position."""

from __future__ import annotations

import gzip
import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.formats.image.volumes import inflated
from pipeline.formats.image.volumes.inflated import InflatedFile, content_of, start_of
from pipeline.storage.positional import PositionalFile

CONTENT = np.random.default_rng(3).integers(0, 9, 1_000_003).astype(np.uint8).tobytes()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflated, "_BLOCK_BYTES", 10_007)
    monkeypatch.setattr(inflated, "_PIECE_BYTES", 4099)


def read(file: PositionalFile, start: int, count: int) -> bytes:
    found = bytearray(count)
    file.read_at(start, memoryview(found))
    return bytes(found)


def members(*parts: bytes) -> bytes:
    return b"".join(map(gzip.compress, parts))


@pytest.mark.parametrize("cuts", [(), (500_000,), (10_007, 20_014, 999_999)])
def test_any_part_of_one_member_or_several(cuts: tuple[int, ...], tmp_path: Path) -> None:
    ends = [0, *cuts, len(CONTENT)]
    path = tmp_path / "a.gz"
    path.write_bytes(members(*(CONTENT[a:b] for a, b in itertools.pairwise(ends))))
    with_places = random.Random(1)
    places = [(start, with_places.randint(1, 40_000)) for start in with_places.sample(range(len(CONTENT)), 100)]
    file = content_of(PositionalFile(path), len(CONTENT))
    assert isinstance(file, InflatedFile)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda place: check(file, *place), places))
    file.close()


def check(file: PositionalFile, start: int, count: int) -> None:
    count = min(count, len(CONTENT) - start)
    assert read(file, start, count) == CONTENT[start : start + count]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    inflate = InflatedFile._inflate

    def counted(self: InflatedFile, number: int, memory: Any) -> Any:
        seen.append(number)
        return inflate(self, number, memory)

    monkeypatch.setattr(InflatedFile, "_inflate", counted)
    return seen


def test_every_block_is_inflated_once_while_there_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    (tmp_path / "a.gz").write_bytes(members(CONTENT))
    file = InflatedFile(PositionalFile(tmp_path / "a.gz"), len(CONTENT))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda start: check(file, start, 50_000), range(900_000, 0, -50_000)))
    assert seen == list(range(len(seen)))
    file.close()


def test_less_memory_costs_only_the_blocks_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    (tmp_path / "a.gz").write_bytes(members(CONTENT))
    file = InflatedFile(PositionalFile(tmp_path / "a.gz"), len(CONTENT))
    file._cache._least_bytes = 10_007
    file._cache._capacity_bytes = file._cache._useful_bytes = 20_014
    check(file, 0, len(CONTENT))
    blocks = len(seen)
    check(file, 500_000, 10)
    assert seen[blocks:] == [500_000 // 10_007]
    assert file._cache._held_bytes <= 20_014
    assert file.hold_at_most(1 << 40) <= 20_014 + blocks * (44 << 10)
    file.close()


@pytest.mark.parametrize("end", [30, 5000, -9, -1])
def test_a_file_cut_short(end: int, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(members(CONTENT)[:end])
    with PositionalFileOf(tmp_path / "a.gz") as opened, pytest.raises(InputError, match=r"a\.gz: truncated"):
        read(content_of(opened, len(CONTENT)), 0, len(CONTENT))


def test_a_wrong_checksum_and_damaged_bytes(tmp_path: Path) -> None:
    packed = bytearray(members(CONTENT))
    for place in (-6, len(packed) // 2):
        damaged = packed.copy()
        damaged[place] ^= 0xFF
        (tmp_path / "a.gz").write_bytes(damaged)
        with PositionalFileOf(tmp_path / "a.gz") as opened, pytest.raises(InputError, match=r"a\.gz: corrupt"):
            read(content_of(opened, len(CONTENT)), 0, len(CONTENT))
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + bytes(50))
    with PositionalFileOf(tmp_path / "a.gz") as opened, pytest.raises(InputError, match=r"a\.gz: corrupt"):
        start_of(opened, 100)


def test_the_start_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "a.gz").write_bytes(members(CONTENT[:5], CONTENT[5:]))
    (tmp_path / "b.gz").write_bytes(zlib.compress(CONTENT, wbits=31))
    with PositionalFileOf(tmp_path / "a") as opened:
        assert start_of(opened, 9000) == CONTENT[:9000]
        assert content_of(opened, 9000) is opened
    with PositionalFileOf(tmp_path / "b.gz") as opened:
        assert start_of(opened, 9000) == CONTENT[:9000]


class PositionalFileOf:
    def __init__(self, path: Path) -> None:
        self._file = PositionalFile(path)

    def __enter__(self) -> PositionalFile:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()
