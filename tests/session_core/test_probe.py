from __future__ import annotations

import json

from session_core.probe import dump_probe, probe_prompts


def test_prompts_depend_on_the_vocabulary_alone() -> None:
    assert probe_prompts(500) == probe_prompts(500)
    assert probe_prompts(500) != probe_prompts(501)
    assert [len(prompt) for prompt in probe_prompts(500)] == [32] * 4


def test_special_tokens_are_left_out() -> None:
    excluded = frozenset(range(10))
    used = {token for prompt in probe_prompts(30, excluded) for token in prompt}
    assert used <= set(range(10, 30))


def test_the_file_has_a_null_for_each_first_token() -> None:
    raw = json.loads(dump_probe([[1, 2]], base=[[-0.5]], adapter=[[-0.25]]))
    assert raw == {
        "format": 1,
        "prompts": [[1, 2]],
        "base": [[None, -0.5]],
        "adapter": [[None, -0.25]],
    }
