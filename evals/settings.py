"""How models are evaluated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class EvalSettings:
    """How models are evaluated; the fields are the options of ``mxquant eval``."""

    seq_len: int | None = None
    windows: int | None = None
    batch_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    tasks: str | None = None
    limit: float | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    trust_remote_code: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
