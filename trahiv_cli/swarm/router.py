"""The router of a home is asked to forward this peer's port (UPnP), and told when that is over."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any, NamedTuple

import miniupnpc

ANSWER_MS = 400  # after each of four questions; routers of a home answer within a second
LEASE_S = 3600  # then the router forgets, should this peer end without a word
NAME = "trahiv"  # what the router's own page calls it


class Forwarded(NamedTuple):
    """What came of asking."""

    host: str  # the IPv4 address outside; empty: it is not forwarded
    why: str  # one sentence for a person


class Router:
    """Forwards one TCP port to this machine while it is asked to; all calls take up to some seconds."""

    def __init__(self) -> None:
        self._gateway: Any = None
        self._port = 0

    def forward(self, port: int) -> Forwarded:
        """Ask for a port, the same outside, for another `LEASE_S`; the answer says what came of it."""
        gateway = miniupnpc.UPnP(discoverdelay=ANSWER_MS)
        try:
            gateway.discover()
            gateway.selectigd()
        except Exception:  # noqa: BLE001 - miniupnpc raises nothing narrower
            return Forwarded("", "No router answers here that could forward a port (UPnP).")
        try:
            host = gateway.externalipaddress()
            gateway.addportmapping(port, "TCP", gateway.lanaddr, port, NAME, "", LEASE_S)
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
        """Tell the router that the port is not needed any more."""
        gateway = self._gateway
        self._gateway = None
        if gateway is not None:
            with contextlib.suppress(Exception):
                gateway.deleteportmapping(self._port, "TCP")
