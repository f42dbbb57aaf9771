# SPDX-License-Identifier: Apache-2.0
"""Every type of causal language model that transformers knows, quantized and loaded in plain transformers.

    python benchmarks/every_architecture.py [--types llama,mamba] [--json FILE] [--write]

A tiny random model of each type (``tests/helpers/tiny_configs.py``) is quantized as NVFP4, MXFP4 and UE5M3 with
blocks of 16. Each output is loaded by ``AutoModelForCausalLM.from_pretrained``; its logits must be those of the
checkpoint that ``mxquant dequantize`` makes of it. A model may be refused before any work, with a sentence that names
the cause. ``--write`` puts the table into docs/architectures.md. About 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))

import torch  # noqa: E402
import transformers  # noqa: E402
from machine import describe, write_json  # noqa: E402
from tiny_configs import MODEL_TYPES, build, logits  # noqa: E402

import mxquant  # noqa: E402
from mxquant.errors import MXQuantError  # noqa: E402

FORMATS = ("nvfp4", "mxfp4", "ue5m3/16")
PAGE = HERE.parent / "docs" / "architectures.md"
BEGIN, END = "<!-- every architecture: begin -->", "<!-- every architecture: end -->"
# Of logits, relative: the same arithmetic in another order. Half precision rounds what it adds up.
_SAME, _SAME_IN_HALF = 1e-5, 5e-3
_SECONDS = 180


@dataclass
class Row:
    """What was seen of one type of model. ``formats``: container and distance of the logits, or an error."""

    model_type: str
    cls: str = ""
    parameters: int = 0
    not_built: str | None = None
    refused: str | None = None
    formats: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        if self.not_built is not None:
            return "not built"
        if self.refused is not None:
            return "refused"
        return "equal" if all(f.get("equal") for f in self.formats.values()) else "differs"


def examine(model_type: str, folder: Path) -> Row:
    """Quantize and load a tiny model of a type, in each format."""
    row = Row(model_type)
    try:
        model = build(model_type)
        dense = logits(model)
        if not bool(dense.isfinite().all()):
            raise ValueError("its logits are not finite")
    except Exception as error:  # of any model's code
        row.not_built = _line(error)
        return row
    row.cls, row.parameters = type(model).__name__, sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder / "source")
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder / "source")
    except Exception as error:  # as above: then it is not ours either
        row.not_built = f"its dense checkpoint does not load: {_line(error)}"
        return row
    for text in FORMATS:
        try:
            row.formats[text] = _compare(folder, text)
        except MXQuantError as error:
            row.refused = _line(error)
            return row
        except Exception as error:  # a fault of ours: loading failed after the work
            row.formats[text] = {"equal": False, "error": _line(error)}
    return row


def _compare(folder: Path, text: str) -> dict[str, Any]:
    packed, dense = folder / f"q-{text.replace('/', '-')}", folder / f"d-{text.replace('/', '-')}"
    plan = mxquant.quantize_model(folder / "source", packed, text).plan
    mxquant.dequantize_model(packed, dense)
    auto = transformers.AutoModelForCausalLM
    wanted = logits(auto.from_pretrained(dense))
    loaded, info = auto.from_pretrained(packed, output_loading_info=True)
    found = logits(loaded)
    distance = float((found - wanted).norm() / wanted.norm())
    bound = _SAME_IN_HALF if loaded.dtype != torch.float32 and plan.on_disk == "mxquant" else _SAME
    lost = sorted(info["missing_keys"] | info["unexpected_keys"])
    return {"container": plan.on_disk, "distance": distance, "lost": lost, "equal": distance <= bound and not lost}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _give_up(*_: object) -> None:
    raise TimeoutError(f"took more than {_SECONDS} s")


def table(rows: Iterable[Row]) -> str:
    """The table of the page: a line for each type that could be built."""
    rows = list(rows)
    counts = {s: sum(r.status == s for r in rows) for s in ("equal", "differs", "refused", "not built")}
    lines = [
        f"{len(rows) - counts['not built']} of {len(rows)} types could be built tiny with random weights (transformers "
        f"{transformers.__version__}): {counts['equal']} load with equal logits in all three formats, "
        f"{counts['refused']} are refused before work, {counts['differs']} differ. C: compressed-tensors, read by "
        "transformers alone; M: mxquant's own format.",
        "",
        "| model type | class | NVFP4 | MXFP4 | UE5M3/16 |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        if r.status in ("equal", "differs"):
            cells = [_cell(r.formats[text]) for text in FORMATS]
            lines.append(f"| {r.model_type} | {r.cls} | {' | '.join(cells)} |")
    refused = [r for r in rows if r.status == "refused"]
    lines += ["", "Refused:", "", *(f"- {r.model_type}: {_sentence(r.refused)}" for r in refused)]
    lost = [r for r in rows if r.status == "not built"]
    lines += ["", "Not built:", "", *(f"- {r.model_type}: {_sentence(r.not_built)}" for r in lost)]
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    if not found.get("equal"):
        return f"**{found.get('error') or 'differs by ' + format(found['distance'], '.2g')}**"
    return "C" if found["container"] == "compressed-tensors" else "M"


def _sentence(text: str | None) -> str:
    return re.sub(r"^\w+Error: ", "", str(text)).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; all by default")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "every_architecture.json")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _give_up)
    rows = []
    for model_type in options.types.split(",") if options.types else MODEL_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(_SECONDS)
            rows.append(examine(model_type, Path(folder)))
            signal.alarm(0)
        r = rows[-1]
        detail = r.not_built or r.refused or {t: f.get("error") or f"{f['distance']:.1e}" for t, f in r.formats.items()}
        print(f"{r.model_type:28} {r.status:9} {detail}", flush=True)
    data = {"machine": describe(), "rows": [{"status": r.status, **asdict(r)} for r in rows]}
    write_json(options.json, data)
    text = table(rows)
    print(text.partition("\n")[0])
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 1 if any(r.status == "differs" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
