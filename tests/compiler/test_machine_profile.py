"""`atsc profile`: the probe model is valid, and its rates come out as a target file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from atsc.compiler import cli, machine_profile
from atsc.compiler.invariants import check_graph
from atsc.compiler.profiling import MeasuredTimer
from atsc.passes.annotate import rates_of
from atsc.targets.target import load, resolve

DRIVER = 500 << 20


def test_the_probe_is_a_valid_graph() -> None:
    check_graph(machine_profile.probe_graph())


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 256), ("INNER", 2560), ("LAYERS", 2), ("VOCAB", 512)):
        monkeypatch.setattr(machine_profile, name, value)


@pytest.mark.toolchain
def test_profile_writes_a_target_that_rooflines_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_small(monkeypatch)
    file = tmp_path / "here.toml"
    assert cli.main(["profile", "-o", str(file), "--threads", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["target"]
    target = load(file)
    assert target.source == "measured"
    assert target.ram_read_bytes_per_s == shown["ram_read_bytes_per_s"]
    # Far apart from each other and from nonsense on any machine that runs tests.
    assert 1e8 < (target.ram_read_bytes_per_s or 0) < 1e12
    assert 1e9 < (target.cpu_ops_per_s or 0) < 1e14
    if target.gpu:
        assert rates_of(target).gpu_bytes_per_s == target.vram_read_bytes_per_s


def test_where_a_profile_cannot_be_written_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_profile, "profile_machine", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for file, expected in (
        (tmp_path / "x.toml", f"{tmp_path} cannot be written; choose another"),
        (tmp_path, "a folder; give the name of a file"),
        (tmp_path / "no" / "x.toml", "create it"),
    ):
        assert cli.main(["profile", "-o", str(file)]) == 2
        assert expected in capsys.readouterr().err


def test_figures_have_their_units_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    laptop = resolve("laptop-rtx3060-6g")
    monkeypatch.setattr(machine_profile, "profile_machine", lambda *_: laptop)
    assert cli.main(["profile"]) == 0
    shown = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["vram"], shown["ram read"], shown["h2d"]) == (
        "6.00 GiB",
        "51.2 GB/s",
        "31.5 GB/s",
    )
    assert (shown["cpu"], shown["hand off"]) == ("2300.0 G int8 op/s", "10.6 us")
    assert (shown["cores"], shown["isa"]) == ("8", "x86-64-v4")


@pytest.mark.toolchain
def test_a_profile_says_what_the_gpus_driver_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or plans for its file take more VRAM than they may. The virtual device has no driver."""
    make_small(monkeypatch)
    here = dataclasses.replace(resolve("virtual"), source="detected")
    monkeypatch.setattr(machine_profile, "resolve", lambda name: here)
    measured = MeasuredTimer.fixed_device_bytes
    monkeypatch.setattr(MeasuredTimer, "fixed_device_bytes", lambda timer: measured(timer) + DRIVER)
    found = machine_profile.profile_machine(tmp_path, threads=1)
    assert DRIVER <= found.gpu_context_bytes < DRIVER + (4 << 20)
    rates = rates_of(found)
    assert min(rates.gpu_bytes_per_s, rates.gpu_ops_per_s, rates.link_bytes_per_s) > 1e6


def test_a_missing_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "-o", "no/such/folder/m.toml"]) == 2
    assert "there is no folder no/such/folder" in capsys.readouterr().err
