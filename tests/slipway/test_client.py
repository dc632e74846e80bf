from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from registry import InvalidInput, Unavailable
from slipway.client import Client, RequestRefused, part
from slipway.home import Home


class _Other(BaseHTTPRequestHandler):
    """A server that is no Slipway: it answers with what its path says."""

    def do_GET(self) -> None:
        status, _, body = self.path.rsplit("/", 1)[-1].partition(".")
        self.send_response(int(status))
        self.end_headers()
        self.wfile.write({"html": b"<html>", "list": b"[]", "null": b'{"error": null}'}[body])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    server = HTTPServer(("127.0.0.1", 0), _Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made = Client(f"http://127.0.0.1:{server.server_port}", "tml-key")
    yield made
    made.close()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("answer", ["200.html", "404.html", "500.list", "403.null", "301.html"])
def test_another_server_is_noticed(client, answer):
    with pytest.raises(RequestRefused, match=rf"answered {answer[:3]}, and not as Slipway does"):
        client.get(f"/{answer}")


def test_a_server_that_is_not_there_is_named():
    client = Client("http://127.0.0.1:1", "tml-key")
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 does not answer"):
        client.get("/groups")
    client.close()


@pytest.fixture
def home(tmp_path, monkeypatch):
    made = Home(tmp_path)
    made.save_key("tml-home")
    monkeypatch.delenv("SLIPWAY_URL", raising=False)
    monkeypatch.delenv("SLIPWAY_API_KEY", raising=False)
    return made


def test_the_environment_names_the_server_unless_a_home_was_named(home, monkeypatch):
    with pytest.raises(Unavailable, match="slipway up"):
        Client.of(home)
    monkeypatch.setenv("SLIPWAY_URL", "http://127.0.0.1:1/")
    client = Client.of(home)
    assert client.url == "http://127.0.0.1:1"
    client.close()
    with pytest.raises(Unavailable, match="slipway up"):
        Client.of(home, named=True)


def test_without_any_key_it_says_which_variable_to_set(tmp_path, home, monkeypatch):
    monkeypatch.setenv("SLIPWAY_URL", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="SLIPWAY_API_KEY"):
        Client.of(Home(tmp_path / "empty"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "foo", "ftp://x"])
def test_an_address_that_is_none_is_refused(home, monkeypatch, url):
    monkeypatch.setenv("SLIPWAY_URL", url)
    with pytest.raises(InvalidInput, match="SLIPWAY_URL"):
        Client.of(home)


def test_an_id_cannot_lead_to_another_route():
    assert part("a b?c#d%") == "a%20b%3Fc%23d%25"
    for bad in ("", ".", "..", "a/b", "../keys"):
        with pytest.raises(InvalidInput):
            part(bad)
