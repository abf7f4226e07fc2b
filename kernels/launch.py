"""The only place that compiles and launches CUDA: NVRTC and the driver, through CuPy's bindings of both.

An operation's kernels live in `kernels/<operation>/<operation>.cu`; headers that several share in `kernels/include`.
A kernel is named by a C++ expression (`box_separable<unsigned char, unsigned, unsigned char>`), so that each template
is instantiated when it is first asked for. Binaries are kept on disk, in `MILLRACE_CACHE_DIR` or the user's cache
folder, under a hash of everything that went into them; a cache that cannot be read or written only costs time.

KernelError(RuntimeError)
├── KernelCompileError    NVRTC refused the source, or is not there; carries the compiler's log
└── KernelLaunchError     the driver refused a launch; names the kernel, grid and block
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.cache import cache_folder

__all__ = [
    "Compiled",
    "Kernel",
    "KernelCompileError",
    "KernelError",
    "KernelLaunchError",
    "Launch",
    "Repeat",
    "compile_for",
    "kernel",
    "multiprocessors",
    "observe",
    "record",
    "shared_bytes_a_block",
]

FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"
# NVRTC before 13.5 takes a lambda without the second for a host function.
LANGUAGE = ("--std=c++17", "--device-as-default-execution-space")
# A launch may use this much shared memory without asking; more has to be granted to the kernel first.
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # percent

_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_RESOURCES = re.compile(
    r"Function properties for (\S+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


class KernelError(RuntimeError):
    """A CUDA kernel could not be compiled or launched."""


class KernelCompileError(KernelError):
    """NVRTC refused a kernel; `log` is what it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class KernelLaunchError(KernelError):
    """The driver refused to load or launch a kernel."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One entry of an operation, compiled for one architecture."""

    expression: str
    lowered: str  # the mangled name under which the binary holds it
    registers: int | None  # a thread; None where the compiler's report could not be read
    stack_bytes: int | None
    spill_bytes: int | None


class Kernel:
    """A kernel loaded on one device."""

    def __init__(self, expression: str, device: int, module: int, function: int) -> None:
        self.expression = expression
        self.device = device
        self.function = function
        self._module = module  # never unloaded: kernels live as long as the process
        self._granted_shared_bytes = SHARED_BYTES_WITHOUT_ASKING

    def launch(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_bytes: int = 0, stream: Any
    ) -> None:
        """Launches on `stream` (a cupy.cuda.Stream of this kernel's device, which must be the current one).

        grid, block : one to three sizes
        args        : CuPy arrays (passed as their pointers) and ctypes values (numbers and structures, by value)

        Raises KernelLaunchError where the driver refuses.
        """
        values = [_value(position, arg) for position, arg in enumerate(args)]
        prepared = _Prepared(self, grid, block, values, shared_bytes)
        prepared.launch(prepared.pointers, stream.ptr)
        if _recording.launches is not None:
            _recording.launches.append((prepared, tuple(args)))

    def grant(self, shared_bytes: int) -> None:
        """Lets launches use so much shared memory."""
        if shared_bytes <= self._granted_shared_bytes:
            return
        driver = _driver()
        driver.funcSetAttribute(self.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        # Blocks that ask for much are sized to share a multiprocessor: it must not keep memory back as cache.
        driver.funcSetAttribute(self.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        self._granted_shared_bytes = shared_bytes


class _Prepared:
    """A launch that lacks nothing but a stream. `pointers` are the addresses of its arguments, which it keeps alive."""

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], values: Sequence[Any], shared_bytes: int
    ) -> None:
        self.kernel = kernel
        self.pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._values = values
        self._sizes = (*(*grid, 1, 1, 1)[:3], *(*block, 1, 1, 1)[:3], shared_bytes)

    def launch(self, pointers: Any, stream: int) -> None:
        driver, runtime = _driver(), _runtime()
        kernel = self.kernel
        try:
            if runtime.getDevice() != kernel.device:
                raise KernelLaunchError(
                    f"{kernel.expression} is loaded on device {kernel.device}: make it the current one"
                )
            runtime.setDevice(kernel.device)  # a thread that has not touched CUDA yet has no context
            kernel.grant(self._sizes[6])
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
    """One launch that was made."""

    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int  # asked for at the launch, beside the kernel's own


def observe(run: Callable[[], Any]) -> list[Launch]:
    """Runs `run` and says which launches this thread made meanwhile."""
    launches: list[Launch] = []
    _recording.observed = launches
    try:
        run()
    finally:
        _recording.observed = None
    return launches


class Repeat:
    """Launches made once, to be made again on other arrays: those of a run that `record` watched."""

    def __init__(self, launches: Sequence[tuple[_Prepared, Sequence[int | None]]]) -> None:
        # Of each launch: the places of its arguments that are arrays, and which of the run's arrays each is.
        self._launches = [
            (prepared, [(place, which) for place, which in enumerate(arrays) if which is not None])
            for prepared, arrays in launches
        ]

    def launch(self, arrays: Sequence[int], stream: int) -> None:
        """arrays: pointers to arrays laid out like the run's, in the same order; stream: a CUDA stream's handle.

        Safe from any thread. Raises KernelLaunchError where the driver refuses.
        """
        cells = (ctypes.c_void_p * len(arrays))(*arrays)
        first = ctypes.addressof(cells)
        for prepared, replaced in self._launches:
            pointers = type(prepared.pointers).from_buffer_copy(prepared.pointers)
            for place, which in replaced:
                pointers[place] = first + which * ctypes.sizeof(ctypes.c_void_p)
            prepared.launch(pointers, stream)


def record(run: Callable[[], None], arrays: Sequence[Any]) -> Repeat | None:
    """Runs `run`, which does nothing but launch kernels, and keeps its launches.

    arrays : the CuPy arrays that it may be given to work on

    Returns what makes the same launches on other arrays; None where the run took more arrays than these.
    """
    _recording.launches = []
    try:
        run()
        launches, which = [], {array.data.ptr: index for index, array in enumerate(arrays)}
        for prepared, args in _recording.launches:
            places = [which.get(arg.data.ptr, -1) if hasattr(arg, "__cuda_array_interface__") else None for arg in args]
            if -1 in places:
                return None
            launches.append((prepared, places))
        return Repeat(launches)
    finally:
        _recording.launches = None


def kernel(operation: str, expression: str) -> Kernel:
    """The kernel that a C++ expression names, compiled and loaded for the current device. Safe from any thread.

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


def compile_for(operation: str, architecture: str, *, quick: bool = False) -> list[Compiled]:
    """Compiles every entry of every VARIANTS of an operation for an architecture such as "sm_90". Needs no GPU.

    quick : leaves most optimisations out, for a fifth of the time; the report of registers may then be missing

    Raises KernelCompileError with the compiler's log, also where an entry names no kernel in the source.
    """
    variants = import_module(f"kernels.{operation}.cuda").VARIANTS
    expressions = tuple(dict.fromkeys(entry for variant in variants.values() for entry in variant.entries))
    # Split: on all cores at once.
    options = ("--ptxas-options=-v", "--split-compile=0", *(("--Ofast-compile=max",) if quick else ()))
    binary = _compile(operation, expressions, architecture, extra_options=options)
    resources = {found[0]: tuple(int(n) for n in found[1:]) for found in _RESOURCES.findall(binary.log)}
    compiled = []
    for expression, lowered in binary.lowered.items():
        if lowered.encode() not in binary.code:
            raise KernelCompileError(f"{operation}: {expression} compiled to nothing for {architecture}", binary.log)
        stack, stores, loads, registers = resources.get(lowered, (None, None, None, None))
        spilled = None if stores is None or loads is None else stores + loads
        compiled.append(
            Compiled(
                expression=expression, lowered=lowered, registers=registers, stack_bytes=stack, spill_bytes=spilled
            )
        )
    return compiled


def multiprocessors() -> int:
    """Streaming multiprocessors of the current device."""
    return _attribute(16, _runtime().getDevice())  # cudaDevAttrMultiProcessorCount


def shared_bytes_a_block() -> int:
    """The most shared memory that a block can ask for on the current device."""
    return _attribute(97, _runtime().getDevice())  # cudaDevAttrMaxSharedMemoryPerBlockOptin


@cache
def _attribute(attribute: int, device: int) -> int:
    return int(_runtime().deviceGetAttribute(attribute, device))


@dataclass(frozen=True, kw_only=True)
class _Binary:
    code: bytes  # a cubin, or PTX for a device newer than this NVRTC
    lowered: dict[str, str]
    log: str


class _Recording(threading.local):
    launches: list[tuple[_Prepared, tuple[Any, ...]]] | None = None
    observed: list[Launch] | None = None


_recording = _Recording()
_loading = threading.RLock()
_loaded: dict[tuple[int, str, str], Kernel] = {}


def _value(position: int, arg: Any) -> Any:
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return arg
    if hasattr(arg, "__cuda_array_interface__"):
        return ctypes.c_void_p(arg.data.ptr)
    raise TypeError(f"argument {position} of a kernel must be a CuPy array or a ctypes value; got {type(arg).__name__}")


def _load(device: int, operation: str, expression: str) -> Kernel:
    driver, runtime = _driver(), _runtime()
    major, minor = _attribute(75, device), _attribute(76, device)  # cudaDevAttrComputeCapabilityMajor, Minor
    architecture = _newest_supported(major * 10 + minor)
    key = _cache_key(operation, (expression,), architecture)
    binary = _read_cached(key)
    if binary is None:
        binary = _compile(operation, (expression,), architecture)
        _write_cached(key, binary)
    try:
        runtime.setDevice(device)
        module = driver.moduleLoadData(binary.code)
        function = driver.moduleGetFunction(module, binary.lowered[expression])
    except (driver.CUDADriverError, runtime.CUDARuntimeError) as exc:
        raise KernelLaunchError(f"{expression} could not be loaded on device {device} ({architecture}): {exc}") from exc
    return Kernel(expression, device, module, function)


def _newest_supported(capability: int) -> str:
    supported = _nvrtc().getSupportedArchs()
    if capability in supported:
        return f"sm_{capability}"
    return f"compute_{max((arch for arch in supported if arch < capability), default=min(supported))}"


def _compile(
    operation: str, expressions: Iterable[str], architecture: str, extra_options: tuple[str, ...] = ()
) -> _Binary:
    nvrtc = _nvrtc()
    path = _source_path(operation)
    options = (*_options(operation), f"-arch={architecture}", f"-I{INCLUDE}", f"-I{path.parent}", *extra_options)
    program = nvrtc.createProgram(path.read_text(), path.name, (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, options)
        lowered = {expression: nvrtc.getLoweredName(program, expression) for expression in expressions}
        code = nvrtc.getCUBIN(program) if architecture.startswith("sm_") else nvrtc.getPTX(program)
        return _Binary(code=bytes(code), lowered=lowered, log=nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as exc:
        log = nvrtc.getProgramLog(program)
        raise KernelCompileError(f"{path.name} does not compile for {architecture}: {exc}", log) from exc
    finally:
        nvrtc.destroyProgram(program)


def _source_path(operation: str) -> Path:
    return FOLDER / operation / f"{operation}.cu"


@cache
def _options(operation: str) -> tuple[str, ...]:
    return (*LANGUAGE, *import_module(f"kernels.{operation}.cuda").OPTIONS)


def _cache_key(operation: str, expressions: tuple[str, ...], architecture: str) -> str:
    digest = hashlib.sha256()
    for part in (*_options(operation), architecture, str(_nvrtc().getVersion()), *expressions):
        digest.update(part.encode() + b"\0")
    for path in _source_files(_source_path(operation)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _source_files(source: Path) -> tuple[Path, ...]:
    """The source and every header it includes, directly or not, in the order met."""
    found: dict[Path, None] = {source: None}
    waiting = [source]
    while waiting:
        for name in _INCLUDED.findall(waiting.pop().read_text()):
            for folder in (source.parent, INCLUDE):
                header = folder / name
                if header.is_file() and header not in found:
                    found[header] = None
                    waiting.append(header)
    return tuple(found)


def _read_cached(key: str) -> _Binary | None:
    """None where there is nothing, or where what is there is not what was written."""
    try:
        head, _, code = (cache_folder("cuda") / key).read_bytes().partition(b"\n")
        written = json.loads(head)
        if hashlib.sha256(code).hexdigest() != written["sha256"]:
            return None
        return _Binary(code=code, lowered=dict(written["lowered"]), log="")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cached(key: str, binary: _Binary) -> None:
    head = json.dumps({"sha256": hashlib.sha256(binary.code).hexdigest(), "lowered": binary.lowered})
    folder = cache_folder("cuda")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{key[:16]}-")
        with os.fdopen(handle, "wb") as file:
            file.write(head.encode() + b"\n" + binary.code)
        Path(temporary).replace(folder / key)
    except OSError:
        return  # a read-only home costs a compilation a process, nothing more


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
