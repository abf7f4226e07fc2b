"""CuPy: its bindings of NVRTC, the driver, the runtime and NCCL, which it calls its own affair."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipeline.cluster.communicators import nccl as ours

pytest.importorskip("cupy_backends", reason="CuPy is not installed", exc_type=ImportError)
from cupy_backends.cuda.api import driver, runtime
from cupy_backends.cuda.libs import nvrtc

# By module: each function and how many arguments we give it, as the first line of its docstring states them.
FUNCTIONS = {
    driver: {
        "funcGetAttribute": 2,
        "funcSetAttribute": 3,
        "launchKernel": 11,
        "moduleGetFunction": 2,
        "moduleLoadData": 1,
        "occupancyMaxActiveBlocksPerMultiprocessor": 3,
    },
    runtime: {
        "deviceGetAttribute": 2,
        "driverGetVersion": 0,
        "eventQuery": 1,
        "free": 1,
        "getDevice": 0,
        "getDeviceCount": 0,
        "getDeviceProperties": 1,
        "memGetInfo": 0,
        "setDevice": 1,
        "streamQuery": 1,
    },
    nvrtc: {
        "addNameExpression": 2,
        "compileProgram": 2,
        "createProgram": 4,
        "destroyProgram": 1,
        "getCUBIN": 1,
        "getLoweredName": 2,
        "getPTX": 1,
        "getProgramLog": 1,
        "getSupportedArchs": 0,
        "getVersion": 0,
    },
}
CASES = [(module, name, count) for module, functions in FUNCTIONS.items() for name, count in functions.items()]


@pytest.mark.parametrize(("module", "name", "count"), CASES, ids=[f"{case[0].__name__}.{case[1]}" for case in CASES])
def test_a_binding_takes_as_many_arguments_as_it_is_given(module: Any, name: str, count: int) -> None:
    found = re.match(rf"{name}\((.*?)\)", getattr(module, name).__doc__)
    assert found, getattr(module, name).__doc__
    assert len(found[1].split(",")) - (not found[1]) == count


@pytest.mark.parametrize("error", [driver.CUDADriverError, runtime.CUDARuntimeError, nvrtc.NVRTCError])
def test_an_error_is_made_from_a_status(error: type[Exception]) -> None:
    assert issubclass(error, RuntimeError)


def test_nvrtc_compiles_a_template_under_the_name_of_an_expression() -> None:
    """All of the binding that needs no device, with the types that `kernels.runtime.launch` expects."""
    program = nvrtc.createProgram("template <int n> __global__ void f(int* x) { x[0] = n; }", "a.cu", (), ())
    try:
        nvrtc.addNameExpression(program, "f<3>")
        nvrtc.compileProgram(program, ("--std=c++17", "-arch=sm_90"))
        lowered = nvrtc.getLoweredName(program, "f<3>")
        assert isinstance(lowered, str)
        assert lowered.encode() in bytes(nvrtc.getCUBIN(program))
        assert isinstance(nvrtc.getProgramLog(program), str)
        assert 90 in nvrtc.getSupportedArchs()
        assert all(isinstance(number, int) for number in nvrtc.getVersion())
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.gpu
def test_nccls_binding_makes_a_communicator_without_waiting_and_takes_pointers() -> None:
    import cupy
    from cupy.cuda import nccl

    assert nccl.available
    assert issubclass(nccl.NcclError, RuntimeError)
    assert len(nccl.get_unique_id()) <= ours._UNIQUE_ID_BYTES
    communicator = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)  # without its constructor: it is begun later
    communicator.__init__(1, nccl.get_unique_id(), 0)
    communicator.check_async_error()
    numbers, sums = cupy.arange(5, dtype=cupy.float32), cupy.zeros(5, cupy.float32)
    stream = cupy.cuda.get_current_stream()
    _, code = ours._NUMBERS[numbers.dtype]
    nccl.groupStart()
    communicator.allReduce(numbers.data.ptr, sums.data.ptr, 5, code, ours._OPS["sum"], stream.ptr)
    nccl.groupEnd()
    stream.synchronize()
    assert bool((sums == numbers).all())
    for name in ("reduce", "broadcast", "allGather", "abort"):
        assert callable(getattr(communicator, name))
    communicator.destroy()


@pytest.mark.gpu
def test_the_binding_has_no_name_for_in_progress() -> None:
    """NCCL's 7 comes out as a KeyError; with a name for it, it would come out as an NcclError."""
    from cupy.cuda import nccl

    with pytest.raises(KeyError) as caught:
        raise nccl.NcclError(ours._IN_PROGRESS)
    assert caught.value.args == (ours._IN_PROGRESS,)


@pytest.mark.gpu
def test_an_arrays_pointer_and_an_events_handle_are_numbers() -> None:
    import cupy

    assert all(isinstance(each.ptr, int) for each in (cupy.empty(1).data, cupy.cuda.Event(), cupy.cuda.Stream()))


@pytest.mark.gpu
def test_an_fft_plan_runs_in_place_between_two_arrays() -> None:
    import cupy
    from cupy.cuda import cufft
    from cupyx.scipy.fft import get_fft_plan

    grid = cupy.ones((2, 8, 8), cupy.complex64)
    plan = get_fft_plan(grid, axes=(1, 2), value_type="C2C")
    plan.fft(grid, grid, cufft.CUFFT_FORWARD)
    plan.fft(grid, grid, cufft.CUFFT_INVERSE)
    assert bool((grid == 64).all())


@pytest.mark.gpu
def test_accelerators_of_reductions_can_be_set() -> None:
    """Only measurements use them."""
    from cupy import _core

    for get, put in (
        (_core.get_reduction_accelerators, _core.set_reduction_accelerators),
        (_core.get_routine_accelerators, _core.set_routine_accelerators),
    ):
        put(get())
