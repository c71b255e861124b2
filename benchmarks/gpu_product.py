"""Looks at what atsc writes on a machine: traces, target files, pages. Steps of gpu.py.

Each step returns its figures and a list of checks: what was found, the least and the most that is
right. A step is `ok` if all of its checks are.
"""

from __future__ import annotations

import importlib.util
import json
import math
import string
import sys
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gpu_run import Record, Run

Span = tuple[float, float]
WORDS = "One morning the river was higher than anybody had seen it, and the bridge was gone. "
NUM_GENERATED = 24
CLOCK_US = 20.0
"""How well the GPU's clock is known on the CPU's."""
VOID_TAGS = {"meta", "br", "hr", "img", "link", "input"}


def check(name: str, found: float, least: float, most: float = math.inf) -> Record:
    """A figure and its bounds; JSON has no infinity, so an open bound is null."""
    is_right = least <= found <= most
    limit = None if math.isinf(most) else most
    return {"check": name, "found": found, "least": least, "most": limit, "ok": is_right}


def judged(checks: Sequence[Record], **figures: Any) -> Record:
    """A step's record."""
    wrong = [f"{c['check']} is {c['found']:.5g}" for c in checks if not c["ok"]]
    record: Record = {"ok": not wrong, "checks": list(checks), **figures}
    return {**record, "error": "; ".join(wrong)} if wrong else record


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json of one token a character, for a model that has none; text needs one."""
    path = folder / "tokenizer.json"
    if path.exists():
        return
    names = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
    vocabulary = {char: index for index, char in enumerate(string.printable)}
    model: Record = {"type": "BPE", **dict.fromkeys(names), "vocab": vocabulary, "merges": []}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    document: Record = {"version": "1.0", **dict.fromkeys(parts), "added_tokens": []}
    path.write_text(json.dumps({**document, "decoder": {"type": "Fuse"}, "model": model}))


def look_at_trace(run: Run, plan: Path) -> Record:
    """`atsc run --trace` of a hybrid plan, or `atsc bench` where there is no tokenizer package."""
    args, trace = run.args, plan.with_name(f"{plan.stem}-run.json")
    options = ("-n", NUM_GENERATED, "--threads", args.threads, "--trace", trace)
    if importlib.util.find_spec("tokenizers"):
        command, text = "run", (WORDS * (args.p // len(WORDS) + 1))[: args.p]
        rate = run.atsc("run", plan, "-p", text, *options)["decode_tokens_per_s"]
    else:
        command = "bench"
        rows = run.atsc("bench", plan, "-p", args.p, "-r", 1, *options)["rows"]
        rate = next(row["avg_ts"] for row in rows if row["n_gen"])
    simulated = run.atsc("simulate", plan, "--prompt", args.p)
    link = run.atsc("inspect", plan)["device"]["link"]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    found = summary(events)
    expected = {**simulated, **(simulated["dynamic"] or {})}
    checks = trace_checks(events, found, rate, expected, 1e9 / link["to_gpu_ns_per_byte"])
    return judged(checks, command=command, trace=str(trace), tokens_per_s=rate, rounds=found)


def summary(events: Sequence[Record]) -> Record:
    """Of all prefill and of all decode rounds that are no warm-up: what its tracks did."""
    found: Record = {}
    rounds = [e for e in events if e["cat"] == "round" and e["args"].get("call") != "warm-up"]
    for kind in ("prefill", "decode"):
        mine = [span(e) for e in rounds if e["name"].split()[0] == kind]
        if not mine:
            continue
        inside = [e for e in events if e["cat"] != "round" and overlap_of([span(e)], mine) > 0]
        whole = sum(end - begin for begin, end in mine)
        computing = united(span(e) for e in inside if e["cat"] in ("cpu", "device"))
        copies = [e for e in inside if e["cat"] == "copy"]
        copying = sum(e["dur"] for e in copies)
        busy = {cat: sum(e["dur"] for e in inside if e["cat"] == cat) for cat in CATEGORIES}
        found[kind] = {
            "rounds": len(mine),
            "events": {cat: sum(e["cat"] == cat for e in inside) for cat in CATEGORIES},
            "round_us": whole / len(mine),
            "cpu_busy": busy["cpu"] / whole,
            "gpu_busy": sum(end - begin for begin, end in gpu_work(inside)) / whole,
            "copy_busy": copying / whole,
            "copies_beside_computing": (
                overlap_of(united(map(span, copies)), computing) / copying if copying else None
            ),
            "copied_bytes_per_s": (
                sum(e["args"]["bytes"] for e in copies) / copying * 1e6 if copying else None
            ),
            "tokens_per_s": len(mine) / (mine[-1][1] - mine[0][0]) * 1e6,
        }
    return found


CATEGORIES = ("cpu", "cpu wait", "device", "device wait", "copy")


def trace_checks(
    events: Sequence[Record], found: Record, rate: float, simulated: Record, link: float
) -> list[Record]:
    """What must hold of a hybrid plan's trace.

    Args:
        events: of the trace; times in microseconds.
        found: their summary.
        rate: tokens per second of decode, as the command printed it.
        simulated: `atsc simulate`'s document, with what it predicts for this way of running.
        link: bytes per second to the GPU, as profiled.
    """
    rounds = united(span(e) for e in events if e["cat"] == "round")
    wide = [(begin - CLOCK_US, end + CLOCK_US) for begin, end in rounds]
    parts = [e for e in events if e["cat"] != "round"]
    lost = [e for e in parts if overlap_of([span(e)], wide) < e["dur"] - 1e-3]
    cpu = [span(e) for e in events if e["cat"] == "cpu"]
    twice = sum(end - begin for begin, end in cpu) - sum(e - b for b, e in united(cpu))
    checks = [
        check("events with a negative duration", sum(e["dur"] < 0 for e in events), 0, 0),
        check("events outside of rounds", len(lost), 0, 0),
        check("microseconds in which the CPU runs two segments", twice, 0, CLOCK_US),
        *(
            check(f"{cat} events", sum(e["cat"] == cat for e in parts), 1)
            for cat in ("cpu", "device", "copy")
        ),
    ]
    for kind, of_kind in found.items():
        checks.append(check(f"{kind}, busy share of the GPU", of_kind["gpu_busy"], 0, 1.001))
        if of_kind["copied_bytes_per_s"]:
            share = of_kind["copied_bytes_per_s"] / link
            checks += [
                check(
                    f"{kind}, share of copying beside computing",
                    of_kind["copies_beside_computing"],
                    0.5,
                ),
                check(f"{kind}, copies' rate by the link's", share, 0.5, 1.15),
            ]
        apart = abs(of_kind["gpu_busy"] - simulated[kind]["gpu_busy"])
        checks.append(check(f"{kind}, GPU busy share minus the simulated", apart, 0, 0.15))
    if "decode" in found and rate:
        by_rounds = found["decode"]["tokens_per_s"] / rate
        checks.append(check("tokens/s of the trace by those reported", by_rounds, 0.85, 1.15))
    return checks


def span(event: Record) -> Span:
    """Begin and end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def united(spans: Iterable[Span]) -> list[Span]:
    """The same times in spans that do not overlap, ascending."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def gpu_work(events: Iterable[Record]) -> list[Span]:
    """When the GPU computed, ascending: its runs, without the waits for weights in them."""
    spans: dict[str, list[Span]] = {"device": [], "device wait": []}
    for event in events:
        if event["cat"] in spans:
            spans[event["cat"]].append(span(event))
    waits = united(spans["device wait"])
    left: list[Span] = []
    for begin, end in united(spans["device"]):
        for first, last in waits:
            if first < end and last > begin:
                left.append((begin, max(begin, first)))
                begin = min(end, last)
        left.append((begin, end))
    return [(begin, end) for begin, end in left if begin < end]


def overlap_of(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Time in both; each is ascending and does not overlap itself."""
    total, start = 0.0, 0
    for begin, end in some:
        while start < len(others) and others[start][1] <= begin:
            start += 1
        for first, last in others[start:]:
            if first >= end:
                break
            total += max(0.0, min(end, last) - max(begin, first))
    return total


SAVE_TARGET = """
import sys
from pathlib import Path
from atsc.targets.target import resolve, save
save(resolve(sys.argv[1]), Path(sys.argv[2]))
"""


def look_at_profile(run: Run, plan: Path, model: Path) -> Record:
    """Measure the machine once, compile for the file, and compare with the plan that is there.

    The plan that was there is replaced. With --target it is that target's file, not a profile.
    """
    args, file = run.args, plan.with_name("profiled.toml")
    if args.target == "auto":
        run.atsc("profile", "-o", file, "--threads", args.threads)
    else:
        run.command(sys.executable, "-c", SAVE_TARGET, args.target, file)
    before = _figures(run, plan)
    budget = json.loads((plan / "plan.json").read_text())["device"]["budget_bytes"]
    compiled = run.atsc(
        *("compile", model, "-o", plan, "--target", file, "--vram", budget, "--ctx", args.ctx),
        *("--chunk", args.chunk, "--threads", args.threads),
    )
    after = _figures(run, plan)
    again = _speeds(run.atsc("simulate", plan, "--target", file, "--vram", budget))
    seconds = {stage["name"]: stage["seconds"] for stage in compiled["stages"]}
    checks = [
        check("seconds of annotate, which measures nothing", seconds["annotate"], 0, 3),
        *(
            check(f"bytes read in {side} by the plan's before", ratio, 0.95, 1.05)
            for side, ratio in _ratios(after["read_bytes"], before["read_bytes"]).items()
        ),
        *(
            check(f"{kind} as predicted, by the plan's before", ratio, 0.8, 1.25)
            for kind, ratio in _ratios(after["tokens_per_s"], before["tokens_per_s"]).items()
        ),
        *(
            check(f"{kind} of simulate --target by the plan's", ratio, 0.9, 1.1)
            for kind, ratio in _ratios(again, after["tokens_per_s"]).items()
        ),
    ]
    return judged(checks, file=file.read_text(), before=before, after=after, stages=seconds)


def _figures(run: Run, plan: Path) -> Record:
    """Bytes that a decode step reads on each side, and predicted speeds."""
    read: Record = {"vram": 0, "ram": 0}
    for unit in run.atsc("inspect", plan)["units"]:
        if unit["cost"]:
            read[unit["residency"]] += sum(unit["cost"]["decode"]["bytes"])
    return {"read_bytes": read, "tokens_per_s": _speeds(run.atsc("simulate", plan))}


def _speeds(simulated: Record) -> Record:
    expected = simulated["dynamic"] or simulated
    return {kind: expected[kind]["tokens_per_s"] for kind in ("decode", "prefill")}


def _ratios(some: Record, others: Record) -> Record:
    """NaN, which is within no bounds, where there was nothing before and is now."""
    return {
        key: some[key] / others[key] if others[key] else (1.0 if not some[key] else math.nan)
        for key in others
    }


def look_at_page(run: Run, plan: Path) -> Record:
    """`atsc inspect --html`: whole, with a map of all units, and nothing from a network."""
    file = plan.with_name(f"{plan.stem}.html")
    shown = run.atsc("inspect", plan, "--html", file)
    text = file.read_text("utf-8")
    page = Page()
    page.feed(text)
    page.close()
    boxes = sum(page.boxes.get(place, 0) for place in ("vram", "ram", "disk"))
    checks = [
        check("tags that are not closed", len(page.open) + page.wrong, 0, 0),
        check("boxes of units by units", boxes / len(shown["units"]), 1, 1),
        check("numbers that are none, or negative sizes", page.bad_numbers, 0, 0),
        check("references to a network", page.references, 0, 0),
        check("drawings", page.drawings, 4),
        check("bytes", len(text), 5000, 20e6),
    ]
    return judged(checks, file=str(file), boxes=page.boxes)


class Page(HTMLParser):
    """Counts what a page has, and what is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: dict[str, int] = {}
        """Of drawings, by their class."""
        self.wrong = self.bad_numbers = self.references = self.drawings = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        found = dict(attrs)
        if tag not in VOID_TAGS:
            self.open.append(tag)
        self.drawings += tag == "svg"
        if tag == "rect":
            kind = found.get("class") or ""
            self.boxes[kind] = self.boxes.get(kind, 0) + 1
        self.references += any("//" in (found.get(key) or "") for key in ("src", "href"))
        for key in ("x", "y", "width", "height"):
            if tag in ("rect", "text") and key in found:
                self.bad_numbers += not _is_size(found[key], at_least=0 if key in SIZES else None)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element without content."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong += 1


SIZES = ("width", "height")


def _is_size(text: str | None, at_least: float | None) -> bool:
    try:
        number = float(text or "")
    except ValueError:
        return False
    return math.isfinite(number) and (at_least is None or number >= at_least)
