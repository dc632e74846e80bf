from __future__ import annotations

import json

from registry.auth import LONGEST_MESSAGE, error_response


def test_a_message_that_quotes_too_much_is_cut():
    body = json.loads(error_response(400, "invalid_input", "x" * 10_000_000).body)
    assert len(body["error"]["message"]) == LONGEST_MESSAGE + 4


def test_half_a_surrogate_pair_is_no_fault_of_the_server_s():
    assert json.loads(error_response(400, "c", "a\ud800b").body)["error"]["message"] == "a?b"
