"""Host memory is bounded by --memory and the program itself, whatever the size of the image."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from pipeline import formats
from pipeline.formats.base import ImageHeader
from tests.images import COMMAND

MIB = 1 << 20
PROGRAM_BYTES = 300 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize(("output", "memory_mib"), [("out.tif", 16), ("out.tif", 128), ("out.npy", 64)])
def test_peak_memory_stays_within_the_budget(tmp_path, output, memory_mib):
    header = ImageHeader(shape=(10_007, 9_973, 3), axes="YXC", dtype=np.dtype(np.uint16))
    writer = formats.create_image(tmp_path / "in.tif", header)
    writer.publish()  # 600 MB of zeros that take no time to make
    arguments = ["run", "smooth", "in.tif", output, "--size", "31", "--memory", f"{memory_mib}MiB", "--quiet"]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=tmp_path)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss * 1024 <= memory_mib * MIB + PROGRAM_BYTES
