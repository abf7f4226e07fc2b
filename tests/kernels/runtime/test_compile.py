"""Every kernel compiles for every architecture we support. No GPU: NVRTC alone.

Every instance for compute_90; of templates with many, code is made for some. Sources that compare __CUDA_ARCH__ with
nothing between two architectures are the same for both, so the others check one architecture for each different text:
compute_75, and those that `architectures` returns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import pytest

import kernels
from kernels.runtime.binaries import _source_files, source_path
from kernels.runtime.launch import SHARED_BYTES_WITHOUT_ASKING, KernelCompileError, _nvrtc, compile_for, entries
from tests.kernels.runtime.ptx import functions, representatives

# Most optimisations left out: a tenth of the time.
QUICK = ("--Ofast-compile=max",)
# Instantiates templates and checks names, types, assertions and operands of assembly, but generates no code.
CHECKED_ONLY = ("-fdevice-syntax-only",)
# A template with more instances is compiled in full for one architecture, and in part for the others.
MANY = 16
# An instance takes seconds: code is made for the first, which is the smallest. On a GPU all of them run.
SLOW = ("median_tile",)
BATCH = 64
OLDEST, IN_FULL, NEWEST = 75, 90, 100
_COMPARED = re.compile(r"__CUDA_ARCH__ (?:>=|<) (\d+)0\b")


def sources(operation: str) -> dict[Path, str]:
    """An operation's source and all headers of ours that it includes."""
    return {path.resolve(): path.read_text() for path in _source_files(source_path(operation))}


def architectures(operation: str) -> list[int]:
    """The oldest, and the oldest of each further text that is not compiled in full."""
    texts = sorted({int(number) for text in sources(operation).values() for number in _COMPARED.findall(text)})
    in_full = max((each for each in texts if each <= IN_FULL), default=OLDEST)
    return [OLDEST, *(each for each in texts if each > OLDEST and each != in_full)]


def template(expression: str) -> str:
    return expression.partition("<")[0]


def covering(expressions: Sequence[str], turn: int) -> tuple[str, ...]:
    """All instances of templates with few, in order; of those with MANY, some that have every pair of arguments that
    any instance has; of SLOW ones the first. Another turn begins elsewhere, and so chooses others.
    """
    groups: dict[str, list[str]] = {}
    for expression in expressions:
        groups.setdefault(template(expression), []).append(expression)
    kept: set[str] = set()
    for name, instances in groups.items():
        if len(instances) <= MANY or name in SLOW:
            kept.update(instances[:1] if name in SLOW else instances)
            continue
        start = turn * len(instances) // 3
        waiting = [*instances[start:], *instances[:start]]
        missing = set().union(*map(pairs, instances))
        while missing:
            best = max(waiting, key=lambda each: len(pairs(each) & missing))
            kept.add(best)
            missing -= pairs(best)
    return tuple(each for each in expressions if each in kept)


def pairs(expression: str) -> frozenset[tuple[tuple[int, str], ...]]:
    """Every two of a template's arguments, with their positions."""
    return frozenset(combinations(enumerate(expression.partition("<")[2].split(", ")), 2))


def batched(expressions: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """In compilations of BATCH: the time for one grows faster than its size."""
    for start in range(0, len(expressions), BATCH):
        yield tuple(expressions[start : start + BATCH])


def one_of_each_template(operation: str) -> tuple[str, ...]:
    """The first: later ones tend to be larger, and to take longer."""
    return tuple({template(entry): entry for entry in reversed(entries(operation))}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "architecture"), [(each, number) for each in kernels.names() for number in architectures(each)]
)
def test_every_template_compiles(operation: str, architecture: int) -> None:
    """All its instances, or every pair of its arguments: the next test compiles every instance for another device."""
    chosen = covering(entries(operation), 1 + architectures(operation).index(architecture))
    assert tuple(compile_for(operation, f"compute_{architecture}", chosen, CHECKED_ONLY).lowered) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("operation", kernels.names())
def test_every_entry_of_every_variant_compiles_and_can_be_assembled(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of templates with MANY or SLOW instances, makes code for some, see `covering`, and checks the other instances.

    Assembles one instance of each template, and of each hand-written instruction that those lack; the text shows the
    other errors of the assembler.
    """
    texts: list[bytes] = []  # NVRTC keeps the text of what it assembles
    nvrtc = _nvrtc()
    binary = nvrtc.getCUBIN
    monkeypatch.setattr(nvrtc, "getCUBIN", lambda program: texts.append(nvrtc.getPTX(program)) or binary(program))
    first = one_of_each_template(operation)
    assembled = [compile_for(operation, "sm_90", first, QUICK)]
    lowered = dict(assembled[0].lowered)
    read = functions(bytes(texts[0]).decode())
    for some in batched([each for each in covering(entries(operation), 0) if each not in lowered]):
        compiled = compile_for(operation, "compute_90", some, QUICK)
        lowered |= compiled.lowered
        read |= functions(compiled.code.decode())
    for expression, name in lowered.items():
        assert read[name].shared_bytes <= SHARED_BYTES_WITHOUT_ASKING, expression
    if further := [each for each in representatives(lowered, read) if each not in first]:
        assembled.append(compile_for(operation, "sm_90", further, QUICK))
    for each in assembled:
        for expression, name in each.lowered.items():
            assert name.encode() in each.code, expression
    for some in batched([each for each in entries(operation) if each not in lowered]):
        lowered |= compile_for(operation, "compute_90", some, CHECKED_ONLY).lowered
    assert lowered.keys() == set(entries(operation))
    assert len(set(lowered.values())) == len(lowered)


@pytest.mark.slow
@pytest.mark.parametrize("operation", kernels.names())
def test_one_of_each_template_compiles_for_the_oldest_and_the_newest_device(operation: str) -> None:
    chosen = one_of_each_template(operation)
    assembled = compile_for(operation, f"sm_{OLDEST}", chosen, QUICK)
    for expression, name in assembled.lowered.items():
        assert name.encode() in assembled.code, expression
    assert tuple(compile_for(operation, f"compute_{NEWEST}", chosen, CHECKED_ONLY).lowered) == chosen


def test_every_text_of_the_sources_is_compiled() -> None:
    assert architectures("smoothing") == [75, 80]  # it compares with 800 and 900
    assert architectures("bilateral") == [75]
    for operation in kernels.names():
        for path, text in sources(operation).items():
            looked_at = text.replace("defined(__CUDA_ARCH__)", "").count("__CUDA_ARCH__")
            assert looked_at == len(_COMPARED.findall(text)), path


def test_every_pair_of_arguments_is_compiled_for_every_architecture() -> None:
    everything = entries("smoothing")
    counts = Counter(map(template, everything))
    chosen = [covering(everything, turn) for turn in range(3)]
    fused = [{each for each in some if template(each) == "fused"} for some in chosen]
    for some, of_fused in zip(chosen, fused, strict=True):
        assert set().union(*map(pairs, some)) == set().union(*map(pairs, everything))
        assert {each for each in everything if counts[template(each)] <= MANY} <= set(some)
        assert len(of_fused) < counts["fused"] / 3
    assert len(set.union(*fused)) > 2 * max(map(len, fused)), "each architecture has others"
    assert covering(("a<1, 2>", "b<1, 2>", "c"), 2) == ("a<1, 2>", "b<1, 2>", "c")


def test_of_slow_templates_the_smallest_is_compiled() -> None:
    everything = [each for each in entries("rank") if template(each) in SLOW]
    assert covering(everything, 2) == ("median_tile<unsigned char, 9>",)


def test_columns_of_narrow_values_stay_in_registers() -> None:
    """Sixteen of bytes, with a mean and a sum of squares each: spilling never pays, for any number of blocks."""
    spilled = compile_for("reduce", "sm_90", ("reduce_tiles<Moments<signed char>>",), ("--ptxas-options=-v",)).log
    assert set(re.findall(r"(\d+) bytes spill", spilled)) == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_running_boxes_compile_as_races_are_looked_for(architecture: str) -> None:
    entries = ("box_running<unsigned char, 3, 15, 1, 16>", "box_column_sums<3, 15, 16>")
    assert compile_for("smoothing", architecture, entries, ("-DTURNS_BY_MBARRIERS", *QUICK)).lowered


FAULTS = (
    "x.missing();",
    "undeclared(x);",
    'static_assert(sizeof(T) == 4, "four bytes");',
    "needs_four_bytes(x);",
    'asm volatile("mov.b32 %0, %0;" : "+r"(x));',
    "constexpr int size = nowhere<T>; i = size;",
    "int none[int(sizeof(T)) - 9]; none[0] = i;",
    "if constexpr (sizeof(T) == 8) x.missing();",
    "ambiguous(x);",
    "i = __reduce_add_sync(~0u, i);",  # from compute_80
)


def test_faults_of_an_instance_are_found_without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "faulty.cu"
    monkeypatch.setattr("kernels.runtime.binaries.source_path", lambda operation: source)
    for fault in ("", *FAULTS):
        source.write_text(
            "__device__ void ambiguous(int);\n__device__ void ambiguous(float);\n"
            'template <class T> __device__ void needs_four_bytes(T) { static_assert(sizeof(T) == 4, "four bytes"); }\n'
            f"template <class T> __global__ void faulty(T* out, int i) {{ T x = out[i]; {fault} out[i] = x + i; }}\n"
        )
        with pytest.raises(KernelCompileError) if fault else nullcontext():
            compile_for("reduce", "compute_75", ("faulty<double>",), CHECKED_ONLY)


# One instance of each kernel, and each way to fetch, that is launched with dependent_launch=True.
DEPENDENT = {
    "smoothing": (
        *(f"fused<float, 1, 1, BOX, {aligned}>" for aligned in ("true", "false")),
        *(f"wide<unsigned short, 3, 16, {aligned}>" for aligned in ("true", "false")),
        *(f"words<3, 16, {rows}_ROWS>" for rows in ("ALIGNED", "MIXED")),
        *("tree<31>", "box_run_plane<7, 14>", "box_column_sums<3, 15, 16>"),
        *("decimate_plane<unsigned char, 4, 13>", "interpolate_plane<unsigned char, 4, 4, 4, 3>"),
    ),
    "nufft": (
        *("spread_cells<2, false, true>", "spread_cells<3, true, false>", "add_cells<2>", "add_cells<3>"),
        *("gather_points<4>", "gather_cells<5>", "grid_lines<84, true, false>", "grid_lines<84, false, true>"),
    ),
}


MEMORY = re.compile(r"\b(?:ld|st|red|atom|prefetch|cp)\.[\w.:]*global")


@pytest.mark.slow
@pytest.mark.parametrize("operation", DEPENDENT)
def test_dependent_launches_touch_no_memory_before_they_synchronize(operation: str) -> None:
    compiled = compile_for(operation, "compute_90", DEPENDENT[operation])
    named = {compiled.lowered[entry] for entry in DEPENDENT[operation]}
    bodies = [body for body in re.split(r"\.entry ", compiled.code.decode())[1:] if re.match(r"\w+", body)[0] in named]
    assert len(bodies) == len(named)
    for body in bodies:
        before, waits, after = body.partition("griddepcontrol.wait")
        assert waits, before
        assert not MEMORY.search(before), before
        assert MEMORY.search(after)
        assert "griddepcontrol.launch_dependents" in after


def test_an_entry_that_is_not_there_is_an_error_with_the_log() -> None:
    with pytest.raises(KernelCompileError, match=r"smoothing.cu does not compile for sm_90") as caught:
        compile_for("smoothing", "sm_90", ("no_such_kernel<int>",))
    assert "no_such_kernel" in caught.value.log


PTX = """
.visible .func  (.param .b32 func_retval0) _Z4helpPj(
	.param .b64 _Z4helpPj_param_0
)
;
.shared .align 16 .b8 _ZZ5firstE6staged[4096];
.visible .entry _Z5firstPj(
	.param .u64 _Z5firstPj_param_0
)
{
	mov.u32 	%r1, _ZZ5firstE6staged;
	// begin inline asm
	cp.async.wait_all;
	// end inline asm
	call.uni (retval0),
	_Z4helpPj,
	(
	param0
	);
	ret;
}
.weak .entry _Z6secondIiEvPj(
	.param .u64 _Z6secondIiEvPj_param_0
)
{
	.shared .align 4 .u32 unused;
	.shared .align 8 .b64 _ZZ6secondIiEvPjE5total;
	st.shared.u64 [_ZZ6secondIiEvPjE5total], %rd7;
	ret;
}
.visible .func  (.param .b32 func_retval0) _Z4helpPj(
	.param .b64 _Z4helpPj_param_0
)
{
	// begin inline asm
	prmt.b32 %r12, %r3, 0, 0x123;
	// end inline asm
	ret;
}
"""


def test_a_kernel_has_the_assembly_and_the_shared_memory_of_what_it_calls() -> None:
    read = functions(PTX)
    assert set(read) == {"_Z4helpPj", "_Z5firstPj", "_Z6secondIiEvPj"}
    assert read["_Z5firstPj"].by_hand == {"\tcp.async.wait_all;\n\t", "\tprmt.b32 %r, %r, 0, 0x123;\n\t"}
    assert read["_Z5firstPj"].shared_bytes == 4096
    assert (read["_Z6secondIiEvPj"].by_hand, read["_Z6secondIiEvPj"].shared_bytes) == (frozenset(), 16)


def test_each_template_and_each_statement_by_hand_has_a_representative() -> None:
    read = functions(PTX)
    first, second = "_Z5firstPj", "_Z6secondIiEvPj"
    expressions = {"a<1>": second, "a<2>": second, "a<3>": first, "a<4>": first, "b": second}
    assert representatives(expressions, read) == ("a<1>", "a<3>", "b")
