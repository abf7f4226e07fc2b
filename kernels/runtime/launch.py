"""The only place that compiles and launches CUDA, through CuPy's bindings of NVRTC and the driver.

An operation's kernels are in `<operation>.cu` in its folder; shared headers are in `kernels/include`.
A kernel is named by a C++ expression (`box_separable<unsigned char, unsigned, unsigned char>`), so each template
is instantiated on first use. Binaries are cached on disk: kernels/runtime/binaries.py.

KernelError(RuntimeError)
├── KernelCompileError    NVRTC rejected the source or is missing; carries the compiler's log
└── KernelLaunchError     the driver rejected a launch; names the kernel, grid and block
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernels.runtime import binaries, pdl
from kernels.runtime.binaries import Binary
from kernels.runtime.compiling import compiling
from kernels.runtime.operations import cuda_module

# Without the second option, NVRTC before 13.5 takes a lambda for a host function.
LANGUAGE = ("--std=c++17", "--device-as-default-execution-space")
# A block may always use this much shared memory, static and dynamic; more must be granted to the kernel first.
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1  # static
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # percent


class KernelError(RuntimeError):
    """A CUDA kernel could not be compiled or launched."""


class KernelCompileError(KernelError):
    """NVRTC rejected a kernel; `log` is its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class KernelLaunchError(KernelError):
    """The driver rejected the loading or a launch of a kernel."""


class Kernel:
    """A kernel loaded on one device."""

    def __init__(self, expression: str, device: int, module: int, function: int, static_shared_bytes: int = 0) -> None:
        self.expression = expression
        self.device = device
        self.function = function
        self._module = module  # never unloaded: kernels live as long as the process
        self._granted_shared_bytes = SHARED_BYTES_WITHOUT_ASKING - static_shared_bytes  # dynamic

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        stream: Any,
        dependent_launch: bool = False,
    ) -> None:
        """Launches on `stream`, a cupy.cuda.Stream of this kernel's device, which must be current.

        grid, block      : one to three sizes
        args             : CuPy arrays (passed as their pointers) and ctypes values (numbers and structures, by value)
        dependent_launch : enables programmatic dependent launch; every thread of the kernel must call
                           grid_dependency_synchronize of kernels/include/pdl.cuh

        Raises KernelLaunchError if the driver rejects the launch.
        """
        values = [_value(position, arg) for position, arg in enumerate(args)]
        prepared = _Prepared(self, grid, block, values, shared_bytes, dependent_launch)
        prepared.launch(prepared.pointers, stream.ptr)
        if _recording.launches is not None:
            _recording.launches.append((prepared, tuple(args)))

    def _grant(self, shared_bytes: int) -> None:
        """Allows launches with this much dynamic shared memory, in addition to the kernel's static."""
        if shared_bytes <= self._granted_shared_bytes:
            return
        driver = _driver()
        driver.funcSetAttribute(self.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        # Blocks that use much are sized to share a multiprocessor, so none of its memory may serve as L1 cache.
        driver.funcSetAttribute(self.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        self._granted_shared_bytes = shared_bytes


class _Prepared:
    """A launch without its stream. `pointers` are the addresses of its arguments, which it keeps alive."""

    def __init__(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        values: Sequence[Any],
        shared_bytes: int,
        dependent_launch: bool,
    ) -> None:
        self.kernel = kernel
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._values = values
        self._sizes = (*(*grid, 1, 1, 1)[:3], *(*block, 1, 1, 1)[:3], shared_bytes)
        self._dependent_launch = dependent_launch and _attribute(75, kernel.device) >= pdl.MIN_MAJOR

    def launch(self, pointers: Any, stream: int) -> None:
        driver, runtime = _driver(), _runtime()
        kernel = self.kernel
        try:
            if runtime.getDevice() != kernel.device:
                raise KernelLaunchError(
                    f"{kernel.expression} is loaded on device {kernel.device}: make it the current one"
                )
            runtime.setDevice(kernel.device)  # gives a thread that is new to CUDA its context
            kernel._grant(self._sizes[6])
            if self._dependent_launch:
                result = pdl.launch(kernel.function, self._sizes, stream, pointers)
                if result:
                    raise driver.CUDADriverError(result)
            else:
                driver.launchKernel(kernel.function, *self._sizes, stream, ctypes.addressof(pointers), 0)
            if _recording.observed is not None:
                _recording.observed.append(
                    Launch(kernel=kernel, grid=self._sizes[:3], block=self._sizes[3:6], shared_bytes=self._sizes[6])
                )
        except (driver.CUDADriverError, runtime.CUDARuntimeError) as exc:
            grid, block, shared_bytes = self._sizes[:3], self._sizes[3:6], self._sizes[6]
            raise KernelLaunchError(
                f"{kernel.expression} with grid {grid}, block {block} and {shared_bytes} bytes of shared memory on "
                f"device {kernel.device}: {exc}"
            ) from exc


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch as it was made."""

    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int  # dynamic, in addition to the kernel's static


def observe(run: Callable[[], Any]) -> list[Launch]:
    """Runs `run` and returns the launches that this thread made."""
    launches: list[Launch] = []
    _recording.observed = launches
    try:
        run()
    finally:
        _recording.observed = None
    return launches


class Repeat:
    """Repeats recorded launches on other arrays: see `record`."""

    def __init__(
        self, launches: Sequence[tuple[_Prepared, Sequence[int | None]]], made_bytes: Sequence[int] = ()
    ) -> None:
        self.made_bytes = tuple(made_bytes)  # of the arrays that the run made
        # For each launch: the positions of its array arguments, and the index of each among the run's arrays.
        self._launches = [
            (prepared, [(place, which) for place, which in enumerate(arrays) if which is not None])
            for prepared, arrays in launches
        ]

    def launch(self, arrays: Sequence[int], stream: int) -> None:
        """arrays: pointers to arrays laid out like the run's, in the same order, and to memory of `made_bytes` each;
        stream: a CUDA stream's handle.

        Thread-safe. Raises KernelLaunchError if the driver rejects a launch.
        """
        cells = (ctypes.c_void_p * len(arrays))(*arrays)
        first = ctypes.addressof(cells)
        for prepared, replaced in self._launches:
            pointers = type(prepared.pointers).from_buffer_copy(prepared.pointers)
            for place, which in replaced:
                pointers[place] = first + which * ctypes.sizeof(ctypes.c_void_p)
            prepared.launch(pointers, stream)


def record(run: Callable[[], Sequence[Any] | None], arrays: Sequence[Any]) -> Repeat | None:
    """Runs `run`, which only launches kernels, and records its launches.

    run    : returns the CuPy arrays that it made for results in between, if any
    arrays : the CuPy arrays that a repeat replaces

    Returns a Repeat of the launches on other arrays; None if the run used arrays other than these.
    """
    _recording.launches = []
    try:
        made = run() or ()
        launches, which = [], {array.data.ptr: index for index, array in enumerate((*arrays, *made))}
        for prepared, args in _recording.launches:
            places = [which.get(arg.data.ptr, -1) if hasattr(arg, "__cuda_array_interface__") else None for arg in args]
            if -1 in places:
                return None
            launches.append((prepared, places))
        return Repeat(launches, [array.nbytes for array in made])
    finally:
        _recording.launches = None


@contextmanager
def on_stream(array: Any, stream: Any = None) -> Iterator[Any]:
    """Makes a CuPy array's device current, and on it `stream`, by default CuPy's current stream there.

    Yields the stream, on which CuPy's own work inside the context runs too.
    """
    import cupy

    with array.device:
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        with stream:
            yield stream


def kernel(operation: str, expression: str) -> Kernel:
    """The kernel that a C++ expression names, compiled and loaded for the current device. Thread-safe.

    Raises KernelCompileError, KernelLaunchError.
    """
    runtime = _runtime()
    device = runtime.getDevice()
    found = _loaded.get((device, operation, expression))
    if found is None:
        with _loading:
            found = _loaded.get((device, operation, expression))
            if found is None:
                found = _load(device, operation, expression)
                _loaded[device, operation, expression] = found
    return found


def entries(operation: str) -> tuple[str, ...]:
    """The C++ expressions of all kernels in an operation's VARIANTS."""
    variants = cuda_module(operation).VARIANTS
    return tuple(dict.fromkeys(entry for variant in variants.values() for entry in variant.entries))


def compile_for(
    operation: str, architecture: str, expressions: Iterable[str] | None = None, options: Iterable[str] = ()
) -> Binary:
    """Compiles kernels of an operation, by default all, for an architecture such as "sm_90". Needs no GPU.

    options : for NVRTC, in addition to the operation's own

    Raises KernelCompileError with the compiler's log, also if an expression names no kernel in the source.
    """
    nvrtc = _nvrtc()
    path = binaries.source_path(operation)
    wanted = entries(operation) if expressions is None else tuple(expressions)
    folders = (f"-I{binaries.INCLUDE}", f"-I{path.parent}")
    program = nvrtc.createProgram(path.read_text(encoding="utf-8"), path.name, (), ())
    try:
        for expression in wanted:
            nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, (*_options(operation), f"-arch={architecture}", *folders, *options))
        lowered = {expression: nvrtc.getLoweredName(program, expression) for expression in wanted}
        # CuPy takes a cubin's last byte, always 0, for the end of a string and leaves it out.
        code = nvrtc.getCUBIN(program) + b"\0" if architecture.startswith("sm_") else nvrtc.getPTX(program)
        return Binary(code=bytes(code), lowered=lowered, log=nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as exc:
        log = nvrtc.getProgramLog(program)
        raise KernelCompileError(f"{path.name} does not compile for {architecture}: {exc}", log) from exc
    finally:
        nvrtc.destroyProgram(program)


def cached_binary(operation: str, expression: str, architecture: str) -> Binary:
    """One kernel's binary from the disk cache; compiled and stored there if it is missing. Needs no GPU.

    Raises KernelCompileError.
    """
    key = binaries.key(operation, (*_options(operation), architecture, str(_nvrtc().getVersion()), expression))
    binary = binaries.read(key)
    if binary is None:
        with compiling():
            binary = compile_for(operation, architecture, (expression,))
        binaries.write(key, binary)
    return binary


def multiprocessors() -> int:
    """Streaming multiprocessors of the current device."""
    return _attribute(16, _runtime().getDevice())  # cudaDevAttrMultiProcessorCount


def shared_bytes_a_block() -> int:
    """Maximum shared memory of a block on the current device."""
    return _attribute(97, _runtime().getDevice())  # cudaDevAttrMaxSharedMemoryPerBlockOptin


def blocks_of(count: int, each: int) -> int:
    """Blocks for `count` items, `each` per block."""
    return -(-count // each)


def pointer(array: Any) -> int:
    """The device address of a CuPy array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def shared_bytes_a_multiprocessor() -> int:
    """Shared memory of a multiprocessor of the current device."""
    return _attribute(81, _runtime().getDevice())  # cudaDevAttrMaxSharedMemoryPerMultiprocessor


def blocks_a_multiprocessor(shared_bytes: int) -> int:
    """Blocks that a multiprocessor's shared memory holds, less what the driver reserves for one more; at least 1."""
    reserved = _attribute(111, _runtime().getDevice())  # cudaDevAttrReservedSharedMemoryPerBlock
    return max((shared_bytes_a_multiprocessor() - reserved) // (shared_bytes + reserved), 1)


@cache
def _attribute(attribute: int, device: int) -> int:
    return int(_runtime().deviceGetAttribute(attribute, device))


class _Recording(threading.local):
    launches: list[tuple[_Prepared, tuple[Any, ...]]] | None = None
    observed: list[Launch] | None = None


_recording = _Recording()
_loading = threading.RLock()
_loaded: dict[tuple[int, str, str], Kernel] = {}


_BY_VALUE = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)


def _value(position: int, arg: Any) -> Any:
    if isinstance(arg, _BY_VALUE):
        return arg
    # Not __cuda_array_interface__, which CuPy builds on each access.
    pointer = getattr(getattr(arg, "data", None), "ptr", None)
    if pointer is None:
        kind = type(arg).__name__
        raise TypeError(f"argument {position} of a kernel must be a CuPy array or a ctypes value; got {kind}")
    return ctypes.c_void_p(pointer)


def _load(device: int, operation: str, expression: str) -> Kernel:
    driver, runtime = _driver(), _runtime()
    major, minor = _attribute(75, device), _attribute(76, device)  # cudaDevAttrComputeCapabilityMajor, Minor
    architecture = _newest_supported(major * 10 + minor)
    binary = cached_binary(operation, expression, architecture)
    try:
        runtime.setDevice(device)
        module = driver.moduleLoadData(binary.code)
        function = driver.moduleGetFunction(module, binary.lowered[expression])
        static_shared_bytes = driver.funcGetAttribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
    except (driver.CUDADriverError, runtime.CUDARuntimeError) as exc:
        raise KernelLaunchError(f"{expression} could not be loaded on device {device} ({architecture}): {exc}") from exc
    return Kernel(expression, device, module, function, static_shared_bytes)


def _newest_supported(capability: int) -> str:
    supported = _nvrtc().getSupportedArchs()
    if capability in supported:
        return f"sm_{capability}"
    return f"compute_{max((arch for arch in supported if arch < capability), default=min(supported))}"


@cache
def _options(operation: str) -> tuple[str, ...]:
    further = os.environ.get("MILLRACE_TEST_KERNEL_OPTIONS", "").split()  # set by scripts/sanitize
    return (*LANGUAGE, *cuda_module(operation).OPTIONS, *further)


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as exc:
        raise KernelCompileError(
            f"NVRTC could not be loaded ({exc}): install millrace[cuda12] or millrace[cuda13]"
        ) from exc
    return nvrtc


@cache
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver


@cache
def _runtime() -> Any:
    from cupy_backends.cuda.api import runtime

    return runtime
