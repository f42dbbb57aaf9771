"""The front matter of a card: the YAML at its head, which the hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from mxquant.schemes.formats import PRESETS

# What of the source's front matter holds for the output too.
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# What the hub calls the use of a model that more than text goes into, by the class that loads it.
_PIPELINES = {"AutoModelForImageTextToText": "image-text-to-text", "AutoModelForMultimodalLM": "audio-text-to-text"}
# Says that a card is ours, and so not the source's.
_OURS = ("quantized_by", "mxquant")


def is_ours(card: str) -> bool:
    """Whether :func:`model_card` made the card."""
    key, value = _OURS
    return front_matter(card).get(key) == value


def front_matter(card: str) -> dict[str, Any]:
    """The YAML at the head of a card; empty where there is none, or none that can be read."""
    match = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def make_front_matter(report: Mapping[str, Any], base_model: str | None, source_card: str | None) -> str:
    """The front matter of an output's card, fences included; arguments as for :func:`.text.model_card`."""
    carried = front_matter(source_card or "")
    fields: dict[str, Any] = {key: carried[key] for key in _CARRIED if key in carried}
    pipeline = fields.get("pipeline_tag") or _PIPELINES.get(str(report.get("auto_class")), "text-generation")
    fields = {**fields, "library_name": "transformers", "pipeline_tag": pipeline}
    if base_model is not None:
        fields |= {"base_model": base_model, "base_model_relation": "quantized"}
    fields[_OURS[0]] = _OURS[1]
    theirs = carried.get("tags")
    tags = [str(t) for t in theirs] if isinstance(theirs, list) else []
    fields["tags"] = list(dict.fromkeys([*tags, "mxquant", *_tags(report)]))
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _tags(report: Mapping[str, Any]) -> list[str]:
    found = [f"{bits}-bit" for bits in sorted({_bits(s) for s in report["schemes"].values()})]
    found += sorted({s["element"].split("_")[0] for s in report["schemes"].values()})
    found += [name for scheme in report["schemes"] if (name := scheme.partition("-")[0]) in PRESETS]
    return found + ([report["on_disk"]] if report["on_disk"] != "mxquant" else [])


def _bits(scheme: Mapping[str, Any]) -> int:
    return int(scheme["element"][2])
