"""`atsc simulate` on plans made by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_plan import MIB, Shape, write_gpu_plan

from atsc.compiler import cli, plan
from atsc.compiler.errors import CodegenError
from atsc.passes.retarget import costs_of, scenario_of_rung

LAPTOP = "laptop-rtx3060-6g"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plans") / "plän 1.atsplan"
    write_gpu_plan(directory, Shape(layers=6, hidden=1024, inner=2048), vram_bytes=325 * MIB)
    return directory


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main(["simulate", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    return code, captured.err


def test_the_plans_own_rung(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = plan.load(folder)
    assert manifest.device is not None
    last = manifest.device.rungs[-1]
    found = simulated(capsys, folder)
    assert (found["decode"]["round_ns"], found["prefill"]["round_ns"]) == (
        last.decode_ns,
        last.prefill_ns,
    )
    assert found["needed_bytes"] == last.required_bytes <= found["vram_bytes"] == 325 * MIB
    assert found["units_in_vram"] == last.on_device.count("1")
    assert 0 < found["units_in_vram"] < found["units_in_vram"] + found["units_on_host"] == 38
    decode = found["decode"]
    assert decode["tokens_per_s"] == pytest.approx(1e9 / decode["round_ns"])
    assert decode["cpu_busy"] + decode["gpu_busy"] < 1
    assert found["prompt_ns"] == found["prefill"]["round_ns"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--ctx", "2049"), "--ctx 2049: tïny has positions for 2048 tokens only"),
        (("--prompt", "99999"), "--prompt 99999: the context is "),
        (("--prompt", "256", "--depth", "300"), "--prompt 256 after 300 others: the context is "),
        (("--compare", "--policy", "cpu"), "leave --policy out"),
    ],
)
def test_what_no_plan_could_do(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str
) -> None:
    code, message = refused(capsys, folder, *flags)
    assert code == 2
    assert expected in message


def test_more_vram_than_the_plan_was_made_for_changes_nothing_and_it_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "made for 325.00 MiB and takes no more; compile again"
    for vram, is_more in (("1G", True), ("325M", False)):
        assert cli.main(["simulate", str(folder), "--vram", vram]) == 0
        assert (hint in capsys.readouterr().out) == is_more
    assert "--vram 0 B: the plan's least placement takes" in refused(capsys, folder, "--vram", 0)[1]


def test_less_vram_takes_the_rung_that_loading_would(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = plan.load(folder)
    assert manifest.device is not None
    costs = costs_of(manifest)
    for number in (0, 3):
        rung = manifest.device.rungs[number]
        found = simulated(capsys, folder, "--vram", rung.required_bytes + 10)
        expected = scenario_of_rung(manifest, costs, number).decode().total_ns
        assert found["decode"]["round_ns"] == rung.decode_ns == expected
    code, error = refused(capsys, folder, "--vram", "1M")
    assert (code, "the plan's least placement takes" in error) == (1, True)


def test_placing_again_for_the_same_machine_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, again = simulated(capsys, folder), simulated(capsys, folder, "--policy", "tensor")
    assert again["decode"]["round_ns"] == own["decode"]["round_ns"]
    assert again["needed_bytes"] <= own["vram_bytes"]


def test_all_policies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, folder, "--compare")["policies"]
    by_name = {each["policy"]: each for each in found}
    assert list(by_name) == ["tensor", "layer", "ffn", "expert", "gpu", "cpu", "stream"]
    assert "policy gpu needs" in by_name["gpu"]["error"]
    fitting = {name: each for name, each in by_name.items() if "error" not in each}
    assert all(each["needed_bytes"] <= 325 * MIB for each in fitting.values())
    best = min(each["decode"]["round_ns"] for each in fitting.values())
    assert by_name["tensor"]["decode"]["round_ns"] == best
    assert by_name["cpu"]["decode"]["cpu_busy"] == 1
    assert by_name["stream"]["decode"]["h2d_bytes_per_s"] > 1e9
    assert cli.main(["simulate", str(folder), "--compare"]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert all(f"\n{name} " in text for name in by_name)


def test_another_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = simulated(capsys, folder, "--policy", "gpu", "--vram", "2G")
    there = simulated(capsys, folder, "--policy", "gpu", "--target", "desktop-rtx4090-24g")
    assert there["vram_bytes"] == 24 * 1024 * MIB
    ratio = here["decode"]["round_ns"] / there["decode"]["round_ns"]
    assert 1.2 < ratio < 1008 / 336
    same = simulated(capsys, folder, "--target", LAPTOP, "--vram", 325 * MIB)
    own = simulated(capsys, folder)
    assert same["decode"]["round_ns"] == own["decode"]["round_ns"]


def test_depth_prompt_and_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = simulated(capsys, folder)
    deep = simulated(capsys, folder, "--depth", "511")
    assert deep["decode"]["round_ns"] > own["decode"]["round_ns"]
    long = simulated(capsys, folder, "--prompt", "512")
    assert 7 * own["prefill"]["round_ns"] < long["prompt_ns"] < 8 * own["prefill"]["round_ns"]
    first = simulated(capsys, folder, "--prompt", "64", "--depth", "0")["prompt_ns"]
    growing = simulated(capsys, folder, "--prompt", "448", "--depth", "0")["prompt_ns"]
    last = simulated(capsys, folder, "--prompt", "64", "--depth", "384")["prompt_ns"]
    assert 6 * first < growing < 7 * last
    short = simulated(capsys, folder, "--prompt", "5")
    assert (short["prefill"]["rows"], short["prompt_ns"]) == (5, short["prefill"]["round_ns"])
    wide = simulated(capsys, folder, "--ctx", "2048", "--policy", "cpu")
    same = simulated(capsys, folder, "--policy", "cpu")
    assert wide["decode"]["round_ns"] > same["decode"]["round_ns"]
    assert refused(capsys, folder, "--ctx", "63")[0] == 2
    code, error = refused(capsys, folder, "--depth", "512")
    assert (code, "the context is 512 tokens" in error) == (2, True)


def test_plans_for_a_cpu_need_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpu_plan(tmp_path / "cpu", vram_bytes=None)
    code, error = refused(capsys, tmp_path / "cpu")
    assert (code, "give a machine with --target" in error) == (2, True)
    found = simulated(capsys, tmp_path / "cpu", "--target", LAPTOP)
    assert (found["policy"], found["units_in_vram"]) == ("tensor", 19)
    code, error = refused(capsys, tmp_path / "cpu", "--target", "x86-64-v3")
    assert (code, "no ram_read_bytes_per_s" in error) == (2, True)


def test_rates_over_time_average_to_the_mean(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = simulated(capsys, folder, "--policy", "stream")["prefill"]
    over_time = prefill["h2d_bytes_per_s_over_time"]
    assert sum(over_time) / len(over_time) == pytest.approx(prefill["h2d_bytes_per_s"], rel=1e-6)
    busy = prefill["gpu_busy_over_time"]
    assert sum(busy) / len(busy) == pytest.approx(prefill["gpu_busy"], rel=1e-6)


@pytest.mark.toolchain
def test_dynamic_transfer_beside_static(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, folder)
    dynamic = found["dynamic"]
    assert found["decode"]["num_promoted"] == 0 < dynamic["decode"]["num_promoted"]
    assert dynamic["decode"]["round_ns"] < found["decode"]["round_ns"]
    assert dynamic["prefill"]["round_ns"] <= found["prefill"]["round_ns"]
    assert cli.main(["simulate", str(folder)]) == 0
    assert capsys.readouterr().out.count("with dynamic transfer") == 2
    whole = simulated(capsys, folder, "--policy", "gpu", "--vram", "2G")
    assert whole["dynamic"] is None, "nothing to promote, no slots"


def test_without_a_compiler_dynamic_transfer_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CodegenError("no C++ compiler was found")

    monkeypatch.setattr("atsc.codegen.transfer_library.load_scheduler", fail)
    assert cli.main(["simulate", str(folder), "--compare", "--json"]) == 0
    captured = capsys.readouterr()
    assert {each.get("dynamic") for each in json.loads(captured.out)["policies"]} == {None}
    assert captured.err.count("\n") == 1 and "no C++ compiler was found" in captured.err
