# SPDX-License-Identifier: Apache-2.0
"""Train the model that ships with mxquant, from scratch, on the text that every Python ships.

    python benchmarks/train_bundled_model.py --out mxquant/bundled/model

takes about 25 minutes on two CPU cores. The result depends on the Python whose text is read, and
in its last digits on the number of threads; the model card that is written along says which.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mxquant.bundled import text

BOS, EOS = "<s>", "</s>"
CONTEXT = 512


def parse_args() -> argparse.Namespace:
    """The options; their defaults are the recipe of the shipped checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write (overwritten)")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=2, help=f"windows of {CONTEXT} tokens")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak, after the warm-up")
    parser.add_argument("--warmup", type=int, default=250, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--intermediate", type=int, default=448)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return parser.parse_args()


def make_tokenizer(documents: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips, and every text begins with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with tied embeddings and grouped-query attention, randomly initialized, in fp32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # EOS pads; a padding row in the embedding would never be trained
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return model


def make_optimizer(model: LlamaForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a hundredth of the peak."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def batches(encoded: list[list[int]], batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless [batch, CONTEXT + 1] token ids: documents packed in a new order every epoch."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(encoded, len(encoded))
        stream = torch.tensor([token for document in order for token in document])
        stream = stream[rng.randrange(CONTEXT) :]
        windows = stream[: len(stream) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        picks = torch.tensor(rng.sample(range(len(windows)), len(windows)))
        for rows in picks.split(batch):
            if len(rows) == batch:
                yield windows[rows]


def train(model: LlamaForCausalLM, encoded: list[list[int]], args: argparse.Namespace) -> tuple[float, float]:
    """Train in place. Returns the mean loss of the last 5 % of steps and the tokens per second."""

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compute = torch.compile(loss_of) if args.compile else loss_of
    optimizer = make_optimizer(model, args)
    model.train()
    losses: list[float] = []
    start = time.perf_counter()
    for step, ids in zip(range(args.steps), batches(encoded, args.batch, args.seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        # Weights, gradients and optimizer state stay fp32; matrix products run in bf16.
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            speed = len(losses) * args.batch * CONTEXT / (time.perf_counter() - start)
            left = (args.steps - step - 1) * args.batch * CONTEXT / speed
            mean = sum(losses[-50:]) / 50
            line = f"{step + 1:6d}  loss {mean:.3f}  {speed:,.0f} tok/s  {left:.0f} s left"
            print(line, flush=True)
    tail = losses[-max(1, args.steps // 20) :]
    return sum(tail) / len(tail), len(losses) * args.batch * CONTEXT / (time.perf_counter() - start)


@torch.inference_mode()
def heldout_loss(folder: Path, ids: torch.Tensor) -> float:
    """Mean NLL in nats a token of the checkpoint on disk, in fp32, windows of CONTEXT tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for window in windows.split(16):
        logits = model(input_ids=window).logits[:, :-1]
        targets = window[:, 1:].flatten()
        total += cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total / (len(windows) * (CONTEXT - 1))


def model_card(facts: dict[str, object], args: argparse.Namespace) -> str:
    """The README of the checkpoint."""
    recipe = {key: value for key, value in vars(args).items() if key not in ("out", "compile")}
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# The model bundled with mxquant

A Llama-architecture language model of {facts["parameters"]:,} parameters (bf16, tied embeddings,
grouped-query attention, context {CONTEXT}), trained from scratch so that quantization can be
tried and tested on trained weights without a download. It writes text in the manner of the Python
documentation; it knows nothing and is of no use for anything else.

Licence: Apache-2.0. Made by `benchmarks/train_bundled_model.py` in mxquant's repository.

## Data
The documentation topics and the docstrings of the standard library, as read by
`mxquant.bundled.text` from Python {facts["python"]}: {facts["train_bytes"]:,} bytes
({facts["train_tokens"]:,} tokens) to train on. The held-out part, split off by document name, was
used for nothing but the figures below (SHA-256 `{facts["heldout_sha256"]}`). No text is included.

## Training
AdamW (betas 0.9, 0.95; gradients clipped at 1), linear warm-up and cosine decay, batches of packed
documents, matrix products in bf16, the rest in fp32.

```json
{json.dumps(recipe)}
```

## Results
| | |
|---|---|
| tokens seen | {facts["tokens_seen"]:,} ({facts["epochs"]:.1f} epochs) |
| training time | {facts["minutes"]:.1f} minutes, {args.threads} CPU threads |
| final training loss | {facts["train_loss"]:.3f} nats per token |
| held-out loss | {facts["heldout_loss"]:.3f} nats per token |
| held-out perplexity | {facts["perplexity"]:.2f} per token, windows of {CONTEXT} |
| held-out bits per byte | {facts["bits_per_byte"]:.3f} |
"""


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bf16, config and tokenizer; file by file in place of any older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.bfloat16().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        config = Path(temporary) / "tokenizer_config.json"
        fields = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        del fields["backend"]  # the class goes by this name in transformers 4 and 5
        config.write_text(json.dumps(fields, indent=2) + "\n")
        for path in Path(temporary).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def main() -> None:
    """Tokenizer, training, checkpoint, figures, model card."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    documents = text.documents("train")
    tokenizer = make_tokenizer(documents, args.vocab)
    # Each document as BOS ... EOS; the tokenizer adds the BOS.
    encoded = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(documents)["input_ids"]]
    train_tokens = sum(map(len, encoded))
    model = make_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters, {train_tokens:,} tokens to train on", flush=True)

    start = time.perf_counter()
    train_loss, speed = train(model, encoded, args)
    minutes = (time.perf_counter() - start) / 60
    save(model, tokenizer, args.out)

    heldout = text.heldout_text()
    ids = tokenizer(heldout, return_tensors="pt")["input_ids"][0]
    loss = heldout_loss(args.out, ids)
    seen = args.steps * args.batch * CONTEXT
    facts = text.provenance() | {
        "parameters": model.num_parameters(),
        "train_bytes": sum(len(document.encode("utf-8")) for document in documents),
        "train_tokens": train_tokens,
        "tokens_seen": seen,
        "epochs": seen / train_tokens,
        "minutes": minutes,
        "train_loss": train_loss,
        "heldout_loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) * len(ids) / len(heldout.encode("utf-8")),
    }
    (args.out / "README.md").write_text(model_card(facts, args), encoding="utf-8")
    print(json.dumps(facts | {"tokens_per_second": round(speed)}, indent=2))


if __name__ == "__main__":
    main()
