"""A potential map over worker processes: the same bits as on one device, also after an interruption."""

from __future__ import annotations

import json

import pytest

from tests.images import names_in
from tests.pipeline.cluster.processes import kill_9, run, running, wait_until, worker_processes
from tests.pipeline.workloads.coulomb.coulomb_jobs import molecule, write_npz, write_trajectory


def coulomb(source, output, *options):
    return ("run", "coulomb", source, output, "--device", "cpu", *options)


def entries(folder, output):
    return list((folder / f"{output}.ledger").glob("chunks-*.json"))


@pytest.mark.slow
def test_two_processes_make_the_same_bits_and_the_same_preview(tmp_path):
    write_trajectory(tmp_path, 3)
    options = ("--trajectory", "a.dcd", "--cell", "none", "--spacing", "0.4", "--quiet")
    assert run(*coulomb("a.pqr", "one.npy", *options, "--preview", "one.png"), cwd=tmp_path) == (0, "", "")
    two = ("--workers", 2, "--chunk-bytes", "60KB", "--preview", "two.png")
    code, out, err = run(*coulomb("a.pqr", "two.npy", *options, *two), cwd=tmp_path)
    assert (code, out) == (0, ""), err
    for suffix in ("npy", "png"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
    receipt = json.loads((tmp_path / "two.npy.receipt.json").read_text())
    assert receipt["device"]["name"] == "2 × cpu"
    assert receipt["chunks"] > 4
    assert receipt["audit"]["samples"] > 290


@pytest.mark.slow
def test_a_killed_command_is_resumed(tmp_path):
    write_npz(tmp_path / "a.npz", molecule(2500, extent=(40, 30, 50)))
    options = ("--scheme", "direct", "--spacing", "0.5", "--padding", "1", "--chunk-bytes", "400KB", "--threads", 1)
    with running(*coulomb("a.npz", "out.mrc", "--workers", 2, *options), cwd=tmp_path) as process:
        wait_until(lambda: len(entries(tmp_path, "out.mrc")) >= 2, "the second segment")
        process.kill()
        process.wait()
        wait_until(lambda: not worker_processes(process), "the workers' end")
    assert "out.mrc" not in names_in(tmp_path)
    resumed = options[:-4] + options[-2:]  # the cut is the ledger's
    code, out, err = run(*coulomb("a.npz", "out.mrc", *resumed, "--resume", "--json"), cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["resumed_chunks"] > 0
    assert run(*coulomb("a.npz", "whole.mrc", *options, "--quiet"), cwd=tmp_path) == (0, "", "")
    found, whole = ((tmp_path / f"{name}.mrc").read_bytes() for name in ("out", "whole"))
    assert found == whole


@pytest.mark.slow
def test_frames_are_shared_also_when_a_worker_is_killed(tmp_path):
    write_trajectory(tmp_path, 200)  # seconds of computing, also where cores are fast
    options = ("--trajectory", "a.dcd", "--cell", "none", "--spacing", "0.25", "--combine", "std", "--threads", 1)
    assert run(*coulomb("a.pqr", "one.npy", *options, "--quiet"), cwd=tmp_path) == (0, "", "")
    with running(*coulomb("a.pqr", "two.npy", *options, "--workers", 2, "--json"), cwd=tmp_path) as process:
        wait_until((tmp_path / "two.npy.ledger").exists, "the ledger")
        began = {each.pid: each.cpu_times().user for each in worker_processes(process)}
        wait_until(lambda: any(busy(each, began) for each in worker_processes(process)), "some computing")
        kill_9(next(each for each in worker_processes(process) if busy(each, began)))
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    receipt = json.loads(out)
    assert receipt["device"]["name"] == "2 × cpu"
    assert receipt["audit"]["samples"] > 290
    assert receipt["stages"]["read"]["seconds"] > 0
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()


def busy(process, began):
    """Whether it has computed for half a second since."""
    return process.cpu_times().user - began.get(process.pid, 0.0) > 0.5
