"""The reader of safetensors headers sees what safetensors itself sees, and names what is wrong with a file."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mxquant.checkpoint.headers import HeaderError, read_header
from mxquant.transformers.matching import read_headers

DTYPES = [torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


@pytest.fixture
def file(tmp_path):
    tensors = {f"t{i}": torch.zeros(i, 3).to(dtype) for i, dtype in enumerate(DTYPES)}  # the first is empty
    tensors |= {"scalar": torch.tensor(1.0), "three": torch.zeros(2, 1, 5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_names_dtypes_shapes_and_order_are_those_of_safetensors(file):
    found = read_header(file)
    with safe_open(file, framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
        expected = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
        nbytes = {name: handle.get_tensor(name).nbytes for name in slices}
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == expected
    assert {name: info.nbytes for name, info in found.items()} == nbytes
    filled = [name for name in expected if nbytes[name]]
    assert [name for name in found if nbytes[name]] == filled
    assert {info.file for info in found.values()} == {file}
    assert read_headers([str(file)]) == found


def header(change):
    def apply(data):
        (length,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return apply


FAULTS = {
    "nothing": (lambda data: b"", "no whole safetensors header"),
    "a header that is cut": (lambda data: data[:40], "no whole safetensors header"),
    "a length without end": (lambda data: b"\xff" * 8 + data[8:], "no whole safetensors header"),
    "no JSON": (lambda data: data[:8] + b"x" + data[9:], "damaged safetensors header"),
    "bytes missing": (lambda data: data[:-3], "3 bytes too short"),
    "bytes too many": (lambda data: data + b"1234", "4 bytes too long"),
    "a dtype of nobody": (header(lambda h: h["three"].update(dtype="F3")), "unknown dtype F3"),
    "a shape that does not fit": (header(lambda h: h["three"].update(shape=[2, 6])), "three takes 40 bytes"),
    "no shape": (header(lambda h: h["three"].pop("shape")), "shape"),
    "an overlap": (header(lambda h: h["three"].update(data_offsets=[0, 40])), "does not follow"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_file_is_named(name, file):
    change, message = FAULTS[name]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(HeaderError, match=message):
        read_header(file)
