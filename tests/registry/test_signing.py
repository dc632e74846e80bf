from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import LinkExpired, Signer, Unauthorized

START = datetime(2026, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)
CLAIM = {"path": "tinker://r/weights/n", "file": "a b/ü.json"}


class Clock:
    now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def signer(tmp_path, clock):
    return Signer(tmp_path / "deep" / "signing.key", clock)


def test_a_claim_comes_back_until_its_time_is_over(signer, clock):
    token, expires = signer.sign(CLAIM, lives=timedelta(minutes=1))
    assert expires == START.replace(microsecond=0) + timedelta(minutes=1)
    clock.now = expires - timedelta(seconds=1)
    assert signer.claim(token) == CLAIM
    clock.now = expires
    with pytest.raises(LinkExpired, match="2026-01-01 12:01:00"):
        signer.claim(token)


def test_the_secret_is_kept_and_private(tmp_path, clock):
    path = tmp_path / "signing.key"
    token, _ = Signer(path, clock).sign(CLAIM, lives=timedelta(minutes=1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["signing.key"]
    again = Signer(path, clock)
    assert again.claim(token) == CLAIM
    path.unlink()
    with pytest.raises(Unauthorized):
        Signer(path, clock).claim(token)


def test_another_server_s_token_is_none(tmp_path, clock, signer):
    other = Signer(tmp_path / "other.key", clock)
    with pytest.raises(Unauthorized):
        signer.claim(other.sign(CLAIM, lives=timedelta(minutes=1))[0])


def test_any_change_of_a_token_makes_it_void(signer):
    token, _ = signer.sign(CLAIM, lives=timedelta(minutes=1))
    for at in range(len(token)):
        for other in "A.=é \n":
            if token[at] != other:
                with pytest.raises(Unauthorized):
                    signer.claim(token[:at] + other + token[at + 1 :])
    for altered in (token[:-1], token + "=", token + "A", token + ".", "." + token, ""):
        with pytest.raises(Unauthorized):
            signer.claim(altered)


@given(text=st.text())
def test_no_other_text_is_a_token(text, tmp_path_factory):
    signer = Signer(tmp_path_factory.getbasetemp() / "signing.key", Clock())
    with pytest.raises(Unauthorized):
        signer.claim(text)
