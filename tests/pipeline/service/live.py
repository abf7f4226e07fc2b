"""A service on a port of this machine, its jobs run in this process."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import uvicorn

from pipeline.cluster.executor import Executor
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import stream_on_device
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.http.edge.connections import BoundedRequests
from pipeline.service.roots import DataRoots
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store
from tests.images import write_image
from tests.pipeline.service.calls import Processes

WAIT_S = 60.0


@contextmanager
def live_service(folder, *, tokens=None, target_bytes=30_000, stream=stream_on_device, urls=(), **tls):
    """Yields (url, store, the data folder, in which lies in.npy). `urls`: further roots; `tls`: uvicorn's options for
    it."""
    data = folder / "data"
    data.mkdir()
    write_image(data / "in.npy", np.random.default_rng(1).integers(0, 65536, (900, 301)).astype(np.uint16), "YX")
    store, roots = Store(folder / "state" / "jobs.sqlite"), DataRoots([data, *urls])
    device = CpuDevice(1)
    device.target_bytes = lambda job_bytes: target_bytes
    previews = folder / "previews"
    previews.mkdir()
    runner = Runner(store, Executor(device=device, stream=stream), roots, Limits(jobs_at_once=1), previews=previews)
    service = Service(
        settings=ServiceSettings(state_dir=folder / "state", data_roots=[data]), store=store, runner=runner,
        roots=roots, previews=previews, processes=Processes(), ready=lambda: None,
        workers=lambda: [dict(device.describe())], tokens=lambda: tokens,
    )  # fmt: skip
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(service), port=0, http=BoundedRequests, log_level="critical", timeout_graceful_shutdown=1, **tls
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    runner.start()
    end = time.monotonic() + WAIT_S
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}", store, data
    finally:
        runner.drain(WAIT_S)
        server.should_exit = True
        thread.join()
        store.close()
