"""Checkpoints of compressed-tensors made from dense ones without the planner: what is packed and ignored is given."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.schemes.formats import QuantScheme

_GROUPS = {
    "nvfp4": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}


def pack(source: Path, out: Path, preset: str, packed: str, ignore: Sequence[str]) -> Path:
    """Pack each matrix whose name matches the pattern ``packed``, with one global scale for all."""
    scheme = QuantScheme.preset(preset)
    found: dict[str, torch.Tensor] = {}
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    chosen = [n for n, t in weights.items() if n.endswith(".weight") and t.ndim == 2 and re.search(packed, n)]
    amax = torch.stack([weights[name].float().abs().amax() for name in chosen]).amax()
    one = (448 * 6 / amax).reshape(1) if scheme.global_scale else None
    for name, weight in weights.items():
        if name not in chosen:
            found[name] = weight
            continue
        q = mxquant.quantize(weight, scheme, global_scale=one)
        found |= {f"{name}_packed": q.packed, f"{name}_scale": q.scale}
        if q.global_scale is not None:
            found[f"{name}_global_scale"] = q.global_scale.clone()
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": f"{preset}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **_GROUPS[preset]},
            }
        },
        "ignore": list(ignore),
    }
    (out / "config.json").write_text(json.dumps(config))
    return out
