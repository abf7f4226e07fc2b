"""Host memory is bounded by --memory and the program itself, whatever the size of the image."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader

MIB = 1 << 20
PROGRAM_BYTES = 300 * 10**6
# The process tells its own peak: what wait4 reports also counts the size of whoever forked it.
MEASURED = """
import atexit, pathlib, re
from pipeline.cli import main
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text())[1]))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("output", "memory_mib"), [("out.tif", 16), ("out.tif", 128), ("out.npy", 64)])
def test_peak_memory_stays_within_the_budget(tmp_path, output, memory_mib):
    header = ImageHeader(shape=(10_007, 4_973, 3), axes="YXS", dtype=np.dtype(np.uint16))
    writer = images.create_image(tmp_path / "in.tif", header)
    writer.publish()  # 300 MB of zeros that take no time to make
    arguments = ["run", "smooth", "in.tif", output, "--size", "31", "--memory", f"{memory_mib}MiB", "--quiet"]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) * 1024 <= memory_mib * MIB + PROGRAM_BYTES
