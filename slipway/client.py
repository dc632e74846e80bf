"""The control plane's own routes, from the other side."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

from registry import InvalidInput, SlipwayError, Unavailable
from slipway.home import Home

PREFIX = "/slipway/v1"
# One long poll of a job; the server holds it no longer than this.
POLL_SECONDS = 15.0


class RequestRefused(SlipwayError):
    """The server's answer is an error; its message is for a person."""


def part(text: str) -> str:
    """What a person typed, as one part of a path.

    Raises:
        InvalidInput: if it would be none, or more than one: no id or name is like that.
    """
    if text in ("", ".", "..") or "/" in text:
        raise InvalidInput(f"{text!r} is no id and no name")
    return quote(text, safe="")


def _given(query: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


class Client:
    """A connection to a control plane.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        key: an API key.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        headers = {"X-API-Key": key}
        # The server is on this machine or named on purpose: a proxy has no place between.
        self._http = httpx.Client(
            base_url=url + PREFIX, headers=headers, timeout=POLL_SECONDS + 45, trust_env=False
        )

    @classmethod
    def of(cls, home: Home, *, named: bool = False) -> Client:
        """The server the environment names, or else the one of a home.

        Args:
            named: whether the home was named on purpose; then it goes before the environment.

        Raises:
            Unavailable: if neither names one.
        """
        environment = {} if named else os.environ
        url = environment.get("SLIPWAY_URL") or home.running().url
        key = environment.get("SLIPWAY_API_KEY") or home.key()
        if key is None:
            raise Unavailable(f"no API key in {home.folder}: set SLIPWAY_API_KEY")
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"SLIPWAY_URL is {url!r}: it must start with http:// or https://")
        return cls(url.rstrip("/"), key.strip())

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """GET; the decoded JSON. Query parameters that are None are left out."""
        return self._request("GET", path, params=_given(query))

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """POST; the decoded JSON."""
        sent = body if body is not None else {}
        return self._request("POST", path, json=sent, params=_given(query))

    def put(self, path: str, body: Any, **query: Any) -> Any:
        """PUT; the decoded JSON."""
        return self._request("PUT", path, json=body, params=_given(query))

    def delete(self, path: str, **query: Any) -> Any:
        """DELETE; the decoded JSON."""
        return self._request("DELETE", path, params=_given(query))

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unavailable(
                f"the server at {self.url} does not answer ({error}): is `slipway up` running?"
            ) from None
        try:
            document = answer.json()
            if answer.is_success:
                return document
            message = str(document["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{self.url} answered {answer.status_code}, and not as Slipway does"
        raise RequestRefused(message)

    def finish(self, job: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> Any:
        """Wait for a job; its result.

        Args:
            progress: called with the job as it is, now and then.

        Raises:
            RequestRefused: with the job's error.
        """
        while job["status"] == "running":
            progress(job)
            # Short at first, so that the bar moves.
            job = self.get(f"/jobs/{job['id']}", wait=1.0)
        progress(job)
        if job["status"] != "done":
            raise RequestRefused(job["error"] or f"the job was {job['status']}")
        return job["result"]
