"""How operations get into the log: let in, refused in their place, or turned away.

A run's operations are numbered by its client, and one that never comes holds up all that
follow. So an operation that can never be done - malformed, or beyond a quota - takes its
place all the same, and fails when its turn comes; what follows it goes on. Only what may be
let in a little later is turned away: the client submits it again.
"""

from __future__ import annotations

from hashlib import sha256

from sqlmodel import Session

from registry import InvalidInput, Principal, QuotaExceeded
from session_core import operations as op
from session_core.allowance import Allowance
from session_core.log import OperationLog
from session_core.models import LoggedOperation, TrainingRun
from session_core.operations import Operation, Refused, encode
from session_core.quota_records import Quotas
from session_core.quotas import training_tokens


class Admission:
    """Puts operations into the log. Synchronous."""

    def __init__(self, log: OperationLog, quotas: Quotas, allowance: Allowance) -> None:
        self._log = log
        self._quotas = quotas
        self._allowance = allowance

    def log(
        self,
        caller: Principal,
        run: TrainingRun,
        seq: int,
        wanted: Operation | Refused,
        *,
        new: bool = False,
    ) -> LoggedOperation:
        """Commit an operation; repeated, the row it has.

        Args:
            new: whether the run begins with it.

        Raises:
            TooMany: if too many operations of the tenant wait.
            InvalidInput: if the sequence id was another operation's.
        """
        operation, payload, refusal = _encoded(wanted)
        tokens = 0 if refusal else training_tokens(operation)

        def admit(session: Session) -> str | None:
            try:
                quota = self._quotas.admit_operation(
                    session,
                    tenant_id=caller.tenant_id,
                    run_id=run.id,
                    seq=seq,
                    tokens=tokens,
                    promised=self._allowance.promised(caller.tenant_id),
                )
                quota.check_datums(operation)
            except QuotaExceeded as error:
                return error.message
            return refusal

        # A load names the version its path has at the moment, which may be another later.
        same = operation.kind if operation.kind == op.LOAD_RUN else (refusal or payload)
        return self._log.append(
            run_id=run.id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            seq=seq,
            kind=operation.kind,
            payload=payload,
            tokens=tokens,
            digest=sha256(same if isinstance(same, bytes) else same.encode()).hexdigest(),
            admit=admit,
            run=run if new else None,
        )


def _encoded(wanted: Operation | Refused) -> tuple[Operation, bytes, str | None]:
    """An operation, its bytes, and why it is refused, if it is: then it is empty."""
    if isinstance(wanted, Operation):
        try:
            return wanted, encode(wanted), None
        except InvalidInput as error:
            wanted = Refused(kind=wanted.kind, message=error.message)
    empty = Operation(kind=wanted.kind)
    return empty, encode(empty), wanted.message
