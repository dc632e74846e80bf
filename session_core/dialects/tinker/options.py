"""How the server shapes the client, by the flags the SDK asks for at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The dialect's settings.

    Fields:
        poll_seconds: how long a poll is held. The client gives one 45 s, and asks again at
            once after an empty answer.
        inline_bytes: a result larger than this is announced by its size first, so that the
            client makes room for it.
        client_config: answered by ``client/config``, once a client.
        dynamic_config: answered by ``client/dynamic_config``, again and again.
    """

    poll_seconds: float = 30.0
    inline_bytes: int = 2**20
    client_config: dict[str, Any] = field(
        default_factory=lambda: {
            "pjwt_auth_enabled": False,
            "use_pyqwest_transport": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            # Numbers given out here cannot collide; those the copies of a client draw can.
            "sample_join_sampling_session": True,
        }
    )
    dynamic_config: dict[str, Any] = field(
        # A sample that nobody waits for any more stops at once.
        default_factory=lambda: {"sample_cancel_enabled": True}
    )
