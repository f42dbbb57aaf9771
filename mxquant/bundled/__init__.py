"""The model that ships with mxquant: a small Llama-architecture one, for demos and tests.

`path()` is its folder; `mxquant.bundled.text` is the text it was trained and is evaluated on.
`benchmarks/train_bundled_model.py` in the source repository makes it again from scratch.
"""

from pathlib import Path


def path() -> Path:
    """The folder of the bundled checkpoint: weights, config, tokenizer and model card.

    Pass it to `AutoModelForCausalLM.from_pretrained` or to `mxquant quantize` like any other.
    """
    return Path(__file__).resolve().parent / "model"
