"""Endpoints: the gateway (a process of its own), the replicas behind it, and what runs where.

`Replicas` runs inference servers (`Engine`), `Endpoints` gives them stable names, and
`GatewayProcess` runs the OpenAI-compatible gateway in front of them.
"""

from __future__ import annotations

from serving.endpoints import Endpoints
from serving.engines import Engine, VllmEngine, fingerprint
from serving.gateway_process import GatewayProcess, snapshot_path
from serving.models import EndpointStatus, EndpointView, ReplicaStatus, ReplicaView
from serving.replicas import Replicas

__all__ = [
    "EndpointStatus",
    "EndpointView",
    "Endpoints",
    "Engine",
    "GatewayProcess",
    "ReplicaStatus",
    "ReplicaView",
    "Replicas",
    "VllmEngine",
    "fingerprint",
    "snapshot_path",
]
