"""What a machine is, as the compiler sees it: a Target, from a file or from this machine."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

from atsc.compiler.errors import UsageError
from atsc.compiler.isa import ISA_FLAGS

_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A machine; 0, None and empty stand for what is not known or not there.

    Later issues fill the rates in by measuring; a target file may give them from a datasheet.
    """

    name: str
    isa: str
    """The highest x86-64 level that the CPU has (atsc.compiler.isa)."""
    cpu_model: str = ""
    features: tuple[str, ...] = ()
    """Flags of /proc/cpuinfo beyond the level that kernels may use: `avx_vnni`, ..."""
    num_cores: int = 0
    """Physical cores that the process may use; of a hybrid CPU, its performance cores."""
    num_threads: int = 0
    """Hardware threads that the process may use."""
    cpu_limit: float | None = None
    """CPUs' worth of time that the control group grants; None: no limit."""
    l2_bytes: int = 0
    """Of one core."""
    l3_bytes: int = 0
    """Of all L3 caches together."""
    ram_bytes: int = 0
    """What the process may use: physical memory, or its control group's limit."""
    ram_read_bytes_per_s: float | None = None
    ram_read_shared_bytes_per_s: float | None = None
    """The same while transfers to the GPU run."""
    cpu_ops_per_s: float | None = None
    """Multiplications and additions of int8 on all cores."""
    gpu: str = ""
    """`cuda`, `virtual` (a device in host memory, for tests), or nothing."""
    gpu_model: str = ""
    sm: int = 0
    """Compute capability, 90 for sm_90."""
    num_sms: int = 0
    vram_bytes: int = 0
    vram_read_bytes_per_s: float | None = None
    gpu_ops_per_s: float | None = None
    """Multiplications and additions of int8 on tensor cores, dense."""
    h2d_bytes_per_s: float | None = None
    """From pinned host memory, alone."""
    hand_off_ns: float | None = None
    """Latency of activations that cross, one way."""
    gpu_context_bytes: int = 0
    """VRAM that a process holds before it has loaded anything."""
    source: str = "datasheet"
    """`datasheet`, `detected` (sizes, no rates) or `measured`."""

    @property
    def default_threads(self) -> int:
        """Threads that a plan runs on unless told otherwise: one a core, within the limit."""
        limit = self.cpu_limit if self.cpu_limit is not None else self.num_cores
        return max(1, min(self.num_cores, int(limit)))


def builtin_names() -> list[str]:
    """Names of the target files that come with atsc."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(path: Path) -> Target:
    """Read a target file: TOML, one key a field of Target.

    Raises:
        UsageError: not readable, not TOML, an unknown key, or a value of the wrong type.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"target file {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"target file {path}: no TOML ({error}); correct the file") from None
    target = Target(**{"name": path.stem, "isa": "", **_checked(data, path)})
    if target.isa not in ISA_FLAGS:
        raise UsageError(
            f"target file {path}: isa is {target.isa!r}; give one of {', '.join(ISA_FLAGS)}"
        )
    return target


def save(target: Target, path: Path) -> None:
    """Write a target file that `load` reads back; what is not known is left out."""
    lines = [f"# Written by atsc for {target.cpu_model or target.name}."]
    for field in dataclasses.fields(target):
        value = getattr(target, field.name)
        if value not in (None, "", 0, ()):
            listed = list(value) if isinstance(value, tuple) else value
            lines.append(f"{field.name} = {json.dumps(listed, ensure_ascii=False)}")
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text("\n".join(lines) + "\n", "utf-8")
    fresh.replace(path)


def resolve(spec: str) -> Target:
    """The target that `--target` names: `auto` (this machine), a built-in name, or a file.

    Raises:
        UsageError: there is no such target, or its file is malformed.
    """
    if spec == "auto":
        from atsc.targets.detect import detect

        return detect()
    if spec in builtin_names():
        return load(_FOLDER / f"{spec}.toml")
    if Path(spec).suffix == ".toml" or Path(spec).is_file():
        return load(Path(spec))
    names = ["auto", *builtin_names()]
    near = difflib.get_close_matches(spec, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(names)}, or a file"
    raise UsageError(f"no target {spec!r}; {hint}")


def _checked(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Values of the fields' types; whole numbers pass for rates, lists for tuples."""
    kinds: dict[str, tuple[type, ...]] = {}
    for field in dataclasses.fields(Target):
        kinds[field.name] = {
            "str": (str,),
            "int": (int,),
            "float | None": (int, float),
            "tuple[str, ...]": (list,),
        }[str(field.type)]
    checked: dict[str, Any] = {}
    for key, value in data.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(kinds)}"
            raise UsageError(f"target file {path}: unknown key {key}; {hint}")
        if isinstance(value, bool) or not isinstance(value, kinds[key]):
            raise UsageError(
                f"target file {path}: {key} is {value!r}; "
                f"give {' or '.join(kind.__name__ for kind in kinds[key])}"
            )
        if isinstance(value, int | float) and value < 0:
            raise UsageError(f"target file {path}: {key} is negative; give 0 where unknown")
        checked[key] = tuple(map(str, value)) if isinstance(value, list) else value
    return checked
