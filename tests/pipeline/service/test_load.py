"""A service under load: many clients at once, one job after another, news without delay."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np

from pipeline.client import Client
from pipeline.service.store.job_events import JobEvents
from tests.images import write_image
from tests.pipeline.service.calls import JOB
from tests.pipeline.service.live import live_service

WAIT_S = 150.0
JOBS, CLIENTS = 12, 6


def open_files():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough


def test_many_clients_at_once_and_nothing_is_lost_or_left_open(tmp_path):
    with live_service(tmp_path) as (url, store, data), Client(url) as watcher:
        write_image(data / "small.npy", np.ones((40, 40), np.uint8), "YX")

        def submit(client):
            with Client(url) as own:
                return [own.submit("smooth", "small.npy", f"{client}-{n}.npy").id for n in range(JOBS // CLIENTS)]

        opened = []
        for _ in range(2):
            with ThreadPoolExecutor(CLIENTS) as threads:
                jobs = [job for ids in threads.map(submit, range(CLIENTS)) for job in ids]
            assert len(set(jobs)) == JOBS
            end = time.monotonic() + WAIT_S
            while any(any(watcher.jobs(state=state, limit=1)) for state in ("queued", "planning", "running")):
                assert time.monotonic() < end
                time.sleep(0.05)
            states = {job.id: job.wait().state for job in watcher.jobs()}
            assert [states[job] for job in jobs] == ["succeeded"] * JOBS
            opened.append(open_files())
        assert len(store.list_jobs(limit=1000)) == 2 * JOBS
        assert opened[1] <= opened[0] + 8  # what a server of months must not gather


def test_that_the_process_lives_is_told_however_many_wait_for_the_store(tmp_path):
    waiting = 50  # more than there are threads for requests
    with (
        live_service(tmp_path) as (url, store, _),
        httpx2.Client(base_url=url, timeout=WAIT_S) as http,
        ThreadPoolExecutor(waiting) as threads,
    ):
        with store._database._writing:
            answers = [
                threads.submit(http.post, "/v1/jobs", json=JOB | {"output": f"{number}.npy"})
                for number in range(waiting)
            ]
            assert http.get("/livez", timeout=20.0).text == "ok\n"
            assert not any(answer.done() for answer in answers)
        assert {answer.result().status_code for answer in answers} == {201}


def test_a_change_wakes_the_listeners_of_that_job():
    job_events = JobEvents()

    async def listen():
        with job_events.of("a") as event, job_events.of("b") as other:
            teller = threading.Thread(target=job_events.notify, args=(["a", "unheard"],))
            teller.start()
            await asyncio.wait_for(event.wait(), WAIT_S)
            teller.join()
            assert not other.is_set()
            with job_events.of("a") as second:
                job_events.notify({"a", "b"})
                await asyncio.wait_for(asyncio.gather(second.wait(), other.wait()), WAIT_S)

    asyncio.run(listen())
    assert not job_events._listeners
    job_events.notify(["a"])


def test_a_loop_that_is_gone_listens_no_more():
    job_events = JobEvents()

    async def leave_open():
        listening = job_events.of("a")
        listening.__enter__()
        return listening

    left = asyncio.run(leave_open())
    job_events.notify(["a"])
    del left
