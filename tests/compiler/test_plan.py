"""The manifest round-trips, and every kind of damage is refused in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_plan import LIBRARY, UNITS, write_plan

from atsc.compiler import isa, plan
from atsc.compiler.check_plan import check_plan, read_file
from atsc.compiler.errors import PlanError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "mödel plan 模.atsplan"
    write_plan(directory)
    return directory


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "plan.json").read_text("utf-8"))
    change(data)
    (folder / "plan.json").write_text(json.dumps(data), "utf-8")


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        check_plan(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "says what to do"
    return message


def test_round_trip(tmp_path: Path) -> None:
    manifest = write_plan(tmp_path / "plan")
    assert plan.load(tmp_path / "plan") == manifest
    assert check_plan(tmp_path / "plan") == manifest
    assert manifest.memory.peak_bytes == 8192 + 4096 + 1024
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.isa = "x86-64-v2"  # type: ignore[misc]


def test_a_whole_plan_passes_in_full_and_reports_progress(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    manifest = check_plan(folder, full=True, progress=lambda *args: seen.append(args))
    total = manifest.files["weights.bin"].bytes
    assert seen[-1] == ("checking weights", total, total)
    digest = hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    assert check_plan(folder, expected_sha256=digest.upper()) == manifest


def test_the_folder_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    check_plan(tmp_path / "link", full=True)


def test_what_is_no_plan(folder: Path, tmp_path: Path) -> None:
    assert "no such plan folder" in refusal(tmp_path / "absent")
    assert "no plan" in refusal(tmp_path)
    assert "a file, not a plan folder" in refusal(folder / "plan.json")


def test_the_manifest_is_pinned(folder: Path) -> None:
    for pinned in ("0" * 64, ""):
        assert "expected_sha256" in refusal(folder, expected_sha256=pinned)


@pytest.mark.parametrize("name", ["libplan.so", "weights.bin", "tokenizer/tokenizer.json"])
def test_missing_truncated_and_longer_files(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"{path}: truncated" in refusal(folder)
    path.write_bytes(data + b"\0")
    assert f"{path}: too long" in refusal(folder)
    path.unlink()
    assert f"{path}: missing" in refusal(folder)
    path.mkdir()
    assert f"{path}: no regular file" in refusal(folder)
    path.rmdir()
    os.mkfifo(path)
    assert f"{path}: no regular file" in refusal(folder)


@pytest.mark.parametrize("name", ["libplan.so", "tokenizer/tokenizer.json"])
def test_altered_files(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    assert "sha256 differs" in refusal(folder)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_in_a_unit_is_found_by_full(folder: Path, unit: str, at: int) -> None:
    entry = next(u for u in plan.load(folder).units if u.name == unit)
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[entry.offset + (at if at >= 0 else entry.bytes - 1)] ^= 0x80
    (folder / "weights.bin").write_bytes(weights)
    check_plan(folder)
    assert f"unit {unit} is damaged" in refusal(folder, full=True)


def test_a_flipped_bit_between_units_is_found_by_full(folder: Path) -> None:
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[5001] ^= 1
    (folder / "weights.bin").write_bytes(weights)
    assert "outside of every unit" in refusal(folder, full=True)


def test_another_schema(folder: Path) -> None:
    edit(folder, lambda data: data.update(schema=3, new_in_schema_3=True))
    assert "plan schema 3, this atsc reads schema 2" in refusal(folder)
    edit(folder, lambda data: data.pop("schema"))
    assert "plan schema None" in refusal(folder)


@pytest.mark.parametrize(
    ("interface", "oldest", "serves"),
    [
        (plan.API_VERSION + 1, plan.API_OLDEST, True),
        (plan.API_VERSION + 1, plan.API_VERSION + 1, False),
        (plan.API_VERSION - 1, plan.API_OLDEST - 1, False),
    ],
)
def test_another_interface(folder: Path, interface: int, oldest: int, serves: bool) -> None:
    """Said before the fields are read, which another version may have changed."""
    edit(folder, lambda data: data.update(interface=interface, oldest_interface=oldest))
    if serves:
        assert check_plan(folder).interface == interface
        return
    edit(folder, lambda data: data.update(new_later=True))
    assert (
        f"this plan was made by another version of atsc (C interface {interface}, this one has "
        f"{plan.API_VERSION})"
    ) in refusal(folder)


@pytest.mark.parametrize("field", ["interface", "oldest_interface"])
def test_no_interface(folder: Path, field: str) -> None:
    edit(folder, lambda data: data.pop(field))
    assert "does not say which C interface" in refusal(folder)


def test_another_platform(folder: Path) -> None:
    edit(folder, lambda data: data.update(platform="linux-aarch64"))
    assert "compiled for linux-aarch64" in refusal(folder)


def test_a_cpu_without_the_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset().union(*isa.ISA_FLAGS.values())
    edit(folder, lambda data: data.update(isa="x86-64-v3"))
    monkeypatch.setattr("atsc.compiler.check_plan.cpu_flags", lambda: everything - {"avx2", "fma"})
    assert "this one lacks avx2, fma" in refusal(folder)
    monkeypatch.setattr("atsc.compiler.check_plan.cpu_flags", lambda: everything)
    check_plan(folder)
    edit(folder, lambda data: data.update(isa="x86-64-v9"))
    assert "x86-64-v9, which this atsc does not know" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../libplan.so",
        "/etc/hostname",
        "tokenizer/../../x",
        "./libplan.so",
        "a//b",
        "",
        "a\\b",
        "a\nb",
        "a\0b",
        "\ud800",
        "plan.json",
    ],
)
def test_paths_that_are_none(folder: Path, name: str) -> None:
    edit(folder, lambda data: data["files"].update({name: data["files"]["libplan.so"]}))
    assert "is no path inside the plan" in refusal(folder)


def test_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "libplan.so").rename(outside / "libplan.so")
    (folder / "libplan.so").symlink_to(outside / "libplan.so")
    assert "a symbolic link, not a file" in refusal(folder)
    (folder / "libplan.so").unlink()
    (outside / "libplan.so").rename(folder / "libplan.so")
    (folder / "tokenizer").rename(outside / "tokenizer")
    (folder / "tokenizer").symlink_to(outside / "tokenizer", target_is_directory=True)
    assert "reached through a symbolic link" in refusal(folder)


def test_a_linked_manifest(folder: Path, tmp_path: Path) -> None:
    (folder / "plan.json").rename(tmp_path / "plan.json")
    (folder / "plan.json").symlink_to(tmp_path / "plan.json")
    assert "no plan" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d.update(surprise=1), "unknown field surprise"),
        (lambda d: d["model"].update(surprise=1), "unknown field model.surprise"),
        (lambda d: d.pop("library"), "field library is missing"),
        (lambda d: d["units"][1].pop("crc32"), "field units[1].crc32 is missing"),
        (lambda d: d["options"].update(ctx="256"), "options.ctx is not a whole number"),
        (lambda d: d["options"].update(ctx=True), "options.ctx is not a whole number"),
        (lambda d: d["model"].update(eos_token_ids=[1, None]), "model.eos_token_ids[1]"),
        (lambda d: d.update(units={}), "units is not a list"),
        (lambda d: d.update(files=[]), "files is not an object"),
        (lambda d: d["files"].pop("weights.bin"), "no entry for weights.bin"),
        (lambda d: d["files"]["libplan.so"].update(sha256="xyz"), "malformed size or hash"),
        (lambda d: d["units"][1].update(offset=4096), "overlaps the one before"),
        (lambda d: d["units"][2].update(offset=12289), "is misaligned"),
        (lambda d: d["units"][2].update(bytes=10**9), "ends beyond weights.bin"),
        (lambda d: d["units"][0].update(bytes=-1), "is misaligned or overlaps"),
    ],
)
def test_malformed_fields(
    folder: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    edit(folder, change)
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"schema": 1, "schema": 1}',
        b'{"schema": NaN}',
        b"[" * 100_000,
        b'{"schema": ' + b"1" * 5000 + b"}",
    ],
)
def test_text_that_is_no_manifest(folder: Path, text: bytes) -> None:
    (folder / "plan.json").write_bytes(text)
    assert str(folder / "plan.json") in refusal(folder)


def test_read_file_gives_only_what_was_compiled(folder: Path) -> None:
    manifest = check_plan(folder)
    assert read_file(folder, manifest, "libplan.so") == LIBRARY
    (folder / "libplan.so").write_bytes(LIBRARY[::-1])
    with pytest.raises(PlanError, match="sha256 differs"):
        read_file(folder, manifest, "libplan.so")


def test_levels_contain_the_levels_below() -> None:
    v3 = frozenset().union(*list(isa.ISA_FLAGS.values())[:3])
    assert isa.missing_flags("x86-64-v3", v3) == []
    assert isa.highest_level(v3) == "x86-64-v3"
    assert isa.highest_level(v3 - {"ssse3"}) == "x86-64"
    assert isa.missing_flags("x86-64-v4", v3 - {"avx"})[0] == "avx"
    assert isa.highest_level(frozenset()) is None
