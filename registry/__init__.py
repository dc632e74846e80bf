"""The system of record: packages, versions, lineage, aliases, evidence, artifacts, tenants."""

from registry.aliases import ANYWHERE, Aliases
from registry.auth import (
    LINKS,
    Admin,
    AuthMiddleware,
    Caller,
    install_error_handlers,
    key_of,
    principal,
)
from registry.bodies import Body
from registry.database import Database
from registry.errors import (
    Conflict,
    Corrupt,
    Forbidden,
    InvalidInput,
    LinkExpired,
    NotFound,
    NotServed,
    PolicyUnmet,
    QuotaExceeded,
    SlipwayError,
    StorageFull,
    TooMany,
    Unauthorized,
    Unavailable,
)
from registry.evidence import Evidence, NewGate, NewRun
from registry.files import Files
from registry.jobs import JobHandle, Jobs, JobView
from registry.limits import LimitMiddleware
from registry.models import Kind, Origin, Role, UsageKind
from registry.registry import Registry, random_id, utc_now
from registry.signing import Signer
from registry.store import Manifest, ManifestFile, Store, canonical, hash_file, manifest_of
from registry.tenants import Principal, Tenants, key_hash
from registry.usage import Entry, Usage, day_of
from registry.versions import NewVersion, Versions
from registry.views import (
    AliasMoveView,
    AliasView,
    EvalRunView,
    GateRunView,
    GroupView,
    HourView,
    KeyView,
    LineageView,
    Page,
    SuiteView,
    TenantView,
    UsageView,
    VersionView,
    View,
)

__all__ = [
    "ANYWHERE",
    "LINKS",
    "Admin",
    "AliasMoveView",
    "AliasView",
    "Aliases",
    "AuthMiddleware",
    "Body",
    "Caller",
    "Conflict",
    "Corrupt",
    "Database",
    "Entry",
    "EvalRunView",
    "Evidence",
    "Files",
    "Forbidden",
    "GateRunView",
    "GroupView",
    "HourView",
    "InvalidInput",
    "JobHandle",
    "JobView",
    "Jobs",
    "KeyView",
    "Kind",
    "LimitMiddleware",
    "LineageView",
    "LinkExpired",
    "Manifest",
    "ManifestFile",
    "NewGate",
    "NewRun",
    "NewVersion",
    "NotFound",
    "NotServed",
    "Origin",
    "Page",
    "PolicyUnmet",
    "Principal",
    "QuotaExceeded",
    "Registry",
    "Role",
    "Signer",
    "SlipwayError",
    "StorageFull",
    "Store",
    "SuiteView",
    "TenantView",
    "Tenants",
    "TooMany",
    "Unauthorized",
    "Unavailable",
    "Usage",
    "UsageKind",
    "UsageView",
    "VersionView",
    "Versions",
    "View",
    "canonical",
    "day_of",
    "hash_file",
    "install_error_handlers",
    "key_hash",
    "key_of",
    "manifest_of",
    "principal",
    "random_id",
    "utc_now",
]
