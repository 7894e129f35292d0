"""Port forwarding by a home router, below miniupnpc, which raises nothing narrower than `Exception`."""

from unittest.mock import Mock

import pytest

from trahiv_cli.reach import upnp as router
from trahiv_cli.reach.upnp import LEASE_S, Forwarded, Router

PORT, LAN, PUBLIC = 4001, "192.168.1.20", "5.5.5.1"


@pytest.fixture
def gateway(monkeypatch):
    made = Mock(lanaddr=LAN)
    made.externalipaddress.return_value = PUBLIC
    monkeypatch.setattr(router.miniupnpc, "UPnP", Mock(return_value=made))
    return made


def test_port_is_forwarded_until_close(gateway):
    made = Router()
    for _ in range(2):  # again for another lease
        assert made.forward(PORT) == Forwarded(PUBLIC, f"The router forwards port {PORT} from {PUBLIC}.")
        gateway.addportmapping.assert_called_with(PORT, "TCP", LAN, PORT, "trahiv", "", LEASE_S)
    for _ in range(2):
        made.close()
    gateway.deleteportmapping.assert_called_once_with(PORT, "TCP")


def test_search_for_router_is_short(gateway):
    Router().forward(PORT)
    [waits_ms] = router.miniupnpc.UPnP.call_args.kwargs.values()
    assert 0 < 4 * waits_ms <= 2000


def require_no_forwarding(words):
    """Require that a router forwards no port, for this reason, until it is closed."""
    made = Router()
    host, why = made.forward(PORT)
    assert host == ""
    assert words in why
    made.close()


@pytest.mark.parametrize("outside", ["100.64.0.9", "192.168.0.3", "", "0.0.0.0"])
def test_nested_router_forwards_no_public_port(gateway, outside):
    gateway.externalipaddress.return_value = outside
    require_no_forwarding(f"behind another one, which calls it {outside}.")
    gateway.deleteportmapping.assert_called_once()


@pytest.mark.parametrize(
    "fails_at, words",
    [
        ("discover", "No router answers here"),
        ("selectigd", "No router answers here"),
        ("externalipaddress", f"does not forward port {PORT}: ConflictInMappingEntry."),
        ("addportmapping", f"does not forward port {PORT}: ConflictInMappingEntry."),
    ],
)
def test_failed_forwarding_is_reported(gateway, fails_at, words):
    getattr(gateway, fails_at).side_effect = Exception("ConflictInMappingEntry")
    require_no_forwarding(words)
    gateway.deleteportmapping.assert_not_called()


def test_router_that_vanishes_causes_no_error(gateway):
    gateway.deleteportmapping.side_effect = Exception("it is gone")
    made = Router()
    made.forward(PORT)
    made.close()
