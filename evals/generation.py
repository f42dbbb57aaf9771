"""Text from a model, as it is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, TextStreamer

from mxquant.convert.memory import anonymous_bytes
from mxquant.errors import CheckpointError, MXQuantError
from mxquant.evals.find_model import first_line
from mxquant.evals.models import EvalModel

Emit = Callable[[str], None]


@dataclass(frozen=True)
class GenerateSettings:
    """How to continue a prompt.

    ``temperature`` 0 takes the likeliest token each time; above, tokens are drawn with ``seed`` from
    the likeliest that together have probability ``top_p``. ``chat``: put the prompt into the
    tokenizer's chat template; None: if it has one.
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool | None = None


@dataclass(frozen=True)
class Generated:
    """A text and what it took.

    ``seconds``: from the first new token to the last; ``prompt_seconds``: to the first. ``stopped``:
    why it ended. ``weight_bytes``: what the model's weights hold; ``process_bytes``: memory of the
    process, on a GPU its largest there; None where the system does not tell.
    """

    model: str
    scheme: str
    bits_per_weight: float | None
    prompt: str
    text: str
    chat: bool
    prompt_tokens: int
    tokens: int
    prompt_seconds: float
    seconds: float
    stopped: str
    weight_bytes: int
    process_bytes: int | None

    @property
    def tokens_per_second(self) -> float | None:
        """Of tokens after the first; None where there is only one."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def generate(model: EvalModel, prompt: str, settings: GenerateSettings, emit: Emit | None = None) -> Generated:
    """Continue ``prompt``; ``emit`` gets pieces of the text as soon as they are certain.

    Raises ``MXQuantError`` for a prompt that is empty or too long, and for a chat without a template.
    """
    chat = _is_chat(model, settings)
    inputs = _tokenize(model, prompt, chat)
    length = int(inputs["input_ids"].shape[1])
    room = _room(model, length)
    limit = settings.max_new_tokens if room is None else min(settings.max_new_tokens, room)
    clock = _Clock(model.tokenizer, emit)
    torch.manual_seed(settings.seed % 2**63)  # any number is a seed
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        tokens = model.model.generate(
            **inputs.to(model.device),
            max_new_tokens=limit,
            streamer=clock,
            logits_processor=[_NumbersOnly(model.source)],
            **_sampling(settings),
            **_padding(model),
        )[0, length:]
    first, last = clock.times[0], clock.times[-1]
    stopped = "end of text"
    if len(tokens) == limit and int(tokens[-1]) not in _ends(model):
        stopped = "--max-new-tokens" if limit == settings.max_new_tokens else "the model's last position"
    return Generated(
        model=model.name,
        scheme=model.scheme,
        bits_per_weight=model.bits_per_weight,
        prompt=prompt,
        text=model.tokenizer.decode(tokens, skip_special_tokens=True),
        chat=chat,
        prompt_tokens=length,
        tokens=len(tokens),
        prompt_seconds=first - started,
        seconds=last - first,
        stopped=stopped,
        weight_bytes=model.weight_bytes,
        process_bytes=_process_bytes(model.device),
    )


class _Clock(TextStreamer):
    """Hands on the text as words are whole, and notes when each token came."""

    def __init__(self, tokenizer: Any, emit: Emit | None):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._emit = emit

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._emit is not None and text:
            self._emit(text)


class _NumbersOnly(LogitsProcessor):
    """Stops a model whose logits are NaN; the likeliest token of none is as good as any."""

    def __init__(self, source: str):
        self._source = source

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if bool(scores.isnan().any()):
            raise MXQuantError(f"the logits of {self._source} are NaN; `mxquant verify` looks for the reason")
        return scores


def _is_chat(model: EvalModel, settings: GenerateSettings) -> bool:
    has_template = bool(getattr(model.tokenizer, "chat_template", None))
    if settings.chat and not has_template:
        raise MXQuantError(f"the tokenizer of {model.source} has no chat template; use --raw")
    return has_template if settings.chat is None else settings.chat


def _tokenize(model: EvalModel, prompt: str, chat: bool) -> Any:
    try:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            inputs = model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = model.tokenizer(prompt, return_tensors="pt")
    except Exception as error:  # of a template as of a text that is none, they come in many kinds
        what = "chat template" if chat else "tokenizer"
        raise MXQuantError(f"the {what} of {model.source} cannot take the prompt: {first_line(error)}") from error
    inputs.pop("token_type_ids", None)
    if not inputs["input_ids"].numel():
        raise MXQuantError("the prompt has no tokens")
    model.check_tokens(inputs["input_ids"])
    return inputs


def _room(model: EvalModel, length: int) -> int | None:
    """How many tokens the model can add to a prompt; None where nothing limits them."""
    positions = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    if length >= positions:
        raise MXQuantError(f"the prompt has {length} tokens, but the model supports only {positions}; shorten it")
    return positions - length


def _sampling(settings: GenerateSettings) -> dict[str, Any]:
    """Arguments that leave nothing to the model's own generation config but where to stop."""
    if settings.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}


def _ends(model: EvalModel) -> set[int]:
    ends = model.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if not all(end is None or isinstance(end, int) for end in ends):
        raise CheckpointError(f"generation_config.json of {model.source}: eos_token_id {ends} is not a token's number")
    return set(ends)


def _padding(model: EvalModel) -> dict[str, int]:
    """One sequence needs no padding, but transformers warns where it does not know the token."""
    end = next(iter(_ends(model)))
    return {} if model.model.generation_config.pad_token_id is not None or end is None else {"pad_token_id": end}


def _process_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else anonymous_bytes()
