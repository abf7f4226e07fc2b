"""Zarr (Blosc-LZ4, chunks of 2 MiB) from and to an S3 server, beside a bare client of the same server.

read    : the whole image into memory; the bare client gets the same objects and drops them
write   : the whole image; the bare client puts objects of the same bytes
run     : `millrace run smooth`, its streaming time; the bare client gets the input's objects and puts the result's

Figures are GB/s of uncompressed samples. Without --url, SeaweedFS (from its wheel) serves from
memory on loopback, and takes its share of the cores; with it, the environment's credentials and endpoint hold.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, measure
from benchmarks.storage.files import CHUNK, SIGMA, noisy_cells
from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image
from pipeline.storage.objects import ObjectPath

THREADS = 32
STORAGE = Storage(chunks=(CHUNK,), compression="lz4")
PARTS = ("read", "write", "run")


@contextmanager
def served(url: str | None) -> Iterator[ObjectPath]:
    """A prefix of the bucket, or of one of a server of our own."""
    if url is not None:
        yield ObjectPath.of(url)
        return
    from tests.object_server import S3Server

    server = S3Server()
    try:
        os.environ.update(server.environment())
        yield ObjectPath.of("s3://open/bench")
    finally:
        server.close()


def names_below(folder: ObjectPath) -> list[str]:
    listed = (each["path"] for page in folder.store.list(folder.key) for each in page)
    return [name for name in listed if "/c/" in name]


def pooled(call: Callable[[Any], object], items: list[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(call, items))


def report(part: str, measured: list[Rival], nbytes: int) -> None:
    for rival in measured:
        low, high = band(rival.seconds)
        rate = nbytes / 1e9 / rival.median_s
        print(f"{part:6} {rival.name:12} {rival.median_s:6.2f} s ({low:.2f}–{high:.2f}) {rate:6.2f} GB/s")
    ratio = np.median(np.array(measured[1].seconds) / np.array(measured[0].seconds))
    print(f"{part:6} ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = Options("storage/objects", __doc__)
    parser.add_parts(PARTS, PARTS)
    parser.add_rounds(repeats=5)
    parser.add_argument("--side", type=int, default=8192, help="rows and columns of the u16 image [default: 8192]")
    parser.add_argument("--url", help="an empty prefix, as s3://BUCKET/PREFIX [default: a server on this machine]")
    asked = parser.parse_args()
    image = noisy_cells(asked.side)
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    out, number = np.empty_like(image), itertools.count()
    print(f"{asked.side} × {asked.side} u16, {image.nbytes / 1e9:.2f} GB, {len(os.sched_getaffinity(0))} cores")
    with served(asked.url) as root:
        targets: list[ObjectPath] = []
        source, store = root / "in.zarr", root.store

        def write(path: ObjectPath) -> None:
            writer = format_for_output(path, STORAGE).create(path, header)
            writer.write(Region.whole(image.shape), image)
            writer.publish()

        def read() -> None:
            with open_image(source) as reader:
                reader.read(Region.whole(image.shape), out)

        def run() -> None:
            target = root / f"{next(number)}.zarr"
            targets.append(target)
            command = [sys.executable, "-m", "pipeline", "run", "smooth", str(source), str(target)]
            command += ["--filter", "gaussian", "--sigma", str(SIGMA), "--device", asked.device, "--quiet"]
            subprocess.run([*command, "--chunks", str(CHUNK), "--compression", "lz4"], check=True)

        def streamed(call: Callable[[], object]) -> float:
            call()
            return float(json.loads((root / f"{targets[-1].name}.receipt.json").read_bytes())["wall_seconds"])

        write(source)
        names = names_below(source)
        contents = [bytes(store.get(name).bytes()) for name in names]

        def get() -> None:
            pooled(lambda name: store.get(name).bytes(), names)

        def put() -> None:
            key = (root / f"bare{next(number)}").key
            pooled(lambda each: store.put(f"{key}/{each}", contents[each]), list(range(len(contents))))

        def both() -> None:
            get()
            put()

        ours: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "read": (read, get),
            "write": (lambda: write(root / f"w{next(number)}.zarr"), put),
            "run": (run, both),
        }
        for part in asked.parts:
            mine, bare = ours[part]
            clock = {"clock": streamed} if part == "run" else {}
            rivals = [Rival(name="millrace", device=asked.device, run=mine, **clock)]  # type: ignore[arg-type]
            measured = measure([*rivals, Rival(name="bare client", device="cpu", run=bare)], asked.repeats)
            report(part, measured, image.nbytes)
        assert np.array_equal(out, image) or "read" not in asked.parts
        root.remove_below()


if __name__ == "__main__":
    main()
