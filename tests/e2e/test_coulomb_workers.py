"""A potential map over worker processes: the same bits as on one device, also after an interruption."""

from __future__ import annotations

import json

from tests.images import names_in
from tests.pipeline.cluster.processes import run, running, wait_until, worker_processes
from tests.pipeline.workloads.coulomb_jobs import molecule, write_npz, write_trajectory


def coulomb(source, output, *options):
    return ("run", "coulomb", source, output, "--device", "cpu", *options)


def entries(folder, output):
    return list((folder / f"{output}.ledger").glob("chunks-*.json"))


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


def test_a_killed_command_is_resumed(tmp_path):
    write_npz(tmp_path / "a.npz", molecule(4000, extent=(40, 30, 50)))
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
