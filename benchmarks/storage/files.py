"""From file to file: whole commands, and their GB/s of uncompressed samples each way, beside rivals in the same rounds.

millrace     `millrace run smooth`, a Gaussian of sigma 2, as a command; `streaming` is its time without start and end
floor        every core decodes and encodes the same chunks with imagecodecs, and does nothing else
tensorstore  a copy of the Zarr by TensorStore, without smoothing
dask         dask.array.map_overlap with OpenCV on all cores, Zarr to Zarr, as a command

Rows: zarr-none, zarr-lz4, zarr-zstd (to the same), tiff-deflate (to Zarr LZ4), tiff (uncompressed, to the same);
`libraries`: reading and writing Zarr alone, in this process, by Millrace, TensorStore, zarr-python and zarrs;
`pyramid`: the command on two cores with a pyramid and compression, against the same without both, from an uncompressed
input and from one of the same compression;
`overhead`: microseconds of one core for each tile or chunk, of 16² samples, so that the codecs' own time hardly counts.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, measure, ratio
from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image

CHUNK = 1024
SIGMA = 2
ROWS = ("zarr-none", "zarr-lz4", "zarr-zstd", "tiff-deflate", "tiff")
LIBRARIES, OVERHEAD, PYRAMID = "libraries", "overhead", "pyramid"
DASK = """
import sys
import cv2, dask.array as da, numpy as np, zarr
source = zarr.open_array(sys.argv[1], mode="r")
target = zarr.create_array(sys.argv[2], shape=source.shape, dtype=source.dtype, chunks=source.chunks,
                           compressors=list(source.compressors) or None, fill_value=0)
cv2.setNumThreads(1)
smooth = lambda block: cv2.GaussianBlur(block, (17, 17), float(sys.argv[3]))
da.from_zarr(source).map_overlap(smooth, depth=8, boundary="reflect", dtype=source.dtype).store(target, lock=False)
"""


def noisy_cells(side: int) -> NDArray[np.uint16]:
    """Bright discs on a dark ground with a camera's noise: Blosc-zstd halves it."""
    rng = np.random.default_rng(0)
    along = np.arange(side, dtype=np.float32)
    image = np.empty((side, side), np.uint16)
    for row in range(0, side, CHUNK):
        rows = along[row : row + CHUNK, None]
        cells = 2000 + 1500 * np.sin(rows / 97) * np.cos(along / 131)
        image[row : row + CHUNK] = cells + 12 * rng.standard_normal(cells.shape, np.float32)
    return image


def storage_of(row: str) -> tuple[str, Storage]:
    """Suffix and storage of a row's input."""
    kind, _, compression = row.partition("-")
    if kind == "zarr":
        return ".zarr", Storage(chunks=(CHUNK,), compression=compression)
    return ".tif", Storage(compression=compression or None)


def write(path: Path, image: NDArray[np.uint16], storage: Storage) -> None:
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    writer = format_for_output(path, storage).create(path, header)
    for row in range(0, len(image), CHUNK):
        rows = image[row : row + CHUNK]
        writer.write(Region((row, 0), (row + len(rows), image.shape[1])), rows)
    writer.publish()


class Millrace:
    """The command, and the streaming time of its receipts."""

    def __init__(self, source: Path, target: Path, options: list[str], device: str) -> None:
        self._command = [
            sys.executable, "-m", "pipeline", "run", "smooth", str(source), str(target), "--filter", "gaussian",
            "--sigma", str(SIGMA), "--device", device, "--quiet", *options,
        ]  # fmt: skip
        self._receipt = target.with_name(target.name + ".receipt.json")
        self.streaming_s: list[float] = []

    def __call__(self) -> None:
        subprocess.run(self._command, check=True)
        self.streaming_s.append(json.loads(self._receipt.read_text())["wall_seconds"])


def floor(source: Path, smoothed: Path, threads: int) -> Callable[[], None]:
    """Decodes each chunk of the source and encodes one of the result, on all cores."""
    import imagecodecs

    from pipeline.formats.image.zarr.chunk_files import ChunkFiles
    from pipeline.formats.image.zarr.nodes import Array, node
    from pipeline.formats.image.zarr.writer import COMPRESSIONS

    _ = imagecodecs.blosc_encode  # imported on first use
    found, result = node(source, "0"), node(smoothed, "0")
    assert isinstance(found, Array)
    assert isinstance(result, Array)
    files, results = ChunkFiles(source / "0", found.stored), ChunkFiles(smoothed / "0", result.stored)
    places = list(itertools.product(*(range(-(-n // c)) for n, c in zip(found.shape, found.chunks, strict=True))))
    compression = source.stem.partition("-")[2]
    options = {**COMPRESSIONS[compression][0].options} if COMPRESSIONS[compression] else {}

    def one(place: tuple[int, ...]) -> None:
        data = files.read(place)
        assert data is not None
        found.stored.codec.decode(data)
        if options:
            chunk = decoded[place]
            imagecodecs.blosc_encode(
                chunk, options["clevel"], compressor=options["cname"], shuffle=1, typesize=2, numthreads=1
            )

    decoded = {place: np.ascontiguousarray(result.stored.codec.decode(results.read(place))) for place in places[:64]}
    decoded = {place: decoded[places[number % len(decoded)]] for number, place in enumerate(places)}

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, places))

    return run


def tensorstore_open(path: Path, **options: Any) -> Any:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, **options}
    return tensorstore.open(spec).result()


def tensorstore_write(like: Path, target: Path, image: NDArray[np.uint16]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    metadata = tensorstore_open(like / "0").spec().to_json()["metadata"]
    tensorstore_open(target, metadata=metadata, create=True).write(image).result()


def tensorstore_copy(source: Path, target: Path) -> None:
    tensorstore_write(source, target, tensorstore_open(source / "0").read().result())


def dask_command(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-c", DASK, str(source / "0"), str(target), str(SIGMA)], check=True)


def libraries(image: NDArray[np.uint16], folder: Path, repeats: int) -> None:
    """Prints GB/s of reading and of writing the image in chunks of 2 MiB, for each library and compression."""
    import zarr

    def read_ours(source: Path) -> None:
        with open_image(source) as reader:
            out = np.empty(image.shape, image.dtype)
            reader.read(Region.whole(image.shape), out)

    def write_zarr(source: Path) -> None:
        like = zarr.open_array(source / "0", mode="r")
        codecs = list(like.compressors) or None
        shutil.rmtree(folder / "zarr", ignore_errors=True)
        made = zarr.create_array(
            folder / "zarr", shape=like.shape, dtype=like.dtype, chunks=like.chunks, compressors=codecs
        )
        made[:] = image

    def with_zarrs(run: Callable[[Path], object], source: Path) -> None:
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            run(source)

    for compression in ("none", "lz4", "zstd"):
        source = folder / f"in-{compression}.zarr"
        storage = Storage(chunks=(CHUNK,), compression=compression)
        write(source, image, storage)
        rivals: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
            "millrace": (read_ours, partial(lambda storage, _: write(folder / "ours.zarr", image, storage), storage)),
            "zarr-python": (lambda source: zarr.open_array(source / "0", mode="r")[:], write_zarr),
        }
        if find_spec("tensorstore"):
            rivals["tensorstore"] = (
                lambda source: tensorstore_open(source / "0").read().result(),
                lambda source: tensorstore_write(source, folder / "tensorstore", image),
            )
        if find_spec("zarrs"):
            rivals["zarrs"] = tuple(partial(with_zarrs, run) for run in rivals["zarr-python"])  # type: ignore[assignment]
        for number, what in enumerate(("read", "write")):
            runs = [Rival(name=name, device="cpu", run=partial(both[number], source)) for name, both in rivals.items()]
            rates = (f"{each.name} {image.nbytes / 1e9 / each.median_s:.2f}" for each in measure(runs, repeats))
            print(f"{compression:5} {what:5} GB/s: {', '.join(rates)}", flush=True)


def pyramid(image: NDArray[np.uint16], folder: Path, asked: Namespace) -> None:
    """Prints how much longer, and how much more of two cores, a job takes whose result is a compressed pyramid."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    kinds = [(".zarr", "lz4"), (".zarr", "zstd"), (".ome.tif", "zstd"), (".ome.tif", "deflate")]
    for (suffix, compression), of_input in itertools.product(kinds, ("none", "same")):
        source, target = folder / f"in{suffix}", folder / f"out{suffix}"
        write(source, image, Storage(compression=compression if of_input == "same" else "none", levels=1))
        cpu_s: dict[str, list[float]] = {"without": [], "with": []}

        def run(name: str, command: Millrace, cpu_s: dict[str, list[float]] = cpu_s) -> None:
            began = resource.getrusage(resource.RUSAGE_CHILDREN)
            command()
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s[name].append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)

        rivals = []
        for name, storage in zip(cpu_s, (("none", "1"), (compression, "auto")), strict=True):
            options = ["--memory", asked.memory, "--compression", storage[0], "--levels", storage[1]]
            command = Millrace(source, target, options, asked.device)
            rivals.append(Rival(name=name, device=asked.device, run=partial(run, name, command)))
        without, with_both = measure(rivals, asked.repeats)
        cpu = np.divide(cpu_s["with"], cpu_s["without"])[1:]
        shown = [
            f"{what} {seconds[0]:.2f} s without, {seconds[1]:.2f} s with: {middle:.2f} ({low:.2f}–{high:.2f}) times"
            for what, seconds, (middle, low, high) in (
                ("wall", (without.median_s, with_both.median_s), ratio(without, with_both)),
                ("CPU", [np.median(each[1:]) for each in cpu_s.values()], (np.median(cpu), *band(cpu.tolist()))),
            )
        ]
        print(f"{suffix:8} {compression:7} input {of_input:4}: {'; '.join(shown)}", flush=True)
    os.sched_setaffinity(0, cores)


def overhead(folder: Path, repeats: int) -> None:
    """Prints the CPU time of reading and of writing one small block, the codec's and the system's included."""
    side, block, rows = 1024, 16, 256
    image = np.tile(noisy_cells(block), (side // block, side // block))
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    regions = [Region((row, 0), (row + rows, side)) for row in range(0, side, rows)]
    out = np.empty_like(image)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # on several, waiting for each other would count

    def cost_us(each: Callable[[Region, NDArray[np.uint16]], None], array: NDArray[np.uint16]) -> float:
        began = time.process_time()
        for region in regions:
            each(region, array[region.slices])
        return (time.process_time() - began) / (side // block) ** 2 * 1e6

    kinds = [(".zarr", compression, None) for compression in ("none", "lz4", "zstd")]
    kinds += [(".zarr", "lz4", (8 * block,)), *((".tif", compression, None) for compression in ("deflate", "zstd"))]
    for suffix, compression, shards in kinds:
        path, costs = folder / f"small{suffix}", []
        storage = Storage(chunks=(block,), shards=shards, compression=compression)
        for _ in range(repeats):
            writer = format_for_output(path, storage).create(path, header)
            written = cost_us(writer.write, image)
            writer.publish()
            with open_image(path) as reader:
                costs.append((cost_us(reader.read, out), written))
            assert np.array_equal(out, image)
        read, written = np.min(costs, axis=0)
        kind = f"{suffix} {compression}{', sharded' * bool(shards)}"
        print(f"{kind:19} µs of a core for each block: read {read:5.1f}, write {written:5.1f}", flush=True)
    os.sched_setaffinity(0, cores)


def main() -> None:
    parser = Options("storage/files", __doc__)
    parser.add_parts((*ROWS, LIBRARIES, PYRAMID, OVERHEAD), ROWS)
    parser.add_rounds(repeats=3)
    parser.add_argument("--side", type=int, default=12288, help="rows and columns of the u16 image [default: 12288]")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where files are [default: /dev/shm]")
    parser.add_argument("--rivals", default="floor,tensorstore,dask", help="which of them [default: all]")
    parser.add_argument("--memory", default="512MiB", help="of the command [default: 512MiB]")
    asked = parser.parse_args()
    image, chosen = noisy_cells(asked.side), asked.rivals.split(",")
    threads = len(os.sched_getaffinity(0))
    print(
        f"{asked.side} × {asked.side} u16, {image.nbytes / 1e9:.2f} GB, sigma {SIGMA}, {threads} cores, {asked.device}"
    )
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        for row in asked.parts:
            folder = Path(name)
            if row == LIBRARIES:
                libraries(image, folder, asked.repeats)
                continue
            if row == PYRAMID:
                pyramid(image, folder, asked)
                continue
            if row == OVERHEAD:
                overhead(folder, asked.repeats)
                continue
            suffix, storage = storage_of(row)
            is_zarr = suffix == ".zarr"
            source = folder / f"in-{storage.compression}{suffix}"
            write(source, image, storage)
            target = folder / ("out.zarr" if is_zarr or storage.compression else "out.tif")
            compression = storage.compression if is_zarr else "lz4"
            options = ["--memory", asked.memory]
            options += ["--chunks", str(CHUNK), "--compression", str(compression)] if target.suffix == ".zarr" else []
            command = Millrace(source, target, options, asked.device)
            command()
            rivals = [Rival(name="millrace", device=asked.device, run=command)]
            if is_zarr and "floor" in chosen:
                rivals.append(Rival(name="floor", device="cpu", run=floor(source, target, threads)))
            if is_zarr and "tensorstore" in chosen and find_spec("tensorstore"):
                copy = partial(tensorstore_copy, source, folder / "copy.zarr")
                rivals.append(Rival(name="tensorstore", device="cpu", run=copy))
            if is_zarr and "dask" in chosen:
                rivals.append(Rival(name="dask", device="cpu", run=partial(dask_command, source, folder / "dask.zarr")))
            measured = measure(rivals, asked.repeats)
            streaming = float(np.median(command.streaming_s[-asked.repeats :]))
            print(f"{row}: streaming {image.nbytes / 1e9 / streaming:.2f} GB/s each way", flush=True)
            for rival in measured:
                low, high = band(rival.seconds)
                rate = image.nbytes / 1e9 / rival.median_s
                print(f"  {rival.name:12} {rival.median_s:7.2f} s ({low:.2f}–{high:.2f})  {rate:6.2f} GB/s", flush=True)
            for each in folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()


if __name__ == "__main__":
    main()
