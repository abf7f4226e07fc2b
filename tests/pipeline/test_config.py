"""Settings: a file, overruled by the environment, overruled by flags; a wrong value names where it came from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.api_models import JobLimits
from pipeline.config import explain, format_bytes, load_settings, parse_bytes
from pipeline.errors import ParameterError
from pipeline.service.settings import ServiceSettings, load_service_settings
from pipeline.workloads import workload_named


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("1048577", 1048577),
        ("64m", 64_000_000),
        ("7168KiB", 7 << 20),
        (" 3 TiB ", 3 << 40),
        (4096, 4096),
    ],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1 potato", "1e9", "0x10", "1 GiB 2"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (512 << 20, "512 MiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_as_people_read_them(count, text):
    assert format_bytes(count) == text


def test_flags_overrule_environment_overrules_file(tmp_path, monkeypatch):
    file = tmp_path / "millrace.toml"
    file.write_text('memory = "1GiB"\nworkers = 3\ndevice = "cpu"\n')
    monkeypatch.setenv("MILLRACE_WORKERS", "5")
    monkeypatch.setenv("MILLRACE_DEVICE", "auto")
    settings = load_settings({"device": "cuda:1", "memory": None}, file=file)
    assert (settings.memory, settings.workers, settings.device) == (1 << 30, 5, "cuda:1")
    monkeypatch.setenv("MILLRACE_CONFIG", str(file))
    assert load_settings({}).memory == 1 << 30


@pytest.mark.parametrize(
    ("file", "environment", "flags", "message"),
    [
        ('memory = "lots"', {}, {}, "millrace.toml, key memory: 'lots' is not an amount of memory"),
        ("colour = 1", {}, {}, "millrace.toml, key colour: there is no such setting; there are device, memory"),
        ("memory = ", {}, {}, "millrace.toml: Invalid value"),
        ("threads = true", {}, {}, "millrace.toml, key threads: no setting is true; give a number or text"),
        ("", {"MILLRACE_WORKERS": "0"}, {}, "MILLRACE_WORKERS: must be greater than or equal to 1; got '0'"),
        ("", {}, {"device": "gpu"}, "--device: must be auto, all, cpu, cuda or cuda:N; got 'gpu'"),
        ("", {}, {"threads": "1.5"}, "--threads: must be a whole number; got '1.5'"),
        ("", {}, {"metrics_port": "70000"}, "--metrics-port: must be less than or equal to 65535; got '70000'"),
        ("", {}, {"memory": "1KiB"}, "--memory: 1.0 KiB is too little; the least is 1.0 MiB"),
    ],
)
def test_a_wrong_value_names_its_source(tmp_path, monkeypatch, file, environment, flags, message):
    refuse(load_settings, tmp_path, monkeypatch, file, environment, flags, message)


@pytest.mark.parametrize(
    ("file", "environment", "flags", "message"),
    [
        ('data_roots = ["/"]\nport = "x"', {}, {}, "millrace.toml, key port: "),
        ('data_roots = ["/"]\ncolour = 1', {}, {}, "key colour: there is no such setting; there are state_dir"),
        ('data_roots = ["/"]\nport = 1', {"MILLRACE_PORT": "x"}, {}, "MILLRACE_PORT: "),
        ("", {"MILLRACE_PORT": "x"}, {"data_roots": "/", "port": 70_000}, "--port: "),
        ("port = 1", {}, {}, "data_roots: is not set; pass --data-roots, or set it in the environment or a TOML file"),
        ('[service]\ndata_roots = ["/"]', {}, {}, "key service: there is no such setting; there are state_dir"),
        ("", {}, {"data_roots": "/", "state_dir": ""}, "--state-dir: the name is empty"),
        ("state_dir = 5", {}, {"data_roots": "/"}, "key state_dir: must be the name of a file or folder; got 5"),
        ('tokens_file = "a\\u0000"', {}, {"data_roots": "/"}, "key tokens_file: 'a\\x00' is the name of no file"),
        ("", {}, {"data_roots": "~nobody-of-all/x"}, "--data-roots: ~nobody-of-all/x: ~ has no home folder here; "),
        ("", {}, {"data_roots": "/", "scheduler": "tcp://h:99999"}, "--scheduler: must be an address like tcp://"),
    ],
)
def test_a_services_wrong_value_names_its_source(tmp_path, monkeypatch, file, environment, flags, message):
    refuse(load_service_settings, tmp_path, monkeypatch, file, environment, flags, message)


def refuse(load, folder, monkeypatch, file, environment, flags, message):
    path = folder / "millrace.toml"
    path.write_text(file)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParameterError) as caught:
        load(flags, file=path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_who_has_no_home_is_told_where_to_keep_jobs(monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ParameterError, match=r"^--state-dir: ~/\.local/state/millrace: ~ has no home folder"):
        load_service_settings({"data_roots": "/"})


def test_each_of_a_services_settings_tells_its_source(tmp_path, monkeypatch):
    file = tmp_path / "millrace.toml"
    file.write_text('port = 1\nmemory = "2GiB"\nhost = "::1"\n')
    monkeypatch.setenv("MILLRACE_PORT", "2")
    monkeypatch.setenv("MILLRACE_HOST", "localhost")
    monkeypatch.setenv("MILLRACE_CONFIG", str(file))
    found = load_service_settings({"port": 3, "data_roots": "/", "drain_s": None})
    assert (found.settings.port, found.settings.host, found.settings.memory) == (3, "localhost", 2 << 30)
    expected = {"port": "--port", "host": "MILLRACE_HOST", "memory": str(file), "data_roots": "--data-roots"}
    assert found.sources == dict.fromkeys(ServiceSettings.model_fields, "default") | expected


@pytest.mark.parametrize("threads", ["x", "0", "-1", "", "1.5"])
def test_a_number_of_threads_that_numba_does_not_take(monkeypatch, threads):
    monkeypatch.setenv("NUMBA_NUM_THREADS", threads)
    with pytest.raises(ParameterError, match="NUMBA_NUM_THREADS: must be a whole number above 0; unset it"):
        load_settings({})


def test_a_body_that_is_no_object():
    text = "Input should be a valid dictionary or object to extract fields from"
    fault = {"type": "model_attributes_type", "msg": text, "input": []}
    assert explain(fault) == "must be an object; got []"


@pytest.mark.parametrize("given", ["nan", " -NaN", math.nan])
def test_nan_is_no_number_rather_than_beyond_a_bound(given):
    with pytest.raises(ValidationError) as error:
        workload_named("rolling-ball").Parameters(radius=given)
    assert explain(error.value.errors()[0]) == f"must be a number less than or equal to 200; got {given!r}"


def test_a_bound_of_memory_has_a_unit():
    with pytest.raises(ValidationError) as error:
        JobLimits(memory_bytes=1)
    assert explain(error.value.errors()[0]) == "must be greater than or equal to 256 MiB; got 1"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ParameterError, match=r"none\.toml: No such file or directory; name a TOML file by --config"):
        load_settings({}, file=tmp_path / "none.toml")


def test_a_file_that_is_no_text_is_told_without_its_bytes(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ParameterError, match=r"binary\.toml: is not UTF-8 text; name a TOML file"):
        load_settings({}, file=tmp_path / "binary.toml")
