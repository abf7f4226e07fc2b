"""The gain of each level of overlap: one job streamed at levels 1, 2, 3 and 5, timed and plotted chunk by chunk."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from pipeline.config import format_bytes
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.device import OVERLAPS
from pipeline.engine.run import RunOptions, open_device, plan_job
from pipeline.engine.stages import ALWAYS
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.workloads import JobSpec, workloads

COLUMNS = 20_000
BAND_ROWS = 500
COLOURS = dict(zip(ALWAYS, ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2"), strict=True))


def main() -> None:
    options = _options()
    results = json.loads(options.draw.read_text()) if options.draw else _measured(options)
    for result in results:
        rate = format_bytes(result["bytes"] / result["wall_seconds"])
        print(f"overlap {result['overlap']}: {result['wall_seconds']:.2f} s, {rate}/s in and out")
    if options.json:
        options.json.write_text(json.dumps(results))
    if options.plot:
        _plot(results, options.plot)


def _options() -> argparse.Namespace:
    parser = Options("engine/overlap", __doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", type=int, default=3 << 30, help="bytes of the ring")
    parser.add_argument("--rows", type=int, default=10_000, help=f"rows of {COLUMNS} u16 RGB pixels")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write every interval to this file")
    parser.add_argument("--plot", type=Path, help="plot the timelines to this file (needs matplotlib)")
    parser.add_argument("--draw", type=Path, help="plot a file written by --json instead of measuring")
    return parser.parse_args()


def _measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "in.tif"
        _make_image(source, options.rows)
        _streamed(options, source, OVERLAPS[-1])  # warms caches and compiles kernels
        return [_streamed(options, source, overlap) for overlap in OVERLAPS]


def _make_image(path: Path, rows: int) -> None:
    header = ImageHeader(shape=(rows, COLUMNS, 3), axes="YXS", dtype=np.dtype(np.uint16))
    band = np.random.default_rng(0).integers(0, 65536, (BAND_ROWS, COLUMNS, 3), np.uint16)
    writer = images.create_image(path, header)
    for top in range(0, rows, BAND_ROWS):
        bottom = min(top + BAND_ROWS, rows)
        writer.write(Region((top, 0, 0), (bottom, COLUMNS, 3)), np.ascontiguousarray(band[: bottom - top]))
    writer.publish()


def _streamed(options: argparse.Namespace, source: Path, overlap: int) -> dict[str, Any]:
    parameters = workloads()["smooth"].Parameters(size=(3,))
    spec = JobSpec(workload="smooth", input=source, output=source.with_name("out.tif"), parameters=parameters)
    device = open_device(options.device, overlap=overlap)
    job = plan_job(spec, device, RunOptions(memory_bytes=options.memory))
    job.output.open()
    try:
        with DevicePipeline(device, job.output, slot_bytes(job.plan.chunks), slots=job.slots) as pipeline:
            record = pipeline.stream(job.plan.chunks, keep_timeline=True)
    finally:
        job.output.discard()
    origin = min(interval.began for interval in record.timeline)
    return {
        "overlap": overlap,
        "device": dict(device.describe()),
        "wall_seconds": record.wall_seconds,
        "bytes": job.plan.input_bytes + job.plan.output_bytes,
        "timeline": [[each.stage, each.chunk, each.began - origin, each.ended - origin] for each in record.timeline],
    }


def _plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(results), 1, figsize=(10, 1.6 * len(results) + 0.6), sharex=True)
    for axes, result in zip(panels, results, strict=True):
        for stage, _, began, ended in result["timeline"]:
            row = ALWAYS.index(stage)
            # The outline keeps short intervals visible.
            look = {"height": 0.8, "color": COLOURS[stage], "edgecolor": COLOURS[stage], "linewidth": 0.4}
            axes.barh(row, ended - began, left=began, **look)
        axes.set_yticks(range(len(ALWAYS)), ALWAYS)
        axes.invert_yaxis()
        axes.set_title(f"overlap {result['overlap']}: {result['wall_seconds']:.2f} s", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"seconds, on {results[0]['device']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
