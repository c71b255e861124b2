"""benchmarks/general.py: its networks are valid, and engines take turns."""

from __future__ import annotations

import itertools

import general
import numpy as np
import onnx
import pytest


@pytest.mark.parametrize(("name", "weights"), [("resnet18", 11.7e6), ("mobilenet", 3.5e6)])
def test_networks_have_the_layers_of_their_names(name: str, weights: float) -> None:
    model, inputs = general.make(name)
    onnx.checker.check_model(model, full_check=True)
    count = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    assert count == pytest.approx(weights, rel=0.02)
    assert inputs["image"].shape == (1, 3, 224, 224)


def test_engines_take_turns() -> None:
    seconds = itertools.count()
    order: list[str] = []
    engines = [lambda: order.append("theirs"), lambda: order.append("ours")]
    times, turns = general.alternate(engines, 0.0, lambda: float(next(seconds)))
    runs = general.RUNS_OF_TURN
    assert times == [[1.0] * runs * turns] * 2
    assert order == (["theirs"] * (runs + 1) + ["ours"] * (runs + 1)) * turns
