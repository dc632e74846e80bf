"""The protobuf side of the wire: forward/backward requests, and two kinds of result.

The message classes are the SDK's own. Everything here only translates; what the numbers mean
is checked by the engine.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from registry import InvalidInput
from session_core import operations as op
from session_core.operations import Array, Operation, Refused, Result, datum_arrays, split


def _messages() -> Any:
    """The SDK's generated message classes, without the SDK: importing that loads torch."""
    package = importlib.util.find_spec("tinker")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("session_core.dialects.tinker._pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pb = _messages()

MEDIA_TYPE = "application/x-protobuf"
# The SDK splits its requests at 5 MB; nobody needs ten times that.
LARGEST_BODY = 64 * 2**20

DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def decompress(body: bytes, encoding: str | None) -> bytes:
    """A body as it was before zstd.

    Raises:
        InvalidInput: for another encoding, bad data, or data that grows past 64 MiB.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidInput(f"content encoding {encoding!r} is not served: send zstd or none")
    try:
        # Read no further than the limit, so that a small body cannot become a huge one.
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            data: bytes = reader.read(LARGEST_BODY + 1)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is no zstd: {error}") from None
    if len(data) > LARGEST_BODY:
        raise InvalidInput(f"the body is larger than {LARGEST_BODY} bytes: send smaller batches")
    return data


def parse_forward_backward(body: bytes) -> tuple[str, int, Operation | Refused]:
    """A ForwardBackwardRequest: the run's id, the sequence id, and the operation.

    The operation is refused if a datum has another shape than it says.

    Raises:
        InvalidInput: if the bytes are no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidInput(f"the body is no ForwardBackwardRequest: {error}") from None
    kind = op.FORWARD if message.forward_only else op.FORWARD_BACKWARD
    operation: Operation | Refused
    try:
        operation = _operation(kind, message)
    except InvalidInput as error:
        operation = Refused(kind=kind, message=error.message)
    return message.model_id, message.seq_id, operation


def _operation(kind: str, message: Any) -> Operation:
    tokens, inputs = [], dict[str, list[Array]]()
    names = {name for datum in message.data for name in datum.loss_fn_inputs}
    for index, datum in enumerate(message.data):
        tokens.append(_tokens(index, datum.model_input))
        for name in names:
            if name not in datum.loss_fn_inputs:
                raise InvalidInput(f"datum {index} has no {name}, and others have")
            where = f"datum {index}, {name}"
            inputs.setdefault(name, []).append(_tensor(where, datum.loss_fn_inputs[name]))
    config = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        config[name] = getattr(value, value.WhichOneof("value") or "number")
    return Operation(
        kind=kind,
        params={"loss_fn": message.loss_fn, "loss_fn_config": config},
        arrays=datum_arrays(tokens, inputs) if tokens else {},
    )


def _tokens(index: int, chunks: Iterable[Any]) -> Array:
    pieces = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InvalidInput(f"datum {index} has a chunk that is not text: only text is served")
        pieces.append(
            _numbers(f"datum {index}, tokens", chunk.encoded_text.tokens, np.dtype("<i4"))
        )
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def _tensor(where: str, tensor: Any) -> Array:
    """A dense or sparse tensor as a dense array of its shape."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"{where}: its dtype is not served: send float32 or int64")
    shape = tuple(tensor.shape)
    if any(extent < 0 for extent in shape):
        raise InvalidInput(f"{where}: shape {list(shape)} has a negative extent")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _dense(where, tensor.sparse_csr, dtype, shape)
    flat = _numbers(where, tensor.dense, dtype)
    if not shape:
        return flat
    if int(np.prod(shape, dtype=object)) != flat.size:
        raise InvalidInput(f"{where}: {flat.size} numbers do not fill shape {list(shape)}")
    return flat.reshape(shape)


def _dense(where: str, csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return dense_of_csr(
        where,
        _numbers(where, csr.values, dtype),
        _numbers(where, csr.crow_indices, np.dtype("<i8")),
        _numbers(where, csr.col_indices, np.dtype("<i8")),
        shape,
    )


def dense_of_csr(
    where: str, values: Array, rows: Array, columns: Array, shape: tuple[int, ...], *, fill: int = 0
) -> Array:
    """A matrix given by compressed sparse rows, `fill` where nothing is listed.

    Raises:
        InvalidInput: if the indices do not fit, or the whole matrix were over 64 MiB.
    """
    size = values.dtype.itemsize
    if len(shape) != 2 or int(np.prod(shape, dtype=object)) * size > LARGEST_BODY:
        raise InvalidInput(f"{where}: shape {list(shape)} is no sparse matrix that fits")
    whole = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values)
    inside = ((columns >= 0) & (columns < shape[1])).all()
    if not (whole and inside and len(values) == len(columns) and (np.diff(rows) >= 0).all()):
        raise InvalidInput(f"{where}: its CSR indices do not fit shape {list(shape)}")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _numbers(where: str, data: bytes, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{where}: {len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype)


def forward_backward_output(result: Result) -> bytes:
    """A result's ForwardBackwardOutput."""
    flat, offsets = result.arrays["logprobs"], result.arrays["logprobs.offsets"]
    flat = np.ascontiguousarray(flat, "<f4")
    width = int(np.prod(flat.shape[1:], dtype=np.int64)) * flat.itemsize
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(offsets) - 1)
    field = record.fields["logprobs"]
    field.data = flat.tobytes()
    field.offsets = (offsets.astype("<i8") * width).tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    field.trailing_shape.extend(flat.shape[1:])
    for name, value in result.params["metrics"].items():
        message.metrics[name] = value
    data: bytes = message.SerializeToString()
    return data


def sample_response(result: Result) -> bytes:
    """A result's SampleResponse."""
    message = pb.SampleResponse()
    arrays = result.arrays
    offsets = arrays["tokens.offsets"]
    rows = zip(
        result.params["stop_reasons"],
        split(arrays["tokens"], offsets),
        split(arrays["logprobs"], offsets),
        strict=True,
    )
    for reason, tokens, logprobs in rows:
        message.sequences.add(
            stop_reason=STOP_REASONS[reason],
            tokens=tokens.astype("<i4").tobytes(),
            logprobs=logprobs.astype("<f4").tobytes(),
        )
    if "top.ids" in arrays:
        tops = zip(
            message.sequences,
            split(arrays["top.ids"], offsets),
            split(arrays["top.logprobs"], offsets),
            strict=True,
        )
        for sequence, ids, scores in tops:
            _fill_top(sequence.topk_sampled_logprobs, ids, scores)
    if "prompt_logprobs" in arrays:
        message.prompt_logprobs = arrays["prompt_logprobs"].astype("<f4").tobytes()
    if "prompt_top.ids" in arrays:
        _fill_top(
            message.topk_prompt_logprobs, arrays["prompt_top.ids"], arrays["prompt_top.logprobs"]
        )
    if "prompt_targets.logprobs" in arrays:
        found = arrays["prompt_targets.logprobs"]
        _fill_targets(message.target_prompt_logprobs, found, arrays.get("prompt_targets.places"))
    if "prompt_alternatives.ids" in arrays:
        drawn = message.prompt_alt_tokens
        _fill_dense(drawn.tokens, arrays["prompt_alternatives.ids"], "<i8", pb.DTYPE_INT64)
        scores = arrays["prompt_alternatives.logprobs"]
        _fill_dense(drawn.logprobs, scores, "<f4", pb.DTYPE_FLOAT32)
    data: bytes = message.SerializeToString()
    return data


def _fill_top(message: Any, ids: Array, logprobs: Array) -> None:
    message.length, message.k = ids.shape
    message.token_ids = ids.astype("<i4").tobytes()
    message.logprobs = logprobs.astype("<f4").tobytes()


def _fill_dense(message: Any, array: Array, dtype: str, code: int) -> None:
    message.dense = array.astype(dtype).tobytes()
    message.dtype = code
    message.shape.extend(array.shape)


def _fill_targets(message: Any, logprobs: Array, places: Array | None) -> None:
    """Logprobs in the layout the targets had: dense, or where the sparse ones stood."""
    if places is None:
        _fill_dense(message, logprobs, "<f4", pb.DTYPE_FLOAT32)
        return
    rows, width = logprobs.shape
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend((rows, width))
    counts = np.bincount(places // max(1, width), minlength=rows)
    csr = message.sparse_csr
    csr.values = logprobs.reshape(-1)[places].astype("<f4").tobytes()
    csr.crow_indices = np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tobytes()
    csr.col_indices = (places % max(1, width)).astype("<i8").tobytes()
