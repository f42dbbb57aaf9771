"""The tables of docs/architectures.md, compared with what the planner does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from architecture_cases import CASES, TEXT_ALONE, Case, expanded
from expert_kinds import KINDS
from tiny_models import make_source
from transformers import AutoModelForCausalLM

from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.convert.pipeline import plan_model
from mxquant.convert.tensor_plan import TensorPlan

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
# What the page does not list.
UNSAID = ("norm", "bias", "embedding", "output head")


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Model type -> quantized layers, and what stays dense beside them."""
    rows: dict[str, tuple[set[str], set[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or cells[0] == ["model_type"]:
            continue
        names, quantized, dense = cells
        for name in names:
            assert name not in rows, name
            rows[name] = {n for text in quantized for n in expanded(text)}, {n for t in dense for n in expanded(t)}
    return rows


def layer_names(tensors: list[TensorPlan], prefix: str) -> set[str]:
    """Names inside a layer; those of layers elsewhere as they are."""
    modules = {re.sub(r"\.(weight|bias)$", "", t.name) for t in tensors}
    return {re.sub(rf"^{re.escape(prefix)}\*\.", "", with_wildcards(name)) for name in modules}


def planned(folder: Path, prefix: str) -> tuple[set[str], set[str]]:
    _, plan = plan_model(folder, "ue5m3/16")
    dense = [t for t in plan.dense if t.kind not in UNSAID and t.name.startswith(prefix)]
    return layer_names(plan.quantized, prefix), layer_names(dense, prefix)


@pytest.fixture(scope="module")
def plans(make_checkpoint, tmp_path_factory) -> dict[str, tuple[set[str], set[str]]]:
    """The same as in the table, of every tiny model."""
    found: dict[str, tuple[set[str], set[str]]] = {}

    def add(model_type: str, folder: Path, prefix: str) -> None:
        quantized, dense = found.setdefault(model_type, (set(), set()))
        more, kept = planned(folder, prefix)
        quantized |= more
        dense |= kept

    for case in {**CASES, **TEXT_ALONE}.values():
        config = case.config()
        add(config.model_type, make_source(case, tmp_path_factory.mktemp("source"), torch.float32), case.prefix)
    for kind in KINDS:
        folder = make_checkpoint(kind)
        add(AutoModelForCausalLM.from_pretrained(folder).config.model_type, folder, "model.layers.")
    return found


def test_the_page_says_what_the_planner_does(plans):
    page = table()
    assert page.keys() == plans.keys()
    for model_type, found in plans.items():
        assert page[model_type] == found, model_type


def test_the_page_says_which_models_have_nvfp4_in_a_format_of_ours():
    text = PAGE.read_text(encoding="utf-8").partition("## Who reads the output")[2].partition("## An")[0]

    def has_experts(case: Case) -> bool:
        return any(re.search("expert|moe", name) for name in case.quantized)

    # OPT's narrow embeddings, and Zamba 2's narrow adapters, are of the tiny models only.
    own = {case.config().model_type for case in CASES.values() if not case.compressed and not has_experts(case)}
    assert set(re.findall(r"`(\w+)`", text)) == own - {"opt"}
