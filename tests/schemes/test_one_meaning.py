"""A scheme means the same however it is spelled: options, text, YAML, ``MXQuantConfig``, Python."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mxquant import MXQuantConfig
from mxquant.checkpoint.formats.native import parse_config
from mxquant.cli.bench import bench_command
from mxquant.cli.main import main
from mxquant.cli.options import scheme_from
from mxquant.cli.quantize import quantize_command
from mxquant.errors import SchemeError
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import ELEMENTS, MAX_BLOCK_ELEMENTS, ROUNDINGS, SCALES, QuantScheme, scale_rules
from mxquant.schemes.recipe import QuantRecipe

# Written out, so that the meaning is stated here and not asked of the code under test.
BASES = {
    None: {"element": "fp4_e2m1", "scale": "ue5m3", "block": 16, "global_scale": False},
    "mxfp4": {"element": "fp4_e2m1", "scale": "e8m0", "block": 32, "global_scale": False},
    "nvfp4": {"element": "fp4_e2m1", "scale": "e4m3", "block": 16, "global_scale": True},
    "mxfp6": {"element": "fp6_e2m3", "scale": "e8m0", "block": 32, "global_scale": False},
    "mxfp8": {"element": "fp8_e4m3", "scale": "e8m0", "block": 32, "global_scale": False},
}
DEFAULT_RULES = {
    "e8m0": "even", "e4m3": "search", "ue5m3": "search", "ue5m3-61440": "search", "bf16": "absmax", "fp32": "absmax",
}  # fmt: skip
FLOAT_RULES = {"absmax", "absmax-nonzero", "ceil", "four-over-six", "search"}
EXISTING_RULES = {
    "e8m0": {"floor", "ceil", "even", "rceil", "oas", "search"}, "bf16": {"absmax"}, "fp32": {"absmax"},
    "e4m3": FLOAT_RULES, "ue5m3": FLOAT_RULES, "ue5m3-61440": FLOAT_RULES,
}  # fmt: skip
CHANGES = [
    *(("element", value) for value in ELEMENTS),
    *(("scale", value) for value in SCALES),
    *(("block", value) for value in (8, 16, (32, 32))),
    *(("global_scale", value) for value in (True, False)),
    *(("scale_rule", value) for value in scale_rules()),
    *(("rounding", value) for value in ROUNDINGS),
]
CASES = [{}, *({k: v} for k, v in CHANGES)]
CASES += [dict(pair) for pair in itertools.combinations(CHANGES, 2) if pair[0][0] != pair[1][0]]
REFUSED = "refused"


def meaning(base, changes):
    """What a base with changes means; ``REFUSED`` where there is no such scheme."""
    fields = {**BASES[base], "scale_rule": DEFAULT_RULES[BASES[base]["scale"]], "rounding": "nearest"}
    if "scale" in changes:
        fields |= {"global_scale": False, "scale_rule": DEFAULT_RULES[changes["scale"]]}
    fields |= changes
    exists = fields["scale_rule"] in EXISTING_RULES[fields["scale"]]
    if not exists or (fields["scale_rule"] == "four-over-six" and fields["element"] != "fp4_e2m1"):
        return REFUSED
    return QuantScheme(**fields)


def block_text(block):
    return "x".join(map(str, block)) if isinstance(block, tuple) else str(block)


def python(base, changes):
    return QuantScheme(**changes) if base is None else QuantScheme.preset(base, **changes)


def merged(base, changes):
    return (QuantScheme() if base is None else QuantScheme.parse(base)).merge(**changes)


def as_fields(base, changes):
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    return fields if base is None else {"preset": base, **fields}


def from_yaml(base, changes):
    return QuantRecipe.from_dict(yaml.safe_load(yaml.safe_dump({"default": as_fields(base, changes)}))).default


def config(base, changes):
    return MXQuantConfig(preset=base, **changes).quant_recipe().default


def reloaded_config(base, changes):
    said = json.loads(json.dumps(MXQuantConfig(preset=base, **changes).to_dict()))
    return MXQuantConfig.from_dict(said).quant_recipe().default


def text(base, changes):
    """A global scale is said with the scale that has it."""
    parts = [] if base is None else [base]
    for name, value in changes.items():
        if name == "block":
            parts.append(block_text(value))
        elif name not in ("scale", "global_scale"):
            parts.append(value)
    if "scale" in changes or "global_scale" in changes:
        scale = changes.get("scale", BASES[base]["scale"])
        parts.append(scale + ("+global" if changes.get("global_scale") else ""))
    return QuantScheme.parse("/".join(parts)) if parts else QuantScheme()


def as_options(changes):
    options = []
    for name, value in changes.items():
        if name == "global_scale":
            options.append("--global-scale" if value else "--no-global-scale")
        else:
            options += [f"--{name.replace('_', '-')}", block_text(value) if name == "block" else value]
    return options


def parsed(command, arguments):
    """The scheme of a command line; without any option that names one, the default."""
    return scheme_from(command.make_context("mxquant", arguments).params) or QuantScheme()


def quantize_options(base, changes):
    return parsed(quantize_command, ["SOURCE", *(["--format", base] if base else []), *as_options(changes)])


def bench_options(base, changes):
    return parsed(bench_command, [*(["--format", base] if base else []), *as_options(changes)])


def scheme_option(base, changes):
    return parsed(quantize_command, ["SOURCE", "--scheme", base or "ue5m3/16", *as_options(changes)])


SPELLINGS = [python, merged, from_yaml, config, reloaded_config, text, quantize_options, bench_options, scheme_option]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.__name__)
@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_base_with_changes_means_the_same_in_every_spelling(base, spelling):
    for changes in CASES:
        try:
            found = spelling(base, changes)
        except SchemeError:
            found = REFUSED
        assert found == meaning(base, changes), (base, changes)


def test_the_cases_are_the_whole_product():
    assert len(CASES) > 250
    assert sum(meaning(base, changes) != REFUSED for base in BASES for changes in CASES) > 1000


@pytest.mark.parametrize(
    ("arguments", "name", "scheme"),
    [
        (["--format", "nvfp4", "--scale", "ue5m3"], "fp4-ue5m3-b16", QuantScheme(scale="ue5m3", block=16)),
        (["--scheme", "nvfp4/ue5m3"], "fp4-ue5m3-b16", QuantScheme(scale="ue5m3", block=16)),
        (["--format", "mxfp4", "--scale", "e4m3"], "fp4-e4m3-b32", QuantScheme(scale="e4m3", block=32)),
        (["--scheme", "e4m3+global/16/search"], "nvfp4", QuantScheme("fp4_e2m1", "e4m3", 16, True, "search")),
        (["--format", "nvfp4"], "nvfp4", QuantScheme("fp4_e2m1", "e4m3", 16, True, "search")),
        (["--scheme", "nvfp4", "--scale-rule", "absmax"], "nvfp4-absmax", QuantScheme.parse("e4m3+global/16/absmax")),
        (["--scheme", "ue5m3/8/ceil", "--block", "4x4"], "fp4-ue5m3-b4x4-ceil", QuantScheme.parse("ue5m3/4x4/ceil")),
    ],
)  # fmt: skip
def test_quantize_takes_a_scheme_and_changes_of_it(arguments, name, scheme, make_checkpoint):
    source = make_checkpoint("llama-even")
    done = CliRunner().invoke(main, ["quantize", str(source), *arguments, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["out"] == f"{source.name}-{name}"
    assert {tensor["scheme"] for tensor in plan["tensors"]} - {None} == {name} == {scheme.name}


def test_quantize_writes_the_scheme_it_was_told(make_checkpoint, tmp_path):
    arguments = ["quantize", str(make_checkpoint("llama-even")), "--scheme", "e4m3+global/8/ceil", "--json"]
    done = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    module, *_ = parse_config(json.loads((tmp_path / "out/config.json").read_text())["quantization_config"])
    assert module.scheme == QuantScheme("fp4_e2m1", "e4m3", 8, True, "ceil")


def test_a_scheme_beside_a_recipe_is_for_layers_that_no_rule_names(make_checkpoint, tmp_path):
    (tmp_path / "mine.yaml").write_text("rules:\n  - q_proj: mxfp8\n")
    arguments = ["--recipe", str(tmp_path / "mine.yaml"), "--scheme", "nvfp4/absmax", "--dry-run", "--json"]
    done = CliRunner().invoke(main, ["quantize", str(make_checkpoint("llama-even")), *arguments])
    assert done.exit_code == 0, done.output
    found = {(t["scheme"], "q_proj" in t["name"]) for t in json.loads(done.stdout)["tensors"] if t["scheme"]}
    assert found == {("mxfp8", True), ("nvfp4-absmax", False)}


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--scheme", "nvfp4", "--format", "mxfp4"], ["--scheme and --format", "cannot be combined"], 2),
        (["--scheme", "e4m4/16"], ["'e4m4'", "ue5m3/16"], 1),
        (["--scheme", "ue5m3/8/16"], ["block twice"], 1),
        (["--scheme", "e4m3+global/16", "--scale", "e8m0", "--scale-rule", "absmax"], ["choose from floor"], 1),
    ],
)
def test_schemes_that_cannot_be_are_refused_with_a_way_out(arguments, words, code):
    done = CliRunner().invoke(main, ["quantize", "SOURCE", *arguments])
    assert done.exit_code == code, done.output
    assert all(word in " ".join(done.output.split()) for word in words), done.output


@st.composite
def schemes(draw):
    scale = draw(st.sampled_from(list(SCALES)))
    element = draw(st.sampled_from(list(ELEMENTS)))
    rules = [rule for rule in SCALES[scale].rules if rule != "four-over-six" or element == "fp4_e2m1"]
    rows = draw(st.integers(1, 1024))
    columns = draw(st.one_of(st.sampled_from([16, 32]), st.integers(2, MAX_BLOCK_ELEMENTS // 1024)))
    block = draw(st.sampled_from([columns, (rows, columns)]))
    rounding, has_global = draw(st.sampled_from(ROUNDINGS)), draw(st.booleans())
    return QuantScheme(element, scale, block, has_global, draw(st.sampled_from(rules)), rounding)


def reads_as(text):
    try:
        return QuantScheme.parse(text)
    except SchemeError:
        return None


@given(schemes())
def test_every_scheme_is_read_back_from_its_text(scheme):
    assert QuantScheme.parse(scheme.text) == scheme
    parts = scheme.text.split("/")
    assert QuantScheme.parse("/".join(reversed(parts))) == scheme
    for i in range(len(parts)):  # scale and block are always said, also where they are the defaults
        shorter = "/".join(parts[:i] + parts[i + 1 :])
        assert reads_as(shorter) != scheme or parts[i] in ("ue5m3", "16"), shorter
    for spelled in (scheme.spelled(rule=True), scheme.spelled(preset=False), scheme.spelled(rule=True, preset=False)):
        assert QuantScheme.parse(spelled) == scheme
    assert str(scheme.scale_rule) in scheme.spelled(rule=True).split("/")


@given(schemes(), schemes())
def test_names_are_fit_for_files_and_tell_schemes_apart(one, other):
    assert not set(one.name) & set('/\\:*?"<>| ')
    assert (one.name == other.name) == (one == other)


@given(schemes(), st.booleans())
def test_every_activation_scheme_is_read_back_from_its_text(scheme, per_token):
    if scheme.block_shape[0] == 1 and scheme.rounding == "nearest":
        activations = ActivationScheme(scheme, per_token and scheme.global_scale)
        assert ActivationScheme.parse(activations.text) == activations
        assert ActivationScheme.from_dict(activations.to_dict()) == activations


@pytest.mark.parametrize("scale", SCALES)
def test_activations_have_the_plain_rule_unless_they_name_one(scale):
    plain = "even" if scale == "e8m0" else "absmax"
    for rule in SCALES[scale].rules:
        weight = QuantScheme("fp4_e2m1", scale, 16, scale_rule=rule, rounding="stochastic")
        assert ActivationScheme.same_as(weight).scheme == QuantScheme("fp4_e2m1", scale, 16, scale_rule=plain)
        assert ActivationScheme.parse(f"{scale}/16/{rule}").scheme.scale_rule == rule
    assert ActivationScheme.parse(f"{scale}/16").scheme.scale_rule == plain
    assert ActivationScheme.from_dict({"scheme": {"scale": scale}}).scheme.scale_rule == plain


def test_files_of_before_say_what_they_said():
    """``nvfp4`` was the name of the rule absmax; the fields beside the name decide."""
    fields = {
        "element": "fp4_e2m1", "scale": "e4m3", "block": 16, "global_scale": True, "scale_rule": "absmax",
        "rounding": "nearest",
    }  # fmt: skip
    module = {"names": ["model.layers.*.mlp.up_proj"], "scheme": "nvfp4", "shape": [64, 32], "transposed": False}
    written = {"quant_method": "mxquant", "format_version": 1, "mxquant_version": "0.1.0"}
    table = parse_config({**written, "schemes": {"nvfp4": fields}, "modules": [module]})
    (entry,) = table
    assert entry.scheme == QuantScheme.parse("nvfp4/absmax")
    assert entry.scheme.to_dict() == fields
