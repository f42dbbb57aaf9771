"""A sample of all causal language models that transformers knows; the whole of it is a benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import every_architecture
import pytest
import torch
from tiny_configs import MODEL_TYPES

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = Path(every_architecture.__file__).parent / "results" / "every_architecture.json"
# Types that are refused, or cannot be built, are in the results.
SAMPLE = [t for t in MODEL_TYPES[5::14] if t not in ("gemma3n", "hy_v4", "jetmoe", "musicgen")]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_every_format_loads_with_equal_logits(model_type, tmp_path):
    row = every_architecture.examine(model_type, tmp_path)
    assert row.status == "equal", row


def test_the_page_says_what_was_seen_of_all_types():
    rows = [
        every_architecture.Row(**{k: v for k, v in row.items() if k != "status"})
        for row in json.loads(RESULTS.read_text())["rows"]
    ]
    counts = {status: sum(row.status == status for row in rows) for status in ("equal", "differs", "refused")}
    assert counts["differs"] == 0
    assert sum(counts.values()) >= 160
    assert counts["refused"] <= 15
    page = every_architecture.PAGE.read_text(encoding="utf-8")
    for row in rows:
        assert re.search(rf"^(\| |- ){row.model_type}( \||:)", page, re.MULTILINE), row.model_type
    assert f"{counts['equal']} load with equal logits" in page


def test_the_benchmark_tells_a_difference(tmp_path, monkeypatch):
    seen = []

    def other(model: torch.nn.Module) -> torch.Tensor:
        seen.append(model)
        found = logits(model)
        return found if len(seen) != 3 else found + 0.01 * found.abs().mean()

    logits = every_architecture.logits
    monkeypatch.setattr(every_architecture, "logits", other)
    row = every_architecture.examine("llama", tmp_path)
    assert row.status == "differs"
    assert [f["equal"] for f in row.formats.values()] == [False, True, True]
