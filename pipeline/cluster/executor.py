"""Selects where jobs run: on the one device of this process, or on the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.cluster.dask import worker_start
from pipeline.cluster.dask.worker_start import WorkerSpec, cpu_workers, gpu_workers
from pipeline.config import Settings
from pipeline.engine.devices.discovery import all_gpus, usable_gpus
from pipeline.engine.planned import PlannedDevice
from pipeline.engine.run import Stream, open_device, stream_on_device, watch
from pipeline.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Executor:
    """The device that a job is planned for, and the function that streams its chunks."""

    device: PlannedDevice
    stream: Stream


@contextmanager
def open_executor(settings: Settings, modules: Sequence[str] = ()) -> Iterator[Executor]:
    """Open the device or workers that the settings name; they are closed when the context ends.

    modules : modules that worker processes started here import in advance

    Dask is used only with `scheduler`, with `workers`, or with the device `all` on a machine with several GPUs.
    ParameterError if settings contradict each other, DeviceUnavailable if there is no such device or scheduler.
    """
    _refuse_contradictions(settings)
    if settings.scheduler is not None:
        from pipeline.cluster.dask.tls import use_certificates
        from pipeline.cluster.dask.worker_processes import workers_of

        use_certificates(settings)
        with workers_of(settings.scheduler, settings.device, settings.threads) as workers:
            workers.gathers_metrics = settings.metrics_port is not None
            yield Executor(device=workers, stream=workers.stream)
        return
    if settings.device == "all" or settings.workers is not None:
        worker_start.start_fork_server(modules)  # its imports overlap with the search for GPUs and the import of Dask
    several_gpus = settings.device == "all" and len(all_gpus()) > 1
    if several_gpus or settings.workers is not None:
        from pipeline.cluster.dask.worker_processes import local_workers

        with local_workers(worker_specs(settings)) as workers:
            workers.gathers_metrics = settings.metrics_port is not None
            yield Executor(device=workers, stream=workers.stream)
        return
    name = "auto" if settings.device == "all" else settings.device
    device = open_device(name, settings.threads, settings.overlap)
    if settings.metrics_port is not None:
        watch(device)
    yield Executor(device=device, stream=stream_on_device)


def worker_specs(settings: Settings) -> list[WorkerSpec]:
    """One worker process for each GPU that the settings name, or `workers` processes on the CPU."""
    if settings.device == "all":
        gpus = all_gpus()
    elif settings.device == "auto":
        gpus = usable_gpus() if settings.workers is None else []
    else:
        device = open_device(settings.device, settings.threads)
        gpus = [] if device.name == "cpu" else [int(device.name.removeprefix("cuda:"))]
    return gpu_workers(gpus) if gpus else cpu_workers(settings.workers or 1, settings.threads)


def _refuse_contradictions(settings: Settings) -> None:
    clustered = settings.scheduler is not None or settings.workers is not None or settings.device == "all"
    if settings.scheduler is not None and settings.workers is not None:
        raise ParameterError("--workers starts processes here, --scheduler uses those of a cluster: give one of them")
    if settings.scheduler is not None and settings.device not in ("auto", "cpu", "cuda"):
        raise ParameterError(
            f"--device {settings.device} names a device of this machine; with --scheduler, use auto, cpu or cuda"
        )
    if settings.workers is not None and settings.device not in ("auto", "cpu"):
        raise ParameterError(
            f"--workers starts processes on the CPU, and --device {settings.device} means GPUs: give one of them "
            "(--device all has a process for each GPU)"
        )
    if settings.workers is not None and settings.device == "auto" and usable_gpus():
        raise ParameterError("--workers starts processes on the CPU and this machine has a GPU: add --device cpu")
    if clustered and settings.overlap != 5:
        raise ParameterError("--overlap is for one device: leave it out, or leave out --workers, --scheduler and all")
