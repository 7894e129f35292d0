"""Forwarding of this peer's port by a home router (UPnP), until the peer ends."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any, NamedTuple

import miniupnpc

LEASE_S = 3600  # then the router ends the forwarding by itself, if this peer was killed


class Forwarded(NamedTuple):
    """The result of a forwarding request."""

    host: str  # the IPv4 address outside; empty: it is not forwarded
    why: str  # one sentence for a person


class Router:
    """Forwards one TCP port to this machine until it is closed; each call takes up to some seconds."""

    def __init__(self) -> None:
        self._gateway: Any = None
        self._port = 0

    def forward(self, port: int) -> Forwarded:
        """Ask the router to forward a port, the same outside, for another `LEASE_S` seconds."""
        # Milliseconds after each of four discovery requests; home routers answer within a second.
        gateway = miniupnpc.UPnP(discoverdelay=400)
        try:
            gateway.discover()
            gateway.selectigd()
        except Exception:  # noqa: BLE001 - miniupnpc raises nothing narrower
            return Forwarded("", "No router answers here that could forward a port (UPnP).")
        try:
            host = gateway.externalipaddress()
            gateway.addportmapping(port, "TCP", gateway.lanaddr, port, "trahiv", "", LEASE_S)
        except Exception as error:  # noqa: BLE001 - as above
            return Forwarded("", f"The router does not forward port {port}: {error}.")
        self._gateway = gateway
        self._port = port
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_global:
                return Forwarded(host, f"The router forwards port {port} from {host}.")
        why = f"The router forwards port {port}, but is itself behind another one, which calls it {host}."
        return Forwarded("", why)

    def close(self) -> None:
        """Ask the router to end the forwarding."""
        gateway = self._gateway
        self._gateway = None
        if gateway is not None:
            with contextlib.suppress(Exception):
                gateway.deleteportmapping(self._port, "TCP")
