"""From file to file: whole commands, and their GB/s of uncompressed samples each way, beside rivals in the same rounds.

millrace     `millrace run smooth`, a Gaussian of sigma 2, as a command; `streaming` is its time without start and end
floor        every core decodes and encodes the same chunks with imagecodecs, and does nothing else
tensorstore  a copy of the Zarr by TensorStore, without smoothing; zarrs: the same by zarr-python with zarrs
dask         dask.array.map_overlap with OpenCV on all cores (on a GPU: with CuPy), Zarr to Zarr, as a command
vips         `vips gaussblur` of the uncompressed TIFF
loop         a loop of tifffile and OpenCV over the small files, as a command

Rows: zarr-none, zarr-lz4, zarr-zstd (to the same), tiff-deflate (to Zarr LZ4), tiff (uncompressed, to the same), small
(the same pixels in TIFFs of 512², to the same); results have one level, as rivals' have, unless `--levels` is given;
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
SMALL = "small"
ROWS = ("zarr-none", "zarr-lz4", "zarr-zstd", "tiff-deflate", "tiff", SMALL)
RIVALS = ("floor", "tensorstore", "zarrs", "dask", "vips", "loop")
LIBRARIES, OVERHEAD, PYRAMID = "libraries", "overhead", "pyramid"
DASK = """
import sys
import dask.array as da, numpy as np, zarr
source = zarr.open_array(sys.argv[1], mode="r")
target = zarr.create_array(sys.argv[2], shape=source.shape, dtype=source.dtype, chunks=source.chunks,
                           compressors=list(source.compressors) or None, fill_value=0)
sigma = float(sys.argv[3])
if sys.argv[4] == "cuda":
    import cupy
    from cupyx.scipy.ndimage import gaussian_filter
    smooth = lambda block: cupy.asnumpy(gaussian_filter(cupy.asarray(block), sigma))
else:
    import cv2
    cv2.setNumThreads(1)
    smooth = lambda block: cv2.GaussianBlur(block, (17, 17), sigma)
da.from_zarr(source).map_overlap(smooth, depth=8, boundary="reflect", dtype=source.dtype).store(target, lock=False)
"""

LOOP = """
import pathlib, sys
import cv2, tifffile
for path in pathlib.Path(sys.argv[1]).iterdir():
    smooth = cv2.GaussianBlur(tifffile.imread(path), (17, 17), float(sys.argv[3]))
    tifffile.imwrite(pathlib.Path(sys.argv[2], path.name), smooth)
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
        receipts = target.with_name(f"{target.name}.receipt.json"), target / "millrace.receipts.json"
        self._receipt = receipts[not target.suffix]
        self.streaming_s: list[float] = []

    def __call__(self) -> None:
        subprocess.run(self._command, check=True)
        receipt = json.loads(self._receipt.read_text())
        self.streaming_s.append(receipt.get("runs", [receipt])[-1]["wall_seconds"])


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


def zarrs_copy(source: Path, target: Path) -> None:
    import zarr

    shutil.rmtree(target, ignore_errors=True)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        made = zarr.open_array(source / "0", mode="r")
        zarr.create_array(target, data=made[:], chunks=made.chunks, compressors=list(made.compressors) or None)


def script(code: str, source: Path, target: Path, device: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run([sys.executable, "-c", code, str(source), str(target), str(SIGMA), device], check=True)


def rivals_of(row: str, source: Path, target: Path, device: str) -> dict[str, Callable[[], object]]:
    """The rivals of a row; `target`: Millrace's result."""
    if row == SMALL:
        return {"loop": partial(script, LOOP, source, target.with_name("loop"), device)}
    if row == "tiff":
        command = ["vips", "gaussblur", source, target.with_name("vips.tif"), str(SIGMA)]
        return {"vips": partial(subprocess.run, command, check=True)}
    if source.suffix != ".zarr":
        return {}
    return {
        "floor": floor(source, target, len(os.sched_getaffinity(0))),
        "tensorstore": partial(tensorstore_copy, source, target.with_name("copy.zarr")),
        "zarrs": partial(zarrs_copy, source, target.with_name("zarrs.zarr")),
        "dask": partial(script, DASK, source / "0", target.with_name("dask.zarr"), device),
    }


def write_small(folder: Path, image: NDArray[np.uint16]) -> None:
    folder.mkdir()
    for row, column in itertools.product(range(0, len(image), 512), repeat=2):
        tile = np.ascontiguousarray(image[row : row + 512, column : column + 512])
        write(folder / f"{row}-{column}.tif", tile, Storage())


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
    parser.add_argument("--rivals", default=",".join(RIVALS), help="which of them [default: all that are installed]")
    parser.add_argument("--levels", default="1", help="of Millrace's results; rivals write one [default: 1]")
    parser.add_argument("--memory", default="512MiB", help="of the command [default: 512MiB]")
    asked = parser.parse_args()
    image, chosen = noisy_cells(asked.side), asked.rivals.split(",")
    size, cores = f"{image.nbytes / 1e9:.2f} GB", len(os.sched_getaffinity(0))
    print(f"{asked.side} × {asked.side} u16, {size}, sigma {SIGMA}, {cores} cores, {asked.device}")
    find = {"floor": str, "vips": shutil.which}
    missing = {each for each in chosen if not find.get(each, find_spec)({"loop": "cv2"}.get(each, each))}
    if missing:
        print(f"not installed here: {', '.join(sorted(missing))}")
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
            source = folder / f"in-{storage.compression}{suffix}"
            target = folder / ("out.tif" if row == "tiff" else "out.zarr")
            if row == SMALL:
                source, target = folder / "in", folder / "out"
                write_small(source, image)
            else:
                write(source, image, storage)
            compression = storage.compression if suffix == ".zarr" else "lz4"
            options = ["--memory", asked.memory, "--levels", asked.levels]
            options += ["--chunks", str(CHUNK), "--compression", str(compression)] if target.suffix == ".zarr" else []
            command = Millrace(source, target, options, asked.device)
            command()
            rivals = [Rival(name="millrace", device=asked.device, run=command)]
            for rival_name, run in rivals_of(row, source, target, asked.device).items():
                if rival_name in chosen and rival_name not in missing:
                    rivals.append(Rival(name=rival_name, device=asked.device, run=run))
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
