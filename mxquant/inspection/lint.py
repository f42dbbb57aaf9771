"""What serving engines need of shapes, as warnings: the checkpoint is right, but a kernel may refuse it.

For the formats that vLLM reads, of a layer ``[N, K]``, projections that it fuses taken together:

- in_features: a whole number of blocks on each GPU (``ModelOptNvFp4LinearMethod.create_weights``: "in
  features size is not multiple of 16");
- Marlin, on GPUs whose tensor cores do not multiply FP4: a tile of 128 x 64 or 64 x 128 must divide
  ``K x N`` (``thread_config_t`` in its ``marlin.cu``; else "Invalid thread config", vLLM issue 38022). Newer
  versions pad ``N`` to 64 (``marlin_utils_fp4.py``, pull request 37296);
- CUTLASS and FlashInfer, on GPUs that do: ``N`` and ``K`` must be multiples of 32
  (``nvfp4_scaled_mm_kernels.cu``). Versions since pull request 31099 pad both, which costs a copy;
- experts: multiples of 128, to which their scales are padded; where they were not, results were wrong
  (pull request 35497).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.transformers.fused import fused_groups

_CUTLASS = 32
_EXPERT_TILE = 128
_MARLIN_TILES = ((128, 64), (64, 128))


def lint(weights: Iterable[PackedWeight], method: str | None) -> list[str]:
    """A sentence for each need that some layers do not meet, with their shape and number."""
    if method is None or "vLLM" not in registry.get(method).readers:
        return []
    layers: dict[str, list[PackedWeight]] = defaultdict(list)
    weights = list(weights)
    fused = fused_groups(weight.module for weight in weights)
    for weight in weights:
        layers[fused.get(weight.module, weight.module)].append(weight)
    found: dict[str, list[str]] = defaultdict(list)
    for members in layers.values():
        n, k = sum(w.shape[0] for w in members), members[0].shape[1]
        for need in _unmet(n, k, members[0]):
            found[need].append(f"{' + '.join(w.module for w in members)} [{n}, {k}]")
    return [f"{need}: {_examples(names)}" for need, names in found.items()]


def _unmet(n: int, k: int, weight: PackedWeight) -> list[str]:
    found = []
    block = weight.scheme.block_shape[1]
    if k % block:
        found.append(f"engines need in_features to be whole blocks of {block}")
    if not any(k % tile_k == 0 and n % tile_n == 0 for tile_k, tile_n in _MARLIN_TILES):
        found.append(
            "Marlin (GPUs without FP4) takes [N, K] in multiples of [64, 128] or [128, 64]; vLLM pads N or refuses"
        )
    if n % _CUTLASS or k % _CUTLASS:
        found.append(
            f"CUTLASS (GPUs with FP4) takes N and K in multiples of {_CUTLASS}; vLLM pads, or refuses in older versions"
        )
    if _is_expert(weight) and (n % _EXPERT_TILE or k % _EXPERT_TILE):
        found.append(f"kernels for experts pad to multiples of {_EXPERT_TILE}, and some versions of vLLM get it wrong")
    return found


def _is_expert(weight: PackedWeight) -> bool:
    return weight.experts is not None or ".experts." in weight.module


def _examples(names: list[str]) -> str:
    alike = list(dict.fromkeys(with_wildcards(name) for name in names))
    more = f" and {len(alike) - 2} other kinds" if len(alike) > 2 else ""
    return f"{', '.join(alike[:2])}{more} ({len(names)} layers)"
