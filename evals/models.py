"""Models as the evaluations see them: loaded, described, and run in pieces of logits."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxquant.codec.qtensor import QTensor
from mxquant.errors import CheckpointError, MXQuantError
from mxquant.evals.find_model import Source, find_model, first_line

# How the names of the files begin that tokenizers are read from.
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "spm", "merges", "tekken", "bpe")
DTYPES = ("auto", "float32", "bfloat16", "float16")


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

    def check_tokens(self, tokens: torch.Tensor) -> None:
        """Raise ``CheckpointError`` if the tokenizer makes tokens that the model has no embedding for."""
        rows, largest = self.model.get_input_embeddings().weight.shape[0], int(tokens.max())
        if largest >= rows:
            raise CheckpointError(
                f"the tokenizer of {self.source} produces token {largest}, but the model has only "
                f"{rows} tokens; do they belong to the same model?"
            )

    @contextlib.contextmanager
    def logits(self, tokens: torch.Tensor) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Logits of ``tokens`` (int64 ``[batch, length]``), a range of positions at a time.

        Yields ``f(start, stop) -> [batch, stop - start, vocabulary]`` in the model's dtype. The
        body runs once and keeps its hidden states; the head runs for the positions asked for. All
        logits of a window are gigabytes where the vocabulary is large.
        """
        self.check_tokens(tokens)
        tokens = tokens.to(self.device)
        if not takes_positions(self.model):
            whole = self.model(tokens, use_cache=False).logits
            yield lambda start, stop: whole[:, start:stop]
            return

        def piece(start: int, stop: int) -> torch.Tensor:
            keep = torch.arange(start, stop, device=tokens.device)
            return self.model(tokens, use_cache=False, logits_to_keep=keep).logits

        with _run_once(self.model.base_model):
            yield piece


def takes_positions(model: Any) -> bool:
    """Whether the model has a body and a head, and can run the head for chosen positions only."""
    return model.base_model is not model and "logits_to_keep" in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def _run_once(module: torch.nn.Module) -> Iterator[None]:
    """While this lasts, ``module`` computes its first call and answers all others with that."""
    forward = module.forward
    kept: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(forward(*args, **kwargs))
        return kept[0]

    with forward_is(module, once):
        yield


@contextlib.contextmanager
def answering(module: torch.nn.Module, answer: Any) -> Iterator[None]:
    """While this lasts, ``module`` answers every call with ``answer``."""
    with forward_is(module, lambda *args, **kwargs: answer):
        yield


@contextlib.contextmanager
def forward_is(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, calls of ``module`` go to ``forward``."""
    before = module.__dict__.get("forward")  # accelerate, too, replaces it on the instance
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]


def load_model(
    source: str | Path | Source,
    *,
    dtype: str = "auto",
    device: str = "auto",
    name: str | None = None,
    trust_remote_code: bool = False,
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
    options = {"local_files_only": found.folder is not None, "trust_remote_code": trust_remote_code}
    try:
        model = _load_weights(found, dtype, where, options)
    except MXQuantError:
        raise
    except Exception as error:  # a loader's boundary: safetensors, hub, OS and transformers errors alike
        raise CheckpointError(f"cannot load {found.given}: {first_line(error)}") from error
    model.eval()
    scheme, bits = describe_weights(model, found.quant_method)
    return EvalModel(
        name=name or found.name,
        source=found.given,
        model=model,
        tokenizer=_load_tokenizer(found, options),
        scheme=scheme,
        bits_per_weight=bits,
        disk_bytes=found.disk_bytes,
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


def _load_weights(found: Source, dtype: str, where: torch.device, options: dict[str, Any]) -> Any:
    import mxquant

    model, info = mxquant.load(
        found.folder or found.given,
        dtype=dtype,
        device_map=None if where.type == "cpu" else str(where),
        output_loading_info=True,
        **options,
    )
    # transformers only warns and fills them with random numbers; a perplexity of that is a wrong number.
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"checkpoint {found.given} lacks tensor {missing[0]}{more}")
    return model


def _load_tokenizer(found: Source, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(found.folder or found.given, **options)
    except Exception as error:  # as above
        if found.folder is not None and not any(p.name.startswith(_TOKENIZER_FILES) for p in found.folder.iterdir()):
            raise CheckpointError(f"{found.given} has no tokenizer; copy its files from the original model") from error
        raise CheckpointError(f"cannot load the tokenizer of {found.given}: {first_line(error)}") from error


def describe_weights(model: torch.nn.Module, method: str | None) -> tuple[str, float | None]:
    """Scheme and bits per weight of the quantized part."""
    weights: Counter[str] = Counter()
    stored = 0
    for q in _packed(model):
        weights[q.scheme.name] += math.prod(q.shape)
        stored += q.nbytes
    if not weights:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return (f"dense {dtype}" if method is None else method), None
    return " + ".join(name for name, _ in weights.most_common()), 8 * stored / weights.total()


def _packed(model: torch.nn.Module) -> Iterator[QTensor]:
    """Every packed matrix, those of experts too; one that several layers share comes once."""
    from mxquant.nn.quant_linear import QuantLinear
    from mxquant.transformers.experts import QuantExperts

    seen = set()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            found = [module.qweight]
        elif isinstance(module, QuantExperts):
            found = [q for name in module.entries for q in module.qtensors(name)]
        else:
            continue
        for q in found:
            if q.packed.data_ptr() not in seen:
                seen.add(q.packed.data_ptr())
                yield q


def _weight_bytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}.values())


def quiet_transformers(*, progress_bars: bool) -> None:
    """Keep transformers' warnings, and unless ``progress_bars`` its bars, off standard error."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    if not progress_bars:
        disable_progress_bar()
