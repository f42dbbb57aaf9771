"""The layer against an explicit reference made of ``quantize`` and ``dequantize``, and where it is used."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxquant.ops.operators import fake_quantize
from mxquant.schemes.formats import QuantScheme
from mxquant.training import Monitor, Noise, convert, noise_of
from mxquant.training.functional import linear, rotation
from mxquant.training.noise import noise_name
from mxquant.training.recipes import RECIPES, LinearFormats, TrainingRecipe

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, IN, OUT = 64, 96, 64
NEAREST = LinearFormats.of("e8m0/32x32/rceil")
ALL = [name for name in RECIPES if name != "bf16"]


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, IN, generator=generator)
    weight = torch.randn(OUT, IN, generator=generator) * 0.02
    grad = torch.randn(TOKENS, OUT, generator=generator) * 1e-3
    return x, weight, grad


def run(x, weight, grad, formats, state, bias=None):
    """Result and gradients of the layer."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(x, weight, bias, formats, "layer", state)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


def explicit(x, weight, grad, formats, state):
    """The three products, each operand quantized along the dimension that is summed over."""

    def q(operand, tensor, name):
        scheme = formats.scheme(operand)
        role = operand.partition("_")[0]
        full = f"layer/{role}" if formats.shared(role) or not name else f"layer/{role}.{name}"
        return fake_quantize(tensor.contiguous(), scheme, seed=int(state[0]), name=noise_name(full, state))

    h = rotation(state) if formats.hadamard else torch.eye(16)
    along_tokens = lambda t: (t.t().unflatten(1, (-1, 16)) @ h).flatten(1)  # noqa: E731
    y = q("activation_forward", x, "") @ q("weight_forward", weight, "").t()
    if formats.shared("weight"):
        dx = q("gradient_dgrad", grad, "dgrad") @ q("weight_dgrad", weight, "")
    else:
        dx = q("gradient_dgrad", grad, "dgrad") @ q("weight_dgrad", weight.t(), "dgrad").t()
    if formats.shared("gradient"):
        dw = q("gradient_wgrad", grad, "").t() @ q("activation_wgrad", x, "")
    else:
        name = "wgrad.rotated" if formats.hadamard else "wgrad"
        dw = q("gradient_wgrad", along_tokens(grad), name) @ q("activation_wgrad", along_tokens(x), name).t()
    return y, dx, dw


@pytest.mark.parametrize("name", ALL)
def test_products_and_gradients_are_those_of_the_quantized_operands(operands, name):
    state = torch.tensor([5, 3])
    formats = RECIPES[name].default
    for found, expected in zip(run(*operands, formats, state), explicit(*operands, formats, state), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    plain = operands[0] @ operands[1].t()
    assert 0.01 < (found_error := relative(run(*operands, formats, state)[0], plain)) < 0.3, found_error


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_gradients_are_those_of_straight_through_autograd(operands):
    """Against autograd through ``x + (Q(x) - x).detach()``, which shares no code with the layer."""
    x, weight, grad = operands
    scheme = NEAREST.weight_forward
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    through = lambda t: t + (fake_quantize(t.detach(), scheme) - t.detach())  # noqa: E731
    y = through(a) @ through(b).t()
    (y * fake_quantize(grad, scheme)).sum().backward()
    found = run(x, weight, grad, NEAREST, torch.tensor([0, 1]))
    for mine, theirs in zip(found, (y.detach(), a.grad, b.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_mean_of_stochastic_gradients_is_the_gradient_of_the_quantized_operands(operands):
    """It converges with one over the root of the draws; under saturating scales it goes elsewhere."""
    x, weight, grad = operands
    grad = grad.clamp(-3e-3, 3e-3) / 3e-3 * 7.9 * 2.0**-10  # floor's scale is 2^-10: what is above 6 saturates
    errors = {}
    for rule in ("rceil", "floor"):
        scheme = QuantScheme(scale="e8m0", block=(32, 32), scale_rule=rule)
        stochastic = QuantScheme(scale="e8m0", block=(32, 32), scale_rule=rule, rounding="stochastic")
        formats = LinearFormats.of({"weight": scheme, "activation": scheme, "gradient": stochastic})
        exact = (grad @ fake_quantize(weight, scheme), grad.t() @ fake_quantize(x, scheme))
        for draws in (16, 256):
            runs = [run(x, weight, grad, formats, torch.tensor([0, i]))[1:] for i in range(draws)]
            mean = [sum(each) / draws for each in zip(*runs, strict=True)]
            errors[rule, draws] = [relative(m, e) for m, e in zip(mean, exact, strict=True)]
    for i in range(2):
        assert 3 < errors["rceil", 16][i] / errors["rceil", 256][i] < 5  # 4 = sqrt(256 / 16)
        assert errors["floor", 256][i] > 2 * errors["rceil", 256][i]
        assert errors["floor", 16][i] / errors["floor", 256][i] < 2.5, errors


def test_forward_and_backward_see_the_same_numbers_in_tiles_and_others_in_1d_blocks(operands):
    mismatch = {}
    for name in ("fp4-2d", "mxfp4-1d", "nvfp4"):
        with Monitor() as monitor:
            run(*operands, RECIPES[name].default, torch.tensor([0, 1]))
        mismatch[name] = {role: part["mismatch"] for role, part in monitor.summary()["roles"].items()}
    assert set(mismatch["fp4-2d"].values()) == {0.0}
    scheme = RECIPES["mxfp4-1d"].default.weight_forward
    _, weight, _ = operands
    forward, dgrad = fake_quantize(weight, scheme), fake_quantize(weight.t().contiguous(), scheme).t()
    assert mismatch["mxfp4-1d"]["weight"] == pytest.approx(relative(dgrad, forward), rel=1e-5)
    assert min(mismatch["mxfp4-1d"].values()) > 0.03
    assert mismatch["nvfp4"]["weight"] == 0.0


def test_identity_inputs_read_out_the_same_weight_in_forward_and_dgrad():
    """Rows of one-hot numbers are exact in FP4, so the layer hands out its two weights unchanged."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    equal = {}
    for name in ("fp4-2d", "mxfp4-1d-tf-sr"):
        x = torch.eye(64).requires_grad_()
        y = linear(x, weight, None, RECIPES[name].default, "layer", torch.tensor([0, 1]))
        y.backward(torch.eye(64))
        equal[name] = torch.equal(y.detach().t(), x.grad)
    assert equal == {"fp4-2d": True, "mxfp4-1d-tf-sr": False}


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_a_mean_over_more_tokens_lose_nothing(operands, name):
    """A loss that is 2^-16 of another, as a mean over 65,536 times the tokens is, has gradients that are."""
    x, weight, grad = operands
    state, formats = torch.tensor([5, 3]), RECIPES[name].default
    _, *large = run(x, weight, grad, formats, state)
    _, *small = run(x, weight, grad * 2**-16, formats, state)
    for one, other in zip(large, small, strict=True):
        assert torch.equal(one * 2**-16, other)


def test_saturated_and_lost_blocks_are_counted():
    x = torch.ones(1, 64)
    x[:, :32] *= 7.5  # above 6 * 2^0, floor's scale
    x[:, 32:] *= 1e-9  # far below e4m3's smallest scale
    formats = LinearFormats.of({"activation": "e8m0/32/floor", "weight": "e4m3/32/absmax"})
    with Monitor() as monitor:
        linear(x, x, None, formats, "layer", torch.tensor([0, 1]))
    roles = monitor.summary()["roles"]
    assert (roles["activation"]["saturated"], roles["activation"]["zero_scale"]) == (0.5, 0.0)
    assert (roles["weight"]["saturated"], roles["weight"]["zero_scale"]) == (0.0, 0.5)


def test_noise_is_that_of_the_pass_and_of_nothing_else(operands):
    formats = RECIPES["fp4-2d"].default
    first, again, other = (run(*operands, formats, torch.tensor([0, i]))[2] for i in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, run(*operands, formats, torch.tensor([1, 1]))[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp4-2d", "nvfp4", "ue5m3-2d"])
def test_what_is_not_finite_reaches_the_gradients(operands, bad, name):
    """As in high precision: gradient scalers and divergence checks look for it there."""
    x, weight, grad = operands
    grad[3, 4] = bad
    _, dx, dw = run(x, weight, grad, RECIPES[name].default, torch.tensor([0, 1]))
    assert dx.isnan().all()
    assert dw.isnan().all()


class Block(nn.Module):
    """Two layers with something in between; ``recompute`` checkpoints them."""

    def __init__(self, recompute: bool | None = None):
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32, bias=False)
        self.recompute = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None or not self.training:
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.recompute)


def block(recipe: str | TrainingRecipe = "fp4-2d", recompute: bool | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(Block(recompute), Block(recompute)), recipe, seed=seed)


def gradients(model: nn.Module, x: torch.Tensor, backwards: int = 1) -> list[torch.Tensor]:
    for part in x.chunk(backwards):
        model(part).square().mean().backward()
    return [p.grad for p in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Everything is rounded stochastically, so that the recomputed forward has noise to repeat.
NOISY = TrainingRecipe("noisy", LinearFormats.of("e8m0/32x32/rceil/stochastic"))


@pytest.mark.parametrize("recipe", [NOISY, RECIPES["mxfp4-1d-tf-sr"], RECIPES["nvfp4"].override(exclude=["none"])])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_noise_again(recipe, reentrant):
    recipe = TrainingRecipe(recipe.name, recipe.default)
    x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = gradients(block(recipe), x)
    model = block(recipe, recompute=reentrant)
    assert same(gradients(model, x), expected)
    assert noise_of(model).passes == 1
    assert not same(gradients(block(recipe, seed=1), x), expected)


def test_accumulation_is_the_sum_of_micro_steps_with_noise_of_their_own():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    model = block()
    together = [g.clone() for g in gradients(model, x, backwards=2)]
    apart = []
    for number, part in enumerate(x.chunk(2)):
        other = block()
        noise_of(other).start(number)
        apart.append(gradients(other, part))
    assert same(together, [a + b for a, b in zip(*apart, strict=True)])
    assert noise_of(model).passes == 2


def test_evaluation_is_no_pass():
    model = block()
    x = torch.randn(32, 32)
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    assert noise_of(model).passes == 0


def test_the_state_of_the_noise_makes_a_restart_exact():
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    model = block(seed=3)
    gradients(model, x)
    state = noise_of(model).state_dict()
    model.zero_grad()
    expected = [g.clone() for g in gradients(model, x)]
    restarted = block(seed=0)
    noise_of(restarted).load_state_dict(state)
    assert same(gradients(restarted, x), expected)


@pytest.mark.parametrize("name", ["fp4-2d", "mxfp4-1d", "ue5m3-2d"])
def test_under_autocast_operands_are_those_of_fp32_and_products_bf16(operands, name):
    x, weight, grad = operands
    x = x.bfloat16().float()  # numbers that autocast leaves as they are
    formats = RECIPES[name].default
    nearest = formats.map(lambda role, s: QuantScheme.from_dict(s.to_dict() | {"rounding": "nearest"}))
    state = torch.tensor([0, 1])
    grad = grad.bfloat16().float()
    expected = run(x, weight, grad, nearest, state)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(a, b, torch.zeros(OUT), nearest, "layer", state)
    y.backward(grad.bfloat16())
    assert (y.dtype, a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for found, wanted in zip((y, a.grad, b.grad), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=float(wanted.abs().max()) * 2**-9)


@pytest.mark.parametrize("name", ["fp4-2d", "nvfp4"])
def test_compiled_without_a_graph_break_to_the_same_values(name):
    formats = LinearFormats.of(RECIPES[name].default.to_dict())  # none that has been used before
    recipe = TrainingRecipe(name, formats)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    eager, compiled = block(recipe), block(recipe)
    run_compiled = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for _ in range(3):  # the pass changes, and with it the noise; the graph does not
        run_compiled(x).square().mean().backward()
        for a, b in zip((p.grad for p in compiled.parameters()), gradients(eager, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert noise_of(compiled).passes == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_batch_without_tokens():
    model = block()
    model(torch.empty(0, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_weights_and_inputs_without_gradient(operands):
    x, weight, grad = operands
    formats = RECIPES["mxfp4-1d"].default
    expected = run(x, weight, grad, formats, torch.tensor([0, 1]))
    a = x.clone().requires_grad_()
    linear(a, weight, None, formats, "layer", torch.tensor([0, 1])).backward(grad)
    b = weight.clone().requires_grad_()
    linear(x, b, None, formats, "layer", torch.tensor([0, 1])).backward(grad)
    assert torch.equal(a.grad, expected[1])
    assert torch.equal(b.grad, expected[2])


def test_a_copy_has_noise_of_its_own():
    model = block()
    other = copy.deepcopy(model)
    gradients(other, torch.randn(32, 32))
    assert (noise_of(model).passes, noise_of(other).passes) == (0, 1)


def test_the_rotation_is_orthogonal_and_of_the_seed():
    first, second = rotation(Noise(0).state), rotation(Noise(1).state)
    torch.testing.assert_close(first @ first.t(), torch.eye(16))
    assert set(first.abs().flatten().tolist()) == {0.25}
    assert not torch.equal(first, second)


def test_ranks_share_the_noise_of_weights_only(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    names = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        names.append([noise_name(f"layer/{role}", torch.tensor([0, 1])) for role in ("weight", "gradient")])
    assert names[0][0] == names[1][0]
    assert names[0][1] != names[1][1]
