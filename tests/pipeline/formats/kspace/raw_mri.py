"""Raw MRI files for tests, written from plain arrays: ISMRMRD, BART, .npz; and where real ones lie."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

HEAD = np.dtype(
    [
        ("version", "<u2"), ("flags", "<u8"), ("measurement_uid", "<u4"), ("scan_counter", "<u4"),
        ("acquisition_time_stamp", "<u4"), ("physiology_time_stamp", "<u4", (3,)), ("number_of_samples", "<u2"),
        ("available_channels", "<u2"), ("active_channels", "<u2"), ("channel_mask", "<u8", (16,)),
        ("discard_pre", "<u2"), ("discard_post", "<u2"), ("center_sample", "<u2"), ("encoding_space_ref", "<u2"),
        ("trajectory_dimensions", "<u2"), ("sample_time_us", "<f4"), ("position", "<f4", (3,)),
        ("read_dir", "<f4", (3,)), ("phase_dir", "<f4", (3,)), ("slice_dir", "<f4", (3,)),
        ("patient_table_position", "<f4", (3,)),
        ("idx", [
            ("kspace_encode_step_1", "<u2"), ("kspace_encode_step_2", "<u2"), ("average", "<u2"), ("slice", "<u2"),
            ("contrast", "<u2"), ("phase", "<u2"), ("repetition", "<u2"), ("set", "<u2"), ("segment", "<u2"),
            ("user", "<u2", (8,)),
        ]),
        ("user_int", "<i4", (8,)), ("user_float", "<f4", (8,)),
    ]
)  # fmt: skip
_BESIDE = Path(__file__).parents[5] / "shared" / "data"
NOISE_FLAG, DUMMY_FLAG = 1 << 18, 1 << 26

XML = """<?xml version="1.0"?>
<ismrmrdHeader xmlns="http://www.ismrm.org/ISMRMRD"><encoding>
 <encodedSpace><matrixSize><x>{em[0]}</x><y>{em[1]}</y><z>{em[2]}</z></matrixSize>
  <fieldOfView_mm><x>{ef[0]}</x><y>{ef[1]}</y><z>{ef[2]}</z></fieldOfView_mm></encodedSpace>
 <reconSpace><matrixSize><x>{rm[0]}</x><y>{rm[1]}</y><z>{rm[2]}</z></matrixSize>
  <fieldOfView_mm><x>{rf[0]}</x><y>{rf[1]}</y><z>{rf[2]}</z></fieldOfView_mm></reconSpace>
 <encodingLimits><kspace_encoding_step_2><minimum>0</minimum><maximum>{steps}</maximum><center>{centre}</center>
  </kspace_encoding_step_2></encodingLimits>
 <trajectory>radial</trajectory></encoding></ismrmrdHeader>"""


def xml(matrix, fov, *, encoded_matrix=None, encoded_fov=None, centre=0, steps=0):
    return XML.format(em=encoded_matrix or matrix, ef=encoded_fov or fov, rm=matrix, rf=fov, centre=centre, steps=steps)


def acquisition(data, traj, **head):
    """One record: data (coils, samples), traj (samples, columns) or None; `head` fields, those of idx as idx_NAME."""
    record = np.zeros((), HEAD)
    record["version"] = 1
    record["active_channels"] = record["available_channels"] = data.shape[0]
    record["number_of_samples"] = data.shape[1]
    record["trajectory_dimensions"] = 0 if traj is None else traj.shape[1]
    for name, value in head.items():
        if name.startswith("idx_"):
            record["idx"][name.removeprefix("idx_")] = value
        else:
            record[name] = value
    flat = np.empty(0, np.float32) if traj is None else np.ascontiguousarray(traj, np.float32).reshape(-1)
    return record, flat, np.ascontiguousarray(data, np.complex64).view(np.float32).reshape(-1)


def write_ismrmrd(path, header, acquisitions, group="dataset"):
    floats = h5py.vlen_dtype(np.float32)
    kind = np.dtype([("head", HEAD), ("traj", floats), ("data", floats)])
    table = np.empty(len(acquisitions), kind)
    for number, record in enumerate(acquisitions):
        for field, value in zip(("head", "traj", "data"), record, strict=True):
            table[field][number] = value
    with h5py.File(path, "w") as file:
        made = file.create_group(group)
        made.create_dataset("data", data=table, chunks=(1,), maxshape=(None,))
        made.create_dataset("xml", data=np.array([header], object), dtype=h5py.string_dtype("utf-8"))
    return path


def readouts(kspace, traj, **head):
    """Acquisitions of kspace (coils, spokes, samples) and traj (spokes, samples, columns)."""
    return [
        acquisition(kspace[:, spoke], traj[spoke], idx_kspace_encode_step_1=spoke, **head)
        for spoke in range(kspace.shape[1])
    ]


def write_cfl(path, array):
    """`array` with BART's dimensions, first fastest."""
    dims = array.shape + (1,) * (16 - array.ndim)
    Path(path).with_suffix(".hdr").write_text(f"# Dimensions\n{' '.join(map(str, dims))} \n")
    Path(path).with_suffix(".cfl").write_bytes(np.asarray(array, np.complex64).tobytes(order="F"))
    return Path(path).with_suffix(".cfl")


def read_cfl(path):
    """An array with BART's sixteen dimensions."""
    dims = [int(word) for word in Path(path).with_suffix(".hdr").read_text().splitlines()[1].split()]
    return np.fromfile(Path(path).with_suffix(".cfl"), np.complex64).reshape(dims, order="F")


def real_scan(name):
    """A file of real raw data; skips the test where there are none."""
    path = Path(os.environ.get("MILLRACE_TEST_DATA", _BESIDE)) / "mri" / name
    if not path.is_file():
        pytest.skip(f"{name} is not under $MILLRACE_TEST_DATA or ../shared/data")
    return path
