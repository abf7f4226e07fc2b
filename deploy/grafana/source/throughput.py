"""*Throughput*: what goes through, where the time goes, and how well the stages overlap."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.panels import (
    BAD,
    GOOD,
    STAGE_COLOURS,
    WARN,
    Panel,
    Query,
    Steps,
    assembled,
    choice,
    dashboard_of,
    graph,
    number,
)

# The goal is also a series, `millrace:overlap_efficiency:goal`, but a colour's step cannot read one.
OVERLAP_GOAL = 0.95
_OVERLAP_STEPS = Steps(BAD, ((0.75, WARN), (OVERLAP_GOAL, GOOD)))
_CHOSEN = '{workload=~"$workload"}'
_WORK = f"millrace_work_total{_CHOSEN}[$__rate_interval]"
_CHUNK_SECONDS = "sum by (le, stage) (rate(millrace_stage_duration_seconds_bucket[$__rate_interval]))"


def throughput() -> Dashboard:
    board = dashboard_of(
        "millrace-throughput", "Millrace: Throughput", "Bytes and work a second, stages, overlap, collectives."
    ).with_variable(
        choice(
            "workload", "Workload", "Which kinds of jobs are shown, where that can be told apart.",
            "millrace_work_total", "workload",
        )
    )  # fmt: skip
    return assembled(
        board,
        {
            "Now": _now(),
            "What goes through": _through(),
            "Stages and overlap": _stages(),
            "Iterative reconstruction": _solvers(),
            "Collectives": _gangs(),
        },
    )


def _now() -> list[Panel]:
    return [
        number(
            "In", "Bytes of input that chunks are read from each second.", "Bps",
            Query(f"sum(rate(millrace_input_bytes_total{_CHOSEN}[$__rate_interval]))", "in"),
        ),
        number(
            "Out", "Bytes of output that are written each second.", "Bps",
            Query(f"sum(rate(millrace_output_bytes_total{_CHOSEN}[$__rate_interval]))", "out"),
        ),
        number(
            "Chunks", "Chunks written each second.", "suffix: chunks/s",
            Query(
                'sum(rate(millrace_chunks_total{workload=~"$workload", outcome="written"}[$__rate_interval]))', "chunks"
            ),
        ),
        number(
            "Overlap efficiency", "Busy share of the busiest stage, mean of the workers at work. The goal is 95 %.",
            "percentunit", Query("millrace:overlap_efficiency:ratio_rate5m", "overlap"), thresholds=_OVERLAP_STEPS,
        ),
        number(
            "Fraction of the bus", "Bytes over the busiest bus of a GPU, one way, over what it carries.", "percentunit",
            Query("max(gpu_direction:millrace_gpu_pcie:ratio_rate5m)", "bus"),
        ),
        number(
            "Collectives", "Bytes that all ranks together give to collectives each second.", "Bps",
            Query("sum(op:millrace_collective_bytes:rate5m)", "collectives"),
        ),
    ]  # fmt: skip


def _fastest(rates: str) -> str:
    """The ten largest sums by worker."""
    return f"topk(10, sum by (device, instance) ({rates}) > 0)"


def _through() -> list[Panel]:
    return [
        graph(
            "Input", "Bytes of input that chunks are read from each second, by workload.", "Bps",
            [Query(
                f"sum by (workload) (rate(millrace_input_bytes_total{_CHOSEN}[$__rate_interval])) > 0", "{{workload}}"
            )],
            stacked=True,
        ),
        graph(
            "Output", "Bytes of output that are written each second, by workload.", "Bps",
            [Query(
                f"sum by (workload) (rate(millrace_output_bytes_total{_CHOSEN}[$__rate_interval])) > 0", "{{workload}}"
            )],
            stacked=True,
        ),
        graph(
            "Work", "Work done each second, in the workload's own unit: pixels, pairs or samples. These are far apart, "
            "so the axis is logarithmic; where nothing is done, there is a gap.", "sishort",
            [Query(f"sum by (workload, unit) (rate({_WORK})) > 0", "{{workload}}: {{unit}}/s")], logarithmic=True,
        ),
        graph(
            "Work by worker", "The same by worker, the ten fastest of each workload. A worker has one GPU, or is on "
            "the CPU.", "sishort",
            [Query(
                f"topk by (workload) (10, sum by (workload, unit, device, instance) (rate({_WORK})) > 0)",
                "{{instance}} {{device}}, {{workload}}: {{unit}}/s",
            )],
            logarithmic=True, listed=True,
        ),
        graph(
            "Input by worker", "Bytes of input that a worker reads each second; the ten fastest.", "Bps",
            [Query(
                _fastest(f"rate(millrace_input_bytes_total{_CHOSEN}[$__rate_interval])"), "{{instance}} {{device}}"
            )],
            listed=True,
        ),
        graph(
            "Output by worker", "Bytes of output that a worker writes each second; the ten fastest.", "Bps",
            [Query(
                _fastest(f"rate(millrace_output_bytes_total{_CHOSEN}[$__rate_interval])"), "{{instance}} {{device}}"
            )],
            listed=True,
        ),
    ]  # fmt: skip


def _solvers() -> list[Panel]:
    return [
        graph(
            "Iterations", "Iterations of iterative reconstructions that end each second.", "suffix: iterations/s",
            [Query(
                f"sum by (workload) (rate(millrace_solver_iterations_total{_CHOSEN}[$__rate_interval]))", "{{workload}}"
            )],
        ),
        graph(
            "Residual", "Relative residual of a worker's newest reconstruction, the ten largest. Near 1 nothing is "
            "fitted.", "percentunit",
            [Query(f"topk(10, millrace_solver_residual_ratio{_CHOSEN})", "{{instance}} {{device}}, {{workload}}")],
            listed=True,
        ),
        graph(
            "Objective", "Objective of a worker's newest reconstruction with a penalty, in the samples' units; the ten "
            "largest.", "sishort",
            [Query(f"topk(10, millrace_solver_objective{_CHOSEN})", "{{instance}} {{device}}, {{workload}}")],
            logarithmic=True, listed=True,
        ),
    ]  # fmt: skip


def _stages() -> list[Panel]:
    return [
        graph(
            "Overlap efficiency against its goal", "Busy share of the busiest stage of each worker at work, over five "
            "minutes, the ten lowest. At the goal that stage hardly waits for the others: only a faster one helps. Far "
            "below it something else holds all of them up, or jobs have so few chunks that nothing can overlap.",
            "percentunit",
            [
                Query("bottomk(10, instance:millrace_overlap_efficiency:ratio_rate5m)", "{{instance}} {{device}}"),
                Query("millrace:overlap_efficiency:goal", "goal"),
            ],
            thresholds=_OVERLAP_STEPS, colours={"goal": GOOD}, highest=1, columns=24, listed=True,
        ),
        graph(
            "Time at work", "Share of the time that a worker has any chunk in progress; the ten busiest.",
            "percentunit",
            [Query(
                _fastest("rate(millrace_pipeline_wall_seconds_total[$__rate_interval])"), "{{instance}} {{device}}"
            )],
            highest=1, listed=True,
        ),
        graph(
            "Stage seconds", "Seconds that each stage is busy each second, all workers and their threads added up.",
            "suffix: s/s", [Query("stage:millrace_stage_seconds:rate5m", "{{stage}}")], stacked=True,
            colours=STAGE_COLOURS,
        ),
        graph(
            "Bytes by stage", "Bytes that go through each stage each second, all workers added up.", "Bps",
            [Query("stage:millrace_stage_bytes:rate5m", "{{stage}}")], colours=STAGE_COLOURS,
        ),
        graph(
            "Bytes computed, by worker", "Bytes of input that a worker computes on each second, the ten fastest; of "
            "sums where ranks share the work.", "Bps",
            [Query(
                'topk(10, instance_stage:millrace_stage_bytes:rate5m{stage="compute"})', "{{instance}} {{device}}"
            )],
            stacked=True, listed=True,
        ),
        graph(
            "Time of a chunk in a stage", "Nine of ten chunks take less time than this in the stage.", "s",
            [Query(f"histogram_quantile(0.9, {_CHUNK_SECONDS})", "{{stage}}")], colours=STAGE_COLOURS,
        ),
        graph(
            "Fraction of the bus", "Bytes over each GPU's bus, into it (rx) and out of it (tx), over what the bus "
            "carries one way.", "percentunit",
            [Query("gpu_direction:millrace_gpu_pcie:ratio_rate5m", "{{gpu}} {{direction}}")], highest=1,
        ),
    ]  # fmt: skip


def _gangs() -> list[Panel]:
    return [
        graph(
            "Bandwidth of collectives", "Bytes that a rank gives to collectives over the seconds that it is in them, "
            "waiting for others too: a few bytes are slow. The axis is logarithmic.",
            "Bps", [Query("op:millrace_collective_bandwidth:ratio_rate5m > 0", "{{op}}")], logarithmic=True,
        ),
        graph(
            "Time in collectives", "Seconds in collectives each second, all ranks added up; waiting for others counts.",
            "suffix: s/s",
            [Query("sum by (op) (rate(millrace_collective_seconds_total[$__rate_interval]))", "{{op}}")], stacked=True,
        ),
    ]  # fmt: skip
