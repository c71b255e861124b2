"""The package `atsc` itself: what an application sees."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import atsc
from atsc.compiler import driver, errors
from atsc.runtime import loader


def test_every_error_is_there() -> None:
    own = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.AtscError)
    }
    assert own <= set(atsc.__all__)
    for name in own:
        assert getattr(atsc, name) is getattr(errors, name)


def test_compile_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[driver.CompileOptions, object]] = []

    def compile_model(options: driver.CompileOptions, observer: object) -> Path:
        seen.append((options, observer))
        return Path("out")

    monkeypatch.setattr(driver, "compile_model", compile_model)
    observer = object()
    assert atsc.compile("m.onnx", "p", ctx=7, observer=observer) == Path("out")  # type: ignore[arg-type]
    atsc.compile(Path("m.onnx"))
    atsc.compile("m.gguf", vram="6G", headroom=1000)
    gguf = driver.CompileOptions(model=Path("m.gguf"), vram_bytes=6 << 30, headroom_bytes=1000)
    assert seen == [
        (driver.CompileOptions(model=Path("m.onnx"), output=Path("p"), ctx=7), observer),
        (driver.CompileOptions(model=Path("m.onnx")), None),
        (gguf, None),
    ]


def test_unknown_options_are_named() -> None:
    with pytest.raises(atsc.UsageError, match="'ram'"):
        atsc.compile("m.onnx", ram="1G")
    with pytest.raises(atsc.UsageError, match="'six' is no size"):
        atsc.compile("m.onnx", vram="six")


def test_load_goes_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(atsc.PlanError, match="no plan"):
        atsc.load(tmp_path)
    seen: list[object] = []
    monkeypatch.setattr(loader, "load", lambda path, **options: seen.append((path, options)))
    atsc.load(str(tmp_path), threads=2)
    assert seen == [(tmp_path, {"threads": 2})]
