"""The Triton kernels, run by Triton's interpreter on CPU tensors, give what the PyTorch reference gives.

A sample of all combinations; ``pytest --full-parity`` goes through every one.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from mxquant.codec.qtensor import QTensor, dequantize_parts
from mxquant.codec.rng import derive_key
from mxquant.codec.rounding import quantize_tensor
from mxquant.kernels.triton.backend import TritonBackend
from mxquant.schemes.formats import ROUNDINGS, SCALES, QuantScheme

backend = TritonBackend()

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
    # numpy, of overflows that the formats ask for
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FORMATS = ("e8m0", "e4m3", "ue5m3", "ue5m3-61440")
BLOCKS = (8, 16, 32, 64, (32, 32), (16, 16))
UNUSUAL = (7, 12, 300, (3, 24), (32, 1))
ROWS = (1, 3, 16, 17, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (77, 605)  # odd both ways
VIEWS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight(shape: tuple[int, int] = SHAPE, low: int = -6, high: int = 2) -> torch.Tensor:
    """Rows of very different sizes, so that scales go through many binades."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    exponents = torch.randint(low, high, (shape[0], 1), generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def scheme_for(scale: str, block, global_scale: bool) -> QuantScheme:
    rule = "even" if scale == "e8m0" else "absmax"
    return QuantScheme(scale=scale, block=block, global_scale=global_scale, scale_rule=rule)


def quantized(scheme: QuantScheme, shape: tuple[int, int] = SHAPE) -> QTensor:
    return quantize_tensor(weight(shape), scheme)


def assert_close(y: torch.Tensor, exact: torch.Tensor) -> None:
    """DESIGN's tolerances: 1e-5 for fp32, else 1.1 times the error of rounding the exact result."""
    error = (y.double() - exact).norm()
    if y.dtype == torch.float32:
        assert error <= 1e-5 * exact.norm()
    else:
        assert error <= 1.1 * (exact.to(y.dtype).double() - exact).norm()


@pytest.mark.parametrize("scale", FORMATS)
@pytest.mark.parametrize("block", [*BLOCKS, *UNUSUAL], ids=str)
def test_dequantize_gives_the_bits_of_the_reference(scale, block):
    for global_scale, dtype in itertools.product((False, True), DTYPES):
        scheme = scheme_for(scale, block, global_scale)
        q = quantize_tensor(weight((37, 301), -20, 8), scheme)
        expected = dequantize_parts(q.packed, q.scale, q.global_scale, q.shape, scheme, dtype)
        got = backend.dequantize(q.packed, q.scale, q.global_scale, q.shape, scheme, dtype)
        assert torch.equal(got.view(VIEWS[dtype]), expected.view(VIEWS[dtype]))


@pytest.mark.parametrize("scale", FORMATS)
def test_every_code_of_element_and_scale_decodes_as_the_formats_say(scale):
    scheme = scheme_for(scale, 16, False)
    packed = torch.arange(16, dtype=torch.uint8).repeat(256, 1)[:, ::2]
    packed = (packed | (packed + 1) << 4).contiguous()
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1)
    got = backend.dequantize(packed, codes, None, (256, 16), scheme, torch.float32)
    values = [[scheme.element_format.value(e) * scheme.scale_format.value(s) for e in range(16)] for s in range(256)]
    expected = torch.tensor(values)
    assert torch.equal(got.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(got[finite].view(torch.int32), expected[finite].view(torch.int32))


def linear_cases() -> list[tuple[str, object, bool]]:
    return list(itertools.product(FORMATS[:3], BLOCKS, (False, True)))


@pytest.mark.parametrize(("scale", "block", "global_scale"), linear_cases(), ids=str)
def test_linear_is_as_exact_as_its_dtype_allows(scale, block, global_scale, full):
    q = quantized(scheme_for(scale, block, global_scale))
    dense = q.dequantize().double()
    combinations = list(itertools.product(ROWS, DTYPES))
    if not full:  # three of fifteen, others for each scheme; all of them in five schemes
        first = linear_cases().index((scale, block, global_scale))
        combinations = [combinations[(3 * first + 7 * i) % 15] for i in range(3)]
    for rows, dtype in combinations:
        x, bias = torch.randn(rows, SHAPE[1]).to(dtype), torch.randn(SHAPE[0]).to(dtype)
        y = backend.linear(x, q.packed, q.scale, q.global_scale, bias, q.shape, q.scheme)
        assert_close(y, x.double() @ dense.T + bias.double())


@pytest.mark.parametrize("block", UNUSUAL, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_serves_blocks_of_any_length(block, rows):
    q = quantized(scheme_for("ue5m3", block, False))
    x = torch.randn(rows, SHAPE[1])
    y = backend.linear(x, q.packed, q.scale, None, None, q.shape, q.scheme)
    assert_close(y, x.double() @ q.dequantize().double().T)


@pytest.mark.parametrize("columns", [1208, 2048, 8192])
def test_one_row_is_read_in_words_where_rows_are_words(columns):
    from mxquant.kernels.triton.linear import words

    q = quantized(scheme_for("e4m3", 16, True), (19, columns))
    assert words(q.packed, q.scheme)
    x = torch.randn(columns)
    y = backend.linear(x, q.packed, q.scale, q.global_scale, None, q.shape, q.scheme)
    assert y.shape == (19,)
    assert_close(y, q.dequantize().double() @ x.double())


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_product_cut_along_k_is_the_same_bits_every_time(rows):
    from mxquant.kernels.triton.configs import candidates

    q = quantized(scheme_for("ue5m3", 16, False), (24, 4096))
    assert candidates(rows, *q.shape, 1)[0].splits > 1
    x = torch.randn(rows, 4096).bfloat16()
    call = (x, q.packed, q.scale, None, None, q.shape, q.scheme)
    first = backend.linear(*call)
    assert torch.equal(first, backend.linear(*call))
    assert_close(first, x.double() @ q.dequantize().double().T)


def test_rows_of_activations_may_lie_apart():
    q = quantized(scheme_for("ue5m3", 16, False))
    wide = torch.randn(6, 2 * SHAPE[1])
    for x in (wide[:, : SHAPE[1]], wide[::2, : SHAPE[1]], wide[:, ::2]):
        y = backend.linear(x, q.packed, q.scale, None, None, q.shape, q.scheme)
        assert_close(y, x.double() @ q.dequantize().double().T)


def test_infinite_activations_stay_infinite():
    q = quantize_tensor(torch.ones(4, 16), scheme_for("ue5m3", 16, False))
    for rows in (1, 2):
        x = torch.ones(rows, 16)
        x[0, 3] = torch.inf
        assert backend.linear(x, q.packed, q.scale, None, None, q.shape, q.scheme)[0].eq(torch.inf).all()


@pytest.mark.parametrize("scale", FORMATS[:3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_input_gradient_is_that_of_the_dense_weight(scale, dtype, rows):
    q = quantized(scheme_for(scale, 16 if rows < 33 else (16, 16), rows == 5))
    grad = torch.randn(rows, SHAPE[0]).to(dtype)
    got = backend.linear_grad(grad, q.packed, q.scale, q.global_scale, q.shape, q.scheme)
    assert_close(got, grad.double() @ q.dequantize().double())


def quantize_cases(full: bool) -> list[QuantScheme]:
    found = []
    for scale in FORMATS:
        for number, rule in enumerate(SCALES[scale].rules):
            blocks = (8, 16, 64, (32, 32), (16, 16), (4, 8), (32, 1), 32)
            for i, (block, g, rounding) in enumerate(itertools.product(blocks, (False, True), ROUNDINGS)):
                if full or (i + 11 * number) % 7 == 0:
                    found.append(
                        QuantScheme(scale=scale, block=block, global_scale=g, scale_rule=rule, rounding=rounding)
                    )
    return found


def hard_weight(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, ties, subnormals and (in fp32) the largest numbers, besides ordinary rows."""
    w = weight((37, 301), -22, 16)
    w[3], w[4] = 0, -0.0
    w[5, :40] = torch.tensor([6.0, -6, 5, 2.5, 0.25, 0.75, 1.25, 1.75, 3.5, 7]).repeat(4)
    w[6] = 1e-42
    w[7] = 3e38 if dtype == torch.float32 else 1
    w[8] = 1.0
    return w.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else w.to(dtype)


@pytest.mark.parametrize("scale", FORMATS)
def test_quantize_gives_the_bytes_of_the_reference(scale, full):
    for number, scheme in enumerate(s for s in quantize_cases(full) if s.scale == scale):
        w = hard_weight(DTYPES[number % 3])
        expected = quantize_tensor(w, scheme, seed=5, name="n")
        packed, codes = backend.quantize(w, scheme, derive_key(5, "n"), expected.global_scale)
        assert torch.equal(codes.view(torch.uint8), expected.scale.view(torch.uint8)), scheme.name
        assert torch.equal(packed, expected.packed), scheme.name


def test_stochastic_rounding_draws_from_64_bit_indices_and_keys():
    w = weight((64, 256))
    for key in (0, 1, 16, (1 << 63) + 5, (1 << 64) - 1, 1 << 31, 1 << 63):
        scheme = QuantScheme(scale="ue5m3", block=16, scale_rule="absmax", rounding="stochastic")
        packed, _ = backend.quantize(w, scheme, key, None)
        from mxquant.codec import rounding

        expected = rounding._quantize_rows(w, scheme, None, key, 0, False)
        assert torch.equal(packed, expected[0])


def only_program(launch, first: int):
    """Run one program of a launch, ``first`` along axis 0: the interpreter would run them all."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: setattr(builder, "grid_idx", (first, y, z))
    try:
        launch.grid = (1, *launch.grid[1:])
        launch.run()
    finally:
        builder.set_grid_idx = original


@pytest.mark.parametrize("rows", [1, 2])
def test_offsets_past_two_to_the_31_reach_the_right_bytes(rows):
    from mxquant.kernels.triton import linear
    from mxquant.kernels.triton.configs import Config

    # Memory is only touched where it is read: the last rows of 2^32 + 2^18 weights.
    n, k = (1 << 18) + 16, 1 << 14
    scheme = scheme_for("e8m0", 32, False)
    small = quantized(scheme, (16, k))
    packed = torch.empty(scheme.packed_shape((n, k)), dtype=torch.uint8)
    scale = torch.empty(scheme.scale_shape((n, k)), dtype=torch.uint8)
    packed[-16:], scale[-16:] = small.packed, small.scale
    x, out = torch.randn(rows, k), torch.empty(rows, n)
    config = Config(1 if rows == 1 else 16, 16, 1024, 128, 1)
    (launch,) = linear.plan(x, packed, scale, None, None, out, scheme, config)
    only_program(launch, n // 16 - 1)
    assert_close(out[:, -16:].clone(), x.double() @ small.dequantize().double().T)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_fp4_times_fp4_is_the_product_of_the_dequantized(name):
    from mxquant.kernels.triton import native

    scheme = QuantScheme.preset(name)
    x, w = quantize_tensor(torch.randn(19, 320), scheme), quantized(scheme, (70, 320))
    bias, out = torch.randn(70), torch.empty(19, 70)
    parts = [(q.packed, q.scale, q.global_scale) for q in (x, w)]
    native.plan(*parts, bias, out, scheme).run()
    assert_close(out, x.dequantize().double() @ w.dequantize().double().T + bias.double())


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "nvfp4/search"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_are_quantized_then_multiplied_by_tensor_cores(text, dtype):
    scheme = QuantScheme.parse(text)
    x, bias = weight((2 * 9, 320)).view(2, 9, 320).to(dtype), torch.randn(70).to(dtype)
    w = quantized(scheme, (70, 320))
    assert backend.why_not("quantized_linear", x, w.shape, scheme, activations=scheme) is None
    y = backend.quantized_linear(x, w.packed, w.scale, w.global_scale, bias, w.shape, scheme, scheme)
    rounded = quantize_tensor(x.view(-1, 320), scheme).dequantize().double()
    assert_close(y.view(-1, 70), rounded @ w.dequantize().double().T + bias.double())


def test_tokens_that_are_not_finite_stay_so_through_tensor_cores():
    x = weight((6, 64))
    x[2, 5] = torch.inf
    for name, lost in (("mxfp4", [2]), ("nvfp4", range(6))):
        scheme = QuantScheme.preset(name)
        w = quantized(scheme, (16, 64))
        y = backend.quantized_linear(x, w.packed, w.scale, w.global_scale, None, w.shape, scheme, scheme)
        assert y.isnan().all(1).nonzero().flatten().tolist() == list(lost)


def test_formats_that_tensor_cores_do_not_multiply_are_told_apart():
    nvfp4, mxfp4, ue5m3 = QuantScheme.preset("nvfp4"), QuantScheme.preset("mxfp4"), QuantScheme()
    x = torch.randn(3, 64)
    for weights, activations, per_token in (
        (nvfp4, mxfp4, False),
        (ue5m3, ue5m3, False),
        (nvfp4, QuantScheme.parse("nvfp4/32"), False),
        (nvfp4, nvfp4, True),
    ):
        assert backend.why_not("quantized_linear", x, (16, 64), weights, activations=activations, per_token=per_token)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_quantize_notices_one_weight_that_is_not_finite(value):
    w = weight()
    w[70, 600] = value
    assert backend.quantize(w, scheme_for("ue5m3", 16, False), 0, None) is None
    w[70, 600] = 3e38
    assert backend.quantize(w, scheme_for("ue5m3", 16, False), 0, None) is not None
