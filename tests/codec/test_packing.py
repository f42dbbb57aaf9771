"""Codes <-> bytes, against a bit string written out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from mxquant.codec.numerics import decode_packed, element_table
from mxquant.codec.packing import pack, unpack
from mxquant.schemes.formats import ELEMENTS, packed_row_bytes


def reference_row(codes: list[int], bits: int) -> list[int]:
    """Codes one after the other from the lowest bit up, cut into bytes: little-endian."""
    number = sum(code << bits * i for i, code in enumerate(codes))
    return list(number.to_bytes(packed_row_bytes(len(codes), bits), "little"))


def random_codes(rows: int, columns: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 6, 7, 8, 17, 64, 127])
def test_packing_is_the_little_endian_bit_string_and_unpacking_undoes_it(bits, columns):
    codes = random_codes(5, columns, bits, seed=columns)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [reference_row(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits, columns), codes)


def test_the_even_index_is_the_low_nibble():
    assert pack(torch.tensor([[0x1, 0xE, 0x7]], dtype=torch.uint8), 4).tolist() == [[0xE1, 0x07]]


def test_every_pair_of_fp4_codes_survives():
    first, second = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack([first, second], -1).view(1, -1).to(torch.uint8)
    packed = pack(codes, 4)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(unpack(packed, 4, 512), codes)


def test_every_fp6_code_survives_in_every_place_beside_all_others():
    place = torch.arange(4).view(4, 1, 1)
    code = torch.arange(64).view(1, 64, 1)
    slots = torch.arange(4).view(1, 1, 4)
    for others in (0, 63):
        codes = torch.where(slots == place, code, others).view(-1, 4).to(torch.uint8)
        assert torch.equal(unpack(pack(codes, 6), 6, 4), codes)


@pytest.mark.parametrize("bits", [4, 6])
def test_padding_is_zero_codes(bits):
    full = pack(torch.cat([random_codes(3, 5, bits), torch.zeros(3, 3, dtype=torch.uint8)], 1), bits)
    assert torch.equal(pack(random_codes(3, 5, bits), bits), full[:, : packed_row_bytes(5, bits)])
    assert not full[:, packed_row_bytes(5, bits) :].any()


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_transposed_and_sliced_codes_pack_like_their_copies(bits):
    base = random_codes(11, 13, bits)
    for view in (base.t(), base[:, 1:], base[1:, 3:10], base[::2]):
        assert torch.equal(pack(view, bits), pack(view.clone(memory_format=torch.contiguous_format), bits))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_packed_width_that_does_not_fit_is_refused(bits):
    packed = pack(random_codes(2, 8, bits), bits)
    for columns in (4, 12):
        with pytest.raises(ValueError, match=f"{columns} codes of {bits} bits"):
            unpack(packed, bits, columns)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("columns", [1, 7, 8, 30])
def test_decoding_packed_bytes_looks_every_code_up(name, columns):
    fmt = ELEMENTS[name]
    codes = random_codes(9, columns, fmt.bits) & ~(1 << fmt.bits - 1) % 256
    codes = codes.clamp(max=fmt.max_code) | random_codes(9, columns, 1, seed=1) << fmt.bits - 1
    values = decode_packed(pack(codes, fmt.bits), fmt, columns)
    assert values.dtype == torch.float32
    assert torch.equal(values.view(torch.int32), element_table(name)[codes.long()].view(torch.int32))


def test_packed_fp4_reads_as_pairs_of_ml_dtypes_numbers():
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    low, high = (x.view(ml_dtypes.float4_e2m1fn).astype(np.float32) for x in (packed & 15, packed >> 4))
    expected = np.stack([low, high], -1).reshape(2, 256)
    values = decode_packed(torch.from_numpy(packed), ELEMENTS["fp4_e2m1"], 256).numpy()
    assert np.array_equal(values.view(np.int32), expected.view(np.int32))
