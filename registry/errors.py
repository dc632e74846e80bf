"""Every error a Slipway package raises on purpose.

    SlipwayError
    ├── InvalidInput      400  the request itself is wrong
    ├── NotServed         400  it could be asked of another server, and is not done here
    ├── Unauthorized      401  no key, or one that is not known
    ├── LinkExpired       403  a signed link whose time is over
    ├── Forbidden         403  the key is known, but not for this
    ├── QuotaExceeded     403  the tenant has used up what it may have
    ├── NotFound          404  no such thing, or it belongs to another tenant
    ├── PolicyUnmet       412  an alias demands what the version does not have
    ├── Conflict          422  the thing exists already, or has moved meanwhile
    ├── Corrupt           422  bytes on disk do not match their digest
    ├── TooMany           429  too much at once: it goes when what is under way is done
    ├── Unavailable       503  a part that is needed is not running
    └── StorageFull       507  the disk has no room; nothing was written

A message says which thing, what is wrong with it, and what to do. Conflict is 422 and not
409 because clients in the field (the ``tinker`` SDK among them) retry a 409 for minutes.
"""

from __future__ import annotations


class SlipwayError(Exception):
    """Base of all: a message for a person, a status for a client."""

    status = 500
    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(SlipwayError):
    """The request itself is wrong."""

    status = 400
    code = "invalid_input"


class NotServed(SlipwayError):
    """The request is well-formed, and this server does not do such things, on purpose."""

    status = 400
    code = "not_served"


class Unauthorized(SlipwayError):
    """No API key, or one that is not known or is revoked."""

    status = 401
    code = "unauthorized"


class Forbidden(SlipwayError):
    """The key is valid, but does not reach this far."""

    status = 403
    code = "forbidden"


class QuotaExceeded(SlipwayError):
    """The tenant has used up what it may have; trying again now is of no use."""

    status = 403
    code = "quota_exceeded"


class LinkExpired(SlipwayError):
    """A signed link was good, and its time is over."""

    status = 403
    code = "link_expired"


class NotFound(SlipwayError):
    """No such thing for this tenant."""

    status = 404
    code = "not_found"


class PolicyUnmet(SlipwayError):
    """The alias demands something the version does not have."""

    status = 412
    code = "policy_unmet"


class Conflict(SlipwayError):
    """The thing exists already, or has moved since it was read."""

    status = 422
    code = "conflict"


class Corrupt(SlipwayError):
    """Bytes on disk do not match their recorded digest, or are missing."""

    status = 422
    code = "corrupt"


class TooMany(SlipwayError):
    """Too much at once; it is let in when some of what is under way is done."""

    status = 429
    code = "too_many"


class Unavailable(SlipwayError):
    """A part that is needed is not running."""

    status = 503
    code = "unavailable"


class StorageFull(SlipwayError):
    """The disk has no room; nothing was registered."""

    status = 507
    code = "storage_full"
