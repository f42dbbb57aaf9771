"""Experts packed in one tensor: each row is multiplied by its own expert's weight."""

from __future__ import annotations

import os

import pytest
import torch

import mxquant
from mxquant.kernels.triton.backend import TritonBackend
from mxquant.ops.grouped import grouped_linear
from mxquant.schemes.formats import QuantScheme

TEXTS = ["ue5m3/16", "nvfp4", "mxfp4", "e4m3/8", "ue5m3/32x32", "ue5m3/12"]
COUNTS = [[5, 0, 17, 1], [0, 0, 0, 40], [1, 1, 1, 1], [0, 0, 0, 0], [130, 3, 70, 0]]
ROWS, COLUMNS = 37, 72


@pytest.fixture(params=["dispatched", "triton"])
def implementation(request):
    """The operator as it is dispatched on this machine, or the Triton kernel in its interpreter."""
    if request.param == "dispatched":
        return grouped_linear
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")

    def run(x, ends, packed, scale, global_scale, scheme, *, columns, bias=None):
        return TritonBackend().grouped_linear(x, ends, packed, scale, global_scale, bias, scheme)

    return run


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(scheme: QuantScheme, count: int = 4):
    made = [mxquant.quantize(normal(ROWS, COLUMNS, seed=e) * 10.0**-e, scheme) for e in range(count)]
    global_scale = torch.cat([q.global_scale for q in made]) if scheme.global_scale else None
    return made, (torch.stack([q.packed for q in made]), torch.stack([q.scale for q in made]), global_scale)


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_row_meets_its_own_expert(text, counts, dtype, implementation):
    scheme = QuantScheme.parse(text)
    made, parts = experts(scheme)
    x, bias = normal(sum(counts), COLUMNS, seed=9).to(dtype), normal(4, ROWS, seed=8).to(dtype)
    y = implementation(x, ends_of(counts), *parts, scheme, columns=COLUMNS, bias=bias)
    assert y.shape == (sum(counts), ROWS)
    for e, rows in enumerate(x.split(counts)):
        exact = rows.double() @ made[e].dequantize().double().T + bias[e].double()
        error = (y.split(counts)[e].double() - exact).norm()
        limit = 1e-5 * exact.norm() if dtype == torch.float32 else 1.1 * (exact.to(dtype).double() - exact).norm()
        assert error <= limit


def test_it_is_an_operator_with_the_gradients_of_its_experts():
    scheme = QuantScheme()
    made, parts = experts(scheme)
    counts = [3, 0, 4, 2]
    x, bias = normal(9, COLUMNS).requires_grad_(), normal(4, ROWS, seed=8).requires_grad_()
    shape = [4, ROWS, COLUMNS]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    arguments = (x, ends_of(counts), *parts, bias, shape, scheme.text)
    torch.library.opcheck(torch.ops.mxquant.grouped_linear, arguments, test_utils=checks)
    grad = normal(9, ROWS, seed=5)
    (grouped_linear(x, ends_of(counts), *parts, scheme, columns=COLUMNS, bias=bias) * grad).sum().backward()
    expected = torch.cat([g @ made[e].dequantize() for e, g in enumerate(grad.split(counts))])
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(bias.grad, torch.stack([g.sum(0) for g in grad.split(counts)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"ends": torch.tensor([3, 2, 5, 9], dtype=torch.int32)}, "must not decrease"),
        (lambda a: a | {"ends": torch.tensor([3, 4, 5, 8], dtype=torch.int32)}, "number of rows, 9"),
        (lambda a: a | {"ends": torch.tensor([3, 4, 5, 9])}, "int32"),
        (lambda a: a | {"x": normal(9, COLUMNS + 1)}, "do not fit"),
        (lambda a: a | {"bias": normal(4, ROWS + 1)}, "bias must be"),
        (lambda a: a | {"global_scale": torch.ones(4)}, "has no global scale"),
        (lambda a: a | {"scale": a["scale"][:3]}, "stacked"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    _, (packed, scale, _) = experts(QuantScheme())
    parts = {"x": normal(9, COLUMNS), "ends": ends_of([3, 0, 4, 2]), "packed": packed, "scale": scale}
    arguments = change({**parts, "global_scale": None})
    with pytest.raises(ValueError, match=message):
        grouped_linear(**arguments, scheme=QuantScheme(), columns=COLUMNS)
