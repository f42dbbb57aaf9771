"""``mxquant bench`` measures, explains and refuses."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from mxquant.cli.main import main
from mxquant.evals import speed
from mxquant.ops.backends import backend
from mxquant.schemes.formats import QuantScheme

CPU = torch.device("cpu")


def run(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_shape_is_measured_against_dense_and_ceilings(tmp_path):
    plot, output = tmp_path / "roof.png", tmp_path / "bench.json"
    text = run("--shape", "2,64,96", "--device", "cpu", "--dtype", "float32", "--plot", plot, "--output", output)
    assert "Ceilings" in text
    assert plot.stat().st_size > 1000
    record = json.loads(output.read_text())
    (row,) = record["results"]
    assert row["seconds"] > 0
    assert row["dense_seconds"] > 0
    assert row["error"] < 1e-5
    assert row["speedup"] == pytest.approx(row["dense_seconds"] / row["seconds"])
    assert record["scheme"] == "fp4-ue5m3-b16"
    if backend("cpu") is not None:
        assert record["instruction"] in text
        assert record["instruction_flops"] > row["flops"]


def test_the_shapes_of_a_model_come_from_its_config_alone(make_checkpoint, tmp_path):
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_bytes((make_checkpoint("llama") / "config.json").read_bytes())
    shapes = speed.model_shapes(str(folder))
    assert {(s.n, s.k) for s in shapes} == {(64, 64), (32, 64), (36, 64), (64, 36)}
    assert sum(s.count for s in shapes) == 14


def test_explain_says_who_serves_each_layer_and_why(make_checkpoint):
    layers = json.loads(run(make_checkpoint("llama"), "--explain", "--json", "--device", "cuda", "--rows", "1,64"))
    assert {(row["served_by"], row["rows"]) for row in layers["layers"]} == {("triton", 1), ("triton", 64)}
    assert "GEMV" in run(make_checkpoint("llama"), "--explain", "--device", "cuda")


def test_the_time_of_a_call_is_its_median():
    assert 0 < speed.seconds(lambda: torch.ones(10).sum(), CPU) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass MODEL or --shape"),
        (("--shape", "1,2"), "is not M,N,K"),
        (("--shape", "1,0,2"), "is not M,N,K"),
        (("--shape", "1,8,16", "--rows", "x"), "is not a list of numbers"),
        (("--shape", "1,8,16", "--block", "y"), "neither a length"),
        (("--shape", "1,8,16", "--plot", "a.txt"), "pictures are written as"),
        (("no-such-folder",), "no-such-folder"),
    ],
)
def test_requests_that_make_no_sense_are_refused(arguments, message):
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code
    assert message in done.output + done.stderr


def test_the_error_is_that_of_the_kernel_not_of_the_format():
    top = speed.Ceilings(1e9, 1e9)
    row = speed.measure("", 3, 40, 96, QuantScheme.preset("mxfp4"), torch.float32, CPU, top)
    assert row.error < 1e-6
    assert row.bytes == QuantScheme.preset("mxfp4").nbytes((40, 96)) + 4 * 3 * (40 + 96)
