# SPDX-License-Identifier: Apache-2.0
"""A copy of a checkpoint that computes the same with narrower (or wider) weights.

    python benchmarks/make_narrow_model.py MODEL OUT --factor 2^-6
    python benchmarks/make_narrow_model.py MODEL OUT --sigma 0.005

Real models whose weights are narrow are large; this makes a small one as narrow. How, and for which
architectures, is described in ``mxquant/analysis/rescale.py``. The copy's logits are compared with
those of the original on a few tokens before anything is written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rescale import rescale
from transformers import AutoModelForCausalLM, AutoTokenizer

import mxquant.bundled
from mxquant.errors import MXQuantError
from mxquant.evals.find_model import find_model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or hub id of a dense model, or 'bundled'")
    parser.add_argument("out", type=Path, help="folder to write")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--factor", type=number, help="multiplies every projection's standard deviation, e.g. 2^-6")
    goal.add_argument("--sigma", type=number, help="the standard deviation that every projection should have")
    return parser.parse_args()


def number(text: str) -> float:
    """``0.25``, or a power such as ``2^-6``."""
    base, power, exponent = text.partition("^")
    return float(base) ** float(exponent) if power else float(text)


def make_copy(source: str | Path, out: Path, **goal: Any) -> list[Any]:
    """Rescale a checkpoint (arguments as for :func:`rescale`) into the folder ``out``."""
    if out.exists() and any(out.iterdir()):
        raise MXQuantError(f"{out} exists and is not empty")
    find_model(source)  # for its errors, which are short
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    tokens = torch.arange(256)[None] % model.config.vocab_size
    before = logits(model, tokens)
    moved = rescale(model, **goal)
    if not torch.equal(logits(model, tokens), before):
        raise MXQuantError("the logits have changed, so this is not the same model any more; nothing was written")
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return moved


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False).logits


def main() -> None:
    args = parse_args()
    source = mxquant.bundled.path() if args.model == "bundled" else args.model
    try:
        moved = make_copy(source, args.out, factor=args.factor, sigma=args.sigma)
    except (MXQuantError, OSError) as error:
        sys.exit(f"Error: {error}")
    sigmas = [(m.before, m.after) for m in moved]
    for when, values in zip(("before", "after"), zip(*sigmas, strict=True), strict=True):
        middle = statistics.median(values)
        print(
            f"{when}: standard deviation of the projections {min(values):.3g} to {max(values):.3g}, median {middle:.3g}"
        )
    print(f"written to {args.out}; its logits are those of the original, bit for bit")


if __name__ == "__main__":
    main()
