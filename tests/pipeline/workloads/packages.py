"""Packages that offer workloads, as pip leaves them: a module and its metadata."""

from __future__ import annotations

BUILT_IN = [
    "bilateral",
    "bottomhat",
    "chain",
    "close",
    "coulomb",
    "deviation",
    "dilate",
    "divide-background",
    "dog",
    "erode",
    "log",
    "maximum",
    "median",
    "minimum",
    "mri",
    "open",
    "percentile",
    "rolling-ball",
    "smooth",
    "subtract-background",
    "tophat",
    "unsharp",
]


def install(folder, package, source, **points):
    """A module `package` with this source, and entry points name="module:object"."""
    (folder / f"{package}.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = {value}\n" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("[millrace.workloads]\n" + "".join(lines))
