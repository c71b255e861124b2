"""`atsc doctor`: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atsc.compiler import cli
from atsc.compiler.commands import doctor
from atsc.targets.target import Target

WHOLE = doctor.Findings(
    target=Target(
        name="here",
        isa="x86-64-v4",
        cpu_model="A CPU",
        features=("avx512_vnni",),
        num_cores=8,
        num_threads=16,
        cpu_limit=2.5,
        ram_bytes=32 << 30,
        gpu="cuda",
        gpu_model="A GPU",
        sm=89,
        vram_bytes=8 << 30,
    ),
    available_bytes=20 << 30,
    cuda_driver="CUDA 12.8",
    compiler="g++ 12",
    zig="0.14.0",
    cuda_compiler="nvrtc 13.5",
    packages=dict.fromkeys(doctor.PACKAGES, "1.0"),
    cache_dir=Path("/home/me/.cache/atsc"),
    cache_bytes=300 << 20,
    cache_is_writable=True,
)


def missing(**changes: Any) -> dict[str, dict[str, str]]:
    found = dataclasses.replace(WHOLE, **changes)
    return {f.name: f.missing for f in doctor.features_of(found) if f.missing}


def without(*names: str) -> dict[str, str]:
    return {name: "" if name in names else "1.0" for name in doctor.PACKAGES}


def test_a_whole_machine_lacks_nothing() -> None:
    assert missing() == {}


def test_a_cache_that_cannot_be_written() -> None:
    wanted = {
        "a cache folder that can be written, not /home/me/.cache/atsc": "set ATSC_CACHE_DIR to one"
    }
    assert missing(cache_is_writable=False) == {
        "compile": wanted,
        "compile for a GPU": wanted,
    }


def test_whether_a_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._is_writable(tmp_path / "not" / "yet")
    (tmp_path / "file").touch()
    assert not doctor._is_writable(tmp_path / "file" / "atsc")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert not doctor._is_writable(tmp_path / "not" / "yet")


def test_what_each_package_is_for() -> None:
    for name, features in {
        "onnxruntime": {"verify"},
        "jinja2": {"compile", "chat", "verify", "compile for a GPU"},
        "gguf": {"convert GGUF"},
        "tokenizers": {"run", "chat", "convert GGUF", "run on a GPU"},
        "ziglang": {"--toolchain zig"},
        "apache-tvm": {"rare operators"},
    }.items():
        assert set(missing(packages=without(name))) == features, name
    assert missing(packages=without("onnxruntime"))["verify"] == {
        "onnxruntime": "pip install 'atsc[verify]'"
    }


def test_one_compiler_is_enough() -> None:
    assert missing(compiler="") == {}
    assert missing(zig="") == {}
    advice = "apt install g++, or pip install 'atsc[zig]'"
    lacks = {"a C++ compiler": advice}
    assert missing(compiler="", zig="") == {"compile": lacks, "compile for a GPU": lacks}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cuda_driver": ""}, "the NVIDIA driver (libcuda.so.1)"),
        ({"target": dataclasses.replace(WHOLE.target, gpu="")}, "a GPU that the driver shows"),
        (
            {"target": dataclasses.replace(WHOLE.target, sm=61)},
            "a GPU of sm_75 or later; this one is sm_61",
        ),
    ],
)
def test_gpus(changes: dict[str, Any], expected: str) -> None:
    found = missing(**changes)
    assert list(found) == ["run on a GPU"]
    assert list(found["run on a GPU"]) == [expected]


def test_an_old_cpu_compiles_but_does_not_run() -> None:
    for isa in ("x86-64-v2", "unknown"):
        found = missing(target=dataclasses.replace(WHOLE.target, isa=isa))
        assert set(found) == {"run", "chat", "verify", "run on a GPU"}


def test_the_text_fits_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poor = dataclasses.replace(
        WHOLE, packages=without("onnx", "onnx-ir"), cuda_driver="", cuda_compiler=""
    )
    monkeypatch.setattr(doctor, "examine", lambda: poor)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for expected in (
        "A CPU: x86-64-v4, avx512_vnni",
        "8, 16 threads, limited to 2.5 CPUs' time",
        "A GPU, sm_89, 8.00 GiB",
        "/home/me/.cache/atsc, 300.00 MiB",
        "needs onnx, onnx-ir (pip install 'atsc[compiler]')",
        "run                ok",
    ):
        assert expected in text


def test_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATSC_CACHE_DIR", str(tmp_path))
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "a.o").write_bytes(bytes(1234))
    code = cli.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (code == 0)
    assert (document["cache_dir"], document["cache_bytes"]) == (str(tmp_path), 1234)
    assert document["target"]["num_threads"] == len(os.sched_getaffinity(0))
    assert document["packages"]["numpy"]
    assert 0 < document["available_bytes"] <= document["target"]["ram_bytes"]
    names = [feature["name"] for feature in document["features"]]
    assert names[:2] == ["compile", "run"]
    assert all(feature["ok"] is (feature["missing"] == {}) for feature in document["features"])


def test_it_works_where_the_extras_are_missing() -> None:
    """Everything beyond numpy is hidden."""
    hide = """
import sys
from importlib.machinery import PathFinder
hidden = {"onnx", "onnx_ir", "onnxscript", "jinja2", "gguf", "tokenizers", "onnxruntime",
          "ziglang", "cuda", "tvm"}
find = PathFinder.find_spec
def find_spec(name, *rest):
    return None if name.partition(".")[0] in hidden else find(name, *rest)
PathFinder.find_spec = find_spec
from atsc.compiler import cli
sys.exit(cli.main(["doctor", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert [name for name, version in document["packages"].items() if version] == ["numpy"]
    compile_, run = document["features"][:2]
    assert set(compile_["missing"]) >= {"onnx", "onnx-ir", "onnxscript", "jinja2"}
    assert set(run["missing"]) == {"tokenizers"}
