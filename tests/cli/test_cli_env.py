"""``mxquant env`` says which kernels are used, what is missing and what that costs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mxquant.cli.env import describe
from mxquant.cli.main import main
from mxquant.kernels.cpu import library


def test_env_prints_the_same_facts_for_people_and_programs():
    facts = json.loads(CliRunner().invoke(main, ["env", "--json"]).stdout)
    text = CliRunner().invoke(main, ["env"]).stdout
    assert facts["versions"]["torch"] in text
    assert facts["processor"] in text
    assert str(facts["cpu_kernels"]["level"] or "reference") in text


def test_env_says_what_a_missing_library_costs_and_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "CHOSEN", None)
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    library.load.cache_clear()
    try:
        kernels = describe()["cpu_kernels"]
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
    assert kernels["library"] is None
    assert "not built" in kernels["missing"]
    assert "slower" in kernels["cost"]
    assert "install" in kernels["cure"]


def test_env_says_that_the_environment_turned_kernels_off(monkeypatch):
    if isinstance(library.load(), str):
        pytest.skip("no compiled kernels here")
    monkeypatch.setenv("MXQUANT_KERNELS", "reference")
    kernels = describe()["cpu_kernels"]
    assert kernels["level"] is None
    assert "MXQUANT_KERNELS" in kernels["missing"]
