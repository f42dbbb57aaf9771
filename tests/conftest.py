"""Fixtures and switches shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Nothing in the tests may reach the network, whatever the machine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Triton's interpreter runs kernels on CPU tensors; it has to be chosen before Triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Odd sizes on purpose: 36 input features divide by no block length in use.
_SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "intermediate_size": 36, "num_key_value_heads": 2, "max_position_embeddings": 64}
_MOE = {**_LLAMA, "intermediate_size": 32, "num_experts_per_tok": 2}
_MOE48 = {**_MOE, "intermediate_size": 48}
_LATENT = {
    **_MOE,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GROUPS = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-parity",
        action="store_true",
        help="kernels: every combination of formats, shapes and chips in place of a sample of them",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether tests of kernels go through every combination."""
    return request.config.getoption("--full-parity")


def _configs() -> dict[str, Callable[[], object]]:
    import transformers as hf

    return {
        "llama": lambda: hf.LlamaConfig(**_LLAMA, tie_word_embeddings=False),
        "llama-tied": lambda: hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
        "llama-even": lambda: hf.LlamaConfig(**{**_LLAMA, "intermediate_size": 96}, tie_word_embeddings=False),
        "qwen2": lambda: hf.Qwen2Config(**_LLAMA),
        "gemma3": lambda: hf.Gemma3TextConfig(**_LLAMA, head_dim=16, sliding_window=32),
        "gpt2": lambda: hf.GPT2Config(vocab_size=64, n_layer=2, n_embd=64, n_head=4, n_positions=64),
        "mixtral": lambda: hf.MixtralConfig(**_LLAMA, num_local_experts=2),
        "mixtral-even": lambda: hf.MixtralConfig(**_MOE, num_local_experts=4),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_MOE, num_experts=4, moe_intermediate_size=48, head_dim=16),
        "qwen2-moe": lambda: hf.Qwen2MoeConfig(
            **_MOE, num_experts=4, moe_intermediate_size=48, shared_expert_intermediate_size=32
        ),
        "deepseek-v3": lambda: hf.DeepseekV3Config(
            **_LATENT, **_GROUPS, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=48
        ),
        "llama4": lambda: hf.Llama4TextConfig(
            **_MOE48, intermediate_size_mlp=96, num_local_experts=4, head_dim=16, interleave_moe_layer_step=1
        ),
        "gpt-oss": lambda: hf.GptOssConfig(**_MOE48, num_local_experts=4, head_dim=16, sliding_window=32),
        "jetmoe": lambda: hf.JetMoeConfig(**{**_MOE, "num_key_value_heads": 2}, num_local_experts=2, kv_channels=16),
        "granite-moe": lambda: hf.GraniteMoeConfig(**_MOE, num_local_experts=4),
    }


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_checkpoint(kind, dtype="float32", max_shard_size="5GB")`` -> folder of a tiny random model.

    Folders are shared between tests: copy one before changing it.
    """
    made: dict[tuple[str, str, str], Path] = {}

    def make(kind: str, dtype: str = "float32", max_shard_size: str = "5GB") -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        key = (kind, dtype, max_shard_size)
        if key not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_configs()[kind]()).to(getattr(torch, dtype))
            for name, parameter in model.named_parameters():  # biases and norms start as constants
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            (folder / "tokenizer_config.json").write_text('{"marker": "carried along"}')
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the faults of tests/helpers/broken_inputs.py are made from; copy it before changing it."""
    from broken_inputs import make_good

    folder = tmp_path_factory.mktemp("good")
    make_good(folder)
    return folder


@pytest.fixture(scope="module", params=["reference", "kernels"])
def implementation(request):
    """For tests that hold for the PyTorch reference and for the compiled kernels alike."""
    from mxquant.ops.backends import backend

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setenv("MXQUANT_KERNELS", "reference")
        else:
            patch.delenv("MXQUANT_KERNELS", raising=False)
            if backend("cpu") is None:
                pytest.skip("no compiled kernels here")
        yield


@pytest.fixture
def one_thread():  # type: ignore[no-untyped-def]
    """Small tensors, where other work keeps the cores busy, would wait for threads more than compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
