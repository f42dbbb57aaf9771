"""Broken checkpoints: each fault is a small function that breaks a copy of one good, tiny checkpoint.

Files are taken apart and put together here, without the safetensors library, which would refuse to
write most of this. ``SOURCES`` are faults of dense checkpoints, what ``mxquant quantize`` is given.
"""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from mxquant.cli.main import main

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"  # 48 x 32, in bfloat16


def make_good(folder: Path) -> None:
    """A random Llama in two shards, with a tokenizer of bytes, a chat template and other side files."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(models.BPE(vocab=letters | {"<s>": 256, "</s>": 257}, merges=[]))
    text.pre_tokenizer, text.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=text, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("Do as you like.")


# Name of a tensor -> dtype, shape, bytes.
Tensors = dict[str, tuple[str, list[int], bytes]]


@dataclass(frozen=True)
class Fault:
    """``breaks(folder)`` makes a good checkpoint a broken one; ``says``: what the message must have in it."""

    name: str
    breaks: Callable[[Path], object]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


SOURCES: list[Fault] = []


def add(name: str, breaks: Callable[[Path], object], *says: str) -> None:
    SOURCES.append(Fault(name, breaks, says))


def broken(*says: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Puts a function into the table under its own name."""

    def register(function: Callable[[Path], object]) -> Callable[[Path], object]:
        add(function.__name__.replace("_", " "), function, *says)
        return function

    return register


# Looking at what a command did


def run(*args: object) -> Result:
    """``mxquant ARGS`` in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


def stderr_line(result: Result) -> str:
    """The one line that a command which failed has printed to standard error."""
    lines = printed_errors(result)
    assert len(lines) == 1, result.stderr
    return lines[0]


def printed_errors(result: Result) -> list[str]:
    """What a command that failed has printed to standard error: a line for each problem, and nothing else."""
    if not isinstance(result.exception, SystemExit):
        raise AssertionError(f"a traceback: {result.exception!r}") from result.exception
    lines = result.stderr.splitlines()
    assert all(line.startswith("Error: ") for line in lines), result.stderr
    return lines


def tree(folder: Path) -> dict[str, object]:
    """Everything in a folder: the bytes of files, the targets of links."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.readlink() if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


# Taking files apart


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON object in a file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def config(**values: Any) -> Callable[[Path], object]:
    """Sets fields of the config; ``...`` removes one."""

    def change(data: dict[str, Any]) -> None:
        for key, value in values.items():
            data.pop(key, None) if value is ... else data.update({key: value})

    return lambda folder: edit_json(folder / "config.json", change)


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / INDEX, change)


def writes(file: str, data: bytes | str) -> Callable[[Path], object]:
    """Puts something else in the place of a file."""
    raw = data if isinstance(data, bytes) else data.encode()
    return lambda folder: (folder / file).write_bytes(raw)


def cut(file: str, length: int) -> Callable[[Path], object]:
    """Keeps the first ``length`` bytes of a file, or all but the last ``-length``."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:length])


def folder_in_place_of(file: str) -> Callable[[Path], object]:
    def breaks(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return breaks


def link_to(target: str, file: str) -> Callable[[Path], object]:
    """A symbolic link in the place of a file."""

    def breaks(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(target)

    return breaks


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def read_all(folder: Path) -> dict[str, Any]:
    """Every tensor of the good checkpoint, as PyTorch has it."""
    from safetensors.torch import load_file

    return load_file(folder / FIRST) | load_file(folder / SECOND)


def write_shard(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def header(change: Callable[[dict[str, Any]], object], file: str = SECOND) -> Callable[[Path], object]:
    """Changes the header of a shard, and none of its data."""

    def breaks(folder: Path) -> None:
        found, data = read_shard(folder / file)
        change(found)
        write_shard(folder / file, found, data)

    return breaks


def entry(**values: Any) -> Callable[[Path], object]:
    """Changes what the header says of the tensor ``UP``; ``...`` removes a field."""

    def change(found: dict[str, Any]) -> None:
        for key, value in values.items():
            found[UP].pop(key) if value is ... else found[UP].update({key: value})

    return header(change)


def repack(folder: Path, change: Callable[[Tensors], object], file: str = SECOND):
    """Write a shard anew from what ``change`` makes of its tensors: name -> dtype, shape, bytes. The index follows."""
    found, data = read_shard(folder / file)
    found.pop("__metadata__", None)
    tensors = {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in found.items()}
    change(tensors)
    made, end = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    write_shard(folder / file, made, b"".join(raw for _, _, raw in tensors.values()))

    def follow(data: dict[str, Any]) -> None:
        others = {name: f for name, f in data["weight_map"].items() if f != file}
        data["weight_map"] = others | dict.fromkeys(tensors, file)

    if (folder / INDEX).exists():
        edit_json(folder / INDEX, follow)


def value(name: str, bits: int) -> Callable[[Path], object]:
    """Puts the bfloat16 of these bits into row 5, column 3 of a tensor, or at element 3 of a vector."""

    def change(tensors: Tensors) -> None:
        dtype, shape, raw = tensors[name]
        at = 2 * (3 if len(shape) == 1 else 5 * shape[1] + 3)
        tensors[name] = dtype, shape, raw[:at] + struct.pack("<H", bits) + raw[at + 2 :]

    return lambda folder: repack(folder, change, shard_of(folder, name))


def as_dtype(name: str, dtype: str, size: int) -> Callable[[Path], object]:
    """Stores a tensor as zeros of another dtype."""

    def change(tensors: Tensors) -> None:
        shape = tensors[name][1]
        tensors[name] = dtype, shape, bytes(size * shape[0] * shape[1])

    return lambda folder: repack(folder, change, shard_of(folder, name))


def renamed(name: str) -> Callable[[Path], object]:
    """Gives the matrix ``UP`` a name that the model does not know."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors.pop(UP)

    return lambda folder: repack(folder, change)


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def only(folder: Path, **files: bytes) -> None:
    """Take the safetensors away and put other files there; ``__`` stands for a dot in their names."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)


# config.json

BOM = b"\xef\xbb\xbf"

add("config missing", lambda folder: (folder / "config.json").unlink(), "config.json")
add("config empty", writes("config.json", ""), "config.json")
add("config blank", writes("config.json", " \n"), "config.json")
add("config not JSON", writes("config.json", "model_type: llama"), "config.json")
add("config cut short", cut("config.json", 100), "config.json")
add("config a list", writes("config.json", "[1, 2]"), "config.json")
add("config null", writes("config.json", "null"), "config.json")
add("config a web page", writes("config.json", "<!DOCTYPE html><html>404"), "config.json")
add("config nested without end", writes("config.json", "[" * 100_000), "config.json")
add("config with a byte order mark", lambda f: writes("config.json", BOM + (f / "config.json").read_bytes())(f),
    "config.json", "BOM")  # fmt: skip
add("config in UTF-16", lambda f: writes("config.json", (f / "config.json").read_text().encode("utf-16"))(f),
    "config.json")  # fmt: skip
add("config in Latin-1", writes("config.json", '{"model_type": "caf\xe9"}'.encode("latin-1")), "config.json")
add("config a folder", folder_in_place_of("config.json"), "config.json")
add("config a link in a circle", link_to("config.json", "config.json"), "config.json")
add("config a link to nothing", link_to("nowhere", "config.json"), "config.json")
add("config without a model type", config(model_type=..., architectures=...), "config.json")
add("config of an unknown model type", config(model_type="no-such-model"), "config.json", "no-such-model")
add("config whose model type is a number", config(model_type=7), "config.json")
add(
    "config of a model that writes no text",
    config(model_type="vit"),
    "does not know architecture LlamaForCausalLM as a language model",
)
add("config with another hidden size", config(hidden_size=64), "lm_head.weight", "[260, 32]", "[260, 64]")
add("config with a hidden size in words", config(hidden_size="thirty-two"), "config.json", "hidden_size")
add("config with a hidden size of zero", config(hidden_size=0), "lm_head.weight", "[260, 0]")
add("config with a negative hidden size", config(hidden_size=-32), "config.json")
add("config with a hidden size that is a list", config(hidden_size=[32]), "config.json", "hidden_size")
add("config with heads that do not fit", config(num_attention_heads=5), "config.json")
add("config with no heads", config(num_attention_heads=0), "config.json")
add("config with too many layers", config(num_hidden_layers=3), "model.layers.2.")
add("config with too few layers", config(num_hidden_layers=1), "model.layers.1.")
add("config with layers in words", config(num_hidden_layers="two"), "config.json", "num_hidden_layers")
add("config with another vocabulary", config(vocab_size=100), "lm_head.weight", "[100, 32]")
add("config with an activation that does not exist", config(hidden_act="no-such-act"), "config.json", "no-such-act")
add("config with a dtype that does not exist", config(dtype="float99"), "config.json", "float99")
add("config with a null for the norm", config(rms_norm_eps=None), "config.json", "rms_norm_eps")
add("config with rope of no known kind", config(rope_scaling={"rope_type": "no-such-rope", "factor": 2.0}),
    "no-such-rope")  # fmt: skip
add("config of custom code", config(auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    model_type="custom-model"), "--trust-remote-code")  # fmt: skip

# Checkpoints that are something else

for kind in ("mxquant", "compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8", "no-such-method"):
    add(f"already quantized by {kind}", config(quantization_config={"quant_method": kind}), kind, "already quantized")
add("quantized by nobody knows what", config(quantization_config={"bits": 4}), "already quantized")
add("quantization config a text", config(quantization_config="gptq"), "config.json", "quantization_config")
add("quantization config a list", config(quantization_config=["gptq"]), "config.json", "quantization_config")
add("quantized by ModelOpt", writes("hf_quant_config.json", "{}"), "modelopt", "already quantized")


@broken("adapter", "merge")
def only_an_adapter(folder: Path) -> None:
    weights = (folder / SECOND).read_bytes()
    (folder / "config.json").unlink()
    only(folder, adapter_model__safetensors=weights, adapter_config__json=b'{"peft_type": "LORA"}')


@broken("adapter", "merge")
def an_adapter_beside_a_config(folder: Path) -> None:
    only(folder, adapter_model__safetensors=(folder / SECOND).read_bytes(), adapter_config__json=b"{}")


add("only ONNX", lambda f: only(f, model__onnx=b"onnx"), "model.onnx", "safetensors")
add("only HDF5", lambda f: only(f, tf_model__h5=b"hdf"), "tf_model.h5", "safetensors")
add("only Flax", lambda f: only(f, flax_model__msgpack=b"flax"), "flax_model.msgpack", "safetensors")
add("only a training state", lambda f: only(f, training_state__pt=b"torch"), "training_state.pt", "safetensors")
add("download not finished", lambda f: only(f, model__safetensors__incomplete=b"half"), "model.safetensors.incomplete")
add("no weights", only, "safetensors")
add("nothing at all", lambda f: [p.unlink() for p in f.iterdir()], "config.json")

# The index

add("index empty", writes(INDEX, ""), INDEX)
add("index not JSON", writes(INDEX, "weight_map"), INDEX)
add("index cut short", cut(INDEX, 300), INDEX)
add("index a list", writes(INDEX, "[]"), INDEX)
add("index in UTF-16", lambda f: writes(INDEX, (f / INDEX).read_text().encode("utf-16"))(f), INDEX)
add("index nested without end", writes(INDEX, "[" * 100_000), INDEX)
add("index a folder", folder_in_place_of(INDEX), INDEX)
add("index a link in a circle", link_to(INDEX, INDEX), INDEX)
add("index without weight_map", index(lambda d: d.pop("weight_map")), INDEX, "weight_map")
add("index whose weight_map is a list", index(lambda d: d.update(weight_map=[FIRST])), INDEX, "weight_map")
add("index that names no tensors", index(lambda d: d.update(weight_map={})), INDEX)
add("index with numbers for files", index(lambda d: d["weight_map"].update({UP: 2})), INDEX, UP)
add("index with an empty file name", index(lambda d: d["weight_map"].update({UP: ""})), INDEX, UP)
add("index with a NUL in a file name", index(lambda d: d["weight_map"].update({UP: "a\0b"})), INDEX, UP)
add("index with a very long file name", index(lambda d: d["weight_map"].update({UP: 300 * "x"})), INDEX, 300 * "x")
add("index that leads out of the folder", index(lambda d: d["weight_map"].update({UP: f"../{SECOND}"})), INDEX, UP)
add("index with an absolute path", index(lambda d: d["weight_map"].update({UP: "/etc/passwd"})), INDEX, "/etc/passwd")
add("index that names its own folder", index(lambda d: d["weight_map"].update({UP: "."})), INDEX, UP)
add("index that names another kind of file", index(lambda d: d["weight_map"].update({UP: "LICENSE"})), "LICENSE")
add("index that names a file that is not there", index(lambda d: d["weight_map"].update({UP: "more.safetensors"})),
    "more.safetensors")  # fmt: skip
add("index that names a tensor that is not there", index(lambda d: d["weight_map"].update({"ghost.weight": SECOND})),
    INDEX, "ghost.weight", SECOND)  # fmt: skip
add("index with a tensor in another file", index(lambda d: d["weight_map"].update({UP: FIRST})), INDEX, UP, FIRST)
add("index that leaves a tensor out", index(lambda d: d["weight_map"].pop(UP)), INDEX, UP, SECOND)
add("index that leaves a file out", index(lambda d: d.update(
    weight_map={n: f for n, f in d["weight_map"].items() if f == FIRST})), "lacks", "model.")  # fmt: skip
add("index of another model", index(lambda d: d.update(
    weight_map={f"other.{n}": f for n, f in d["weight_map"].items()})), INDEX, "other.")  # fmt: skip

# Weight files

add("shard missing", lambda folder: (folder / SECOND).unlink(), SECOND)
add("shard missing and no index", lambda f: [(f / name).unlink() for name in (SECOND, INDEX)], SECOND, "missing")
add("shard empty", writes(SECOND, b""), SECOND)
add("shard of seven bytes", cut(SECOND, 7), SECOND)
add("shard cut off in its header", cut(SECOND, 100), SECOND)
add("shard cut off after its header", lambda f: write_shard(f / SECOND, read_shard(f / SECOND)[0], b""), SECOND)
add("shard cut off in its data", cut(SECOND, -1000), SECOND)
add("shard that lacks its last byte", cut(SECOND, -1), SECOND)
add("shard with a byte too many", lambda f: writes(SECOND, (f / SECOND).read_bytes() + b"x")(f), SECOND)
add("shard of zeros", lambda f: writes(SECOND, bytes((f / SECOND).stat().st_size))(f), SECOND)
add("shard of ones", lambda f: writes(SECOND, b"\xff" * (f / SECOND).stat().st_size)(f), SECOND)
add("shard with a header longer than the file", writes(SECOND, struct.pack("<Q", 10**6) + b"{}"), SECOND)
add("shard with an enormous header length", writes(SECOND, struct.pack("<Q", 2**63) + b"{}"), SECOND)
add("shard whose header is not JSON", lambda f: write_shard(f / SECOND, b"{not json}", b""), SECOND)
add("shard whose header is a list", lambda f: write_shard(f / SECOND, b"[]", b""), SECOND)
add("shard whose header is not UTF-8", lambda f: write_shard(f / SECOND, b'{"\xff\xfe": 1}', b""), SECOND)
add("shard whose header nests without end", lambda f: write_shard(f / SECOND, b"[" * 100_000, b""), SECOND)
add("shard without tensors", lambda f: write_shard(f / SECOND, {}, b""), SECOND, INDEX)
add("shard that is a git-lfs pointer", writes(SECOND, (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 4000000000\n")),
    SECOND, "git-lfs", "git lfs pull")  # fmt: skip
add("shard that is a web page", writes(SECOND, "<!DOCTYPE html>\n<html><title>401</title></html>"), SECOND, "web page")
add("shard that is a JSON error", writes(SECOND, '{"error": "Repository not found"}'), SECOND)
add("shard that is compressed", lambda f: writes(SECOND, gzip.compress((f / SECOND).read_bytes()))(f), SECOND)
add("shard that is a folder", folder_in_place_of(SECOND), SECOND)
add("shard that is a link in a circle", link_to(SECOND, SECOND), SECOND)
add("shard that is a link to nothing", link_to("../../blobs/0123abcd", SECOND), SECOND)
add("shard that is there twice", lambda f: shutil.copyfile(f / FIRST, f / SECOND), FIRST, SECOND, "again in")


@broken(SECOND)
def shard_saved_by_torch(folder: Path) -> None:
    import torch

    torch.save({UP: torch.zeros(48, 32)}, folder / SECOND)


@broken("tensors")
def single_file_without_tensors(folder: Path) -> None:
    only(folder)
    write_shard(folder / "model.safetensors", {"__metadata__": {"format": "pt"}}, b"")


@broken(FIRST, SECOND, UP, "again in")
def tensor_in_two_shards(folder: Path) -> None:
    found, data = read_shard(folder / SECOND)
    raw = data[slice(*found[UP]["data_offsets"])]
    repack(folder, lambda tensors: tensors.update({UP: ("BF16", [48, 32], raw)}), FIRST)


@broken(FIRST, SECOND, UP, "again in")
def tensor_in_two_files_without_an_index(folder: Path) -> None:
    tensor_in_two_shards(folder)
    (folder / INDEX).unlink()


@broken(UP)
def tensor_twice_in_one_header(folder: Path) -> None:
    found, data = read_shard(folder / SECOND)
    text = json.dumps(found)
    again = json.dumps({UP: {**found[UP], "shape": [32, 48]}})
    write_shard(folder / SECOND, f"{text[:-1]}, {again[1:]}".encode(), data)


# Entries of a header

add("tensor without a dtype", entry(dtype=...), SECOND)
add("tensor without a shape", entry(shape=...), SECOND)
add("tensor without offsets", entry(data_offsets=...), SECOND)
add("tensor of an unknown dtype", entry(dtype="BF17"), SECOND)
add("tensor of a dtype in small letters", entry(dtype="bf16"), SECOND)
add("tensor of a dtype of another size", entry(dtype="F32"), SECOND)
add("tensor of elements smaller than a byte", entry(dtype="F4", shape=[192, 32]), UP, "F4")
add("tensor with a shape that is larger", entry(shape=[96, 32]), SECOND)
add("tensor with a shape that is a text", entry(shape="48x32"), SECOND)
add("tensor with a negative size", entry(shape=[-48, -32]), SECOND)
add("tensor with a size of zero", entry(shape=[0, 32]), SECOND)
add("tensor with a fraction for a size", entry(shape=[48.5, 32]), SECOND)
add("tensor with sizes that overflow", entry(shape=[2**63, 2**63]), SECOND)
add("tensor with three offsets", entry(data_offsets=[0, 1, 2]), SECOND)
add("tensor with offsets backwards", entry(data_offsets=[3072, 0]), SECOND)
add("tensor past the end of the file", entry(data_offsets=[10**9, 10**9 + 3072]), SECOND)
add("tensor over another one", header(lambda h: h[UP].update(data_offsets=h[NORM]["data_offsets"])), SECOND)
add("tensor with a hole before it", header(lambda h: h.pop(UP)), SECOND)
add("tensor that is a number", header(lambda h: h.update({UP: 7})), SECOND)
add("metadata that is no text", header(lambda h: h.update(__metadata__={"format": 7})), SECOND)

# Tensors that are whole, but not what the model asks for

add("tensor missing", lambda f: repack(f, lambda t: t.pop(UP)), "lacks", UP)
add("norm missing", lambda f: repack(f, lambda t: t.pop(NORM)), "lacks", NORM)
add("tensor transposed", entry(shape=[32, 48]), UP, "[32, 48]", "[48, 32]")
add("tensor as a vector", entry(shape=[48 * 32]), UP, "[1536]", "[48, 32]")
add("tensor with one dimension more", entry(shape=[1, 48, 32]), UP, "[1, 48, 32]")
add("tensor that is a scalar", lambda f: repack(f, lambda t: t.update({UP: ("BF16", [], b"\0\0")})), UP, "[]")
add("tensor with nothing in it", lambda f: repack(f, lambda t: t.update({UP: ("BF16", [0, 32], b"")})), UP, "[0, 32]")
for name, size in {"I8": 1, "U8": 1, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F64": 8, "C64": 8}.items():
    add(f"weights in {name}", as_dtype(UP, name, size), UP, name)

# Values

for name, bits, says in (
    ("nan", 0x7FC0, "nan"),
    ("-nan", 0xFFC1, "nan"),
    ("inf", 0x7F80, "inf"),
    ("-inf", 0xFF80, "-inf"),
):
    add(f"{name} in a weight", value(UP, bits), UP, f"{says} at row 5, column 3")
    add(f"{name} in a norm", value(NORM, bits), NORM, f"{says} at", "column 3")
add("nan in the embedding", value(EMBEDDING, 0x7FC0), EMBEDDING, "nan at row 5, column 3")

# Names; a matrix that the model does not know would stay dense by accident

ODD_NAMES = {
    "spaces": "my weights . weight",
    "letters from everywhere": "模型.λ.żółć.🦙.weight",
    "a path": "../../etc/passwd",
    "a newline": "first\nsecond.weight",
    "an escape sequence": "\x1b[31mred.weight",
    "a thousand letters": 1000 * "x" + ".weight",
    "markup": "[bold]weight[/bold]",
    "quotes": "'\"`$(ls).weight",
}
SHOWN = {"a newline": "first second.weight", "an escape sequence": r"\x1b[31mred.weight"}
for what, odd in ODD_NAMES.items():
    add(f"tensor named by {what}", renamed(odd), UP, SHOWN.get(what, odd))

# Side files


@broken("tokenizer.json")
def side_file_that_is_a_link_in_a_circle(folder: Path) -> None:
    link_to("tokenizer.json", "tokenizer.json")(folder)
