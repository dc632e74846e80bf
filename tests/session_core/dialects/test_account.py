"""The caller's own key, what was used and what is stored, as the official SDK asks for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from tinker.cli.auth_api import AuthApiError, TinkerAuthApi

from registry import UsageKind


@pytest.fixture
def admin(server: Any) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key=server.key)


def this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def test_usage_by_the_hour_is_the_ledgers(server: Any, admin: Any, run_of: Any, steps: Any) -> None:
    server.registry.prices.set(UsageKind.TRAIN, Decimal("1.5"))
    with server.client(user_metadata={"who": "me"}) as service:
        client = run_of(service)
        steps(client, 0, 3)
        sampler = client.save_weights_and_get_sampling_client().result()
        sampler.sample(
            types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=4, stop=[])
        ).result()
        session_id = client.get_info().model_id.partition(":")[0]
        client.save_state("one").result()
    begin = this_hour() - timedelta(hours=1)
    found = admin.get_billing_usage(begin, begin + timedelta(hours=3)).result()
    counted: dict[str, int] = {}
    for event in found.data:
        assert event.base_model == "org/tiny"
        assert event.session_id == session_id
        assert event.project_id == "default"
        assert event.bucket_end - event.bucket_start == timedelta(hours=1)
        kind = event.event_info.type
        counted[kind] = counted.get(kind, 0) + event.event_info.token_count
        if kind == "training":
            assert event.effective_rate_usd_per_million_tokens == 1.5
            assert event.estimated_cost_usd == pytest.approx(1.5e-6 * event.event_info.token_count)
        else:
            assert event.estimated_cost_usd is None
    totals = {row.kind: row.tokens for row in server.registry.usage.totals(server.tenant_id)}
    assert counted == {
        "training": totals[UsageKind.TRAIN],
        "sampling_prefill": totals[UsageKind.PREFILL],
        "sampling_sample": totals[UsageKind.SAMPLE],
    }
    assert counted["sampling_sample"] == 8
    assert found.sessions[session_id].user_metadata == {"who": "me"}
    stored = admin.get_current_checkpoint_storage_usage().result()
    (row,) = stored.data
    version = server.registry.versions.get(server.tenant_id, "default/1")
    assert (row.checkpoint_count, row.size_bytes) == (1, version.size_bytes)
    assert admin.get_current_checkpoint_storage_usage(project_id="other").result().data == []


@pytest.mark.parametrize(
    ("shift", "length", "fault"),
    [
        (timedelta(minutes=5), timedelta(hours=1), "must be a full hour"),
        (timedelta(hours=5), timedelta(hours=1), "in the future"),
        (timedelta(hours=-1), timedelta(0), "must be after starting_on"),
        (timedelta(days=-20), timedelta(days=15), "14 days at most"),
    ],
)
def test_windows_that_are_none(
    server: Any, admin: Any, shift: timedelta, length: timedelta, fault: str
) -> None:
    begin = this_hour() + shift
    with pytest.raises(tinker.BadRequestError, match=fault):
        admin.get_billing_usage(begin, begin + length).result()


def test_strangers_see_their_own(server: Any, run_of: Any, steps: Any) -> None:
    with server.client() as service:
        client = run_of(service)
        steps(client, 0, 1)
        client.save_state("one").result()
    stranger = tinker.AdminClient(base_url=server.url, api_key=server.key_of_a_stranger())
    begin = this_hour()
    assert stranger.get_billing_usage(begin, begin + timedelta(hours=2)).result().data == []
    assert stranger.get_current_checkpoint_storage_usage().result().data == []


def test_an_audit_log_is_refused_with_a_way_out(admin: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="alias's history"):
        admin.get_audit_log().result()


def test_a_key_shows_itself_and_ends_itself(server: Any) -> None:
    _, key = server.registry.tenants.create_key(server.tenant_id, "laptop")
    with httpx.Client() as http:
        api = TinkerAuthApi(http, base_url=server.url)
        shown = api.get_self_api_key(key)
        assert shown.name == "laptop"
        assert shown.details.org_details.name == "default"
        api.delete_self_api_key(key)
        with pytest.raises(AuthApiError, match="401"):
            api.get_self_api_key(key)
        assert api.get_self_api_key(server.key).name == "test"
