"""Certificates towards a scheduler: what is incomplete or wrong is one line, and a plain network is warned of."""

from __future__ import annotations

import dask
import pytest
from distributed.security import Security

from pipeline.cluster.dask.tls import use_certificates
from pipeline.config import Settings
from pipeline.errors import ParameterError
from tests.pipeline.service.certificates import Authority


@pytest.fixture
def files(tmp_path):
    authority = Authority(tmp_path)
    cert, key = authority.sign()
    return {"scheduler_ca": authority.file, "scheduler_cert": cert, "scheduler_key": key}


@pytest.fixture(autouse=True)
def _own_configuration():
    with dask.config.set({"distributed.comm.require-encryption": None}):
        before = dask.config.get("distributed.comm.tls")
        with dask.config.set(
            {"distributed.comm.tls": {**before, **{role: {} for role in ("client", "worker", "scheduler")}}}
        ):
            yield


def test_every_role_shows_the_certificate_and_nothing_goes_out_plain(files):
    use_certificates(Settings(scheduler="tls://10.0.0.1:8786", **files))
    security = Security()
    assert security.require_encryption
    assert security.tls_ca_file == str(files["scheduler_ca"])
    for role in ("client", "worker", "scheduler"):
        assert getattr(security, f"tls_{role}_cert") == str(files["scheduler_cert"])
        assert getattr(security, f"tls_{role}_key") == str(files["scheduler_key"])
        assert security.get_connection_args(role)["ssl_context"] is not None


@pytest.mark.parametrize("left_out", ["scheduler_ca", "scheduler_cert", "scheduler_key"])
def test_all_three_or_none(files, left_out):
    with pytest.raises(ParameterError, match=f"{left_out}: is not set; give scheduler_ca, scheduler_cert and"):
        use_certificates(Settings(scheduler="tls://10.0.0.1:8786", **files | {left_out: None}))


def test_what_cannot_be_used_is_named(files, tmp_path):
    with pytest.raises(
        ParameterError, match=r"scheduler tcp://10[.]0[.]0[.]1:8786: certificates are for an address like tls:"
    ):
        use_certificates(Settings(scheduler="tcp://10.0.0.1:8786", **files))
    with pytest.raises(ParameterError, match=f"scheduler_key {tmp_path}/none: No such file or directory; choose one"):
        use_certificates(Settings(scheduler="tls://10.0.0.1:8786", **files | {"scheduler_key": tmp_path / "none"}))
    for name in files:
        (tmp_path / "text").write_text("text")
        with pytest.raises(ParameterError, match="are no certificates and key"):
            use_certificates(Settings(scheduler="tls://10.0.0.1:8786", **files | {name: tmp_path / "text"}))


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("tcp://10.0.0.1:8786", True), ("tcp://head:8786", True), ("tcp://127.0.0.1:8786", False),
        ("tcp://[::1]:8786", False), ("tcp://localhost:8786", False), ("tls://10.0.0.1:8786", False), (None, False),
    ],
)  # fmt: skip
def test_a_plain_network_is_warned_of(caplog, address, warned):
    use_certificates(Settings(scheduler=address))
    assert [each.getMessage().partition(":8786: ")[2][:40] for each in caplog.records] == (
        ["anyone on that network can run code on it"[:40]] if warned else []
    )
