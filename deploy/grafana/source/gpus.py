"""*GPUs*: what the driver says of each, and the ranks that run on them."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.panels import (
    BAD,
    GOOD,
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

# Several processes may see one GPU, and all report the same of it: hence the `max by (gpu)` everywhere.
_CHOSEN = '{gpu=~"$gpu"}'
_MEMORY_STEPS = Steps(GOOD, ((0.9, WARN), (0.95, BAD)))
_HEAT_STEPS = Steps(GOOD, ((80, WARN), (87, BAD)))
_EPOCH_STEPS = Steps(GOOD, ((2, WARN),))


def gpus() -> Dashboard:
    board = dashboard_of(
        "millrace-gpus", "Millrace: GPUs", "Memory, load, power, heat and bus of every GPU, and its ranks."
    ).with_variable(choice("gpu", "GPU", "Which GPUs are shown, by UUID.", "millrace_gpu_memory_total_bytes", "gpu"))
    return assembled(board, {"Now": _now(), "Load": _load(), "Bus and ranks": _bus()})


def _now() -> list[Panel]:
    return [
        number(
            "GPUs", "GPUs that workers have.", "none",
            Query(f"count(count by (gpu) (millrace_gpu_memory_total_bytes{_CHOSEN}))", "GPUs"),
        ),
        number(
            "Fullest memory", "Share in use on the fullest GPU, by all programs.", "percentunit",
            Query(f"max(gpu:millrace_gpu_memory:ratio{_CHOSEN})", "memory"), thresholds=_MEMORY_STEPS,
        ),
        number(
            "Utilization", "Share of the time that a kernel was running, mean of the GPUs.", "percentunit",
            Query(f"avg(max by (gpu) (millrace_gpu_utilization_ratio{_CHOSEN}))", "utilization"),
        ),
        number(
            "Power", "Drawn by all GPUs together.", "watt",
            Query(f"sum(max by (gpu) (millrace_gpu_power_watts{_CHOSEN}))", "power"),
        ),
        number(
            "Hottest", "The temperature of the hottest chip. Above some 87 °C GPUs slow themselves down.", "celsius",
            Query(f"max(millrace_gpu_temperature_celsius{_CHOSEN})", "hottest"), thresholds=_HEAT_STEPS,
        ),
        number(
            "Epoch of ranks", "The newest: above 1 ranks were lost and the others went on.", "none",
            Query("max(millrace_communicator_epoch)", "epoch"), thresholds=_EPOCH_STEPS,
        ),
    ]  # fmt: skip


def _load() -> list[Panel]:
    return [
        graph(
            "Utilization", "Share of the time that a kernel was running; the ten busiest GPUs.", "percentunit",
            [Query(f"topk(10, max by (gpu) (millrace_gpu_utilization_ratio{_CHOSEN}))", "{{gpu}}")], highest=1,
            listed=True,
        ),
        graph(
            "Memory", "Bytes in use, by all programs; the ten fullest GPUs.", "bytes",
            [Query(f"topk(10, max by (gpu) (millrace_gpu_memory_used_bytes{_CHOSEN}))", "{{gpu}}")], listed=True,
        ),
        graph(
            "Share of the memory", "Memory in use over the total; the ten fullest GPUs. Above 95 % an alert fires.",
            "percentunit", [Query(f"topk(10, gpu:millrace_gpu_memory:ratio{_CHOSEN})", "{{gpu}}")],
            thresholds=_MEMORY_STEPS, highest=1, listed=True,
        ),
        graph(
            "Temperature", "Of the chip; the ten hottest. Above some 87 °C GPUs slow themselves down.", "celsius",
            [Query(f"topk(10, max by (gpu) (millrace_gpu_temperature_celsius{_CHOSEN}))", "{{gpu}}")],
            thresholds=_HEAT_STEPS, listed=True,
        ),
        graph(
            "Power", "Drawn by a GPU; the ten that draw most.", "watt",
            [Query(f"topk(10, max by (gpu) (millrace_gpu_power_watts{_CHOSEN}))", "{{gpu}}")], listed=True,
        ),
        graph(
            "Bytes computed", "Bytes of input that a worker computes on each second, by its GPU, the ten fastest; "
            "of sums where ranks share the work.", "Bps",
            [Query(
                'topk(10, instance_stage:millrace_stage_bytes:rate5m{stage="compute", device=~"$gpu"})',
                "{{device}} {{instance}}",
            )],
            listed=True,
        ),
    ]  # fmt: skip


def _bus() -> list[Panel]:
    pcie = f"rate(millrace_gpu_pcie_bytes_total{_CHOSEN}[$__rate_interval])"
    return [
        graph(
            "Bus", "Bytes over PCI Express each second, by all programs: rx into the GPU, tx out of it; the "
            "ten fastest each way.", "Bps",
            [Query(f"topk by (direction) (10, max by (gpu, direction) ({pcie}))", "{{gpu}} {{direction}}")],
            listed=True,
        ),
        graph(
            "Fraction of the bus", "The same over what the link carries one way.", "percentunit",
            [Query(
                f"topk by (direction) (10, gpu_direction:millrace_gpu_pcie:ratio_rate5m{_CHOSEN})",
                "{{gpu}} {{direction}}",
            )],
            highest=1, listed=True,
        ),
        graph(
            "Communicators given up", "In the hour before, by why: requested, or a lost rank, a deadline or an error; "
            "these raise an alert.", "none",
            [Query("max by (reason) (increase(millrace_communicator_aborts_total[1h]))", "{{reason}}")],
            thresholds=Steps(GOOD, ((1, WARN),)),
        ),
        graph(
            "Epoch of ranks", "The newest that a process knows, the ten highest: above 1 a rank was lost.", "none",
            [Query("topk(10, max by (instance) (millrace_communicator_epoch))", "{{instance}}")],
            thresholds=_EPOCH_STEPS, listed=True,
        ),
    ]  # fmt: skip
