"""What no client should send: each gets a clear answer, and other sessions go on.

The run it is sent to goes on as well: its sequence ids are taken, and what follows is done.
"""

from __future__ import annotations

import threading
import time

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

MEDIA_TYPE = "application/x-protobuf"
ADAM = {"learning_rate": 1e-3}
CONTEXT = 256
"""The tiny base model's."""


def tensor(values, dtype, shape=None):
    code = {"<f4": pb.DTYPE_FLOAT32, "<i8": pb.DTYPE_INT64}[dtype]
    array = np.asarray(values, dtype)
    return pb.Tensor(
        dtype=code, shape=list(array.shape) if shape is None else shape, dense=array.tobytes()
    )


def message(tokens=(5, 6, 7), loss_fn="cross_entropy", config=None, datums=1, **inputs):
    """A ForwardBackwardRequest that is in order, unless the arguments are not."""
    count = len(tokens)
    given = {
        "target_tokens": tensor(np.full(count, 9), "<i8"),
        "weights": tensor(np.ones(count), "<f4"),
        **inputs,
    }
    request = pb.ForwardBackwardRequest(loss_fn=loss_fn)
    for name, value in (config or {}).items():
        request.loss_fn_config[name] = value
    for _ in range(datums):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, value in given.items():
            if value is not None:
                datum.loss_fn_inputs[name].CopyFrom(value)
    return request


NAN, INF = float("nan"), float("inf")
POLICY = {"weights": None, "advantages": tensor([1, 1, 1], "<f4")}
REFUSED = [
    (message(datums=0), "empty|no data"),
    (message(tokens=()), "Datum 0 is empty"),
    (message(tokens=(5, -1, 7)), "token -1 is outside the vocabulary"),
    (message(tokens=(5, 2**31 - 1, 7)), "token 2147483647 is outside the vocabulary"),
    (message(target_tokens=tensor([1, 2, 2**62], "<i8")), "is outside the vocabulary"),
    (message(tokens=[5] * (CONTEXT + 1)), f"has {CONTEXT + 1} tokens; the context holds"),
    (message(weights=tensor([1, 1], "<f4")), r"weights has shape \[2\]"),
    (message(weights=tensor([1, NAN, 1], "<f4")), "weights holds NaN or infinity"),
    (message(weights=tensor([1, -INF, 1], "<f4")), "weights holds NaN or infinity"),
    (message(weights=tensor([3e38] * 3, "<f4")), "Datum 0: its cross_entropy loss is not finite"),
    (message(weights=tensor([1e30] * 3, "<f4")), "gradient is not finite"),
    (message(weights=None), "needs the inputs 'weights'"),
    (message(target_tokens=tensor([1, 2], "<i8")), "2 target_tokens for 3 tokens"),
    (message(target_tokens=tensor([1.0, 2, 3], "<f4")), "must hold integers"),
    (message(target_tokens=tensor([1, 2, 3], "<i8", shape=[3, 0])), "do not fill shape"),
    (message(weights=tensor([1, 2, 3], "<f4", shape=[2**40, 2**40])), "do not fill shape"),
    (message(weights=tensor([1, 2, 3], "<f4", shape=[-3])), "negative"),
    (message(nonsense=tensor([1, 1, 1], "<f4")), "'nonsense' are not known"),
    (message(loss_fn="mse"), "Unknown loss_fn 'mse'"),
    (message(loss_fn="ppo", config={"clip": 1.0}, **POLICY), "knows no 'clip'"),
    (message(loss_fn="dro", **POLICY, logprobs=tensor([0, 0, 0], "<f4")), "must give 'beta'"),
    (
        message(loss_fn="dro", config={"beta": NAN}, **POLICY, logprobs=tensor([0] * 3, "<f4")),
        "finite",
    ),
    (
        message(loss_fn="ppo", **POLICY, logprobs=tensor([0, INF, 0], "<f4")),
        "logprobs holds NaN or infinity",
    ),
    (
        message(loss_fn="importance_sampling", **POLICY, logprobs=tensor([0, -3e38, 0], "<f4")),
        "Datum 0: its importance_sampling loss is not finite at token 1",
    ),
]


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        yield client


@pytest.fixture
def neighbour(server):
    """Another session, which trains and samples all the while; it must never be disturbed."""
    ended = threading.Event()
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=1).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, np.float32)},
    )
    losses: list[float] = []

    def train() -> None:
        while not ended.is_set():
            passed = client.forward_backward([datum], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])

    thread = threading.Thread(target=train)
    thread.start()
    yield losses
    before = len(losses)
    server.wait_until(lambda: len(losses) > before + 1, seconds=60)
    ended.set()
    thread.join()
    assert losses[-1] < losses[0]


class Sender:
    """A run that is sent things by hand."""

    def __init__(self, http: httpx.Client, run_id: str) -> None:
        self._http = http
        self.run_id = run_id
        self.seq = 0

    def pass_(self, request, **headers):
        """Send a ForwardBackwardRequest under the next sequence id."""
        self.seq += 1
        request.model_id, request.seq_id = self.run_id, self.seq
        return self._http.post(
            "/api/v1/forward_backward",
            content=request.SerializeToString(),
            headers={"content-type": MEDIA_TYPE, **headers},
        )

    def post(self, route, **body):
        """Send an operation of JSON under the next sequence id."""
        self.seq += 1
        sent = {"model_id": self.run_id, "seq_id": self.seq, **body}
        return self._http.post(f"/api/v1/{route}", json=sent)

    def outcome(self, response):
        """What came of an operation."""
        assert response.status_code == 200, response.text
        request = {"request_id": response.json()["request_id"]}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self._http.post("/api/v1/retrieve_future", json=request)
            if not answer.headers["content-type"].startswith("application/json"):
                return {"type": "protobuf"}
            body = answer.json()
            if body.get("type") != "try_again":
                return body
        raise TimeoutError


@pytest.fixture
def sender(server, http):
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=1).result()
    return Sender(http, client.model_id)


def test_wrong_datums_fail_by_name_and_the_run_goes_on(sender, neighbour):
    sent = [(sender.pass_(request), said) for request, said in REFUSED]
    good = sender.pass_(message())
    step = sender.post("optim_step", adam_params=ADAM)
    for response, said in sent:
        failed = sender.outcome(response)
        assert failed.get("category") == "user", (said, failed)
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(failed["error"])
    assert "error" not in sender.outcome(good)
    # The gradient is that of the good batch alone: the same as in a run that had no other.
    assert sender.outcome(step)["metrics"]["grad_norm:mean"] == pytest.approx(
        fresh_norm(sender), rel=1e-6
    )


def fresh_norm(sender):
    session = sender._http.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
    created = sender._http.post(
        "/api/v1/create_model",
        json={
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "org/tiny",
            "lora_config": {"rank": 4, "seed": 1},
        },
    )
    other = Sender(sender._http, created.json()["model_id"])
    other.outcome(created)
    other.pass_(message())
    return other.outcome(other.post("optim_step", adam_params=ADAM))["metrics"]["grad_norm:mean"]


def test_wrong_steps_and_saves_fail_by_name(sender, neighbour):
    wrong = [
        (sender.post("optim_step", adam_params={"learning_rate": -1}), "learning_rate"),
        (sender.post("optim_step", adam_params={"learning_rate": 1, "momentum": 1}), "momentum"),
        (sender.post("optim_step", adam_params={"learning_rate": "fast"}), "must be a number"),
        (sender.post("optim_step", adam_params={"beta1": 1.0}), "beta1"),
        (sender.post("optim_step", adam_params={"grad_clip_norm": [1]}), "must be a number"),
        (sender.post("save_weights", path="../../etc"), "etc"),
        (sender.post("save_weights", path="a b\n"), "name"),
        (
            sender.post("load_weights", path="tinker://x:train:0/weights/none", optimizer=True),
            "none",
        ),
        (sender.post("load_weights", path="file:///etc/passwd", optimizer=True), "passwd"),
    ]
    step = sender.post("optim_step", adam_params=ADAM)
    for response, said in wrong:
        failed = sender.outcome(response)
        assert failed.get("category") == "user", (said, failed)
        assert said in failed["error"]
    assert sender.outcome(step)["metrics"]


def test_bodies_that_are_none_are_refused_and_take_no_number(sender, http, neighbour):
    route = "/api/v1/forward_backward"
    large = 10 * 2**20
    bomb = zstandard.ZstdCompressor().compress(b"\0" * 2**28)
    assert len(bomb) < 2**16
    protobuf = {"content-type": MEDIA_TYPE}
    compressed = {**protobuf, "content-encoding": "zstd"}
    whole = message()
    whole.model_id, whole.seq_id = sender.run_id, 1
    cut = whole.SerializeToString()[:-3]
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    cases = [
        (400, "ForwardBackwardRequest", {"content": b"\xff" * 64, "headers": protobuf}),
        (400, "ForwardBackwardRequest", {"content": cut, "headers": protobuf}),
        (400, "application/x-protobuf", {"json": {"model_id": sender.run_id}}),
        (400, "larger than", {"content": bomb, "headers": compressed}),
        (400, "no zstd", {"content": b"plain", "headers": compressed}),
        (400, "gzip", {"content": b"", "headers": {**protobuf, "content-encoding": "gzip"}}),
        (400, "sequence id 0", {"content": b"", "headers": protobuf}),
    ]
    for status, said, request in cases:
        answer = http.post(route, **request)
        assert answer.status_code == status, answer.text[:500]
        assert said in answer.json()["error"]["message"]
    elsewhere = [
        ("create_session", {"json": {"tags": ["x" * large]}}),
        ("create_session", {"json": {"tags": ["x"] * 100_000}}),
        ("create_session", {"json": {"user_metadata": {"k": "x" * 2**20}}}),
        ("create_session", {"content": deep, "headers": {"content-type": "application/json"}}),
        ("create_session", {"json": {"display_name": "x" * 5_000_000}}),
        ("save_weights", {"json": {"model_id": sender.run_id, "seq_id": 1, "path": "x" * 2**20}}),
        ("optim_step", {"json": {"model_id": "x" * 2**20, "seq_id": 1}}),
        ("optim_step", {"json": {"model_id": sender.run_id, "adam_params": ADAM}}),
        ("optim_step", {"json": {"model_id": sender.run_id, "seq_id": 2**70, "adam_params": ADAM}}),
        ("optim_step", {"json": {"model_id": sender.run_id, "seq_id": -1, "adam_params": ADAM}}),
        ("optim_step", {"json": {"model_id": sender.run_id, "seq_id": 0, "adam_params": ADAM}}),
        ("optim_step", {"json": [1, 2]}),
        ("optim_step", {"content": b"{", "headers": {"content-type": "application/json"}}),
    ]
    for name, request in elsewhere:
        answer = http.post(f"/api/v1/{name}", **request)
        assert 400 <= answer.status_code < 500, (name, answer.text[:300])
        error = answer.json()["error"]
        assert error["message"]
        assert len(answer.content) < 10_000, "what was sent is not sent back"
    # None of it took the first number.
    assert sender.outcome(sender.post("optim_step", adam_params=ADAM))["metrics"]


def test_wrong_samples_are_refused_by_name(server, http, neighbour):
    sampler = server.client().create_sampling_client(base_model="org/tiny").result()
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    (model,) = rest.get_server_capabilities().result().supported_models
    context = model.max_context_length
    fine = [5, 6, 7]
    wrong = [
        (fine, {"temperature": -1.0}, "temperature"),
        (fine, {"top_p": 0.0}, "top_p"),
        (fine, {"top_p": 1.5}, "top_p"),
        (fine, {"top_k": -7}, "top_k"),
        (fine, {"max_tokens": 0}, "max_tokens"),
        (fine, {"max_tokens": -3}, "max_tokens"),
        ([], {}, "prompt"),
        ([-1], {}, "vocabulary"),
        ([10**6], {}, "vocabulary"),
        ([5] * context, {}, "context|room"),
    ]
    for prompt, params, said in wrong:
        with pytest.raises((tinker.TinkerError, ValueError), match=said):
            sampler.sample(
                types.ModelInput.from_ints(prompt), 1, types.SamplingParams(**params)
            ).result()
    for count in (0, -1, 10**6):
        with pytest.raises(tinker.TinkerError, match="num_samples"):
            sampler.sample(
                types.ModelInput.from_ints(fine), count, types.SamplingParams(max_tokens=1)
            ).result()
    one = sampler.sample(
        types.ModelInput.from_ints(fine), 1, types.SamplingParams(max_tokens=2, temperature=0)
    )
    assert len(one.result().sequences) == 1


def test_the_api_answers_while_the_engine_computes(server, http):
    client = server.client().create_lora_training_client("org/tiny", rank=32, seed=1).result()
    tokens = np.arange(400) % 250 + 5
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(399, np.float32)},
    )
    work = [client.forward_backward([datum] * 400, "cross_entropy").future() for _ in range(4)][-1]
    answers = 0
    while not work.done():
        assert http.post("/api/v1/get_info", json={"model_id": client.model_id}).is_success
        answers += 1
    assert answers > 20, "it answered between operations alone"
