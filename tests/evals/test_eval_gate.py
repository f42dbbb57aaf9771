"""A gate passes what is within every limit and nothing else, and says so with its exit code."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxquant
import mxquant.bundled
from mxquant.cli.main import main
from mxquant.errors import MXQuantError
from mxquant.evals import gate
from mxquant.evals.gate import Limits, parse_share
from mxquant.evals.results import ModelResult
from mxquant.evals.tasks import Metric

BUNDLED = str(mxquant.bundled.path())
QUICK = ("--text", "builtin", "--seq-len", "64", "--windows", "5", "--device", "cpu")


def invoke(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("5 %", 0.05), ("0.05", 0.05), (".5%", 0.005), ("0", 0), ("150%", 1.5), ("2.5%", 0.025)],
)
def test_a_share_is_in_percent_only_with_its_sign(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "'5' may mean 5% or 500%; write the percent sign"),
        ("1.0", "may mean 1% or 100%"),
        ("-5%", "is not a share; write 5% or 0.05"),
        ("nan", "is not a share"),
        ("inf%", "is not a share"),
        ("", "is not a share"),
        ("5%%", "is not a share"),
    ],
)
def test_what_may_be_misread_is_refused(text, message):
    with pytest.raises(MXQuantError, match=message):
        parse_share(text)


def row(name, ratio=None, kl=None, accuracy=None, baseline=None):
    """A made-up row; without a ratio it has no perplexity."""
    made = ModelResult(name, name, "", None, None, 0, "float32", "cpu", is_baseline=baseline is None, baseline=baseline)
    divergence = None if ratio is None else SimpleNamespace(ratio=ratio, kl=kl)
    made.perplexities = {"text": SimpleNamespace(divergence=divergence)}
    if accuracy is not None:
        made.tasks = [Metric("piqa", "acc", accuracy, 0.1, True), Metric("piqa", "perplexity", 5.0, None, False)]
    return made


@pytest.mark.parametrize(
    ("limits", "figures", "passed"),
    [
        (Limits(ppl_increase=0.25), {"ratio": 1.25, "kl": 9}, True),
        (Limits(ppl_increase=0.25), {"ratio": 1.26, "kl": 0}, False),
        (Limits(ppl_increase=0.25), {"ratio": 0.5, "kl": 9}, True),
        (Limits(ppl_increase=0.25), {"ratio": math.nan, "kl": 0}, False),
        (Limits(ppl_increase=0.25), {"ratio": math.inf, "kl": 0}, False),
        (Limits(ppl_increase=0.25), {}, False),
        (Limits(kl=0.5), {"ratio": 9, "kl": 0.5}, True),
        (Limits(kl=0.5), {"ratio": 1, "kl": 0.51}, False),
        (Limits(kl=0.5), {"ratio": 1, "kl": math.nan}, False),
        (Limits(accuracy_drop=0.25), {"accuracy": 0.5}, True),
        (Limits(accuracy_drop=0.25), {"accuracy": 0.49}, False),
        (Limits(accuracy_drop=0.25), {"accuracy": 1.0}, True),
        (Limits(accuracy_drop=0.25), {"accuracy": math.nan}, False),
        (Limits(accuracy_drop=0.25), {}, False),
        (Limits(ppl_increase=0.25, kl=0.5), {"ratio": 1.0, "kl": 0.6}, False),
    ],
)
def test_a_model_passes_at_its_limit_and_not_beyond(limits, figures, passed):
    dense = row("dense", accuracy=0.75)
    found = gate.check(limits, [dense, row("good", 1, 0, 0.75, dense), row("m", baseline=dense, **figures)], ["text"])
    assert {c.model for c in found.checks} == {"good", "m"}
    assert found.passed is passed
    assert all(check.passed for check in found.checks if check.model == "good")
    assert [line.split()[0] for line in found.failures] == ["m"] * len(found.failures)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["passed"] is passed


def test_a_gate_that_finds_nothing_to_check_does_not_pass():
    dense = row("dense")
    found = gate.check(Limits(accuracy_drop=0.1), [dense, row("m", 1, 0, baseline=dense)], ["text"])
    assert not found.passed
    assert found.failures == ["the gate found nothing to check"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-ppl-increase", "5%"], "--max-ppl-increase requires --baseline MODEL"),
        (["--max-kl", "0.1"], "--max-kl requires --baseline"),
        (["--max-ppl-increase", "5", "--baseline", "x"], "write the percent sign"),
        (["--max-kl", "-1", "--baseline", "x"], "--max-kl"),
        (["--max-kl", "nan", "--baseline", "x"], "--max-kl nan is not a finite number"),
        (
            ["--max-kl", "1", "--baseline", "x", "--no-perplexity", "--tasks", "y"],
            "cannot be combined with --no-perplexity",
        ),
        (["--max-accuracy-drop", "1%", "--baseline", "x"], "--max-accuracy-drop requires --tasks"),
        (["--report", "report.pdf"], "must end in .md"),
        (["--report", "no/such/report.md"], "there is no folder no/such"),
    ],
)
def test_a_gate_that_cannot_work_is_refused_before_anything_is_read(arguments, message):
    result = invoke("eval", "./nowhere", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A good one, and one whose logits are not finite."""
    folder = tmp_path_factory.mktemp("models")
    mxquant.quantize_model(BUNDLED, folder / "good", "ue5m3/16")
    shutil.copytree(folder / "good", folder / "broken")
    tensors = load_file(folder / "broken/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "broken/model.safetensors", metadata={"format": "pt"})
    return folder


def test_exit_code_3_and_the_measured_figures_say_what_failed(models, tmp_path):
    arguments = ("eval", models / "good", models / "broken", "--baseline", BUNDLED, *QUICK)
    report = tmp_path / "report.md"
    result = invoke(*arguments, "--max-kl", "0.5", "--max-ppl-increase", "20%", "--report", report, "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["gate"]["passed"] is False
    assert found["gate"]["limits"] == {"max_ppl_increase": 0.2, "max_kl": 0.5, "max_accuracy_drop": None}
    checks = {(check["model"], check["figure"]): check for check in found["gate"]["checks"]}
    against = found["models"][1]["perplexity"]["divergence"]
    assert checks["good", "KL, nats"]["measured"] == against["kl"]
    assert checks["good", "perplexity increase"]["measured"] == pytest.approx(against["perplexity_ratio"] - 1)
    assert {key: check["passed"] for key, check in checks.items()} == {
        **{("good", figure): True for figure in ("KL, nats", "perplexity increase")},
        **{("broken", figure): False for figure in ("KL, nats", "perplexity increase")},
    }
    assert checks["broken", "KL, nats"]["measured"] is None
    assert "Error: broken fails the gate on builtin: KL, nats none, at most 0.5 allowed" in result.stderr
    text = report.read_text()
    assert "**Gate: failed.**" in text
    assert "| broken | KL, nats | builtin | none | at most 0.5 | FAIL |" in text
    assert f"| good | KL, nats | builtin | {against['kl']:.4g} | at most 0.5 | pass |" in text
    assert "![comparison](report.png)" in text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    for words in ("seq_len: `64`", "torch: `", "5 windows of 64 tokens", "fp4-ue5m3-b16"):
        assert words in text


def test_exit_code_0_within_the_limits_and_the_table_says_pass(models):
    result = invoke("eval", models / "good", "--baseline", BUNDLED, *QUICK, "--max-kl", "0.5")
    assert result.exit_code == 0, result.stderr
    assert "pass" in result.stdout
    assert "at most 0.5" in result.stdout
