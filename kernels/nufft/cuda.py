"""Every kernel of nufft.cu: those in production, and the steps of their ladders."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kernels.nufft.exact import cuda as exact
from kernels.nufft.gridding import cuda as gridding
from kernels.nufft.toeplitz import cuda as toeplitz
from kernels.runtime.ladder import Variant

OPTIONS: tuple[str, ...] = ()

VARIANTS: Mapping[str, Variant] = MappingProxyType({**exact.VARIANTS, **gridding.VARIANTS, **toeplitz.VARIANTS})
