"""``mxquant theory``: tables, data and pictures of expected errors, and what it refuses."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner

from mxquant import theory
from mxquant.cli.main import main
from mxquant.evals.theory_plots import plot_error_curves, plot_parts
from mxquant.evals.theory_study import neighbours, steps, study
from mxquant.schemes.formats import QuantScheme


def run(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["theory", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_table_has_the_librarys_numbers():
    text = run("--scales", "e4m3,ue5m3", "--blocks", "8,32", "--sigma", "0.02")
    rows = [line.split() for line in text.splitlines() if "absmax" in line]
    assert [row[:2] for row in rows] == [[f"{scale}/absmax", n] for scale in ("e4m3", "ue5m3") for n in ("8", "32")]
    for row in rows:
        assert float(row[4]) == pytest.approx(theory.mse(row[0].split("/")[0], int(row[1]), sigma=0.02), abs=1e-5)
    assert "Gaussian weights in fp4_e2m1, relative to sigma^2" in text


def test_json_and_csv_have_every_part_of_every_point(tmp_path):
    path = tmp_path / "errors.csv"
    arguments = ("--scales", "e4m3,nvfp4", "--sigma", "0.01,0.02", "--metric", "absolute", "--csv", path, "--json")
    record = json.loads(run(*arguments, "--distribution", "laplace", "--blocks", "16"))
    assert [(row["scheme"], row["sigma"]) for row in record["errors"]] == [
        ("e4m3/16/absmax", 0.01),
        ("e4m3/16/absmax", 0.02),
        ("nvfp4", 0.01),
        ("nvfp4", 0.02),
    ]
    row = record["errors"][0]
    parts = theory.error(QuantScheme.parse("e4m3/16/absmax"), 0.01, distribution="laplace", metric="absolute")
    assert row["total"] == parts.total
    assert (row["others"], row["maximum"], row["zero"]) == (parts.others, parts.maximum, parts.zero)
    assert record["crossovers"] is None
    with path.open() as file:
        assert [float(r["total"]) for r in csv.DictReader(file)] == [r["total"] for r in record["errors"]]


def test_crossovers_are_found_and_those_of_e8m0_said_to_repeat():
    record = json.loads(run("--scales", "e4m3", "--blocks", "16,8", "--crossovers", "--json"))
    (crossing,) = record["crossovers"]
    assert crossing["sigma"] == pytest.approx(0.0194, abs=5e-5)
    assert crossing["better_above"] == "e4m3/8/absmax"
    assert not crossing["every_octave"]
    text = run("--scales", "e8m0", "--blocks", "32", "--rule", "floor", "--sigma", "1:4", "--crossovers")
    assert "repeat in every octave" in text
    assert text.count("32 v 64") == 2  # those of one octave
    assert "0.01335" in text  # the mean over it


def test_a_range_becomes_a_curve_with_its_ends(tmp_path):
    record = json.loads(run("--scales", "e4m3", "--blocks", "8", "--sigma", "1e-3:0.7", "--points", "5", "--json"))
    sigmas = [row["sigma"] for row in record["errors"]]
    assert sigmas[0] == 1e-3
    assert sigmas[-1] == 0.7
    assert np.diff(np.log(sigmas)) == pytest.approx([np.log(700) / 4] * 4)
    plot, parts = tmp_path / "curves.png", tmp_path / "parts.svg"
    arguments = ("--scales", "e4m3,e8m0", "--blocks", "8,16", "--sigma", "1e-3:1", "--points", "30")
    text = run(*arguments, "--crossovers", "--plot", plot, "--plot-parts", parts)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "blocks whose scale is zero" in parts.read_text(encoding="utf-8")  # as a comment beside its shapes
    assert text.count("block 8") == 2


def test_a_sampled_rule_says_so():
    text = run("--scales", "ue5m3/16/four-over-six", "--sigma", "0.02")
    assert "Sampled, since the rule looks at the whole block: ue5m3/16/four-over-six (standard error" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sigma", "0"), "is neither positive numbers"),
        (("--sigma", "1:0.1"), "nor an ascending range"),
        (("--sigma", "1:2:3"), "nor an ascending range"),
        (("--sigma", "wide"), "is neither positive numbers"),
        (("--blocks", "8,,16"), "an empty item"),
        (("--blocks", "1"), "must be a length of at least 2"),
        (("--scales", "e5m9"), "'e5m9' is not a preset"),
        (("--rule", "floor"), "does not exist for e4m3 scales"),
        (("--distribution", "cauchy"), "choose from gaussian"),
        (("--plot", "a.png"), "a picture needs a range"),
        (("--plot", "a.jpg", "--sigma", "1e-3:1"), "pictures are written as"),
        (("--plot", "nowhere/a.png", "--sigma", "1e-3:1"), "there is no folder nowhere"),
        (("--csv", "nowhere/a.csv"), "there is no folder nowhere"),
    ],
)
def test_requests_that_make_no_sense_are_refused(arguments, message):
    done = CliRunner().invoke(main, ["theory", *arguments])
    assert done.exit_code
    assert message in done.output + done.stderr


def test_neighbours_differ_in_the_block_only():
    schemes = [theory.scheme_of(s, block=b) for s in ("e4m3", "ue5m3") for b in (32, 8, 16)]
    schemes.append(theory.scheme_of("bf16", block=4))
    texts = [(a.text, b.text) for a, b in neighbours(schemes)]
    assert texts == [
        ("e4m3/8/absmax", "e4m3/16/absmax"),
        ("e4m3/16/absmax", "e4m3/32/absmax"),
        ("ue5m3/8/absmax", "ue5m3/16/absmax"),
        ("ue5m3/16/absmax", "ue5m3/32/absmax"),
        ("bf16/4", "bf16/8"),
    ]


def test_a_study_advances_as_often_as_it_said():
    schemes, calls = [theory.scheme_of("e4m3", block=b) for b in (8, 16)], []
    study(schemes, [0.1, 0.2], span=(0.1, 0.2), advance=lambda: calls.append(1))
    assert len(calls) == steps(schemes, [0.1, 0.2], crossovers=True) == 5


def test_pictures_are_drawn_for_any_number_of_panels(tmp_path):
    sigmas = np.geomspace(0.001, 1, 8)
    curves = [theory.curve(theory.scheme_of(s, block=8), sigmas) for s in ("e4m3", "ue5m3", "e8m0", "bf16", "fp32")]
    for count in (1, 5):
        for draw in (plot_error_curves, plot_parts):
            path = tmp_path / f"{draw.__name__}{count}.svg"
            draw(curves[:count], path, title="A title", caption="a long caption " * 30)
            drawn = path.read_text(encoding="utf-8")
            assert "A title" in drawn
            assert all(c.scheme.scale in drawn for c in curves[:count])
    marked = tmp_path / "marked.svg"
    crossings = theory.crossovers(theory.scheme_of("e4m3", block=8), low=0.01, high=0.1)
    both = [theory.curve(theory.scheme_of("e4m3", block=b), sigmas) for b in (8, 16)]
    plot_error_curves(both, marked, crossovers=crossings, marks={"a model": 0.2}, metric="squared")
    assert "a model" in marked.read_text(encoding="utf-8")
    assert "8 v 16: .0194" in marked.read_text(encoding="utf-8")
