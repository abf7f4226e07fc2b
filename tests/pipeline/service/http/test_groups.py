"""Who sees and changes what: each role against jobs of its own group and of another, over every route."""

from __future__ import annotations

import re

import pytest

from pipeline.api_models import State
from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import JobFilter
from tests.pipeline.service.calls import JOB, assert_problem, succeed

# name: role, groups
PEOPLE = {
    "ada": ("user", ["mri"]), "bob": ("user", ["eeg"]), "cy": ("user", ["eeg", "mri"]), "dee": ("user", []),
    "eve": ("viewer", ["mri"]), "root": ("operator", []),
}  # fmt: skip


@pytest.fixture
def client(world, tmp_path):
    lines = [token_line(name, name, role, groups) for name, (role, groups) in PEOPLE.items()]
    (tmp_path / "tokens").write_text("\n".join(lines))
    return world.http(Tokens(tmp_path / "tokens"))


def as_(name):
    return {"Authorization": f"Bearer {name}"}


def accepted(client, name, **what):
    response = client.post("/v1/jobs", json=JOB | {"output": f"{name}.npy"} | what, headers=as_(name))
    assert response.status_code == 201, response.text
    return response.json()["jobs"][0]["id"]


def listed(client, name, **params):
    return [job["owner"] for job in client.get("/v1/jobs", params=params, headers=as_(name)).json()["jobs"]]


@pytest.fixture
def jobs(client, world):
    return {name: accepted(client, name) for name in ("ada", "bob", "cy", "dee")}


SEEN = {
    "ada": ["ada"], "bob": ["cy", "bob"], "cy": ["cy", "bob", "ada"], "dee": ["dee"], "eve": ["ada"],
    "root": ["dee", "cy", "bob", "ada"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "owners"), SEEN.items())
def test_lists_counts_and_pages_show_the_jobs_of_ones_groups(client, world, jobs, name, owners):
    assert listed(client, name) == owners
    assert listed(client, name, state="queued") == owners
    assert listed(client, name, owner="ada") == [each for each in owners if each == "ada"]
    assert listed(client, name, group="mri") == [each for each in owners if each == "ada"]
    assert listed(client, name, limit=1) == owners[:1]
    page = client.get("/", headers=as_(name)).text
    assert sorted(re.findall(r'href="/jobs/(\w{12})"', page)) == sorted(jobs[each] for each in owners)
    assert f"all<b>{len(owners)}</b>" in page
    assert f"queued<b>{len(owners)}</b>" in page


ROUTES = ("", "/log", "/events", "/receipt", "/result", "/preview")


@pytest.mark.parametrize("name", PEOPLE)
def test_every_route_of_a_foreign_job_says_that_there_is_none(client, world, jobs, name):
    for owner in ("ada", "bob"):
        succeed(world.store, jobs[owner])
        (world.data / f"{owner}.npy").write_bytes(b"samples")
        (world.previews / f"{jobs[owner]}.png").write_bytes(b"\x89PNG")
    for owner in ("ada", "bob"):
        job, is_seen = jobs[owner], owner in SEEN[name]
        paths = [*(f"/v1/jobs/{job}{route}" for route in ROUTES), f"/jobs/{job}"]
        if PEOPLE[name][0] != "viewer":
            paths.append(f"/submit?like={job}")
        for path in paths:
            answer = client.get(path, headers=as_(name))
            if is_seen:
                assert answer.status_code == 200, path
            else:
                assert_problem(answer, 404, f"there is no job {job}")
                assert owner not in answer.text


@pytest.mark.parametrize("what", ["cancel", "retry"])
@pytest.mark.parametrize(
    ("name", "owner", "status"),
    [
        ("ada", "ada", 200), ("ada", "bob", 404), ("bob", "cy", 403), ("cy", "ada", 403), ("dee", "ada", 404),
        ("eve", "ada", 403), ("eve", "bob", 403), ("root", "ada", 200), ("root", "bob", 200),
    ],
)  # fmt: skip
def test_jobs_are_changed_by_their_owner_and_by_operators(client, world, jobs, name, owner, status, what):
    job = jobs[owner]
    if what == "retry":
        assert client.post(f"/v1/jobs/{job}/cancel", headers=as_("root")).status_code == 200
    before = world.store.job(job)
    assert client.post(f"/v1/jobs/{job}/{what}", headers=as_(name)).status_code == status
    after = world.store.job(job)
    assert (after != before) == (status == 200)


def test_viewers_submit_nothing_and_see_no_form(client, world, jobs):
    refused = client.post("/v1/jobs", json=JOB | {"output": "x.npy"}, headers=as_("eve"))
    assert_problem(refused, 403, "eve is a viewer and may only look; ask an operator for the role user")
    assert len(world.store.list_jobs()) == len(jobs)
    page = client.get(f"/jobs/{jobs['ada']}", headers=as_("eve")).text
    assert 'data-post="' not in page
    assert "/submit" not in page
    assert client.get("/submit", headers=as_("eve")).status_code == 403
    page = client.get(f"/jobs/{jobs['ada']}", headers=as_("ada")).text
    assert f'data-post="/v1/jobs/{jobs["ada"]}/cancel"' in page
    assert 'data-post="' not in client.get(f"/jobs/{jobs['bob']}", headers=as_("cy")).text, "it is bob's"
    assert 'data-post="' in client.get(f"/jobs/{jobs['bob']}", headers=as_("root")).text


def test_a_job_belongs_to_one_of_its_owners_groups(client, world):
    assert world.store.job(accepted(client, "cy")).asked.group == "eeg"
    assert world.store.job(accepted(client, "cy", group="mri", output="2.npy")).asked.group == "mri"
    assert world.store.job(accepted(client, "dee")).asked.group == ""
    for name, group in (("ada", "eeg"), ("ada", ""), ("dee", "mri")):
        refused = client.post("/v1/jobs", json=JOB | {"output": "3.npy", "group": group}, headers=as_(name))
        assert_problem(refused, 403, f"group: {name} does not belong to '{group}'")
    refused = client.post("/v1/jobs", json=JOB | {"output": "3.npy", "group": "a b"}, headers=as_("root"))
    assert_problem(refused, 422, "group: must be the name of a group; got 'a b'")


def test_the_form_asks_those_with_several_groups_for_one(client):
    form = client.get("/submit", headers=as_("cy")).text
    assert re.search(r'<select name="group"><option>eeg</option><option>mri</option></select>', form)
    for name in ("ada", "dee", "root"):
        assert 'name="group"' not in client.get("/submit", headers=as_(name)).text


def test_a_job_cannot_come_after_one_that_its_owner_does_not_see(client, jobs):
    after_foreign = JOB | {"output": "x.npy", "after": [jobs["bob"]]}
    assert_problem(client.post("/v1/jobs", json=after_foreign, headers=as_("ada")), 404, "there is no job")
    assert client.post("/v1/jobs", json=after_foreign, headers=as_("cy")).status_code == 201


def test_a_foreign_job_that_writes_the_same_output_is_not_named(client, jobs):
    refused = client.post("/v1/jobs", json=JOB | {"output": "bob.npy"}, headers=as_("ada"))
    assert_problem(refused, 409, "bob.npy: a job of another group writes it")
    assert jobs["bob"] not in refused.text
    refused = client.post("/v1/jobs", json=JOB | {"output": "bob.npy"}, headers=as_("cy"))
    assert_problem(refused, 409, f"bob.npy: job {jobs['bob']} writes it")


def test_groups_have_data_roots_of_their_own(world, tmp_path):
    own = tmp_path / "mri"
    own.mkdir()
    (tmp_path / "tokens").write_text(f"{token_line('ada', 'ada', groups=['mri'])}\n{token_line('dee', 'dee')}\n")
    client = world.http(Tokens(tmp_path / "tokens"), group_roots={"mri": [own]})
    job = accepted(client, "ada")  # relative paths begin in the group's first root
    assert world.store.job(job).asked.written == str(own / "ada.npy")
    inside = {"input": str(own / "in.npy"), "output": str(own / "out.npy")}
    accepted(client, "ada", **inside)
    refused = client.post("/v1/jobs", json=JOB | inside, headers=as_("dee"))
    assert_problem(refused, 422, "is outside the service's data roots")
    common = {"input": str(world.data / "in.npy"), "output": str(world.data / "out.npy")}
    assert_problem(client.post("/v1/jobs", json=JOB | common, headers=as_("ada")), 422, "outside the service's data")
    accepted(client, "dee", **common)
    assert str(own) in client.get("/submit", headers=as_("ada")).text
    assert str(own) not in client.get("/submit", headers=as_("dee")).text
    succeed(world.store, job)
    (own / "ada.npy").write_bytes(b"samples of mri")
    (world.data / "ada.npy").write_bytes(b"samples of all")
    assert client.get(f"/v1/jobs/{job}/result", headers=as_("ada")).content == b"samples of mri"


def test_the_store_lists_by_groups_whatever_else_is_asked_for(client, world, jobs):
    def owners(**wanted):
        return [each.asked.owner for each in world.store.list_jobs(JobFilter(**wanted))]

    for groups in ((), ("mri",), ("eeg",), ("eeg", "mri"), ("", "mri"), ("none",)):
        expected = [
            name for name in ("dee", "cy", "bob", "ada") if (PEOPLE[name][1] or [""])[0] in groups
        ]  # fmt: skip
        assert owners(groups=groups) == expected
        assert owners(groups=groups, state="queued") == expected
        assert owners(groups=groups, state="failed") == []
        assert owners(groups=groups, workload="smooth") == expected
        assert owners(groups=groups, owner="cy") == [each for each in expected if each == "cy"]
        newest = world.store.job(jobs["dee"]).number
        assert owners(groups=groups, before=newest) == [each for each in expected if each != "dee"]
        assert world.store.counts(groups)[State.QUEUED] == len(expected)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mri=/a:/b,eeg=/c", {"mri": ["/a", "/b"], "eeg": ["/c"]}),
        ({"mri": ["/a"]}, {"mri": ["/a"]}),
        ("", {}),
    ],
)
def test_data_roots_of_groups_are_written_in_a_file_or_on_one_line(text, found):
    settings = ServiceSettings(data_roots=["/d"], group_roots=text)
    assert {group: [str(each) for each in roots] for group, roots in settings.group_roots.items()} == found
