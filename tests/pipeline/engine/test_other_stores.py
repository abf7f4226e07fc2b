"""Runs from and to web servers, Google Cloud Storage and Azure: what differs from S3."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import numpy as np
import pytest
import tifffile

from kernels.smoothing import uniform_filter
from pipeline.errors import InputError
from pipeline.storage import objects
from pipeline.storage.objects import ObjectPath
from tests.images import read_image, write_image
from tests.object_server import use_environment
from tests.pipeline.service.certificates import Authority
from tests.web_server import WebServer

OPTIONS = ("--size", "5", "--device", "cpu", "--chunks", "64", "--shards", "128", "--chunk-bytes", "60K", "--quiet")
# The key that every emulator of Azure has.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture
def samples():
    return np.random.default_rng(0).integers(0, 65536, (701, 331)).astype(np.uint16)


def assert_runs(millrace, root, samples):
    source = write_image(root / "in.zarr", samples, "YX")
    code, _, said = millrace("run", "smooth", source, root / "out.zarr", *OPTIONS)
    assert code == 0, said
    np.testing.assert_array_equal(read_image(root / "out.zarr"), uniform_filter(samples, 5))
    assert json.loads((root / "out.zarr.receipt.json").read_bytes())["output"] == str(root / "out.zarr")
    assert "identical bits" in millrace("verify", root / "out.zarr", "--device", "cpu")[1]
    code, _, said = millrace("run", "smooth", source, root / "out.zarr", *OPTIONS)
    assert code == 2
    assert "objects are not replaced" in said


def test_a_web_server(samples, millrace, monkeypatch, tmp_path):
    use_environment(monkeypatch, {})
    server = WebServer()
    try:
        root = ObjectPath.of(f"http://127.0.0.1:{server.server_port}/data set")
        assert_runs(millrace, root, samples)
        tifffile.imwrite(tmp_path / "a.tif", samples, byteorder=">")
        server.objects["/data set/a b.tif"] = 1, (tmp_path / "a.tif").read_bytes()
        named = f"http://127.0.0.1:{server.server_port}/data%20set/a%20b.tif"
        assert millrace("run", "smooth", named, tmp_path / "b.tif", "--size", "5", "--device", "cpu")[0] == 0
        np.testing.assert_array_equal(read_image(tmp_path / "b.tif"), uniform_filter(samples, 5))
        assert server.parts_sent["/data%20set/a%20b.tif"] <= 6  # all audited windows come from blocks
        code, _, said = millrace("run", "smooth", root / "none.tif", tmp_path / "c.tif", "--device", "cpu")
        assert (code, said) == (2, f"millrace: {root}/none.tif: no such file; check the path\n")
        for name in ("", "/zarr.json"):  # a page for every path
            server.objects[f"/data set/page.tif{name}"] = 1, b"<html>Sign in</html>"
        code, _, said = millrace("run", "smooth", root / "page.tif", tmp_path / "c.tif", "--device", "cpu")
        assert (code, f"{root}/page.tif: not a TIFF: it begins with b'<htm'" in said) == (2, True)
        code, _, said = millrace("run", "smooth", root.parent, tmp_path / "c.tif", "--device", "cpu")
        assert (code, said) == (2, f"millrace: {root.parent}: is the URL of no object; write it as {root.parent}/KEY\n")
        server.status_of_others = 403
        code, _, said = millrace("run", "smooth", root / "none.tif", tmp_path / "c.tif", "--device", "cpu")
        fault = "access is denied (403 Forbidden); the server needs a permission"
        assert (code, said) == (2, f"millrace: {root}/none.tif: {fault}\n")
        server.has_ranges = False
        code, _, said = millrace("run", "smooth", named, tmp_path / "c.tif", "--device", "cpu")
        fault = "the server sends whole files only, and Millrace reads parts; download the file first"
        assert (code, said) == (2, f"millrace: {root}/a b.tif: {fault}\n")
    finally:
        server.close()


def test_a_web_server_with_a_certificate_of_an_own_authority(monkeypatch, tmp_path):
    use_environment(monkeypatch, {})
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.sign())
    server = WebServer()
    try:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.objects["/a.npy"] = 1, b"123"
        path = ObjectPath.of(f"https://127.0.0.1:{server.server_port}/a.npy")
        with pytest.raises(InputError, match=r"certificate is not trusted \(UnknownIssuer\); .* set SSL_CERT_FILE to"):
            path.stat()
        objects._stores.clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert path.read_bytes() == b"123"
    finally:
        server.close()
        objects._stores.clear()


def test_google_cloud_storage(samples, millrace, monkeypatch):
    server = WebServer(is_google=True)
    account = {
        "gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True, "client_email": "",
        "private_key": "", "private_key_id": "",
    }  # fmt: skip
    use_environment(monkeypatch, {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)})
    try:
        assert_runs(millrace, ObjectPath.of("gs://bucket/a"), samples)
        assert not [name for name in server.objects if "partial" in name or "ledger" in name]
    finally:
        server.close()


def test_azure(samples, millrace, monkeypatch, tmp_path):
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("Azurite is not installed; scripts/test installs it where there is npm")
    with subprocess.Popen(
        [azurite, "--silent", "--inMemoryPersistence", "--blobPort", "10077", "--skipApiVersionCheck"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            use_environment(monkeypatch, {
                "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
                "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:10077/devstoreaccount1",
            })  # fmt: skip
            create_container("http://127.0.0.1:10077/devstoreaccount1", "box")
            assert_runs(millrace, ObjectPath.of("az://box/a"), samples)
            code, _, said = millrace("run", "smooth", "az://other/a.zarr", tmp_path / "a.zarr", "--device", "cpu")
            assert code == 2
            assert "there is no bucket other (ContainerNotFound)" in said
        finally:
            process.kill()


def create_container(account, name):
    until = time.monotonic() + 60
    while True:
        date, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2023-11-03"
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
        signed += f"/devstoreaccount1/devstoreaccount1/{name}\nrestype:container"
        mark = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256)).decode()
        headers = {
            "x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey devstoreaccount1:{mark}",
        }  # fmt: skip
        try:
            asked = urllib.request.Request(f"{account}/{name}?restype=container", method="PUT", headers=headers)
            urllib.request.urlopen(asked, timeout=10).close()
            return
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
