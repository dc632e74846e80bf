from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from registry import Conflict, Unavailable
from slipway.home import Address, Home

ADDRESS = Address(pid=os.getpid(), url="http://127.0.0.1:1", gateway_url="http://127.0.0.1:2")


def test_one_holds_it_and_the_next_is_told_who(tmp_path):
    home = Home(tmp_path / "home")
    with home.locked():
        home.announce(ADDRESS)
        assert home.running() == ADDRESS
        second = Home(tmp_path / "home").locked()
        with pytest.raises(Conflict, match=rf"process {os.getpid()} at http://127.0.0.1:1"):
            second.__enter__()
        with pytest.raises(Conflict, match=rf"process {os.getpid()} at"):
            Home(tmp_path / "home").refuse_if_held()
        assert home.running() == ADDRESS
    with pytest.raises(Unavailable, match="slipway up"):
        home.running()
    with home.locked():
        pass


def test_who_holds_it_is_known_before_it_listens(tmp_path):
    home = Home(tmp_path / "home")
    home.refuse_if_held()
    assert not home.folder.exists()
    with home.locked(), pytest.raises(Conflict, match=rf"process {os.getpid()}, which is starting"):
        Home(tmp_path / "home").refuse_if_held()
    home.refuse_if_held()


def test_the_address_of_a_process_that_is_gone_is_none(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    home = Home(tmp_path)
    home.announce(Address(pid=int(gone.stdout), url=ADDRESS.url, gateway_url=ADDRESS.gateway_url))
    with pytest.raises(Unavailable, match="slipway up"):
        home.running()


def test_what_a_killed_server_left_is_not_taken_for_this_one(tmp_path):
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    home.announce(ADDRESS)
    with home.locked():
        assert home.address() is None


def test_the_key_is_for_its_owner_only(tmp_path):
    home = Home(tmp_path)
    assert home.key() is None
    home.save_key("tml-one")
    home.save_key("tml-two")
    assert home.key() == "tml-two"
    mode = (tmp_path / "credentials.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"pid": 1}', "null"])
def test_garbage_is_no_address_and_no_key(tmp_path, garbage):
    (tmp_path / "server.json").write_text(garbage)
    (tmp_path / "credentials.json").write_text(garbage)
    home = Home(tmp_path)
    assert home.address() is None
    assert home.key() is None
