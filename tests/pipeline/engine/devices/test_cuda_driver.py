"""What the CUDA driver says of its devices."""

from __future__ import annotations

import pytest

from pipeline.engine.devices.cuda_driver import device_uuid
from pipeline.engine.devices.discovery import cuda_properties, usable_gpus

pytestmark = pytest.mark.gpu


def test_a_gpu_is_known_by_the_name_that_nvml_has_for_it():
    import pynvml

    pynvml.nvmlInit()
    known = {pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())}
    names = [cuda_properties(ordinal)["uuid"] for ordinal in usable_gpus()]
    assert len(set(names)) == len(names)
    assert set(names) <= known


def test_zeros_do_not_end_a_uuid():
    assert {len(device_uuid(ordinal)) for ordinal in usable_gpus()} == {16}
