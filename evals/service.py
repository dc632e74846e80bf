"""Runs suites on served versions, keeps the evidence, and decides gates from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from evals import gates, leakage, probe, runner, statistics
from evals.outcomes import ItemResult, counts
from evals.suites import Suite, parse
from evals.targets import REQUEST_TIMEOUT_S, Codec, CompletionsTarget, Served, TargetProvider
from registry.errors import Conflict, InvalidInput, NotFound
from registry.evidence import NewGate, NewRun
from registry.jobs import JobHandle, Jobs, JobView
from registry.models import Kind, Origin
from registry.registry import Registry
from registry.views import EvalRunView, GateRunView, SuiteView, VersionView

TOKENIZER = "tokenizer.json"


class EvalService:
    """One a server. `concurrency`: questions in flight at once in a run."""

    def __init__(
        self,
        registry: Registry,
        jobs: Jobs,
        provider: TargetProvider,
        *,
        concurrency: int = 32,
        retries: int = 3,
        backoff_s: float = 0.5,
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._provider = provider
        self._concurrency = concurrency
        self._retries = retries
        self._backoff_s = backoff_s

    def add_suite(self, tenant_id: str, spec: dict[str, Any]) -> SuiteView:
        """Check a suite and freeze it; adding it again changes nothing.

        Raises InvalidInput that explains every mistake.
        """
        return self._registry.evidence.add_suite(tenant_id, parse(spec).name, spec)

    def start_run(
        self, tenant_id: str, reference: str, suite: str, *, keep: bool = False
    ) -> JobView:
        """Run a suite (name or digest) on a version; a job, whose result is the stored run.

        `keep`: leave the replica running for a deployment. Asking for what is already being
        run gives the same job. Raises NotFound and InvalidInput before any job is made.
        """
        version = self._registry.versions.get(tenant_id, reference)
        view, spec = self._registry.evidence.suite(tenant_id, suite)
        parsed = parse(spec)
        if version.kind is not Kind.MERGED:
            raise InvalidInput(
                f"{version.reference} is of kind {version.kind.value}, and only merged versions "
                f"can be served; merge it first with: slipway merge {version.reference}"
            )

        async def work(handle: JobHandle) -> dict[str, Any]:
            run = await self._run(handle, version, view, parsed, keep=keep)
            interval = statistics.wilson(run.correct, run.items)
            return run.model_dump(mode="json") | {"interval": [interval.low, interval.high]}

        key = f"eval:{version.id}:{view.digest}:{keep}"
        return self._jobs.start("eval", tenant_id, work, key=key)

    async def _run(
        self,
        handle: JobHandle,
        version: VersionView,
        view: SuiteView,
        suite: Suite,
        *,
        keep: bool,
    ) -> EvalRunView:
        total = len(suite.items)
        folder = self._registry.store.path(version.digest)
        codec = await asyncio.to_thread(Codec, folder / TOKENIZER)
        # The cheap self-test comes before a server is started for nothing.
        await asyncio.to_thread(probe.known_answers, suite, codec)
        handle.progress(0, total, f"starting a replica of {version.reference}")
        # Loopback only: proxy settings of the environment must not get in between.
        client = httpx.AsyncClient(
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=self._concurrency),
        )
        async with client, self._provider.serve(version, keep=keep) as served:
            target = CompletionsTarget(
                base_url=served.target_url, model=served.model, codec=codec, client=client
            )
            handle.progress(0, total, "checking that the version is really loaded")
            loaded = await self._check_loaded(target, version, served)
            message = f"asking {version.reference}"
            results = await runner.run(
                suite,
                target,
                codec,
                concurrency=self._concurrency,
                retries=self._retries,
                backoff_s=self._backoff_s,
                progress=lambda done, of: handle.progress(done, of, message),
            )
            # Within the block: what cannot be kept must not leave a replica behind.
            new = _new_run(version, view, suite, served, loaded, results)
            return await asyncio.to_thread(self._registry.evidence.add_run, new)

    async def _check_loaded(
        self, target: CompletionsTarget, version: VersionView, served: Served
    ) -> dict[str, Any]:
        path = await asyncio.to_thread(self._probe_file, version)
        if path is None:
            return {"skipped": f"{version.reference} has no {probe.FILE}"}
        found = await asyncio.to_thread(probe.read_probe, path)
        dtype = str(served.engine.get("dtype", ""))
        return (await probe.check_loaded(target, found, dtype=dtype)).as_json()

    def _probe_file(self, version: VersionView) -> Path | None:
        """The version's own probe, or that of the adapter a merge was made from."""
        holders = [version]
        if version.origin is Origin.MERGE:
            holders += [self._registry.versions.by_id(parent) for parent in version.parents]
        paths = (self._registry.store.path(holder.digest) / probe.FILE for holder in holders)
        return next((path for path in paths if path.is_file()), None)

    def start_gate(
        self,
        tenant_id: str,
        candidate: str,
        baseline: str,
        suite: str,
        *,
        alpha: float = gates.DEFAULT_ALPHA,
    ) -> GateRunView:
        """Decide from each version's latest stored run of the suite, and keep the verdict.

        Raises NotFound that tells which run is missing, InvalidInput for alpha or a version
        offered against itself, and Conflict when the runs cannot be compared soundly: engines
        differ, items leaked into training, or the training data of a version is unknown.
        """
        gates.check_alpha(alpha)
        evidence = self._registry.evidence
        versions = [self._registry.versions.get(tenant_id, r) for r in (candidate, baseline)]
        if versions[0].digest == versions[1].digest:
            raise InvalidInput(
                f"{versions[0].reference} and {versions[1].reference} are the same bytes "
                f"({versions[0].digest}); a gate compares two different versions"
            )
        view, spec = evidence.suite(tenant_id, suite)
        runs = [self._latest(tenant_id, version, view) for version in versions]
        gates.check_comparable(*runs)
        parsed = parse(spec)
        checked = [self._clean(version, parsed) for version in versions]
        decision = gates.decide(
            *([ItemResult.model_validate(item) for item in evidence.items(run)] for run in runs),
            alpha=alpha,
            looks=self._looks(tenant_id, versions[0], view.digest) + 1,
        )
        table = decision.statistics | {
            "leakage": {"candidate": checked[0], "baseline": checked[1]},
            "engine_fingerprint": runs[0].engine_fingerprint,
        }
        return evidence.add_gate(
            NewGate(
                tenant_id=tenant_id,
                candidate_run=runs[0],
                baseline_run=runs[1],
                verdict=decision.verdict,
                reason=decision.reason,
                statistics=table,
            )
        )

    def _latest(self, tenant_id: str, version: VersionView, suite: SuiteView) -> EvalRunView:
        run = self._registry.evidence.latest_run(tenant_id, version.id, suite.digest)
        if run is None:
            raise NotFound(
                f"there is no run of {suite.name} ({suite.digest[:19]}) on {version.reference}; "
                f"run it first with: slipway eval run {version.reference} --suite {suite.name}"
            )
        if run.version_digest != version.digest:
            raise Conflict(f"the run {run.id} is of other bytes than {version.reference} holds")
        return run

    def _clean(self, version: VersionView, suite: Suite) -> str:
        """`clean` or `unchecked`; all else is refused."""
        codec = Codec(self._registry.store.path(version.digest) / TOKENIZER)
        found = leakage.check(self._registry, version, suite, codec)
        if found.status == "unknown":
            raise Conflict(
                f"what {version.reference} was trained on is unknown: it has no "
                f"{leakage.FILE}, so no verdict on held-out items can be given"
            )
        if found.status == "leaked":
            named = ", ".join(found.items[:20])
            more = f" and {len(found.items) - 20} more" if len(found.items) > 20 else ""
            raise Conflict(
                f"{len(found.items)} of {len(suite.items)} items of {suite.name} occur in the "
                f"training data of {version.reference}: {named}{more}; remove them from the "
                "suite and run it again"
            )
        return found.status

    def _looks(self, tenant_id: str, candidate: VersionView, suite_digest: str) -> int:
        """Gates so far of the candidate's group on this suite."""
        past = self._registry.evidence.gates(tenant_id, suite_digest=suite_digest, limit=10_000)
        return sum(gate.candidate.rpartition("/")[0] == candidate.group for gate in past)


def _new_run(
    version: VersionView,
    view: SuiteView,
    suite: Suite,
    served: Served,
    loaded: dict[str, Any],
    results: list[ItemResult],
) -> NewRun:
    engine = served.engine | {
        "replica_id": served.replica_id,
        "grader": suite.make_grader().name,
        "self_tests": {"known_answers": len(suite.items), "loaded": loaded},
    }
    return NewRun(
        tenant_id=version.tenant_id,
        version_id=version.id,
        version_digest=version.digest,
        suite_name=view.name,
        suite_digest=view.digest,
        engine=engine,
        engine_fingerprint=served.fingerprint,
        counts=counts(results),
        items=tuple(result.model_dump(mode="json") for result in results),
    )
