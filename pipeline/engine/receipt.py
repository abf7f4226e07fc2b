"""The receipt beside every output: its origin, the software and devices, speed and audit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.engine.ledger import Entry
from pipeline.engine.planned import PlannedJob
from pipeline.engine.stages import StageRecord
from pipeline.errors import MillraceError, StorageError, counted
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import PartialFile
from pipeline.workloads.paths import receipt_path
from pipeline.workloads.protocol import Audit

# Packages whose versions can change a result.
RECORDED_PACKAGES = (
    "numpy", "numba", "llvmlite", "scipy", "finufft", "tifffile", "zarr", "h5py", "imagecodecs", "MDAnalysis",
)  # fmt: skip


def to_json(value: Any) -> str:
    """Indented JSON with each list of plain values on one line."""
    return re.sub(
        r"\[\s+([^][{}]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(value, indent=2)
    )


def make_receipt(
    job: PlannedJob,
    *,
    entries: Sequence[Entry],
    record: StageRecord,
    audit: Audit,
    identity: Mapping[str, Any],
    started: float,
) -> dict[str, Any]:
    """The receipt, ready for JSON: seconds, bytes, UTC times.

    `entries`: those of an interrupted run that this one resumed; seconds and stages are of this run only.
    """
    return {
        **job.describe(),
        "input": dict(identity),
        "request": job.spec.parameters.request(),
        "output": str(job.spec.output.absolute()),
        "millrace": __version__,
        "versions": {name: found for name in RECORDED_PACKAGES if (found := _installed(name))},
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_chunks": 0 if job.halvings else sum(len(entry.chunks) for entry in entries),
        "wall_seconds": round(record.wall_seconds, 6),
        "stages": {
            stage: {"seconds": round(totals.seconds, 6), "bytes": totals.nbytes, "lanes": totals.lanes}
            for stage, totals in record.totals.items()
        },
        "overlap_efficiency": round(record.overlap_efficiency, 4),
        "audit": audit.describe(),
    }


# By the unit of an audit's error: the noun for the compared values, and the unit in a sentence.
_AUDITED = {
    "sample values": ("pixel", "of a step"),
    "relative to the window's largest value": ("pixel", "of the window's largest value"),
    "relative to the largest value": ("pixel", "of the largest value"),
    "relative to the sum of the terms' sizes": ("point", "of the sum of the terms' sizes"),
    "relative to the RMS potential of uncorrelated charges": (
        "point", "of the RMS potential of uncorrelated charges",
    ),
    "k-space samples, relative to the sum of the pixels' magnitudes": (
        "k-space sample", "of the sum of the pixels' magnitudes",
    ),
}  # fmt: skip


def verified(audit: Mapping[str, Any]) -> str:
    """A receipt's audit in words."""
    unit = audit.get("unit", "")
    noun, part = _AUDITED.get(unit, ("value", unit))
    count, worst = counted(audit["samples"], noun), audit["worst_error"]
    if worst == 0:
        return f"{count} verified, all exact"
    if part == "of a step" and worst <= 0.5:
        return f"{count} verified, all within rounding ({worst:.3g} {part})"
    return f"{count} verified, worst error {worst:.3g} {part}".rstrip() + f" (tolerated: {audit['tolerance']:.3g})"


def write_receipt(output: Path, receipt: Mapping[str, Any]) -> None:
    """Write the receipt beside the output, atomically."""
    text = (to_json(receipt) + "\n").encode()
    path = receipt_path(output)
    try:
        if isinstance(path, ObjectPath):
            path.write_bytes(text)
            return
        file = PartialFile(path, len(text))
        try:
            file.write_at(0, text)
            file.publish()
        finally:
            file.discard()
    except MillraceError as error:
        raise StorageError(f"{output} is complete, but not its receipt: {error}") from error


@cache
def _installed(package: str) -> str | None:
    """Cached, since a service writes many receipts. `version` parses all metadata and takes ten times as long."""
    try:
        said = re.search(r"^Version: *(\S+)", distribution(package).read_text("METADATA") or "", re.MULTILINE)
        return said[1] if said else version(package)
    except PackageNotFoundError:
        return None
