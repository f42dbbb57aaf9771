"""The packed linear layer on CPUs: against float64, at every instruction level, in every setting it may run in."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F

import mxquant
from mxquant.codec.qtensor import QTensor
from mxquant.ops.backends import explain
from mxquant.schemes.formats import PRESETS, QuantScheme

L = pytest.importorskip("mxquant.kernels.cpu.library")
if isinstance(L.load(), str):
    pytest.skip(L.load(), allow_module_level=True)

BEST = L.best_level()
LEVELS = L.LEVELS[: L.LEVELS.index(BEST) + 1]
SCHEMES = [
    QuantScheme(),
    QuantScheme("fp4_e2m1", "e4m3", 16, True, "absmax"),
    QuantScheme("fp4_e2m1", "e8m0", 32),
    QuantScheme(block=8),
    QuantScheme(block=64),
    QuantScheme(block=(16, 16)),
    QuantScheme("fp4_e2m1", "e4m3", (3, 8), True),
    QuantScheme(block=(32, 128)),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=LEVELS)
def level(request):  # type: ignore[no-untyped-def]
    L.set_level(request.param)
    yield request.param
    L.set_level(BEST)


def weight(n: int, k: int, scheme: QuantScheme, seed: int = 0) -> QTensor:
    g = torch.Generator().manual_seed(seed)
    return mxquant.quantize(torch.randn(n, k, generator=g) * 0.05, scheme)


def exact(x: torch.Tensor, q: QTensor, bias: torch.Tensor | None) -> torch.Tensor:
    dense = (
        mxquant.dequantize(q, torch.float64)
        if q.global_scale is None
        else mxquant.dequantize(q, torch.float32).double()
    )
    return F.linear(x.double(), dense, None if bias is None else bias.double())


def assert_close(y: torch.Tensor, x: torch.Tensor, q: QTensor, bias: torch.Tensor | None) -> None:
    """fp32 within 1e-5 of float64, half precision within 1.1 times the error of rounding the exact result."""
    true = exact(x, q, bias)
    assert y.dtype == x.dtype
    assert y.shape == true.shape
    error = (y.double() - true).norm()
    if x.dtype == torch.float32:
        assert error <= 1e-5 * true.norm()
    else:
        assert error <= 1.1 * (true.to(x.dtype).double() - true).norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_any_number_of_rows_is_as_exact_as_its_dtype_allows(scheme, dtype, level):
    g = torch.Generator().manual_seed(1)
    q = weight(70, 272, scheme)
    assert explain("linear", torch.empty(1, 272, dtype=dtype), q.shape, scheme, device_type="cpu").by == "cpu"
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 31, 64):
        x = torch.randn(m, 272, generator=g).to(dtype)
        bias = torch.randn(70, generator=g).to(dtype) if m % 2 else None
        assert_close(mxquant.linear(x, q, bias), x, q, bias)


@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 17, 31, 33, 40, 63, 65, 100, 1000, 2049])
def test_edges_are_handled(k, level):
    g = torch.Generator().manual_seed(k)
    for n in (1, 2, 3, 5, 33):
        for scheme in (SCHEMES[0], SCHEMES[1], SCHEMES[3], SCHEMES[5], SCHEMES[7]):
            q = weight(n, k, scheme, seed=n)
            for m in (1, 2, 4, 7, 10):
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.randn(m, k, generator=g).to(dtype)
                    true = exact(x, q, None)
                    # Short sums may cancel: errors are measured against the terms.
                    bound = x.double().abs() @ mxquant.dequantize(q, torch.float32).double().abs().T
                    eps = 1e-5 if dtype == torch.float32 else 2.0**-8
                    assert ((mxquant.linear(x, q).double() - true).abs() <= eps * bound + 1e-30).all()


def test_large_products_are_right(level):
    g = torch.Generator().manual_seed(5)
    for n, k, m in ((512, 1024, 1), (515, 1000, 2), (1030, 1031, 6), (300, 2048, 130)):
        for scheme in SCHEMES[:3]:
            q = weight(n, k, scheme)
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.randn(m, k, generator=g).to(dtype)
                assert_close(mxquant.linear(x, q), x, q, None)


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3", "e8m0"])
@pytest.mark.parametrize("block", [8, 16, 64])
def test_every_scale_code_means_what_the_reference_says(scale, block, level):
    """Row n of the weight has scale code n in its last block; NaN codes make the row's results NaN."""
    scheme = QuantScheme("fp4_e2m1", scale, block)
    k = 520
    q = weight(256, k, scheme)
    codes = q.scale.view(torch.uint8).clone()
    codes[:, -1] = torch.arange(256, dtype=torch.uint8)
    q = QTensor(q.packed, codes.view(q.scale.dtype), None, q.shape, scheme)
    dense = mxquant.dequantize(q, torch.float32).double()
    not_numbers, moderate = dense.isnan().any(1), dense.abs().amax(1) < 1e36
    assert not_numbers.any()
    assert moderate.sum() > 100
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)):
        for m in (1, 2, 5, 30):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
            y = mxquant.linear(x, q).double()
            assert y[:, not_numbers].isnan().all()
            # Large weights of neighbouring blocks cannot hide an error: each result is held against its own terms.
            bound = x.double().abs() @ dense[moderate].abs().T
            assert ((y[:, moderate] - x.double() @ dense[moderate].T).abs() <= tolerance * bound + 1e-37).all()


def test_threads_do_not_change_the_result(level):
    g = torch.Generator().manual_seed(6)
    q = weight(1030, 1031, QuantScheme())
    before = torch.get_num_threads()
    try:
        for m in (1, 4, 40):
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.randn(m, 1031, generator=g).to(dtype)
                made = []
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    made.append(mxquant.linear(x, q))
                assert all(torch.equal(made[0], other) for other in made)
    finally:
        torch.set_num_threads(before)


def test_a_token_does_not_see_its_neighbours(level):
    x = torch.randn(6, 256).bfloat16()
    q = weight(64, 256, QuantScheme())
    alone = mxquant.linear(x, q)
    other = x.clone()
    other[3:] = float("nan")
    assert torch.equal(mxquant.linear(other, q)[:3], alone[:3])
    assert mxquant.linear(other, q)[3:].isnan().all()


def test_batches_views_and_nothing_at_all(level):
    q = weight(32, 64, QuantScheme())
    x = torch.randn(2, 3, 64)
    assert torch.equal(mxquant.linear(x, q), mxquant.linear(x.reshape(6, 64), q).view(2, 3, 32))
    assert torch.equal(mxquant.linear(x.transpose(0, 1), q), mxquant.linear(x, q).transpose(0, 1))
    assert mxquant.linear(x[0, 0], q).shape == (32,)
    assert mxquant.linear(x[:0], q).shape == (0, 3, 32)
    unaligned = torch.randn(65)[1:]
    assert torch.equal(mxquant.linear(unaligned, q), mxquant.linear(unaligned.clone(), q))


@pytest.mark.parametrize("preset", PRESETS)
def test_formats_without_a_kernel_are_served_too(preset, level):
    q = weight(48, 96, PRESETS[preset])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 96).to(dtype)
        assert_close(mxquant.linear(x, q), x, q, None)


def test_flushing_subnormals_changes_no_result(level):
    q = mxquant.quantize(torch.randn(40, 64) * 2.0**-120, QuantScheme("fp4_e2m1", "e8m0", 16))
    x = torch.randn(1, 64) * 2.0**-6
    expected = mxquant.linear(x, q)
    assert expected.abs().max() > 0
    assert torch.set_flush_denormal(True)
    try:
        made = mxquant.linear(x, q)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(made.view(torch.int32), expected.view(torch.int32))


class _Rows(torch.utils.data.Dataset):
    def __init__(self, q: QTensor):
        self.q = q

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((self.q.shape[1],), float(i + 1))
        return mxquant.linear(x, self.q), mxquant.quantize(mxquant.dequantize(self.q), self.q.scheme).packed


def test_kernels_work_in_forked_workers_after_they_ran_with_threads():
    torch.set_num_threads(2)
    q = weight(1024, 1024, QuantScheme())
    x = torch.ones(1024)
    expected = mxquant.linear(x, q)
    loader = torch.utils.data.DataLoader(_Rows(q), num_workers=2, multiprocessing_context="fork", timeout=60)
    for i, (y, packed) in enumerate(loader):
        assert torch.allclose(y[0], expected * (i + 1), rtol=1e-4, atol=1e-4)
        assert packed.shape[1:] == q.packed.shape


def test_a_layer_follows_its_tensors():
    """A layer prepares its product once; afterwards its weight may be loaded, replaced, moved, copied."""
    scheme, x = QuantScheme("fp4_e2m1", "e4m3", 16, True), torch.randn(3, 64)
    layer = mxquant.QuantLinear.from_qtensor(weight(48, 64, scheme), torch.randn(48))
    other = mxquant.QuantLinear.from_qtensor(weight(48, 64, scheme, seed=7), torch.randn(48))
    third = mxquant.QuantLinear.from_qtensor(weight(48, 64, scheme, seed=8), torch.randn(48))

    @torch.no_grad()
    def check(layer: torch.nn.Module) -> torch.Tensor:
        y = layer(x)
        assert torch.equal(y, mxquant.linear(x, layer.qweight, layer.bias))
        return y

    seen = [check(layer)]
    layer.load_state_dict(other.state_dict())
    seen.append(check(layer))
    layer.load_state_dict(third.state_dict(), assign=True)
    seen.append(check(layer))
    layer.bias.data = torch.randn(48)
    seen.append(check(layer))
    layer.weight_global_scale.mul_(2)
    seen.append(check(layer))
    layer.weight_scale = other.weight_scale.clone()
    seen.append(check(layer))
    layer.to(torch.bfloat16)
    seen.append(check(layer))
    layer.bias = None
    seen.append(check(layer))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    twin = copy.deepcopy(layer)
    twin.weight.zero_()
    assert check(twin).abs().max() == 0
    assert torch.equal(check(layer), seen[-1])
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(check(torch.load(file, weights_only=False)), seen[-1])


def test_compiled_models_call_the_kernels():
    layer = mxquant.QuantLinear.from_qtensor(weight(48, 64, QuantScheme()), torch.randn(48))
    x = torch.randn(3, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x)) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_operators_pass_the_checks_of_torch_library():
    q = weight(8, 32, QuantScheme(global_scale=True))  # opcheck does not know float8
    shape, spec = list(q.shape), q.scheme.text
    x = torch.randn(2, 32, requires_grad=True)
    parts = (q.packed, q.scale, q.global_scale)
    torch.library.opcheck(torch.ops.mxquant.linear, (x, *parts, None, shape, spec))
    torch.library.opcheck(torch.ops.mxquant.dequantize, (*parts, shape, spec, torch.bfloat16))
    torch.library.opcheck(torch.ops.mxquant.quantize, (torch.randn(8, 32), QuantScheme().text, 0, "w", None))


def test_gradients_are_those_of_the_dense_layer(level):
    q = weight(24, 64, QuantScheme())
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(24, requires_grad=True)
    mxquant.linear(x, q, bias).square().sum().backward()
    ours = x.grad.clone(), bias.grad.clone()
    x.grad = bias.grad = None
    F.linear(x, mxquant.dequantize(q), bias).square().sum().backward()
    for a, b in zip(ours, (x.grad, bias.grad), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_peak_counts_what_it_does(level):
    multiply = L.library().mxq_multiply
    for dtype in (0, 1, 2):
        one = multiply(dtype, 1, 1)
        assert one > 0
        assert multiply(dtype, 100, 3) == 300 * one
    assert multiply(3, 1, 1) == multiply(0, 0, 1) == multiply(0, 1, 0) == 0
    assert L.peak_flops(torch.bfloat16, seconds=0.01) > 1e6
