"""Headers: what is read from hostile and broken files, and what is written."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from merge.headers import encode_header, read_header
from registry import InvalidInput

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
}


def write(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_a_file_of_the_library_is_read_as_the_library_reads_it(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    data = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert set(header.tensors) == set(file.keys())
        for name, entry in header.tensors.items():
            assert entry.shape == tuple(file.get_slice(name).get_shape())
            assert entry.dtype == file.get_slice(name).get_dtype()
            # The bytes at its place are the tensor's.
            alone = save({name: file.get_tensor(name)})
            assert alone.endswith(data[entry.start : entry.end])
            assert entry.size == math.prod(entry.shape) * TENSORS[name].element_size()


def test_what_is_written_the_library_reads(tmp_path):
    raw, entries = encode_header(
        [("x", "F32", (2, 2)), ("ünï", "BF16", (3,))], {"format": "pt", "by": "us"}
    )
    assert len(raw) % 8 == 0
    path = tmp_path / "written.safetensors"
    path.write_bytes(raw + struct.pack("<4f", 1, 2, 3, 4) + bytes(6))
    assert load_file(path)["x"].tolist() == [[1, 2], [3, 4]]
    assert [entry.name for entry in entries] == list(read_header(path).tensors)
    assert list(read_header(path).tensors.values()) == entries


def test_a_truncated_file_names_what_was_promised_and_what_is_there(tmp_path):
    path = tmp_path / "model-00002.safetensors"
    save_file(TENSORS, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidInput) as caught:
        read_header(path)
    assert "model-00002.safetensors is truncated" in caught.value.message
    assert f"promises {size} bytes, it has {size - 5}" in caught.value.message
    assert "Fetch the file again" in caught.value.message


def entry(start: int, end: int, *, dtype: str = "F32", shape: object = (1,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"", b"", "no JSON"),
        (b"nonsense", b"", "no JSON"),
        (b"[" * 100_000, b"", "no JSON"),
        (b"[]", b"", "no JSON object"),
        (b'{"a":1,"a":2}', b"", "occurs twice"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "gap or an overlap before .*'b'"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "gap or an overlap before .*'b'"),
        ({"a": entry(4, 8)}, bytes(8), "gap or an overlap"),
        ({"a": entry(0, 4)}, bytes(9), "longer than its header says"),
        ({"a": entry(0, 8)}, bytes(8), "makes no sense"),
        ({"a": entry(4, 0)}, bytes(4), "makes no sense"),
        ({"a": entry(0, 4, dtype="F99")}, bytes(4), "makes no sense"),
        ({"a": entry(0, 4, dtype="F32", shape=[-1])}, bytes(4), "makes no sense"),
        ({"a": entry(0, 4, shape=[True])}, bytes(4), "makes no sense"),
        ({"a": entry(0, 4, shape=[1.0])}, bytes(4), "makes no sense"),
        ({"a": entry(0, 4, shape=None)}, bytes(4), "makes no sense"),
        ({"a": []}, b"", "makes no sense"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "no sense"),
        ({"a": entry(0, 4), "__metadata__": {"a": 1}}, bytes(4), "metadata"),
        ({"a": entry(0, 4), "__metadata__": [1]}, bytes(4), "metadata"),
    ],
)
def test_a_header_that_lies_is_refused(header, data, said, tmp_path):
    with pytest.raises(InvalidInput, match=said):
        read_header(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**63), bytes(8)])
def test_a_file_too_short_for_its_header_is_refused(content, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"x\.safetensors"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"x\.safetensors is missing"):
        read_header(tmp_path / "x.safetensors")


@given(place=st.integers(0, 10_000), value=st.binary(min_size=1, max_size=9), cut=st.booleans())
def test_damage_is_refused_or_harmless(place, value, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    data = bytearray(path.read_bytes())
    place %= len(data)
    if cut:
        del data[place:]
    else:
        data[place : place + len(value)] = value
    path.write_bytes(data)
    said, tensors = "", []
    try:
        tensors = list(read_header(path).tensors.values())
    except InvalidInput as error:
        said = error.message
    assert tensors or "x.safetensors" in said
    assert all(0 <= entry.start <= entry.end <= len(data) for entry in tensors)
