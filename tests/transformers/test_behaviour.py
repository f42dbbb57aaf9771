"""A run on fake tensors says what it sees and leaves nothing behind."""

from __future__ import annotations

import logging
import logging.handlers
import random

import torch
import transformers as hf

from mxquant.transformers.behaviour import watch

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


def test_it_says_nothing_and_leaves_no_state_behind():
    """The layers of linear attention have transformers say, once, that they run without their kernels."""

    def state():
        log = logging.getLogger("torch._subclasses.fake_tensor")
        device, grad = torch.get_default_device(), torch.is_grad_enabled()
        return torch.get_default_dtype(), device, grad, log.disabled, hf.utils.logging.get_verbosity()

    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.Qwen3_5TextConfig(**_SIZES, **_LINEAR, num_hidden_layers=2))
    hf.utils.logging.warning_once.cache_clear()
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("transformers").addHandler(said)
    before, numbers, others = state(), torch.get_rng_state(), random.getstate()
    try:
        assert not watch(model).written
    finally:
        logging.getLogger("transformers").removeHandler(said)
    assert not [record.getMessage() for record in said.buffer]
    assert state() == before
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == others
