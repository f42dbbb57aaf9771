"""Each architecture, tied and not, also as a classifier of sequences and tokens, in plain transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from architecture_cases import CASES
from transformers.models.auto import modeling_auto as names

import mxquant
from mxquant.schemes.formats import QuantScheme

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("nvfp4/absmax", "mxfp4", "ue5m3/16")
TASKS = {
    "causal": (hf.AutoModelForCausalLM, names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "sequences": (hf.AutoModelForSequenceClassification, names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "tokens": (hf.AutoModelForTokenClassification, names.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
}


def variants() -> list[tuple[str, str, bool]]:
    """Architecture, task and whether the head, or what would be the head, is tied."""
    found = []
    for (kind, case), (task, (_, known)), tied in itertools.product(CASES.items(), TASKS.items(), (False, True)):
        if not case.parts and case.config().model_type in known:
            found.append((kind, task, tied))
    return found


@pytest.mark.parametrize(("number", "variant"), enumerate(variants()), ids=str)
def test_outputs_are_those_of_the_dequantized_checkpoint(number, variant, full, tmp_path):
    kind, task, tied = variant
    auto = TASKS[task][0]
    config: Any = CASES[kind].config()
    config.tie_word_embeddings, config.num_labels = tied, 3
    torch.manual_seed(0)
    model = auto.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.tie_weights()
    model.save_pretrained(tmp_path / "source")
    for text in FORMATS if full else FORMATS[number % 3 :][:1]:
        packed, dense = tmp_path / f"q-{text[:5]}", tmp_path / f"d-{text[:5]}"
        plan = mxquant.quantize_model(tmp_path / "source", packed, text).plan
        mxquant.dequantize_model(packed, dense)
        loaded, info = auto.from_pretrained(packed, output_loading_info=True)
        assert not info["missing_keys"]
        found, wanted = outputs(loaded), outputs(auto.from_pretrained(dense))
        # Our own format multiplies in fp32 by values that a dense bfloat16 checkpoint with global scales rounds.
        own = plan.on_disk == "mxquant"
        bound = 1e-5 if not own else 0.04 if QuantScheme.parse(text).global_scale else 5e-3
        assert (found - wanted).norm() <= bound * wanted.norm(), (text, plan.on_disk_reason)


@torch.no_grad()
def outputs(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(9, 64, (1, 12), generator=torch.Generator().manual_seed(3))
    return model(input_ids=tokens).logits.float()
