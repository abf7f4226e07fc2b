"""What tests of the API and the pages ask of a service."""

from __future__ import annotations

from pipeline.service.http.problems import MEDIA_TYPE
from pipeline.service.jobs import Computed, Planned, Published
from pipeline.service.store import Facts

JOB = {"workload": "smooth", "input": "in.npy", "output": "out.npy", "parameters": {"size": "3"}}


def submit(client, **what):
    return client.post("/v1/jobs", json=JOB | what)


def accepted(client, **what):
    response = submit(client, **what)
    assert response.status_code == 201, response.text
    return response.json()["jobs"][0]["id"]


def succeed(store, job, receipt=None):
    store.claim("r", now=1.0, lease_s=9.0, owner_cap=99)
    store.apply(job, Planned(1, 4), now=2.0)
    store.apply(job, Computed(1), now=3.0)
    store.apply(job, Published(1), now=4.0, facts=Facts(receipt=receipt or {"chunks": 4}))


def assert_problem(response, status, said):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    found = response.json()
    assert found["status"] == status
    assert said in found["detail"], found["detail"]


class Processes:
    """Looks at files in this process, unlike a service; as `JobProcesses`."""

    def look(self, path, function, *arguments, known, most_bytes, most_s):
        return function(path, *arguments)
