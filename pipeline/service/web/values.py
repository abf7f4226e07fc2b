"""Values for the templates: from receipts, workers and workloads, and the template filters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pipeline.api_models import JobLimits, JobUse, StageView, State, WorkerView
from pipeline.config import format_bytes, format_seconds, spellings
from pipeline.engine.receipt import verified
from pipeline.engine.stages import StageTotals
from pipeline.errors import counted, printable
from pipeline.formats.slices import SUFFIXES
from pipeline.service.http.views import stage_views
from pipeline.service.store import StoredJob
from pipeline.workloads import workloads

# Parameters that the form folds away, unless a similar job set them.
RARE = frozenset(
    {
        "chunks", "shards", "compression", "levels", "crop", "times", "mode", "cval", "truncate", "axes", "nan_policy",
        "nodata",
        "accuracy", "boundary", "smear", "exclude_radius", "origin", "shape", "at", "temperature",
        "tolerance", "wavelet", "block", "basis", "gradient_delay", "matrix", "traj_units", "frame_step", "sorting",
        "view_sharing", "density", "calibration", "compress", "prewhiten", "field_map", "segments", "dwell",
        "transform", "eps", "split", "window", "output_values",
    }
)  # fmt: skip


def stages_of(receipt: Mapping[str, Any]) -> list[StageView]:
    """The stages of a finished run."""
    totals = {
        name: StageTotals(seconds=stage["seconds"], nbytes=stage["bytes"], lanes=stage["lanes"])
        for name, stage in receipt.get("stages", {}).items()
    }
    return stage_views(totals, receipt.get("wall_seconds") or 0.0)


def facts_of(receipt: Mapping[str, Any]) -> dict[str, str]:
    """The main facts of a receipt."""
    device, audit = receipt.get("device", {}), receipt.get("audit", {})
    found = {"Chunks": f"{receipt['chunks']:,}"} if "chunks" in receipt else {}
    if receipt.get("together"):
        found["Together with"] = counted(receipt["together"] - 1, "other job") + " of the array"
    if receipt.get("resumed_chunks"):
        found["Chunks"] += f", {receipt['resumed_chunks']:,} of them by an earlier run"
    if "wall_seconds" in receipt:
        found["Streaming"] = f"{receipt['wall_seconds']:.3g} s"
    if device:
        found["Device"] = ", ".join(str(device[name]) for name in ("name", "model") if name in device)
    if "samples" in audit:
        found["Audit"] = verified(audit)
    return found


def percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def further_facts(worker: WorkerView) -> dict[str, str]:
    """The fields beyond those of the model, formatted for people."""
    units = {"power_watts": " W", "temperature_celsius": " °C"}
    return {
        name.removesuffix("_bytes").removesuffix("_watts").removesuffix("_celsius").replace("_", " "): (
            format_bytes(value) if name.endswith("_bytes") else f"{value}{units.get(name, '')}"
        )
        for name, value in (worker.model_extra or {}).items()
        if value is not None
    }


def fields_of(workload: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The workload's parameters as fields of the form, filled in with those of an earlier job."""
    model = workloads()[workload].Parameters
    schema = model.model_json_schema()
    fields = []
    for (name, what), info in zip(schema["properties"].items(), model.model_fields.values(), strict=True):
        kinds = [what, *what.get("anyOf", [])]
        choices = next((kind["enum"] for kind in kinds if "enum" in kind), None)
        default = what.get("default")
        fields.append(
            {
                "name": name,
                "choices": choices,
                "flag": any(kind.get("type") == "boolean" for kind in kinds),
                "default": typed(default),
                "given": typed(next((given[each] for each in spellings(name, info) if each in given), None)),
                "help": what.get("description", ""),
                "required": name in schema.get("required", []),
                "rare": name in RARE,
            }
        )
    return fields


def typed(value: Any) -> Any:
    """A parameter as typed into a field: numbers are separated by commas, steps by semicolons."""
    if not isinstance(value, list):
        return value
    texts = [str(each) for each in value]
    return ("; " if any(" " in each for each in texts) else ",").join(texts)


def iso(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def moment(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def lasted(stored: StoredJob) -> str:
    """How long the job has been running, or ran."""
    if stored.started_at is None:
        return "–"
    seconds = max((stored.finished_at or time.time()) - stored.started_at, 0.0)
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def share(stored: StoredJob) -> float:
    """The share of finished chunks; 1 once the job has succeeded."""
    if stored.job.state is State.SUCCEEDED:
        return 1.0
    return stored.job.chunks_done / stored.job.chunks if stored.job.chunks else 0.0


def amounts(stored: StoredJob) -> list[tuple[str, str]]:
    """What the job may take, will by its plan, and took: rows for people."""
    rows = [("Limits", _amounts(stored.asked.limits)), ("Used", _amounts(stored.used))]
    if (estimate := stored.estimate) is not None:
        lasts = f", about {format_seconds(estimate.seconds)}" if estimate.seconds is not None else ""
        moved = f"{format_bytes(estimate.read_bytes)} read, {format_bytes(estimate.written_bytes)} written"
        rows.insert(1, ("Estimate", f"{moved}, {format_bytes(estimate.memory_bytes)} of buffers{lasts}"))
    return [(name, value) for name, value in rows if value]


def _amounts(values: JobLimits | JobUse) -> str:
    said = []
    if (seconds := getattr(values, "time_s", None) or getattr(values, "seconds", None)) is not None:
        said.append(format_seconds(round(seconds, 2)))
    if values.memory_bytes is not None:
        said.append(f"{format_bytes(values.memory_bytes)} of memory")
    if values.gpu_memory_bytes is not None:
        said.append(f"{format_bytes(values.gpu_memory_bytes)} of GPU memory")
    if (gpus := getattr(values, "gpus", None)) is not None:
        said.append(counted(gpus, "GPU"))
    return ", ".join(said)


def viewable(name: str) -> bool:
    """Whether a file of that name can be looked at, as far as its name says."""
    return name.lower().endswith(SUFFIXES)


FILTERS = {
    "amounts": amounts,
    "moment": moment, "iso": iso, "lasted": lasted, "share": share, "bytes": format_bytes,
    "printable": printable, "further_facts": further_facts, "viewable": viewable,
}  # fmt: skip
