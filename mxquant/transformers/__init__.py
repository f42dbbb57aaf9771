"""The bridge to Hugging Face transformers: with training and evals, all that imports it.

Importing this package imports nothing; :func:`register` makes our checkpoints known.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Make ``from_pretrained`` know ``quant_method: mxquant``. Calling it again changes nothing.

    Raises ``ImportError`` if transformers is missing or too old.
    """
    module = sys.modules.get("mxquant.transformers.quantizer")
    if module is not None and not hasattr(module, "MXQuantHfQuantizer"):
        return  # its own imports have led here; it registers once it is whole
    from transformers.quantizers import auto

    from mxquant.checkpoint.formats.native import QUANT_METHOD
    from mxquant.transformers.config import MXQuantConfig
    from mxquant.transformers.quantizer import MXQuantHfQuantizer

    if QUANT_METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(MXQuantConfig)
    if QUANT_METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(QUANT_METHOD)(MXQuantHfQuantizer)
