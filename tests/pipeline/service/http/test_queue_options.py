"""What a submission may ask of the queue: limits, throttled arrays, dependencies of any end, webhooks, an estimate."""

from __future__ import annotations

import pytest

from pipeline.api_models import Estimate
from pipeline.config import format_seconds, parse_seconds
from pipeline.errors import InputError, ParameterError
from pipeline.service.http.views import AskedLimits
from pipeline.service.jobs import Claimed, Failed
from pipeline.service.settings import LimitSettings, load_service_settings
from tests.pipeline.service.calls import JOB, accepted, assert_problem, submit, succeed

GIB = 1 << 30
NOTHING = {"time_s": None, "memory_bytes": None, "gpu_memory_bytes": None, "gpus": None}


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("90", 90, "90 s"),
        ("1.5h", 5400, "90 min"),
        ("45 min", 2700, "45 min"),
        ("2m", 120, "2 min"),
        ("3d", 259200, "3 d"),
        ("0.25s", 0.25, "0.25 s"),
        ("36H", 129600, "36 h"),
    ],
)
def test_times(text, seconds, shown):
    assert parse_seconds(text) == seconds
    assert format_seconds(seconds) == shown
    assert parse_seconds(shown) == seconds


@pytest.mark.parametrize("text", ["soon", "-1h", "1e3", "1:30", "", "1 week", "nan"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match=r"write it like 90s, 45min, 2h or 1\.5d"):
        parse_seconds(text)


def test_defaults_and_caps_of_the_operator(tmp_path, monkeypatch):
    (tmp_path / "millrace.toml").write_text(
        f'data_roots = ["{tmp_path}"]\n[limits]\ntime = "2h"\ntime_cap = "1d"\nmemory_cap = "8GiB"\ngpus = 1\n'
    )
    in_force = load_service_settings({}, file=tmp_path / "millrace.toml")
    limits = in_force.settings.limits
    assert any(
        "limits" in line and "time=2 h,time_cap=24 h,memory_cap=8.0 GiB,gpus=1" in line for line in in_force.lines()
    )
    granted = {"time_s": 7200.0, "memory_bytes": 8 * GIB, "gpu_memory_bytes": None, "gpus": 1}
    assert limits.granted(AskedLimits()).model_dump() == granted
    asked = {"time_s": 86_400.0, "memory_bytes": GIB, "gpu_memory_bytes": GIB, "gpus": 2}
    assert limits.granted(AskedLimits(**asked)).model_dump() == asked
    with pytest.raises(ParameterError, match=r"limits\.time_s: 25 h is more than the 24 h that a job may have"):
        limits.granted(AskedLimits(time_s=90_000))
    monkeypatch.setenv("MILLRACE_LIMITS", "time=30min,gpus_cap=4")
    assert load_service_settings({}, file=tmp_path / "millrace.toml").settings.limits == LimitSettings(
        time=1800, gpus_cap=4
    )
    for wrong, said in (
        ("time", "'time' is not time=2h,memory_cap=16GiB"),
        ("cores=2", "no such"),
        ("memory=1KiB", "greater than"),
    ):
        with pytest.raises(ParameterError, match=said):
            load_service_settings({"limits": wrong}, file=tmp_path / "millrace.toml")


def test_a_jobs_limits_are_granted_and_shown(world):
    client = world.http(limits={"time": "1h", "gpu_memory_cap": 2 * GIB})
    job = accepted(client, limits={"memory_bytes": GIB, "gpus": 1})
    found = client.get(f"/v1/jobs/{job}").json()
    assert found["limits"] == {"time_s": 3600.0, "memory_bytes": GIB, "gpu_memory_bytes": 2 * GIB, "gpus": 1}
    assert (found["estimate"], found["used"]["seconds"], found["preemptions"]) == (None, 0.0, 0)
    (listed,) = client.get("/v1/jobs").json()["jobs"]
    assert listed | {"submitted_at": found["submitted_at"]} == found  # SQLite writes fewer digits
    assert world.store.job(job).asked.limits.model_dump() == found["limits"]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"time_s": 0}, "limits.time_s: "),
        ({"time_s": "2h"}, "limits.time_s: "),
        ({"memory_bytes": 1}, "limits.memory_bytes"),
        ({"gpus": 0}, "limits.gpus"),
        ({"gpus": True}, "limits.gpus: must be a whole number"),
        ({"cores": 2}, "limits.cores"),
        ({"gpus": 2}, "limits.gpus: 2 are more than the 1"),
        ({"time_s": 7300}, "more than the 2 h that a job may have"),
        ([], "limits: "),
    ],
)
def test_limits_that_are_refused(world, limits, said):
    assert_problem(submit(world.http(limits={"time_cap": "2h"}), limits=limits), 422, said)


def test_an_array_with_a_throttle(world):
    client = world.http()
    jobs = submit(client, array="0-3%2", output="out-{index}.npy").json()["jobs"]
    assert {job["throttle"] for job in jobs} == {2}
    claimed = [world.store.claim("r", now=1.0, lease_s=9.0, owner_cap=99) for _ in range(3)]
    assert [job and job.asked.array_index for job in claimed] == [0, 1, None]
    assert world.store.oldest_queued() is None, "none of them could run"
    succeed_claimed(world.store, claimed[1])
    assert world.store.claim("r", now=1.0, lease_s=9.0, owner_cap=99).asked.array_index == 2
    for wrong in ("0-3%0", "0-3%", "0-3%x", "0-3%-1", "%2"):
        assert_problem(submit(client, array=wrong, output="x-{index}.npy"), 422, "array: must be FROM-TO")
    assert accepted(client, output="other.npy"), "others are not held up"
    assert world.store.claim("r", now=1.0, lease_s=9.0, owner_cap=99).asked.output == "other.npy"


def succeed_claimed(store, claimed):
    store.apply(claimed.job.id, Failed(claimed.job.epoch, "truncated", transient=False), now=2.0)


def test_a_job_after_others_however_they_end(world):
    client = world.http()
    first, second = accepted(client, output="a.npy"), accepted(client, output="b.npy")
    job = accepted(client, output="c.npy", after_any=[first, second])
    last = accepted(client, output="d.npy", after=[job], after_any=[job])
    world.store.apply(first, Claimed(1), now=1.0)
    world.store.apply(first, Failed(1, "truncated", transient=False), now=1.0)
    assert world.store.job(job).job.waiting_for_end == {second}
    client.post(f"/v1/jobs/{second}/cancel")
    assert world.store.job(job).job.claimable
    assert not world.store.job(last).job.claimable
    assert accepted(client, output="e.npy", after_any=[first]), "it has ended already"
    succeed(world.store, job)
    assert world.store.job(last).job.claimable
    assert_problem(submit(client, output="f.npy", after_any=["0" * 12]), 404, "there is no job")
    assert_problem(submit(client, output="f.npy", after_any=["x"]), 422, "after_any")


def test_an_output_that_exists_is_kept(world):
    client = world.http()
    (world.data / "out.npy").write_bytes(b"older")
    refused = submit(client, no_clobber=True)
    assert_problem(refused, 422, "out.npy: exists, and --no-clobber keeps it; choose another name, or remove it")
    job = accepted(client)
    assert client.get(f"/v1/jobs/{job}").json()["no_clobber"] is False
    kept = accepted(client, output="b.npy", no_clobber=True)
    assert client.get(f"/v1/jobs/{kept}").json()["no_clobber"] is True
    assert [each["no_clobber"] for each in client.get("/v1/jobs").json()["jobs"]] == [True, False]
    (world.data / "c-2.npy").symlink_to(world.data / "out.npy")
    array = {"output": "c-{index}.npy", "no_clobber": True}
    assert_problem(submit(client, array="0-3", **array), 422, "out.npy: exists")
    assert len(client.get("/v1/jobs").json()["jobs"]) == 2, "none of the array"
    assert submit(client, array="3-5", **array).status_code == 201
    assert_problem(submit(client, output="../secret.npy", no_clobber=True), 422, "outside the service's data roots")


def test_a_request_that_is_sent_again_after_the_job_has_ended_is_not_refused(world):
    """Its output exists by then."""
    client, key = world.http(), {"Idempotency-Key": "k"}
    first = client.post("/v1/jobs", json=JOB | {"no_clobber": True}, headers=key)
    (world.data / "out.npy").write_bytes(b"the result")
    again = client.post("/v1/jobs", json=JOB | {"no_clobber": True}, headers=key)
    assert (again.status_code, again.json()) == (201, first.json())
    assert_problem(client.post("/v1/jobs", json=JOB | {"no_clobber": True}, headers={"Idempotency-Key": "l"}), 422, "")


def test_webhooks_only_at_the_operators_hosts(world, tmp_path):
    client = world.http(webhook_hosts=["hooks.example.org"])
    job = accepted(client, webhook="https://hooks.example.org/a")
    assert world.store.job(job).asked.webhook == "https://hooks.example.org/a"
    assert "hooks" not in client.get(f"/v1/jobs/{job}").text, "the address may hold a secret"
    refused = submit(client, output="b.npy", webhook="http://169.254.169.254/latest")
    assert_problem(refused, 422, "webhook: 169.254.169.254:80 is not a host that the service may notify")
    flags = {"data_roots": str(tmp_path), "webhook_hosts": "a.org,b.org:8443"}
    with pytest.raises(ParameterError, match="webhook_secret_file: is not set"):
        load_service_settings(flags)
    settings = load_service_settings(flags | {"webhook_secret_file": "/etc/secret"}).settings
    assert settings.webhook_hosts == ["a.org", "b.org:8443"]
    with pytest.raises(ParameterError, match=r"--webhook-url: .* is not an address like https://hooks"):
        load_service_settings(flags | {"webhook_secret_file": "/etc/secret", "webhook_url": "ftp://a.org/"})


def test_the_estimate_of_a_job(world):
    client = world.http()
    job, seen = accepted(client), []
    known = {"chunks": 3, "read_bytes": 10, "written_bytes": 20, "memory_bytes": 30}

    def estimate(stored):
        seen.append(stored.job.id)
        world.store.note_estimate(stored.job.id, known, 7, now=1.0)

    assert_problem(client.get(f"/v1/jobs/{job}/estimate"), 409, "another job is being planned; ask again")
    world.runner.estimate = estimate
    for _ in range(2):
        assert client.get(f"/v1/jobs/{job}/estimate").json() == known | {"seconds": None}
    assert seen == [job], "planned once"
    assert client.get(f"/v1/jobs/{job}").json()["estimate"] == known | {"seconds": None}
    assert world.store.job(job).estimate == Estimate(**known, seconds=None)
    other = accepted(client, output="b.npy")
    client.post(f"/v1/jobs/{other}/cancel")
    assert_problem(client.get(f"/v1/jobs/{other}/estimate"), 409, "is cancelled: there is no estimate")

    def absent(stored):
        raise InputError("in.npy: no such file")

    world.runner.estimate = absent
    third = accepted(client, output="c.npy")
    assert_problem(client.get(f"/v1/jobs/{third}/estimate"), 422, "in.npy: no such file")
