"""Signed links: what may be fetched without a key, by whoever was given the link, for a while."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from registry.errors import LinkExpired, Unauthorized

SECRET_BYTES = 32
_EXPIRES = "expires"


class Signer:
    """Makes tokens that hold a claim and its end, and reads none but its own.

    Args:
        secret: the file of the secret, made when it is first needed, for its owner's eyes
            only. Without it every link that was given out is void.
        clock: the time now, aware.
    """

    def __init__(self, secret: Path, clock: Callable[[], datetime]) -> None:
        self._path = secret
        self._clock = clock
        self._making = threading.Lock()
        self._secret: bytes | None = None

    def sign(self, claim: Mapping[str, str], *, lives: timedelta) -> tuple[str, datetime]:
        """A token for a claim, and when it ends (to the second)."""
        expires = (self._clock() + lives).replace(microsecond=0)
        payload = json.dumps({**claim, _EXPIRES: int(expires.timestamp())}, sort_keys=True)
        body = _encode(payload.encode())
        return f"{body}.{self._mac(body)}", expires

    def claim(self, token: str) -> dict[str, str]:
        """The claim of a token that this signer made.

        Raises:
            Unauthorized: for any other text.
            LinkExpired: if its time is over.
        """
        body, _, mac = token.partition(".")
        # Compared in constant time, and before anything in the token is looked at.
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise Unauthorized("this link is not signed by this server")
        claim = json.loads(_decode(body))
        expires = datetime.fromtimestamp(claim.pop(_EXPIRES), UTC)
        if expires <= self._clock():
            raise LinkExpired(
                f"this link expired at {expires.isoformat(sep=' ')}: ask for a new one"
            )
        return {str(key): str(value) for key, value in claim.items()}

    def _mac(self, body: str) -> str:
        return _encode(hmac.new(self._key(), body.encode(), hashlib.sha256).digest())

    def _key(self) -> bytes:
        with self._making:
            if self._secret is None:
                self._secret = _read_or_make(self._path)
            return self._secret


def _read_or_make(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    return path.read_bytes()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4))
