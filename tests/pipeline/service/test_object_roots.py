"""Data roots in an object store: which URLs jobs may name, and a job that reads and writes them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2 as httpx
import imagecodecs
import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.client import Client
from pipeline.errors import InputError, OutputError, ParameterError, ServiceRefused
from pipeline.service.roots import DataRoots
from pipeline.service.settings import ServiceSettings
from pipeline.storage.objects import ObjectPath
from tests.images import read_image, write_image
from tests.pipeline.service.live import live_service

ROOT = ObjectPath.of("s3://bucket/pre/fix")


@pytest.mark.parametrize("name", ["s3://bucket/pre/fix/a.zarr", "S3://bucket/pre/fix//b/c.tif"])
def test_urls_under_a_root_may_be_used(tmp_path, name):
    roots = DataRoots([tmp_path, ROOT])
    assert isinstance(roots.readable(name), ObjectPath)
    assert isinstance(roots.writable(name), ObjectPath)
    assert str(roots.within(name)) == name.replace("S3", "s3").replace("fix//b", "fix/b")


@pytest.mark.parametrize(
    "name",
    [
        "s3://bucket/pre/fixed/a.zarr", "s3://bucket/pre/a.zarr", "s3://bucket", "s3://other/pre/fix/a.zarr",
        "gs://bucket/pre/fix/a.zarr", "https://bucket/pre/fix/a.zarr", "s3://bucket.evil/pre/fix/a.zarr",
        "s3:/bucket/pre/fix/a.zarr",
    ],
)  # fmt: skip
def test_others_may_not(tmp_path, name):
    roots = DataRoots([tmp_path, ROOT])
    if name.startswith("s3:/b"):  # the name of a file
        assert roots.within(name).is_relative_to(tmp_path)
        return
    with pytest.raises(InputError, match=r"is outside the service's data roots \(.*, s3://bucket/pre/fix\)"):
        roots.readable(name)
    with pytest.raises(OutputError, match="is outside the service's data roots"):
        roots.writable(name)


@pytest.mark.parametrize(
    "name",
    [
        "s3://bucket/pre/fix/../a.zarr", "s3://key:secret@bucket/pre/fix/a.zarr", "s3://secret@bucket/pre/fix/a.zarr",
        "https://bucket/a.zarr?X-Amz-Signature=secret",
    ],
)  # fmt: skip
def test_ways_out_and_credentials_are_refused_and_not_repeated(tmp_path, name):
    roots = DataRoots([tmp_path, ROOT, ObjectPath.of("https://bucket")])
    for call in (roots.within, roots.readable, roots.writable):
        with pytest.raises(InputError) as refused:
            call(name)
        assert "secret" not in str(refused.value)


def test_without_folders_only_urls_may_be_used():
    roots = DataRoots([ROOT])
    assert roots.folder is None
    assert str(roots.within("s3://bucket/pre/fix/a.zarr")) == "s3://bucket/pre/fix/a.zarr"
    for name in ("a.zarr", "/etc/passwd"):
        with pytest.raises(InputError, match="outside the service's data roots"):
            roots.within(name)
    with pytest.raises(OutputError, match="is one of the service's data roots"):
        roots.writable(str(ROOT))


def test_a_groups_own_root_is_no_part_of_the_others(tmp_path):
    own = ObjectPath.of("s3://lab/own")
    roots = DataRoots([tmp_path, ROOT], groups={"lab": [own]})
    assert str(roots.of("lab").within("s3://lab/own/a.zarr")) == "s3://lab/own/a.zarr"
    with pytest.raises(InputError, match="outside"):
        roots.of("lab").within("s3://bucket/pre/fix/a.zarr")
    with pytest.raises(InputError, match="outside"):
        roots.within("s3://lab/own/a.zarr")
    with pytest.raises(ParameterError, match="lies under the data root s3://bucket/pre/fix"):
        DataRoots([ROOT], groups={"lab": [ROOT / "lab"]})


def test_settings_take_urls(tmp_path):
    given = f"{tmp_path}:s3://b/p:https://h:8080/x:gs://c:/more"
    names = [str(tmp_path), "s3://b/p", "https://h:8080/x", "gs://c", "/more"]
    for value in (given, names):
        settings = ServiceSettings(data_roots=value, group_roots={"lab": "s3://lab/own"})
        assert [str(root) for root in settings.data_roots] == names
        assert [isinstance(root, ObjectPath) for root in settings.data_roots] == [False, True, True, True, False]
        assert settings.group_roots["lab"] == [ObjectPath.of("s3://lab/own")]
    assert ServiceSettings(data_roots="relative").data_roots == [Path.cwd() / "relative"]
    with pytest.raises(ValueError, match="would be shown in receipts and logs") as refused:
        ServiceSettings(data_roots=["s3://key:secret@b/p"])
    assert "secret@" not in refused.value.errors()[0]["msg"]


def test_a_job_reads_and_writes_objects(s3, tmp_path):
    samples = np.random.default_rng(0).integers(0, 65536, (701, 331)).astype(np.uint16)
    source, output = write_image(s3 / "data" / "in.zarr", samples, "YX"), s3 / "data" / "out.zarr"
    (s3 / "elsewhere.zarr").write_bytes(b"not for this service")
    with live_service(tmp_path, urls=[s3 / "data"]) as (url, _, _), Client(url) as client:
        job = client.submit("smooth", source, output, size="5")
        assert job.wait().state == "succeeded"
        receipt = job.receipt
        assert (receipt["input"]["path"], receipt["output"]) == (str(source), str(output))
        for name in (str(s3 / "elsewhere.zarr"), str(s3 / "data" / ".." / "elsewhere.zarr")):
            with pytest.raises(ServiceRefused, match=r"outside the service's data roots|is not the URL of an object"):
                client.submit("smooth", name, output, size="5")
        with pytest.raises(ServiceRefused) as refused:
            client.submit("smooth", f"{source}".replace("//", "//key:secret@"), output, size="5")
        assert "secret" not in str(refused.value)
        answer = httpx.get(f"{url}/v1/jobs/{job.id}/result")
        assert (answer.status_code, str(output) in answer.text) == (409, True)
        assert httpx.get(f"{url}/jobs/{job.id}").status_code == 200
        picture = httpx.get(f"{url}/v1/images/slice", params={"path": str(output), "low": 0, "high": 65535})
        assert "etag" not in picture.headers
        shades = imagecodecs.png_decode(picture.content)
        np.testing.assert_allclose(shades, uniform_filter(samples, 5) / 257, rtol=0, atol=0.5 + 1e-6)
        again = client.submit("smooth", source, output, size="3").wait()
        assert again.state == "failed"
        assert "objects are not replaced" in again.error
    np.testing.assert_array_equal(read_image(output), uniform_filter(samples, 5))
    assert json.loads((s3 / "data" / "out.zarr.receipt.json").read_bytes())["job"] == job.id
