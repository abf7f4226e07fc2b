"""Settings from a TOML file, overridden by MILLRACE_… variables, overridden by flags. Read once, then frozen."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from pipeline.errors import ParameterError

_Model = TypeVar("_Model", bound=BaseModel)
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


MINIMUM_MEMORY_BYTES = 1 << 20


def parse_bytes(text: Any) -> Any:
    """Bytes of memory from 512MiB, 2GB, 1.5 GiB or 1048576; ValueError lists the accepted forms."""
    if not isinstance(text, str):
        return text
    matched = _BYTES.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{text!r} is not an amount of memory; write it like 512MiB or 2GB")
    number, prefix, binary = matched.groups()
    power = " kmgt".index(prefix.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def whole(text: Any) -> Any:
    """Digits as an integer; anything else unchanged."""
    return int(text) if isinstance(text, str) and text.isdecimal() else text


def named(path: Any) -> Any:
    """The name of a file or folder; ValueError if it is none."""
    if not isinstance(path, str | Path):
        raise ValueError(f"must be the name of a file or folder; got {brief(repr(path))}")
    if path == "":
        raise ValueError("the name is empty")
    if "\0" in str(path):
        raise ValueError(f"{path!r} is the name of no file: it has a NUL in it")
    return path


# An empty name would mean the working directory.
NamedPath = Annotated[Path, BeforeValidator(named)]
# Workers may run in other folders. Symbolic links are not resolved.
AbsolutePath = Annotated[NamedPath, AfterValidator(lambda path: Path(os.path.abspath(path)))]  # noqa: PTH100


def _enough(count: int) -> int:
    if count < MINIMUM_MEMORY_BYTES:
        raise ValueError(f"{format_bytes(count)} is too little; the least is {format_bytes(MINIMUM_MEMORY_BYTES)}")
    return count


def format_bytes(count: float) -> str:
    """Bytes for people: 512 MiB, 2.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d|)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def parse_seconds(text: Any) -> Any:
    """Seconds from 90, 45min, 2h or 1.5d; ValueError lists the accepted forms."""
    if not isinstance(text, str):
        return text
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{text!r} is not a time; write it like 90s, 45min, 2h or 1.5d")
    return float(matched[1]) * _SECONDS[matched[2].lower()]


def format_seconds(seconds: float) -> str:
    """A time for people: 12 s, 45 min, 2.5 h, 3 d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


DEVICE = r"^(auto|all|cpu|cuda(:\d+)?)$"
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
SCHEDULER = rf"^(tcp|tls)://.+:{_PORT}$"
# The form of settings and request fields that must match a pattern.
_FORMS = {
    "device": "must be auto, all, cpu, cuda or cuda:N",
    "scheduler": "must be an address like tcp://HOST:PORT or tls://HOST:PORT, with a port from 1 to 65535",
    "input": "must be the name of a file or folder",
    "output": "must be the name of a file or folder",
    "array": "must be FROM-TO, such as 0-99",
    "group": "must be the name of a group",
    "owner": "must be the name of a user",
    "name": "must be the name of a user or a group",
    "after": "must be ids of jobs, each of 12 hexadecimal digits, as `millrace jobs` lists them",
    "after_any": "must be ids of jobs, each of 12 hexadecimal digits, as `millrace jobs` lists them",
}
# Pydantic's wording and ours.
_WORDS = {
    "Input should be": "must be",
    "a valid integer": "a whole number",
    "a valid dictionary or object to extract fields from": "an object",
    "a valid ": "a ",
}


_BOUNDS = ("less_than", "less_than_equal", "greater_than", "greater_than_equal")


class Settings(BaseModel):
    """How this machine runs jobs, independent of the workload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(
        "auto",
        pattern=DEVICE,
        description="auto, cpu, cuda, cuda:N, or all (every GPU, one process each) [default: auto]",
    )
    memory: Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_enough)] = Field(
        512 << 20, description="memory limit for the ring buffers on each host, such as 2GiB [default: 512MiB]"
    )
    chunk_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None, ge=1, description="input and output bytes of one chunk, such as 16MiB [default: depends on the device]"
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="compute threads in each process [default: the cores, shared evenly]"
    )
    workers: int | None = Field(
        None, ge=1, le=1024, description="CPU worker processes [default: none; of `millrace worker`: one]"
    )
    scheduler: str | None = Field(
        None,
        pattern=SCHEDULER,
        description="tcp://HOST:PORT or tls://HOST:PORT of a Dask scheduler whose workers run the job",
    )
    scheduler_ca: AbsolutePath | None = Field(
        None, description="PEM file that vouches for a tls:// scheduler and its workers"
    )
    scheduler_cert: AbsolutePath | None = Field(None, description="PEM file with the certificate shown to them")
    scheduler_key: AbsolutePath | None = Field(None, description="PEM file with that certificate's private key")
    overlap: Annotated[Literal[1, 2, 3, 5], BeforeValidator(whole)] = Field(
        5, description="number of the five stages that may overlap: 1, 2, 3 or 5 [default: 5]"
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="serve Prometheus metrics on this port of localhost during the run"
    )


def load_settings(flags: Mapping[str, Any], *, file: Path | None = None) -> Settings:
    """The settings; `flags` that are None were not given. ParameterError names the source of a wrong value."""
    return merged(Settings, flags, file)[0]


def merged(model: type[_Model], flags: Mapping[str, Any], file: Path | None) -> tuple[_Model, dict[str, str]]:
    """The settings of a model, and the source of each: "default", the file, a variable or a flag.

    flags : those that are None were not given
    file  : default: the one in MILLRACE_CONFIG, if set

    Raises ParameterError, which names the source of a wrong value.
    """
    if not re.fullmatch(r"\s*0*[1-9]\d*\s*", os.environ.get("NUMBA_NUM_THREADS", "1")):
        raise ParameterError("NUMBA_NUM_THREADS: must be a whole number above 0; unset it, and pass --threads")
    if file is None and os.environ.get("MILLRACE_CONFIG"):
        file = Path(os.environ["MILLRACE_CONFIG"])
    values = {} if file is None else read_toml(file)
    sources = dict.fromkeys(model.model_fields, "default") | dict.fromkeys(values, str(file))
    for name in model.model_fields:
        variable = f"MILLRACE_{name.upper()}"
        for source, value in ((variable, os.environ.get(variable) or None), (_flag(name), flags.get(name))):
            if value is not None:
                values[name], sources[name] = value, source
    try:
        return model(**values), sources
    except ValidationError as error:
        # Unknown keys first: one may be a misspelt required setting.
        fault = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        name = str(fault["loc"][0])
        if fault["type"] == "missing":
            raise ParameterError(
                f"{name}: is not set; pass {_flag(name)}, or set it in the environment or a TOML file"
            ) from error
        known_sources = {str(file): f"{file}, key {name}", "default": _flag(name)}
        source = known_sources.get(sources[name], sources[name])
        known = f"there is no such setting; there are {', '.join(model.model_fields)}"
        raise ParameterError(f"{source}: {known if fault['type'] == 'extra_forbidden' else explain(fault)}") from error


def spellings(name: str, info: FieldInfo) -> list[str]:
    """The names of a field in input, the current one first."""
    return [str(each) for each in getattr(info.validation_alias, "choices", [name])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def explain(fault: Mapping[str, Any]) -> str:
    """One pydantic fault in one line."""
    if fault["type"] == "extra_forbidden":
        return "there is no such parameter"
    if fault["type"] == "missing":
        return "is required"
    message = str(fault["msg"]).removeprefix("Value error, ").partition(", unable to parse")[0]
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    least = fault.get("ctx", {}).get("ge")
    if least and any("memory" in str(name) for name in fault["loc"]):
        message = message.replace(str(least), format_bytes(least))
    if fault["type"] == "string_pattern_mismatch":
        message = next((_FORMS[name] for name in map(str, reversed(fault["loc"])) if name in _FORMS), message)
    given = brief(repr(fault.get("input")))
    if fault["type"] in _BOUNDS and str(fault.get("input")).strip().lower().lstrip("+-") == "nan":  # within no bounds
        message = message.replace("must be ", "must be a number ", 1)
    return message if fault["type"] == "value_error" else f"{message[0].lower()}{message[1:]}; got {given}"


def of_option(error: ValidationError) -> str:
    """The first fault of parameters in one line, with the option of the command."""
    fault = error.errors()[0]
    return f"{_flag(str(fault['loc'][0]))}: {explain(fault)}" if fault["loc"] else explain(fault)


def brief(text: str, most: int = 200) -> str:
    """User input shortened for a message."""
    return text if len(text) <= most else f"{text[:most]}…"


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a file. ParameterError if it cannot be read, is not TOML, or contains true or false: no setting
    is a Boolean, and Python would take them for numbers."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path}: {error.strerror}; name a TOML file by --config or MILLRACE_CONFIG") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path}: is not UTF-8 text; name a TOML file by --config or MILLRACE_CONFIG") from error
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f'{path}: {error}; write it as TOML: memory = "2GiB"') from error
    for key, value in found.items():
        if isinstance(value, bool):
            raise ParameterError(f"{path}, key {key}: no setting is {str(value).lower()}; give a number or text")
    return found
