"""Peers behind home routers train together: each of them is in every round."""

import pytest

from tests.kit.homes import network
from tests.kit.recipes import write_tiny
from tests.kit.wan import IS_POSSIBLE, NEEDS

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(not IS_POSSIBLE, reason=NEEDS),
]

EIGHT = ("public", "all", "address", "port", "two", "no UDP", "symmetric", "symmetric")
FIVE = ("address", "port", "two", "no UDP", "symmetric")
STEPS = 12


class Village:
    """Commands on the hosts of a network."""

    def __init__(self, workplace, wan, peers):
        self._workplace, self._wan = workplace, wan
        self._pace_s = 0.15 * peers  # two cores carry one peer with a batch every 0.15 s

    def start(self, host, *args):
        """Start a paced `trahiv` with a folder of its own."""
        return self._workplace.start(
            *args, "--output-dir", f"peer-{host}", prefix=self._inside(host), pace_s=self._pace_s
        )

    def run(self, host, *args):
        """Run `trahiv` to its end."""
        return self._workplace.run(*args, prefix=self._inside(host))

    def _inside(self, host):
        return "nsenter", f"--net={self._wan.namespace(host)}"


def recipe_of(folder, peers):
    """A recipe of `STEPS` steps, the first of which waits for this number of peers."""
    return write_tiny(
        folder,
        data={"datasets": [{"path": "builtin/trahiv"}]},
        training__max_steps=STEPS,
        swarm={"mode": "sync", "min_peers": peers},
        hivemind_config={"opt": {"target_batch_size": 4 * peers}},
    )


def require_all_in_each_round(peers):
    """A peer that misses a round fetches the others' average, and reports a smaller group."""
    for peer in peers:
        peer.wait_for("done", 300)
    sizes = [[len(step["round"]["group"]) if step["round"] else 0 for step in peer.steps] for peer in peers]
    assert sizes == [[len(peers)] * STEPS] * len(peers)


@pytest.mark.parametrize(
    "kinds, delay_ms, loss, is_trained_by_public",
    [(EIGHT, 20.0, 0.01, True), (FIVE, 80.0, 0.01, False), (FIVE, 200.0, 0.01, True)],
    ids=["near", "behind a bootstrap node", "far"],
)
def test_every_round_has_all_peers(tmp_path, workplace, kinds, delay_ms, loss, is_trained_by_public):
    hosts = kinds if kinds[0] == "public" else ("public", *kinds)
    peers = len(hosts) - (not is_trained_by_public)
    recipe = recipe_of(tmp_path, peers)
    with network(*hosts, delay_ms=delay_ms, loss=loss) as wan, workplace:
        village = Village(workplace, wan, peers)
        first = village.start(0, "init", *([recipe] if is_trained_by_public else ["--no-train"]))
        join = ("join", *([] if is_trained_by_public else [recipe]), "--peer", first.address, "--yes")
        others = [village.start(host, *join) for host in range(1, len(hosts))]
        require_all_in_each_round(([first] if is_trained_by_public else []) + others)


def test_join_to_unreachable_home_exits_4(tmp_path, workplace):
    recipe = recipe_of(tmp_path, 2)
    with network("port", "port", delay_ms=20.0) as wan, workplace:
        village = Village(workplace, wan, 2)
        first = village.start(0, "init", recipe)
        reached = first.wait_for("ready", 60)
        assert reached["reached"] == "alone"
        refused = village.run(1, "join", "--peer", first.address, "--yes", "--output-dir", "second")
        assert refused.code == 4, refused.err
        print(refused.err)
