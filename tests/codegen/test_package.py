"""A plan folder is whole or absent, and weights.bin holds what its layout says."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atsc.codegen import layout, package
from atsc.codegen.storage import Storage, StoredUnit
from atsc.compiler import isa, plan
from atsc.compiler.check_plan import check_plan
from atsc.compiler.errors import CodegenError, PlanError
from atsc.compiler.ir import ArraySource, BlockFormat, DType, FloatFormat, Weight


def float_weight(name: str, rows: int, width: int, seed: int = 0) -> Weight:
    data = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return Weight(name, (rows, width), FloatFormat(DType.F32), {"data": ArraySource.of(data)})


def int4_weight(name: str, rows: int, width: int) -> Weight:
    rng = np.random.default_rng(1)
    blocks = width // 32
    parts = {
        "codes": ArraySource.of(rng.integers(0, 256, (rows, blocks, 16), np.uint8)),
        "scales": ArraySource.of(rng.random((rows, blocks), np.float32)),
    }
    return Weight(name, (rows, width), BlockFormat(4, 32, False), parts)


def storage_of(*units: tuple[str, list[Weight]]) -> Storage:
    laid, end = [], 0
    for name, weights in units:
        begin = end = layout.align(end, layout.UNIT_ALIGNMENT)
        placed = []
        for weight in weights:
            stored = layout.store(weight, tiled=True)
            placed.append((stored, end))
            end += stored.num_bytes
        laid.append(StoredUnit("weights", name, (name,), begin, end - begin, tuple(placed)))
    return Storage(tuple(laid), {}, end)


def small_storage(seed: int = 0) -> Storage:
    return storage_of(
        ("first", [float_weight("a", 13, 7, seed), int4_weight("b", 24, 96)]),
        ("second", [int4_weight("c", 9, 64)]),
    )


def manifest_of(storage: Storage, weights: package.WeightsFile) -> plan.Manifest:
    units = tuple(
        plan.Unit(u.name, u.nodes, "mixed", u.bytes, u.offset, "ram", crc32)
        for u, crc32 in zip(storage.units, weights.unit_crc32s, strict=True)
    )
    return plan.Manifest(
        plan_id="an id",
        atsc_version="0",
        platform=isa.platform_name(),
        isa="x86-64",
        library="libplan.so",
        weights=package.WEIGHTS,
        model=plan.Model("m", 10, 10, None, (), ()),
        options=plan.Options(10, 10, None, None),
        memory=plan.Memory(storage.num_bytes, 0, 0),
        units=units,
        files={},
        weights_key=weights.key,
    )


def write(output: Path, storage: Storage | None = None, library: bytes = b"lib", **kw: Any) -> bool:
    """Write a whole plan; whether weights.bin was linked."""
    storage = storage or small_storage()
    with package.PlanFolder(output) as folder:
        weights = folder.write_weights(storage.units, **kw)
        folder.add_file("libplan.so", library)
        assert folder.commit(manifest_of(storage, weights)) == Path(os.path.realpath(output))
    return weights.linked


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_plan_is_written_and_checks(tmp_path: Path) -> None:
    output = tmp_path / "mödel plan.atsplan"
    seen: list[tuple[str, int, int]] = []
    write(output, progress=lambda *args: seen.append(args))
    manifest = check_plan(output, full=True)
    assert names(tmp_path) == [output.name]
    assert list(manifest.files) == ["libplan.so", "weights.bin"]
    assert seen[-1][2] == manifest.files["weights.bin"].bytes == small_storage().num_bytes
    assert (output.stat().st_mode & 0o777) == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_weights_lie_where_the_layout_says(tmp_path: Path) -> None:
    storage = small_storage()
    write(tmp_path / "plan", storage)
    data = (tmp_path / "plan" / package.WEIGHTS).read_bytes()
    assert len(data) == storage.num_bytes
    used = bytearray(len(data))
    for unit in storage.units:
        for stored, offset in unit.weights:
            for part in stored.parts:
                expected = b"".join(c.tobytes() for c in layout.part_chunks(stored, part))
                assert offset % layout.PART_ALIGNMENT == 0
                assert data[offset : offset + part.num_bytes] == expected
                used[offset : offset + part.num_bytes] = b"\1" * part.num_bytes
                offset = layout.align(offset + part.num_bytes, layout.PART_ALIGNMENT)
    assert not any(byte for byte, taken in zip(data, used, strict=True) if not taken)
    for unit, entry in zip(storage.units, plan.load(tmp_path / "plan").units, strict=True):
        assert entry.crc32 == zlib.crc32(data[unit.offset : unit.offset + unit.bytes])
    recorded = plan.load(tmp_path / "plan").files[package.WEIGHTS]
    assert recorded == plan.File(len(data), hashlib.sha256(data).hexdigest())


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    stored = layout.store(int4_weight("w", 8, 64), tiled=True)
    relative = StoredUnit("weights", "u", (), 4096, stored.num_bytes, ((stored, 0),))
    short = StoredUnit("weights", "u", (), 0, 64, ((stored, 0),))
    for unit, message in ((relative, "is laid out at 0, which is before 4096"), (short, "beyond")):
        with (
            pytest.raises(CodegenError, match=message),
            package.PlanFolder(tmp_path / "plan") as folder,
        ):
            folder.write_weights([unit])
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("old", [False, True])
def test_an_interrupt_leaves_the_old_plan_or_nothing(
    tmp_path: Path, error: type[BaseException], old: bool
) -> None:
    output = tmp_path / "plan"
    if old:
        write(output, library=b"old")

    def interrupt(what: str, done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        write(output, small_storage(seed=1), progress=interrupt)
    assert names(tmp_path) == (["plan"] if old else [])
    if old:
        assert (output / "libplan.so").read_bytes() == b"old"
        check_plan(output, full=True)


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(package, "_rename", lambda *args: False)
    output = tmp_path / "plan"
    for library in (b"old", b"new and longer"):
        write(output, library=library)
        assert names(tmp_path) == ["plan"]
        check_plan(output, full=True)
    assert (output / "libplan.so").read_bytes() == b"new and longer"


def test_the_exchange_is_there_on_this_system(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not package._rename(tmp_path / "a", tmp_path / "b", package._RENAME_EXCHANGE):
        pytest.skip("this file system has no exchange")
    assert names(tmp_path / "a") == ["b"]
    with pytest.raises(FileExistsError):
        package._rename(tmp_path / "a", tmp_path / "b", package._RENAME_NOREPLACE)


def test_a_failed_replacement_puts_the_old_plan_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plan"
    write(output, library=b"old")
    monkeypatch.setattr(package, "_rename", lambda *args: False)
    rename = Path.rename

    def fail_to_put(self: Path, target: Path) -> Path:
        if self.name.startswith(package._PARTIAL) and target == output:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_to_put)
    with pytest.raises(PlanError, match="Input/output error"):
        write(output, library=b"new")
    assert names(tmp_path) == ["plan"]
    assert (output / "libplan.so").read_bytes() == b"old"


def test_what_is_no_plan_is_not_replaced(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "plan.json").write_text('{"holiday": "plan"}')
    file = tmp_path / "file"
    file.write_text("text")
    for output in (photos, file):
        with pytest.raises(PlanError, match="is no plan, so it is not replaced"):
            write(output)
    with pytest.raises(PlanError, match="there is no folder"):
        write(tmp_path / "absent" / "plan")
    assert names(tmp_path) == ["file", "photos"]
    assert names(photos) == ["plan.json"]


def test_an_empty_folder_and_a_damaged_plan_are_replaced(tmp_path: Path) -> None:
    output = tmp_path / "plan"
    output.mkdir()
    write(output)
    (output / "libplan.so").unlink()
    write(output)
    check_plan(output, full=True)


def test_a_linked_output_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "plan").symlink_to(tmp_path / "disk" / "plan")
    for _ in range(2):
        write(tmp_path / "plan")
    assert (tmp_path / "plan").is_symlink()
    assert names(tmp_path / "disk") == ["plan"]


def test_replanning_links_weights(tmp_path: Path) -> None:
    output, source = tmp_path / "plan", tmp_path / "model.onnx"
    source.write_bytes(b"model")
    assert not write(output, source_files=[source])
    inode = (output / package.WEIGHTS).stat().st_ino
    assert write(output, library=b"for another budget", source_files=[source])
    assert (output / package.WEIGHTS).stat().st_ino == inode
    check_plan(output, full=True)


@pytest.mark.parametrize("change", ["source", "units", "damage", "no sources"])
def test_replanning_writes_weights_where_they_may_differ(tmp_path: Path, change: str) -> None:
    output, source = tmp_path / "plan", tmp_path / "model.onnx"
    source.write_bytes(b"model")
    write(output, source_files=[source])
    storage = small_storage()
    if change == "source":
        os.utime(source, ns=(1, 1))
    elif change == "units":
        storage = storage_of(("first", [float_weight("a", 13, 8)]))
    elif change == "damage":
        data = bytearray((output / package.WEIGHTS).read_bytes())
        data[3] ^= 1
        (output / package.WEIGHTS).write_bytes(data)
    sources = [] if change == "no sources" else [source]
    assert not write(output, storage, source_files=sources)
    check_plan(output, full=True)


def test_companions_travel_as_files(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "blob").write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to(cache / "blob")
    storage = small_storage()
    with package.PlanFolder(tmp_path / "plan") as folder:
        weights = folder.write_weights(storage.units)
        folder.add_file("libplan.so", tmp_path / "tokenizer.json")
        folder.add_companions([tmp_path / "tokenizer.json"])
        with pytest.raises(PlanError, match="two files named tokenizer"):
            folder.add_companions([tmp_path / "tokenizer.json"])
        folder.commit(manifest_of(storage, weights))
    assert not (tmp_path / "plan/tokenizer/tokenizer.json").is_symlink()
    check_plan(tmp_path / "plan")


def test_a_missing_companion_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(PlanError, match=r"gone\.json: No such file"),
        package.PlanFolder(tmp_path / "plan") as folder,
    ):
        folder.add_companions([tmp_path / "gone.json"])
    assert names(tmp_path) == []


def test_a_full_disk_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(package.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PlanError, match="make room"):
        write(tmp_path / "plan")
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_what_is_alive_stays(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f"{package._PARTIAL}{name}").mkdir()
    descriptor = os.open(tmp_path / f"{package._PARTIAL}alive", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        write(tmp_path / "plan")
    finally:
        os.close(descriptor)
    assert names(tmp_path) == [f"{package._PARTIAL}alive", "plan"]


def test_a_file_system_without_locks_and_folder_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(package.fcntl, "flock", refuse)
    monkeypatch.setattr(package.os, "fsync", refuse)
    (tmp_path / f"{package._PARTIAL}somebody").mkdir()
    write(tmp_path / "plan")
    assert names(tmp_path) == [f"{package._PARTIAL}somebody", "plan"]


def test_a_disk_error_while_flushing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(package.os, "fsync", fail)
    with pytest.raises(PlanError, match="Input/output error"):
        write(tmp_path / "plan")
    assert names(tmp_path) == []


MEMORY_PROBE = """
import sys
from pathlib import Path
import numpy as np
from atsc.codegen import layout, package
from atsc.codegen.storage import StoredUnit
from atsc.compiler.ir import ArraySource, BlockFormat, DType, Weight

folder = Path(sys.argv[1])
rows, width, count = 4096, 8192, 12
codes = np.lib.format.open_memmap(folder / "codes.npy", "w+", np.uint8, (rows, width // 32, 16))
scales = np.ones((rows, width // 32), np.float16)
parts = {"codes": ArraySource.of(codes), "scales": ArraySource.of(scales)}
units, end = [], 0
for index in range(count):
    weight = Weight(f"w{index}", (rows, width), BlockFormat(4, 32, False), parts)
    stored = layout.store(weight, tiled=True)
    units.append(StoredUnit('weights', weight.name, (), end, stored.num_bytes, ((stored, end),)))
    end = layout.align(end + stored.num_bytes, 4096)

def anonymous():
    status = Path("/proc/self/status").read_text()
    return next(int(l.split()[1]) << 10 for l in status.splitlines() if l.startswith("RssAnon"))

peak = before = anonymous()
def watch(*_):
    global peak
    peak = max(peak, anonymous())
with package.PlanFolder(folder / "plan") as plan_folder:
    plan_folder.write_weights(units, progress=watch)
print(peak - before, end)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    growth, total = map(int, out.split())
    assert total > 200 << 20
    assert growth < 300 << 20
