"""`--gradient-delay`: simulated delays are corrected, stated in the receipt, and refused where there can be none."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.sense.gradient_delays import delayed
from pipeline.errors import ParameterError
from tests.kernels.sense.phantom import normalised_error, samples
from tests.pipeline.formats.kspace.raw_mri import readouts, write_cfl, write_ismrmrd, xml
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, job, scan, volume, write_npz

DELAYS = np.diag([0.9, -0.6])


def late(points):
    """The k-space of gradients that are late, for the nominal trajectory."""
    return samples(delayed(points, DELAYS).reshape(-1, 2), COILS, N).reshape(COILS, *points.shape[:2])


@pytest.mark.parametrize("asked", ["auto", "0.9,-0.6"])
@pytest.mark.parametrize("density", ["pipe-menon", "ramp"])
def test_delays_are_corrected_and_stated(tmp_path, asked, density):
    kspace, points = scan()
    right, _ = images(write_npz(tmp_path / "right.npz", kspace, points), tmp_path / "a.npy", density=density)
    source = write_npz(tmp_path / "late.npz", late(points).astype(np.complex64), points)
    wrong, plain = images(source, tmp_path / "b.npy", density=density)
    found, receipt = images(source, tmp_path / "c.npy", density=density, gradient_delay=asked)
    assert normalised_error(wrong, right) > 0.1
    assert normalised_error(found, right) < 0.02
    told = receipt["image"]["gradient_delay_samples"]
    assert (told["x"], told["y"]) == pytest.approx((0.9, -0.6), abs=5e-3)
    if asked == "auto":
        assert told["xy"] == pytest.approx(0, abs=5e-3)
        assert 0 <= told["error"] < 0.02
    assert receipt["parameters"]["gradient_delay"] == asked
    assert "gradient_delay" not in plain["parameters"]
    assert "gradient_delay_samples" not in plain["image"]


def test_planes_of_spokes_are_shifted_in_their_plane(tmp_path):
    """A stack of stars of one object in the middle plane: every plane step has the same samples."""
    points = scan(20)[1]
    header = xml((N, N, 4), (160.0, 160.0, 20.0), centre=2, steps=3)
    for name, kspace in (("right", scan(20)[0]), ("late", late(points).astype(np.complex64))):
        records = [
            record for step in range(4) for record in readouts(kspace, points / N, idx_kspace_encode_step_2=step)
        ]
        write_ismrmrd(tmp_path / f"{name}.h5", header, records)
    options = {"traj_units": "cycles/pixel", "iterations": 4}
    right, _ = images(tmp_path / "right.h5", tmp_path / "a.npy", **options)
    wrong, _ = images(tmp_path / "late.h5", tmp_path / "b.npy", **options)
    found, receipt = images(tmp_path / "late.h5", tmp_path / "c.npy", gradient_delay="auto", **options)
    given, _ = images(tmp_path / "late.h5", tmp_path / "d.npy", gradient_delay="0.9,-0.6", **options)
    assert right.shape == (1, 4, N, N)
    assert normalised_error(found, given) < 0.005
    # With so few spokes, where they lie makes a difference of its own.
    assert normalised_error(found, right) < 0.06
    assert normalised_error(wrong, right) > 0.15
    told = receipt["image"]["gradient_delay_samples"]
    assert (told["x"], told["y"]) == pytest.approx((0.9, -0.6), abs=5e-3)


def test_where_there_can_be_none_the_option_is_refused(tmp_path):
    write_cfl(tmp_path / "grid", np.ones((8, 8, 1, 2), np.complex64))
    with pytest.raises(
        ParameterError, match=r"grid\.cfl is Cartesian, and the option is for radial data: leave it out"
    ):
        job(tmp_path / "grid.cfl", tmp_path / "out.npy", gradient_delay="auto")
    source = volume(tmp_path / "volume.npz")
    with pytest.raises(ParameterError, match="spokes in three dimensions do not cross: give x,y,z in samples"):
        job(source, tmp_path / "out.npy", gradient_delay="auto")
    with pytest.raises(ParameterError, match="has delays along 3 axes: give 3 numbers"):
        job(source, tmp_path / "out.npy", gradient_delay="1,2")
