"""``model_card``: the text of an output's ``README.md``, from plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxquant.checkpoint.layout import REPORT_NAME
from mxquant.convert.card.front_matter import make_front_matter
from mxquant.convert.card.quality import quality
from mxquant.presentation.table import markdown

SOURCE_CARD_NAME = "README.source.md"
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)/?$")

_LOAD_CT = """\
The weights are in compressed-tensors' format. vLLM, SGLang and transformers read them without mxquant:

```python
from transformers import {auto}, AutoTokenizer

path = "{path}"{comment}
model = {auto}.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
```

transformers makes them dense when it runs them. With mxquant installed, `mxquant.load(path)` keeps them packed.
"""
_LOAD_NATIVE = """\
The weights are in mxquant's own format and stay packed in memory. mxquant must be installed, not imported:

```python
from transformers import {auto}, AutoTokenizer

path = "{path}"{comment}
model = {auto}.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
```

Without mxquant, loading fails. `mxquant dequantize` writes a dense checkpoint for other tools.
"""


def model_card(
    report: Mapping[str, Any],
    *,
    base_model: str | None = None,
    source_card: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    path: str | None = None,
) -> str:
    """The text of ``README.md``.

    Parameters
    ----------
    report : :meth:`mxquant.convert.report.QuantReport.to_dict`, or the file beside the weights.
    base_model : hub id of the source; None takes it from the report, where a hub id was quantized.
    source_card : the card of the source; license, language and pipeline are carried from it.
    evaluation : the JSON of ``mxquant eval --output``, which names this model among its models.
    path : name on the hub, for the title and the example; without, the text says nothing of where it lies.

    Raises ``CheckpointError`` for an evaluation of other models.
    """
    base_model = base_model or hub_id(str(report["source"]))
    title = (
        path.rpartition("/")[2] if path else f"{_source_name(report, base_model)}, {' and '.join(report['schemes'])}"
    )
    place = {"path": path or ".", "comment": "" if path else "  # this folder, or its name on the hub"}
    place["auto"] = report.get("auto_class", "AutoModelForCausalLM")
    measured = [] if evaluation is None else quality(report, evaluation)
    loading = _LOAD_NATIVE if report["on_disk"] == "mxquant" else _LOAD_CT
    parts = [
        make_front_matter(report, base_model, source_card),
        f"# {title}",
        _summary(report, base_model),
        "## Size and format",
        *_formats(report),
        "## Quality",
        *(measured or ["Only the error of the weights, above, was measured."]),
        "## How to load it",
        loading.format(**place).strip(),
        "## What stayed dense",
        _dense(report),
        "## Made with",
        _made_with(report),
    ]
    if source_card is not None:
        parts.append(f"The card of the source is kept as [{SOURCE_CARD_NAME}]({SOURCE_CARD_NAME}).")
    return "\n\n".join(parts) + "\n"


def hub_id(source: str) -> str | None:
    """The hub id that a folder in the hub's cache is a snapshot of; None for other folders."""
    match = _SNAPSHOT.search(source.replace("\\", "/"))
    return f"{match['owner']}/{match['name']}" if match else None


def _source_name(report: Mapping[str, Any], base_model: str | None) -> str:
    return base_model.rpartition("/")[2] if base_model else Path(str(report["source"])).name


def _summary(report: Mapping[str, Any], base_model: str | None) -> str:
    if base_model is not None:
        base = f"[{base_model}](https://huggingface.co/{base_model})"
    else:
        base = f"`{_source_name(report, None)}`"
    match = _SNAPSHOT.search(str(report["source"]))
    revision = f" (revision `{match['revision']}`)" if match else ""
    share = report["quantized_parameters"] / report["parameters"]
    return (
        f"{base}{revision}, its weights quantized to {report['bits_per_weight']:.3g} bits by mxquant: "
        f"{share:.1%} of {_count(report['parameters'])} parameters."
    )


def _errors(report: Mapping[str, Any]) -> str:
    if "mean_relative_error" not in report:  # of a report of version 0.1.0
        return f"{report['relative_error']:.4f}"
    worst = report["worst_relative_error"]
    mean = f"{report['mean_relative_error']:.4f} in the mean of the layers"
    return f"{mean}, at worst {worst['value']:.4f} ({worst['layer']})"


def _formats(report: Mapping[str, Any]) -> list[str]:
    before, after = report["bytes_before"], report["bytes_after"]
    rows = [
        ("size before", _bytes(before)),
        ("size after", f"{_bytes(after)}, {before / after:.2f} times smaller"),
        ("bits per quantized weight", f"{report['bits_per_weight']:.3f}, scales included"),
        ("relative error of the weights", _errors(report)),
        ("activations as it runs", report["activations"]),
        ("KV cache as it runs", report["kv_cache"]),
        ("format on disk", report["on_disk"]),
    ]
    rows = [(what, value) for what, value in rows if value != "none"]
    layers = [
        (
            name,
            scheme["element"],
            scheme["scale"] + (" and a global scale" if scheme["global_scale"] else ""),
            "x".join(map(str, scheme["block"])) if isinstance(scheme["block"], list) else scheme["block"],
            scheme["scale_rule"],
            ", ".join(g["projection"] for g in report["groups"] if g["scheme"] == name),
        )
        for name, scheme in report["schemes"].items()
    ]
    return [
        markdown(("", ""), rows),
        markdown(("scheme", "elements", "block scales", "block", "scale rule", "layers"), layers),
    ]


def _dense(report: Mapping[str, Any]) -> str:
    rows = [(d["reason"], d["tensors"], _count(d["parameters"]), f"`{d['example']}`") for d in report["dense"]]
    rows += [(f"tied to `{other}`", 0, "0", f"`{name}`") for name, other in report["tied"].items()]
    return markdown(("because", "tensors", "parameters", "for example"), rows)


def _made_with(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    seed = f"; seed {report['seed']}" if any(s["rounding"] != "nearest" for s in report["schemes"].values()) else ""
    return f"{versions}{seed}. All figures are in [{REPORT_NAME}]({REPORT_NAME})."


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _count(number: int) -> str:
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
