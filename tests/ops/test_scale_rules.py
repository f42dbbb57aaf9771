"""A scale rule is added as docs/architecture.md says: a name in a format, a row in a table. Kernels do not know it."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mxquant
from mxquant.codec import scaling
from mxquant.codec.scaling import Blocks, ScaleRule
from mxquant.ops.backends import BACKENDS, backend, choose, explain
from mxquant.schemes import formats
from mxquant.schemes.formats import QuantScheme

UNIT = 2.0**-6
CODE = {"e8m0": 127 - 6, "ue5m3": (15 - 6) << 3}  # of UNIT
KIND = {"e8m0": "power of two", "ue5m3": "mantissa"}


@pytest.fixture(params=KIND)
def scheme(request, monkeypatch):
    """A scheme whose rule was just added: every scale is ``UNIT``."""
    name = request.param

    def units(b: Blocks) -> torch.Tensor:
        return torch.full_like(b.amax, CODE[name], dtype=torch.uint8)

    fmt = formats.SCALES[name]
    monkeypatch.setitem(formats.SCALES, name, replace(fmt, rules=(*fmt.rules, "toy")))
    monkeypatch.setitem(scaling.RULES[KIND[name]], "toy", ScaleRule(units))
    return QuantScheme("fp4_e2m1", name, 16, scale_rule="toy")


def nearest_elements(w: torch.Tensor) -> torch.Tensor:
    """What a weight becomes when all scales are ``UNIT``; nothing in it is halfway between two values."""
    grid = UNIT * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    magnitude = grid[np.abs(np.abs(w.numpy())[..., None] - grid).argmin(-1)]
    return torch.from_numpy(np.copysign(magnitude, w.numpy())).float()


def weight(rows: int = 24, columns: int = 40) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) / 32


@pytest.mark.parametrize("kernels", ["", "triton", "reference"])
def test_a_new_rule_is_quantized_by_the_reference_whatever_kernels_there_are(scheme, kernels, monkeypatch):
    if kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("MXQUANT_KERNELS", kernels)
    w, x = weight(), weight(3)
    q = mxquant.quantize(w, scheme)
    assert torch.equal(mxquant.dequantize(q), nearest_elements(w))
    torch.testing.assert_close(mxquant.linear(x, q), x @ nearest_elements(w).T)
    activations = mxquant.ActivationScheme(scheme)
    y = mxquant.QuantLinear.from_qtensor(q)
    y.activations = activations
    torch.testing.assert_close(y(x), nearest_elements(x) @ nearest_elements(w).T)


@pytest.mark.parametrize("device_type", BACKENDS)
def test_each_backend_says_that_it_does_not_know_a_new_rule(scheme, device_type):
    w = weight()
    if backend(device_type) is None:
        pytest.skip(explain("quantize", w, (24, 40), scheme, device_type=device_type).why)
    served = explain("quantize", w, (24, 40), scheme, device_type=device_type)
    assert served.by == "reference"
    assert served.why.endswith("the scale rule toy")
    known = replace(scheme, scale_rule=None)
    assert explain("quantize", w, (24, 40), known, device_type=device_type).by == BACKENDS[device_type].name
    # Decoding and multiplying do not depend on the rule.
    assert explain("linear", torch.ones(1, 40), (24, 40), scheme, device_type=device_type).by != "reference"
    assert choose("quantize_rows", w, (24, 40), scheme) is None


def test_a_model_is_quantized_by_a_new_rule(scheme, make_checkpoint, tmp_path):
    source = make_checkpoint("llama")
    report = mxquant.quantize_model(source, tmp_path / "out", scheme)
    assert {t.scheme for t in report.plan.quantized} == {scheme}
    mxquant.dequantize_model(tmp_path / "out", tmp_path / "dense", dtype=torch.float32)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "dense" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(after[name], nearest_elements(before[name]))
    assert after[name].any()


def test_theory_samples_the_error_of_a_new_rule(scheme):
    sigma = 1 / 32
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * sigma
    measured = float((nearest_elements(w) - w).double().square().mean()) / sigma**2
    assert mxquant.theory.mse(scheme, sigma=sigma) == pytest.approx(measured, rel=0.03)


def test_every_rule_of_a_format_has_a_row():
    for name, fmt in formats.SCALES.items():
        for rule in fmt.rules:
            assert isinstance(scaling.rule_of(QuantScheme(scale=name, scale_rule=rule)), ScaleRule)
