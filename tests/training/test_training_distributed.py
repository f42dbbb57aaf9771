"""Two gloo ranks against one process that sees the same global batch."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "training_ranks.py"

pytestmark = pytest.mark.usefixtures("one_thread")


def ranks_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> dict[str, list[float]]:
    """Scenario -> losses, as the two ranks have them."""
    file = tmp_path_factory.mktemp("ranks") / "losses.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(file)],
            env=environment | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    module = ranks_module()
    return {
        "nearest": module.train(module.make_model(module.NEAREST)),
        "stochastic": module.train(module.make_model("fp4-2d")),
    }


@pytest.mark.parametrize("scenario", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one_process(on_two_ranks, alone, scenario):
    assert on_two_ranks[scenario] == pytest.approx(alone["nearest"], rel=1e-5)


def test_with_stochastic_rounding_they_are_equal_but_for_the_noise(on_two_ranks, alone):
    """The first loss is that of the same weights; from then on ranks have noise of their own."""
    found, expected = on_two_ranks["ddp stochastic"], alone["stochastic"]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[-1] != pytest.approx(expected[-1], rel=1e-6)
    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("scenario", ["fsdp", "fsdp 1d bf16"])
def test_sharded_models_learn(on_two_ranks, scenario):
    losses = on_two_ranks[scenario]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(on_two_ranks["ddp"][0], rel=1e-2)
