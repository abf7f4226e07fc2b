"""Zarr and other images in an object store, by a real S3 server: the same samples, and the same bytes, as in files."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import tifffile
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipeline.errors import InputError, OutputError, StorageError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.zarr.reader import ZarrReader
from pipeline.formats.image.zarr.writer import COMPRESSIONS, ZarrWriter
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import Opening
from tests.images import read_image, write_image
from tests.object_server import use_environment
from tests.pipeline.formats.image.contract import assert_same_bits
from tests.pipeline.formats.image.test_zarr_chunks import (
    DTYPES,
    SHAPE,
    arrays_of_v2,
    arrays_of_v3,
    noise,
    sharded,
    with_entry,
)

SOME = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NUMBER = itertools.count()


def upload(folder: Path, url: ObjectPath) -> ObjectPath:
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: (url / str(path.relative_to(folder))).write_bytes(path.read_bytes()), files))
    return url


def contents(folder: Any) -> dict[str, bytes]:
    """The bytes of all files or objects below, by their names."""
    if isinstance(folder, ObjectPath):
        listed = [each["path"] for page in folder.store.list(folder.key) for each in page]
        return {name.removeprefix(f"{folder.key}/"): bytes(folder.store.get(name).bytes()) for name in listed}
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@SOME
@given(made=st.one_of(arrays_of_v2(), arrays_of_v3()), data=st.data())
def test_what_the_zarr_library_writes_is_read(
    s3: ObjectPath, tmp_path: Path, made: tuple[str, float, dict[str, Any]], data: st.DataObject
) -> None:
    dtype, fill, options = made
    path = tmp_path / f"{next(NUMBER)}.zarr"
    array = zarr.create(store=str(path), shape=SHAPE, dtype=dtype, fill_value=fill, **options)
    part = tuple(slice(0, data.draw(st.integers(1, size))) for size in SHAPE)
    array[part] = noise(dtype)[part]
    start = tuple(data.draw(st.integers(0, size - 1)) for size in SHAPE)
    region = Region(start, tuple(data.draw(st.integers(a + 1, size)) for a, size in zip(start, SHAPE, strict=True)))
    with images.open_image(upload(path, s3 / path.name)) as reader:
        out = np.empty(region.shape, reader.header.dtype)
        reader.read(region, out)
    assert_same_bits(out, np.asarray(array[region.slices]).astype(out.dtype))


@settings(parent=SOME, max_examples=12)
@given(
    dtype=st.sampled_from(DTYPES),
    compression=st.sampled_from(list(COMPRESSIONS)),
    chunk=st.tuples(*[st.integers(3, 7)] * 3),
    per_shard=st.none() | st.tuples(*[st.integers(1, 3)] * 3),
    cuts=st.tuples(*[st.integers(4, 14)] * 3),
)
def test_objects_have_the_bytes_of_files_although_two_workers_share_them(
    s3: ObjectPath, tmp_path: Path, dtype: str, compression: str, chunk: Any, per_shard: Any, cuts: Any
) -> None:
    name = f"w{next(NUMBER)}.zarr"
    shard = None if per_shard is None else tuple(a * b for a, b in zip(chunk, per_shard, strict=True))
    given_samples = noise(dtype, 1)
    header = ImageHeader(shape=SHAPE, axes="ZYX", dtype=np.dtype(dtype))

    def create(path: Path, opening: Opening = Opening.NEW) -> ZarrWriter:
        return ZarrWriter(
            path, header, opening, stored="ZYX", chunk=chunk, shard=shard, compression=compression, attributes={"a": 1}
        )

    regions = []
    for corner in np.ndindex(*[-(-size // cut) for size, cut in zip(SHAPE, cuts, strict=True)]):
        start = tuple(number * cut for number, cut in zip(corner, cuts, strict=True))
        stop = tuple(min(first + cut, size) for first, cut, size in zip(start, cuts, SHAPE, strict=True))
        regions.append(Region(start, stop))
    local, owner = create(tmp_path / name), create(s3 / name)
    workers = [create(s3 / name, Opening.JOIN) for _ in range(2)]

    def write(number: int) -> None:
        region = regions[number]
        workers[number % 2].write(region, np.ascontiguousarray(given_samples[region.slices]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(regions))))
    for worker in workers:
        worker.flush()
        worker.keep()
    for region in regions:
        local.write(region, np.ascontiguousarray(given_samples[region.slices]))
    local.publish()
    owner.publish()
    assert contents(s3 / name) == contents(tmp_path / name)
    assert contents(s3 / f"{name}.partial") == {}


def test_other_libraries_read_it(s3: ObjectPath, s3_server: Any) -> None:
    samples = noise("uint16", 3)
    write_image(s3 / "a.zarr", samples, "ZYX")
    store = zarr.storage.ObjectStore((s3 / "a.zarr").store_below, read_only=True)
    assert_same_bits(np.asarray(zarr.open_group(store, mode="r")["0"][:]), samples)
    where = {"driver": "s3", "bucket": "open", "endpoint": f"http://127.0.0.1:{s3_server.port}", "aws_region": "x"}
    spec = {"driver": "zarr3", "kvstore": {**where, "path": f"{s3.key}/a.zarr/0/"}}
    assert_same_bits(np.asarray(tensorstore.open(spec).result().read().result()), samples)


def test_other_codecs_are_left_to_the_zarr_library(s3: ObjectPath, tmp_path: Path) -> None:
    path, samples = tmp_path / "a.zarr", noise("uint16")
    zarr.create(
        store=str(path), shape=SHAPE, dtype="u2", chunks=(5, 8, 8), zarr_format=2, filters=[numcodecs.Delta("u2")]
    )[:] = samples
    with images.open_image(upload(path, s3 / "a.zarr")) as reader:
        assert isinstance(reader, ZarrReader)
        assert reader._files is None
    assert_same_bits(read_image(s3 / "a.zarr"), samples)


def test_a_group_of_one_array_is_found(s3: ObjectPath, tmp_path: Path) -> None:
    samples = noise("uint8")
    zarr.open_group(tmp_path / "g.zarr", mode="w").create_array("only", shape=SHAPE, dtype="u1", chunks=SHAPE)[:] = (
        samples
    )
    assert_same_bits(read_image(upload(tmp_path / "g.zarr", s3 / "g.zarr")), samples)


@pytest.mark.parametrize("name", ["a.npy", "a.tif", "a.png", "a.pgm", "big-endian.tif", "tiles.tif"])
def test_single_files_are_read_by_ranges(s3: ObjectPath, tmp_path: Path, name: str) -> None:
    samples = np.random.default_rng(0).integers(0, 65536, (701, 503)).astype(np.uint16)
    path = tmp_path / name
    if name == "big-endian.tif":
        tifffile.imwrite(path, samples, byteorder=">")
    elif name == "tiles.tif":
        tifffile.imwrite(path, samples, tile=(64, 80), compression="zlib")
    else:
        write_image(path, samples, "YX")
    (s3 / name).write_bytes(path.read_bytes())
    with images.open_image(s3 / name) as reader:
        for region in (Region((0, 0), (701, 503)), Region((17, 0), (690, 503)), Region((3, 5), (600, 500))):
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, samples[region.slices])
    (s3 / name).write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=f"^{s3 / name}: "):
        read_image(s3 / name)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:40], "too few for an index"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: with_entry(data, 1 << 40, 9), "outside the shard"),
    ],
)
def test_a_damaged_shard_is_refused_in_one_line(s3: ObjectPath, tmp_path: Path, damage: Any, said: str) -> None:
    file = sharded(tmp_path / "a.zarr")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=said) as refused:
        read_image(upload(tmp_path / "a.zarr", s3 / "a.zarr"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("codec", [None, "auto"])
def test_a_chunk_longer_than_declared_is_not_read(s3: ObjectPath, tmp_path: Path, codec: Any) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(8, 8), dtype="u1", chunks=(8, 8), compressors=codec)[:] = 1
    with (path / "c" / "0" / "0").open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(InputError, match=r"1,048,576 bytes"):
        read_image(upload(path, s3 / "a.zarr"))


def test_a_web_server_like_url_without_metadata_is_named(s3: ObjectPath) -> None:
    with pytest.raises(InputError, match="no such file"):
        images.open_image(s3 / "nothing.zarr")


def header_of(samples: Any) -> ImageHeader:
    return ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)


def test_nothing_half_written_has_metadata(s3: ObjectPath) -> None:
    samples = np.arange(600 * 500, dtype=np.uint16).reshape(600, 500)
    writer = images.create_image(s3 / "a.zarr", header_of(samples))
    writer.write(Region((0, 0), (256, 500)), samples[:256])
    assert any("/c/" in name for name in contents(s3 / "a.zarr"))
    for name in ("a.zarr", "a.zarr/0"):
        with pytest.raises(InputError, match="no such file"):
            images.open_image(s3 / name)
    sealed = []
    writer.write(Region((256, 0), (600, 500)), samples[256:])
    writer.publish(lambda: sealed.append(any(name.endswith("zarr.json") for name in contents(s3 / "a.zarr"))))
    assert sealed == [False]
    assert_same_bits(read_image(s3 / "a.zarr"), samples)


def test_the_root_comes_last(s3: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.ones((30, 30), np.uint8)
    writer = images.create_image(s3 / "a.zarr", header_of(samples))
    writer.write(Region.whole(samples.shape), samples)
    put, order = ObjectPath.put, []

    def noted(self: ObjectPath, buffers: Any, **options: Any) -> Any:
        order.append(self.key.removeprefix(f"{s3.key}/"))
        return put(self, buffers, **options)

    monkeypatch.setattr(ObjectPath, "put", noted)
    writer.publish()
    assert [name for name in order if "partial" not in name] == ["a.zarr/0/zarr.json", "a.zarr/zarr.json"]


def test_a_result_is_never_replaced(s3: ObjectPath) -> None:
    samples = np.ones((30, 30), np.uint8)
    write_image(s3 / "a.zarr", samples, "YX")
    before = contents(s3)
    with pytest.raises(OutputError, match="exists, and objects are not replaced"):
        images.create_image(s3 / "a.zarr", header_of(samples))
    assert contents(s3) == before
    (s3 / "other.zarr" / "notes.txt").write_bytes(b"mine")
    with pytest.raises(OutputError, match="objects that are not a result"):
        images.create_image(s3 / "other.zarr", header_of(samples))
    assert (s3 / "other.zarr" / "notes.txt").read_bytes() == b"mine"


def test_discarding_leaves_nothing(s3: ObjectPath) -> None:
    samples = np.ones((30, 30), np.uint8)
    writer = images.create_image(s3 / "a.zarr", header_of(samples))
    writer.write(Region.whole(samples.shape), samples)
    writer.discard()
    writer.discard()
    assert contents(s3) == {}


def test_a_result_whose_last_answer_was_lost_stays(s3: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.ones((30, 30), np.uint8)
    writer = images.create_image(s3 / "a.zarr", header_of(samples))
    writer.write(Region.whole(samples.shape), samples)
    put = ObjectPath.put

    def lost(self: ObjectPath, buffers: Any, **options: Any) -> Any:
        done = put(self, buffers, **options)
        if self == s3 / "a.zarr" / "zarr.json":
            raise StorageError("no answer")
        return done

    monkeypatch.setattr(ObjectPath, "put", lost)
    with pytest.raises(StorageError, match="no answer"):
        writer.publish()
    writer.discard()
    assert_same_bits(read_image(s3 / "a.zarr"), samples)


def test_one_run_at_a_time(s3: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.storage.partial_objects.RENEWAL_S", 0.05)
    monkeypatch.setattr("pipeline.storage.partial_objects._LOST_AFTER_S", 1.0)
    samples = np.full((30, 30), 7, np.uint8)
    first = images.create_image(s3 / "a.zarr", header_of(samples))
    for opening in (Opening.NEW, Opening.RESUME):
        with pytest.raises(OutputError, match="another run is writing this output; wait for it"):
            images.create_image(s3 / "a.zarr", header_of(samples), opening)
    first._partial._stopping.set()  # type: ignore[attr-defined] # no sign of life any more
    first.write(Region.whole(samples.shape), samples)
    second = images.create_image(s3 / "a.zarr", header_of(samples))
    assert not [name for name in contents(s3) if "/c/" in name]
    with pytest.raises(OutputError, match="was taken over or removed by another run"):
        first.flush()
    with pytest.raises(OutputError, match="was taken over"):
        first.write(Region.whole(samples.shape), samples)
    first.discard()
    second.write(Region.whole(samples.shape), samples + 1)
    second.publish()
    assert_same_bits(read_image(s3 / "a.zarr"), samples + 1)


@pytest.mark.parametrize("width", [30, 500])  # of one chunk, which is changed, and of several
def test_a_refused_write_in_the_middle_keeps_what_is_there(
    s3: ObjectPath, s3_server: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    samples = np.full((600, width), 7, np.uint8)
    writer = images.create_image(s3 / "a.zarr", header_of(samples))
    writer.write(Region((0, 0), (256, width)), samples[:256])
    use_environment(monkeypatch, s3_server.environment("reader"))
    with pytest.raises(StorageError, match="access is denied"):  # not the job's mistake: a resumed run goes on
        writer.write(Region((256, 0), (600, width)), samples[256:])
    use_environment(monkeypatch, s3_server.environment())
    writer.keep()
    resumed = images.create_image(s3 / "a.zarr", header_of(samples), Opening.RESUME)
    resumed.write(Region((256, 0), (600, width)), samples[256:])
    resumed.publish()
    assert_same_bits(read_image(s3 / "a.zarr"), samples)


def test_resuming_needs_something_to_resume(s3: ObjectPath) -> None:
    for opening, said in ((Opening.RESUME, "run the job again without --resume"), (Opening.JOIN, "its owner is gone")):
        with pytest.raises(OutputError, match=said):
            images.create_image(s3 / "a.zarr", header_of(np.ones((3, 3), np.uint8)), opening)
