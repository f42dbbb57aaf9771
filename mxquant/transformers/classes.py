"""Which class of transformers loads a checkpoint: the one that its config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The classes of transformers that a checkpoint may be loaded with, and the tables of the models that they know.
# Where a config names a class that several know, the first is taken.
_AUTO_CLASSES = (
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    ("AutoModelForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("AutoModel", "MODEL_MAPPING_NAMES"),
)
_CAUSAL = "AutoModelForCausalLM"
# How many of them, the first, predict tokens.
_GENERATING = 3


def auto_class(config: Mapping[str, Any]) -> Any:
    """The ``AutoModelFor…`` that loads a model with this ``config.json`` as the class that it names first.

    Where the config names none, or one that transformers does not know for this type of model:
    ``AutoModelForCausalLM``, or the class for multimodal models if only that knows the type.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    model_type = str(config.get("model_type"))
    named = next(iter(config.get("architectures") or ()), None)
    if own := _own_class(config.get("auto_map") or {}, named):
        return getattr(transformers, own)
    known = {auto: getattr(modeling_auto, table).get(model_type) for auto, table in _AUTO_CLASSES}
    for auto, classes in known.items():
        if named is not None and named in (classes if isinstance(classes, tuple | list) else (classes,)):
            return getattr(transformers, auto)
    generating = [auto for auto in list(known)[:_GENERATING] if known[auto] is not None]
    return getattr(transformers, generating[0] if generating else _CAUSAL)


def _own_class(auto_map: Mapping[str, Any], named: str | None) -> str | None:
    """The key of ``auto_map`` with the class that the config names, or else that of causal language models."""
    for auto, _ in _AUTO_CLASSES:
        if named is not None and str(auto_map.get(auto)).rpartition(".")[2] == named:
            return auto
    return _CAUSAL if _CAUSAL in auto_map else None


def predicts_tokens(config: Mapping[str, Any]) -> bool:
    """Whether a model with this ``config.json`` is loaded as a language model that predicts tokens."""
    return auto_class(config).__name__ in [auto for auto, _ in _AUTO_CLASSES[:_GENERATING]]
