"""Every kernel compiles for every architecture we support. No GPU: NVRTC alone."""

from __future__ import annotations

import pytest

import kernels
from kernels.launch import KernelCompileError, _compile, compile_for

# Assembled for one; for the others as far as PTX, where templates are instantiated and what they lack is found:
# assembling takes four times as long as all that.
ARCHITECTURES = ("compute_75", "compute_80", "sm_90", "compute_100")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("operation", kernels.names())
def test_every_entry_of_every_variant_compiles(operation: str, architecture: str) -> None:
    compiled = compile_for(operation, architecture, quick=True)
    assert compiled
    assert len({entry.lowered for entry in compiled}) == len(compiled)


def test_optimised_as_users_get_it_the_compiler_reports_what_each_entry_takes() -> None:
    assert all(entry.registers for entry in compile_for("transpose", "sm_90"))


def test_an_entry_that_is_not_there_is_an_error_with_the_log() -> None:
    with pytest.raises(KernelCompileError, match=r"smoothing.cu does not compile for sm_90") as caught:
        _compile("smoothing", ("no_such_kernel<int>",), "sm_90")
    assert "no_such_kernel" in caught.value.log
