"""`atsc inspect`: memory, placement, rungs, and the page, on plans made by arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gpu_plan import MIB, Shape, write_gpu_plan
from small_plan import write_plan

from atsc.compiler import cli, plan
from atsc.compiler.commands.inspect_page import short_name
from atsc.compiler.commands.memory_table import host_regions, total, vram_regions

SVG = ".//svg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plans") / "<plän> & 1.atsplan"
    write_gpu_plan(directory, Shape(layers=6, hidden=1024, inner=2048), vram_bytes=325 * MIB)
    return directory


def inspected(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def page(folder: Path, output: Path) -> ElementTree.Element:
    """The page, which must be well-formed XML as well."""
    assert cli.main(["inspect", str(folder), "--html", str(output)]) == 0
    text = output.read_text("utf-8")
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", text), "self-contained"
    return ElementTree.fromstring(text)


def titles(drawing: ElementTree.Element, kinds: set[str]) -> list[str]:
    found = []
    for box in drawing.iter("rect"):
        assert float(box.attrib["width"]) >= 0 <= float(box.attrib["height"])
        if box.attrib["class"] in kinds:
            found.append((box.findtext("title") or "").partition("\n")[0])
    return found


def test_regions_add_up_to_the_rung(folder: Path) -> None:
    manifest = plan.load(folder)
    assert manifest.device is not None
    rung = manifest.device.rungs[-1]
    regions = {region.key: region.predicted_bytes for region in vram_regions(manifest)}
    assert regions["weights"] + regions["kv"] == rung.resident_bytes > 0
    assert regions["slots"] == rung.slot_bytes > 0
    assert total(vram_regions(manifest)).predicted_bytes == rung.required_bytes
    assert total(vram_regions(manifest)).measured_bytes is None


def test_host_memory_of_a_plan_for_the_cpu(tmp_path: Path) -> None:
    manifest = write_plan(tmp_path / "plan")
    assert vram_regions(manifest) == []
    assert total(host_regions(manifest)).predicted_bytes == manifest.memory.peak_bytes


def numbers(ranges: str) -> list[int]:
    """Of `0-3, 7`."""
    bounds = [part.split("-") for part in ranges.split(", ")]
    return [n for bound in bounds for n in range(int(bound[0]), int(bound[-1]) + 1)]


def test_every_unit_with_v(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(folder), "-v"]) == 0
    text = capsys.readouterr().out
    for unit in plan.load(folder).units:
        assert re.search(rf"^{re.escape(unit.name)} .* {unit.residency}$", text, re.MULTILINE)


def test_text_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = plan.load(folder)
    assert manifest.device is not None
    assert cli.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    on_gpu = sum(unit.residency == "vram" for unit in manifest.units)
    for expected in ("weights that live there", "CUDA context", "kept free", "325.00 MiB"):
        assert expected in text
    assert "predicted on NVIDIA GeForce RTX 3060 Laptop GPU: decode " in text
    counted = re.findall(r"^(attention|kv cache|ffn|head|embedding) +(.*)$", text, re.MULTILINE)
    vram = [re.match(r"(\d+) units?,", cells) for _, cells in counted]
    assert sum(int(match[1]) for match in vram if match) == on_gpu
    assert len(re.findall(r"^ *\d+\.\d\d MiB +\d+ ", text, re.MULTILINE)) == len(
        manifest.device.rungs
    )
    caches = re.findall(
        r"^(layer \* \w+) +([\d, -]+) +kv-cache +(\d\S+) \w+ +(v?ram)$", text, re.MULTILINE
    )
    assert {name for name, *_ in caches} == {"layer * attention"}, (
        "one row for all layers of a place"
    )
    found = [layer for _, layers, *_ in caches for layer in numbers(layers)]
    assert sorted(found) == list(range(6)), "every layer once"
    assert all(float(size) > 0 for *_, size, _ in caches)
    document = inspected(capsys, folder)
    decode, prefill = document["choices"]
    rung = manifest.device.rungs[-1]
    assert (decode["round_ns"], decode["static_ns"]) == (rung.decode_ns, rung.static_decode_ns)
    assert len(decode["units"]) == rung.promoted.count("1")
    sizes = {unit.name: unit.bytes for unit in manifest.units}
    assert prefill["copied_bytes"] == sum(sizes[name] for name in prefill["units"]) > 0
    assert prefill["round_ns"] < prefill["static_ns"]
    assert re.search(rf"^prefill +{len(prefill['units'])} ", text, re.MULTILINE)
    assert document["device"]["rungs"][-1]["on_device"].count("1") == on_gpu
    sizes = sum(region["predicted_bytes"] for region in document["vram_regions"])
    assert sizes == manifest.device.rungs[-1].required_bytes


def test_measured_memory_stands_beside_the_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_gpu_plan(tmp_path / "p")
    sizes = {region.key: region.predicted_bytes + MIB for region in vram_regions(manifest)}
    data = json.loads((tmp_path / "p" / "plan.json").read_text())
    data["measured"] = {"decode_tok_s": 12.5, "vram_bytes": sizes}
    (tmp_path / "p" / "plan.json").write_text(json.dumps(data))
    assert cli.main(["inspect", str(tmp_path / "p")]) == 0
    text = capsys.readouterr().out
    assert "measured: decode_tok_s 12.5\n" in text
    assert re.search(r"kept free +1\.00 MiB +2\.00 MiB", text)
    body = "".join(page(tmp_path / "p", tmp_path / "page.html").itertext())
    assert "measured" in body
    assert "2.00 MiB" in body


def test_the_page_holds_every_unit(folder: Path, tmp_path: Path) -> None:
    manifest = plan.load(folder)
    drawings = page(folder, tmp_path / "page.html").findall(SVG)
    places, vram, host, decode, prefill = drawings
    names = [unit.name for unit in manifest.units]
    assert titles(places, {"vram", "ram"}) == names
    for residency in ("vram", "ram"):
        expected = [unit.name for unit in manifest.units if unit.residency == residency]
        assert titles(places, {residency}) == expected
    rows = [text.text for text in places.iter("text") if text.attrib.get("text-anchor") == "end"]
    assert rows == ["shared", "embedding", *(f"layer {i}" for i in range(6)), "head"]
    assert len(titles(vram, {"weights", "slots", "context"})) == 3
    assert len(titles(host, {"weights", "kv"})) == 2
    scheduled = [unit.name for unit in manifest.units if unit.cost]
    ran = titles(decode, {"cpu", "gpu"})
    strips = [title for title in ran if title.endswith("% busy")]
    assert sorted(set(ran) - set(strips)) == sorted(scheduled)
    assert titles(decode, {"hand_off"})
    copied = [name for name in titles(prefill, {"copy"}) if " busy" not in name]
    assert copied
    assert titles(prefill, {"promoted"}) == copied, "what is copied runs on the GPU"


def test_the_page_of_a_plan_for_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_gpu_plan(tmp_path / "cpu", vram_bytes=None)
    root = page(tmp_path / "cpu", tmp_path / "page.html")
    places, host, decode, prefill = root.findall(SVG)
    assert titles(places, {"ram"}) == [unit.name for unit in manifest.units]
    assert titles(host, {"weights"})
    for drawing in (decode, prefill):
        assert len(titles(drawing, {"cpu"})) == sum(
            unit.cost is not None for unit in manifest.units
        )
    assert "the plan holds no times" in "".join(root.itertext())
    assert "VRAM" not in "".join(root.itertext())


def test_the_page_of_a_plan_that_says_nothing_of_costs(tmp_path: Path) -> None:
    manifest = write_plan(tmp_path / "plan")
    places, _ = page(tmp_path / "plan", tmp_path / "page.html").findall(SVG)
    assert titles(places, {"ram"}) == [unit.name for unit in manifest.units]


def test_where_the_page_cannot_go(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder), "--html", str(tmp_path / "no" / "page.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "page.html: No such file or directory; choose another file" in captured.err


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/model/layers.12/attn/qkv_proj/MatMul_Q4", "attn/qkv_proj"),
        ("/model/layers.3/mlp/down_proj/MatMul", "mlp/down_proj"),
        ("/model/layers.3/attn/GroupQueryAttention", "attn"),
        ("model.layers.3.attn.o_proj.MatMul.weight_Q4", "attn.o_proj"),
        ("/model/embed_tokens/Gather", "embed_tokens"),
        ("layer 0 · qkv", "· qkv"),
        ("/lm_head/MatMul_Q4", "lm_head"),
        ("a name that is far too long for its cell", "a name that is far too…"),
        ("/", "/"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name, 23) == short


def test_rungs_must_say_where_every_unit_lives(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((folder / "plan.json").read_text("utf-8"))
    (tmp_path / "plan").mkdir()
    for bits in ("01", data["device"]["rungs"][0]["on_device"].replace("0", "2", 1)):
        data["device"]["rungs"][0]["on_device"] = bits
        (tmp_path / "plan" / "plan.json").write_text(json.dumps(data))
        assert cli.main(["inspect", str(tmp_path / "plan")]) == 1
        assert "rung 0 does not say where each unit lives" in capsys.readouterr().err


@pytest.mark.toolchain
def test_a_compiled_plan(
    export: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All the way from a model: work and times in the plan agree, and its memory adds up."""
    folder = tmp_path / "real.atsplan"
    options = ("--ctx", "200", "--chunk", "64", "--target", "virtual", "--vram", "2M")
    assert cli.main(["compile", str(export("llama3-int4-cpu")), "-o", str(folder), *options]) == 0
    manifest = plan.load(folder)
    assert manifest.device is not None
    assert len({unit.residency for unit in manifest.units}) == 2, "some here, some there"
    together = total(vram_regions(manifest)).predicted_bytes
    assert together == manifest.device.rungs[-1].required_bytes <= 2 * MIB
    capsys.readouterr()
    found = []
    for more in ((), ("--target", "virtual", "--vram", "2M")):
        assert cli.main(["simulate", str(folder), *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["decode"]["round_ns"])
    assert found == [manifest.device.rungs[-1].decode_ns] * 2
    places = page(folder, tmp_path / "page.html").findall(SVG)[0]
    assert titles(places, {"vram", "ram"}) == [unit.name for unit in manifest.units]
