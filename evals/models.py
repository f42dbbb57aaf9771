"""Models as the evaluations see them: found, loaded, described, and run in pieces of logits."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxquant.errors import CheckpointError, MXQuantError
from mxquant.evals.hub import ensure_quick_failure

DTYPES = ("auto", "float32", "bfloat16", "float16")
_PACKED_METHODS = ("mxquant", "compressed-tensors")
_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Source:
    """A model that exists: ``given`` by the user, its ``config`` read, its weights not."""

    given: str
    folder: Path | None
    config: Any

    @property
    def quant_method(self) -> str | None:
        """``quant_method`` of its config, e.g. ``"mxquant"``; None for a dense model."""
        quantization = getattr(self.config, "quantization_config", None) or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        return None if method is None else str(getattr(method, "value", method))

    @property
    def max_positions(self) -> int | None:
        """The longest window the model was made for, in tokens; None where it has no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


@dataclass
class EvalModel:
    """A loaded causal language model with its tokenizer and what a report says about it.

    Attributes
    ----------
    name : what tables call it.
    scheme : number format of the linear weights, e.g. ``"fp4-ue5m3-b16"`` or ``"dense bfloat16"``.
    bits_per_weight : stored bits, scales included, over the quantized weights only; None if dense.
    disk_bytes : size of the checkpoint's weight files; None where they are not on this machine.
    weight_bytes : memory that parameters and buffers hold, tied ones counted once.
    """

    name: str
    source: str
    model: Any
    tokenizer: Any
    scheme: str = "dense"
    bits_per_weight: float | None = None
    disk_bytes: int | None = None
    weight_bytes: int = 0

    @property
    def vocab_size(self) -> int:
        """Number of logits a position gets."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @contextlib.contextmanager
    def logits(self, tokens: torch.Tensor) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Logits of ``tokens`` (int64 ``[batch, length]``), a range of positions at a time.

        Yields ``f(start, stop) -> [batch, stop - start, vocabulary]`` in the model's dtype. The
        body runs once and keeps its hidden states; the head runs for the positions asked for. All
        logits of a window are gigabytes where the vocabulary is large.
        """
        tokens = tokens.to(self.device)
        body = self.model.base_model
        if body is self.model or "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            whole = self.model(tokens, use_cache=False).logits
            yield lambda start, stop: whole[:, start:stop]
            return

        def piece(start: int, stop: int) -> torch.Tensor:
            keep = torch.arange(start, stop, device=tokens.device)
            return self.model(tokens, use_cache=False, logits_to_keep=keep).logits

        with _run_once(body):
            yield piece


@contextlib.contextmanager
def _run_once(module: torch.nn.Module) -> Iterator[None]:
    """While this lasts, ``module`` computes its first call and answers all others with that."""
    forward, kept = module.forward, []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(forward(*args, **kwargs))
        return kept[0]

    before = module.__dict__.get("forward")  # accelerate, too, replaces it on the instance
    module.forward = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]


def find_model(source: str | Path) -> Source:
    """Read the config of a folder or hub id, without loading weights.

    Raises ``CheckpointError`` if there is no such model or it is of no known architecture.
    """
    given = str(source)
    folder = Path(given).expanduser()
    is_folder = folder.is_dir()
    if folder.is_file():
        raise CheckpointError(f"{given} is a file; give the folder that holds config.json and the weights")
    if is_folder and not (folder / "config.json").is_file():
        raise CheckpointError(f"folder {given} has no config.json, so it is not a checkpoint")
    if not is_folder and not _may_be_hub_id(given):
        raise CheckpointError(f"no such folder or hub id: {given}")
    online = True if is_folder else ensure_quick_failure()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder if is_folder else given, local_files_only=is_folder)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and the hub's own
        if is_folder:
            raise CheckpointError(f"cannot read the config of {given}: {_first_line(error)}") from error
        why = "the hub does not have it, or not for you" if online else "no such folder, not cached, hub unreachable"
        raise CheckpointError(f"no such folder or hub id: {given} ({why})") from error
    return Source(given, folder if is_folder else None, config)


def load_model(
    source: str | Path | Source, *, dtype: str = "auto", device: str = "auto", name: str | None = None
) -> EvalModel:
    """Load a model for evaluation: quantized ones with packed weights, dense ones as they are.

    ``dtype`` is one of ``DTYPES`` and is that of activations and dense weights (``"auto"``: the
    checkpoint's); ``device`` ``"auto"`` is CUDA where there is one. Raises ``CheckpointError`` for
    a checkpoint that is missing, broken or incomplete.
    """
    found = source if isinstance(source, Source) else find_model(source)
    where = pick_device(device)
    if dtype not in DTYPES:
        raise MXQuantError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    place: Any = found.folder or found.given
    try:
        model = _load_weights(found, place, dtype, where)
    except MXQuantError:
        raise
    except Exception as error:  # a loader's boundary: safetensors, hub, OS and transformers errors alike
        raise CheckpointError(f"cannot load {found.given}: {_first_line(error)}") from error
    model.eval()
    scheme, bits = _describe(model, found.quant_method)
    return EvalModel(
        name=name or (found.folder.resolve().name if found.folder else found.given),
        source=found.given,
        model=model,
        tokenizer=_load_tokenizer(found, place),
        scheme=scheme,
        bits_per_weight=bits,
        disk_bytes=_disk_bytes(found),
        weight_bytes=_weight_bytes(model),
    )


def pick_device(device: str) -> torch.device:
    """``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ... as a device that is there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except Exception as error:  # torch's message depends on how it was built
        raise MXQuantError(f"device {device!r} is not available here; use --device cpu") from error
    return where


def _load_weights(found: Source, place: Any, dtype: str, where: torch.device) -> Any:
    kind = None if dtype == "auto" else getattr(torch, dtype)
    if found.quant_method in _PACKED_METHODS:
        import mxquant

        return mxquant.load(str(place), dtype=kind, device_map=None if where.type == "cpu" else str(where))
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        place, dtype=kind or "auto", output_loading_info=True, local_files_only=found.folder is not None
    )
    # transformers only warns and fills them with random numbers; a perplexity of that is a wrong number.
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"checkpoint {found.given} lacks {len(missing)} tensors, e.g. {missing[0]}")
    return model.to(where)


def _load_tokenizer(found: Source, place: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=found.folder is not None)
    except Exception as error:  # as above
        raise CheckpointError(f"cannot load the tokenizer of {found.given}: {_first_line(error)}") from error


def _describe(model: torch.nn.Module, method: str | None) -> tuple[str, float | None]:
    """Scheme and bits per weight of the quantized part."""
    from mxquant.modules import QuantLinear

    weights: Counter[str] = Counter()
    stored = 0
    for module in model.modules():
        if isinstance(module, QuantLinear):
            weights[module.scheme.name] += module.in_features * module.out_features
            stored += module.qweight.nbytes
    if not weights:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return (f"dense {dtype}" if method is None else method), None
    return " + ".join(name for name, _ in weights.most_common()), 8 * stored / weights.total()


def _weight_bytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}.values())


def _disk_bytes(found: Source) -> int | None:
    folder = found.folder
    if folder is None:
        from transformers.utils import cached_file

        with contextlib.suppress(Exception):  # only a figure in a table
            folder = Path(cached_file(found.given, "config.json", local_files_only=True)).parent
    if folder is None:
        return None
    for pattern in _WEIGHT_FILES:
        if files := list(folder.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return None


def _may_be_hub_id(text: str) -> bool:
    """``name`` or ``owner/name`` in the characters that the hub allows."""
    parts = text.split("/")
    return len(parts) <= 2 and all(p and p[0] not in ".-~" and p.replace("-", "").replace(".", "").replace("_", "").isalnum() for p in parts)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
