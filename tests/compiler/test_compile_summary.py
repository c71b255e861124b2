"""What `atsc compile` says at the end: memory on both sides, speed, and what to do next."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from gpu_plan import MIB, Shape, write_gpu_plan
from small_plan import write_plan

from atsc.compiler import cli, driver, plan

LAPTOP = ("--target", "laptop-rtx3060-6g")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.touch()
    return path


def compiled(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *arguments: object,
) -> tuple[str, str]:
    monkeypatch.setattr(driver, "compile_model", lambda options, observer: folder)
    assert cli.main(["compile", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_plan_for_a_gpu(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "gpu.atsplan"
    write_gpu_plan(folder, Shape(layers=6, hidden=1024, inner=2048), vram_bytes=325 * MIB)
    manifest = plan.load(folder)
    assert manifest.device is not None
    rung = manifest.device.rungs[-1]
    out, err = compiled(capsys, monkeypatch, folder, model, *LAPTOP, "--vram", "325M")
    size = f"{rung.required_bytes / MIB:.2f} MiB of VRAM"
    num_units = sum(unit.cost is not None for unit in manifest.units)
    assert f"takes {size}, where {rung.on_device.count('1')} of {num_units} units live" in out
    assert f": decode {1e9 / rung.decode_ns:.1f} tok/s, prefill " in out
    assert f'run it with: atsc run {folder} -p "Hello"' in out or "no tokenizer.json" in out
    assert err == ""
    document = json.loads(compiled(capsys, monkeypatch, folder, model, *LAPTOP, "--json")[0])
    assert document["vram_bytes"] == rung.required_bytes


def test_a_plan_for_the_cpu_names_flags_that_did_nothing(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "cpu.atsplan"
    write_plan(folder)
    out, err = compiled(capsys, monkeypatch, folder, model)
    assert "takes 13.00 KiB of host memory\nrun it with: atsc run" in out
    assert err == ""
    flags = ("--vram", "1G", "--policy", "cpu", "--headroom", "1G")
    _, err = compiled(capsys, monkeypatch, folder, model, *flags)
    assert err == "without effect: --vram, --headroom; the plan is for the CPU alone\n"


def test_more_than_the_target_has_is_said(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "a plan"
    manifest = write_plan(folder)
    target = {**manifest.target, "ram_bytes": 10 << 10}
    plan.save(dataclasses.replace(manifest, target=target), folder)
    out, err = compiled(capsys, monkeypatch, folder, model)
    assert f"run it with: atsc run '{folder}' -p" in out
    assert "the plan takes 13.00 KiB of host memory, and its target has 10.00 KiB" in err
    _, err = compiled(capsys, monkeypatch, folder, model, *LAPTOP, "--vram", "7G")
    laptop = "NVIDIA GeForce RTX 3060 Laptop GPU"
    assert err.startswith(f"--vram 7.00 GiB: more than the 6.00 GiB of {laptop}; there a smaller")


def test_a_plan_without_a_tokenizer_cannot_take_text(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "cpu.atsplan"
    manifest = write_plan(folder)
    files = {k: v for k, v in manifest.files.items() if not k.startswith("tokenizer/")}
    plan.save(dataclasses.replace(manifest, files=files), folder)
    out, _ = compiled(capsys, monkeypatch, folder, model)
    assert "there was no tokenizer.json beside the model" in out
    assert "run it with" not in out
