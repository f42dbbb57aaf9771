"""Which class of transformers loads a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def auto_class(config: Mapping[str, Any]) -> Any:
    """The ``AutoModelFor…`` for a model with this ``config.json``.

    ``AutoModelForCausalLM``, unless the checkpoint is a multimodal model that only another one knows,
    or that it knows as its language model alone.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto import modeling_auto as names

    model_type = str(config.get("model_type"))
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return AutoModelForCausalLM
    causal = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for auto, known in (
        (AutoModelForImageTextToText, names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        (AutoModelForMultimodalLM, names.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
    ):
        if model_type in known:
            other = model_type in causal and causal[model_type] != known[model_type]
            if model_type not in causal or (other and known[model_type] in (config.get("architectures") or ())):
                return auto
    return AutoModelForCausalLM
