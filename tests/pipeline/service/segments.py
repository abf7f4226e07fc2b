"""A job streamed as a cluster does it, in this process."""

from __future__ import annotations

import secrets

from pipeline.cluster.segments import ClusterJob, WorkerDevice, close_job, cut_segments, run_segment
from pipeline.engine.stages import StageRecord


def in_segments(job, plan, ledger, events, most=None):
    """Segment by segment, for which the job is opened once more, as workers do. `most`: segments at most."""
    if not ledger.exists:
        ledger.create()
    cluster_job = ClusterJob(
        name=secrets.token_hex(8), spec=job.spec, budget=job.budget, held_bytes=0, ledger_identity=ledger.identity,
        worker_device=WorkerDevice(device="cpu", threads=1),
    )  # fmt: skip
    record, left = StageRecord(), {chunk.index: chunk for chunk in plan.chunks}
    events.on_begun(record)
    for segment in cut_segments(plan, workers=1)[:most]:
        receipt = run_segment(cluster_job, segment, lambda stages: None)
        record.include(receipt.stages)
        for notes in receipt.notes:
            job.output.add_notes(notes)
        for index in segment.chunks:
            events.on_written(left[index])
    close_job(cluster_job.name)
    return record
