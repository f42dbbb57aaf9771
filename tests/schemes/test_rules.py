"""Tables that compare schemes say the rules, so that a difference of rules does not pass for one of formats."""

from __future__ import annotations

import pytest

from mxquant.schemes.formats import SCALES, QuantScheme
from mxquant.schemes.rules import default_rules_note, rules_note


@pytest.mark.parametrize(
    ("texts", "note"),
    [
        (["ue5m3/16", "nvfp4", "e4m3/8"], "search"),
        (["ue5m3/16", "nvfp4", "e4m3/8", "mxfp4", "e8m0/16"], "search for ue5m3 and e4m3, even for e8m0"),
        (["e4m3/8", "e4m3/8/absmax", "ue5m3/8/absmax"], "search for e4m3, absmax for e4m3 and ue5m3"),
        (["bf16/8"], "absmax"),
    ],
)
def test_rules_are_said_once_for_all_that_share_them(texts, note):
    assert rules_note(map(QuantScheme.parse, texts)) == note


def test_the_defaults_are_those_of_the_rows():
    note = default_rules_note()
    for scale in ("e4m3", "ue5m3", "e8m0"):
        (part,) = [part for part in note.split(", ") if scale in part.split()]
        assert part.split()[0] == SCALES[scale].default_rule
