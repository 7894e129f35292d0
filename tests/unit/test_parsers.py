"""Parsers of a network's bytes, or of a user's file, answer or refuse.

Each parser is given valid samples, and a few hundred damaged inputs. A failure is anything but an
answer or the parser's own refusal, and an input that takes more than `SLOW_S`.
"""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.lies import lies
from trahiv_cli.errors import AssetError, NotAdmitted, RecipeError, SetupError, Unreachable
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.reports import Past, PeerProgress, Report
from trahiv_cli.optim.rounds import Claim, Header, decoded
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.files import read_rows
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import from_wire, pack, to_wire, unpack
from trahiv_cli.recipe.upstream import mistake_in
from trahiv_cli.swarm.acquaintances import Acquaintances
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.codecs import CODECS
from trahiv_cli.swarm.files import write_private
from trahiv_cli.swarm.invitation import Invitation, read_invitation
from trahiv_cli.swarm.membership import KEY_BYTES, Grant, Owner, Policy, Role, certified, mark_of
from trahiv_cli.swarm.records import OwnersOnly, Quota, Readable, content_of, own_place, owner_of
from trahiv_cli.swarm.roll import read_roll
from trahiv_cli.swarm.snapshot import Manifest, StateOffer, unpacked
from trahiv_cli.train.folder import read_run

SLOW_S = 2.0
LONGEST = 64 * 1024
packed = MSGPackSerializer.dumps


@dataclass(frozen=True)
class Parser:
    """A parser, bytes that it accepts, and errors by which it may refuse others."""

    parse: Callable
    samples: list
    refusals: tuple = (ValueError,)


def of_file(read, name, samples, *refusals):
    """Turn a reader of a file with this name into a parser of bytes."""

    def parse(content):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            file = Path(folder) / name
            write_private(file, content)
            return read(file)

    return Parser(parse, samples, refusals)


def of_wire(read, *samples, refusals=(ValueError,)):
    """Turn a reader of unpacked MessagePack into a parser of bytes."""
    return Parser(lambda content: read(unpacked(content)), list(map(packed, samples)), refusals)


def validate(content):
    half = len(content) // 2
    record = DHTRecord(bytes(20), content[:half], content[half:], swarm_time() + 60)
    return OwnersOnly().validate(record) and Readable().validate(record) and Quota().has_room(record)


def tensor(content):
    message = runtime_pb2.Tensor()
    try:
        message.ParseFromString(content)
    except Exception as error:  # noqa: BLE001 - protobuf's, which the framework answers
        raise ValueError("no protobuf") from error
    return list(decoded([message], [torch.zeros(64)]))


def tensors():
    values = torch.linspace(-1, 1, 64)
    for codec in CODECS.values():
        with contextlib.suppress(ValueError):
            yield codec().compress(values, CompressionInfo.from_tensor(values)).SerializeToString()


def report(tree):
    report = Report.parse_obj(tree)
    told = PeerProgress.of("Qm", report, 0)
    return report, told, Spans.from_wire(report.leases), PeerID(report.peer_id)


OWNER = Owner(bytes(range(KEY_BYTES)))
HOME = OWNER.invite()
GRANT = HOME.grant.to_bytes()
PEER = PeerID(b"\x12\x20" + b"a" * 32)
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
LINE = Invitation((ADDRESS,), OWNER.invite(Role.watcher, expires=10**9), "run-1", "ab" * 8).to_text().encode()
MARKS = [frozenset({mark_of(one)}) for one in (b"1", b"2", b"3")]
POLICY = Policy(3, *MARKS).to_bytes(OWNER)
PLACE = own_place(RSAPrivateKey())
RECIPE = resolve(load_recipe("quickstart", ["hivemind_config.opt.run_id=run-1"]).recipe)
ROLL = {"version": 1, "members": {str(PEER): {"grant": GRANT.hex(), "since": 1.0}}}
PEERS = {"version": 1, "ports": {}, "peers": {str(PEER): {"maddrs": [ADDRESS], "seen": 1}}}
HISTORY = History(1, 10, b"1" * 16)
WAY = Past()
WAY.go_on(HISTORY)
WAY.attest(HISTORY, b"12345678")
REPORT = {
    "peer_id": PEER.to_bytes(),
    "epoch": 1,
    "samples_committed": 10,
    "history": b"1" * 16,
    "leases": [0, 5],
    "time": 1.0,
    "samples_accumulated": 3,
    "samples_per_second": 1.5,
    "client_mode": False,
    **WAY.to_wire(),
}

MESSAGES = {
    "a report": of_wire(report, REPORT, refusals=(ValueError, TypeError)),
    "a history": of_wire(History.from_wire, HISTORY.to_wire()),
    "a ledger": of_wire(Ledger.from_wire, Ledger().to_wire(), [[0, 5, 9, 12], 3]),
    "spans": of_wire(Spans.from_wire, [0, 5, 9, 12], []),
    "a pace": of_wire(Pace.from_wire, DEFAULT_PACE.to_wire()),
    "a claim": Parser(Claim.parse, [Claim(5, 5.0, 1.0, bytes(16)).to_bytes()]),
    "a statement": Parser(content_of, [packed([b"a key", b"a signature", b"what is said"])]),
    "a vote": Parser(Vote.parse, [Vote(b"x" * 32, "late", {"Qm": "why"}, "Qm").to_bytes()]),
    "an offer of a state": of_wire(StateOffer.from_wire, StateOffer((3, b"x"), bytes(16)).to_wire()),
    "a manifest": Parser(
        Manifest.from_bytes,
        [Manifest((3, b"x"), b"\x80", (("float32", (2,), 0, 8),), (bytes(16),)).to_bytes()],
    ),
    "the header of a round": Parser(Header.from_wire, [packed([[b"a"], [b"b"], bytes(32), 1, 100])]),
}

PARSERS = MESSAGES | {
    "an invitation": Parser(
        lambda content: Invitation.parse(content.decode("latin-1")), [LINE], (Unreachable,)
    ),
    "a file with an invitation": of_file(
        lambda path: read_invitation([f"@{path}"]),
        "friend",
        [LINE, b"trahiv join --peer " + LINE, ADDRESS.encode()],
        Unreachable,
        SetupError,
        NotAdmitted,
    ),
    "a grant": Parser(Grant.parse, [GRANT]),
    "a certificate": Parser(
        lambda content: certified(OWNER.public, PEER.to_bytes(), content), [HOME.certify(PEER.to_bytes())], ()
    ),
    "a policy": Parser(lambda content: Policy.parse(content, OWNER.public), [POLICY]),
    "a policy that is signed": Parser(
        lambda content: Policy.parse(
            OWNER.sign(b"trahiv: the owner decides " + content) + content, OWNER.public
        ),
        [POLICY[64:]],
    ),
    "the roll's file": of_file(
        lambda path: read_roll(path.parent), "members.json", [json.dumps(ROLL).encode()]
    ),
    "the file of acquaintances": of_file(
        lambda path: Acquaintances(path).addresses, "peers.json", [json.dumps(PEERS).encode()]
    ),
    "a recipe's file": of_file(
        load_recipe,
        "recipe.yaml",
        [(Path(__file__).parents[2] / "configs/quickstart.yaml").read_bytes()],
        RecipeError,
    ),
    "the recipe of a run": of_file(
        lambda path: read_run(path.parent), "recipe.json", [RECIPE.model_dump_json().encode()], SetupError
    ),
    "the first rows of data": of_file(
        read_rows, "rows.jsonl", [b'{"text": "a"}\n{"text": "b"}\n', b'[{"text": "a"}, "b"]'], AssetError
    ),
    "a chat template": Parser(
        lambda content: mistake_in(content.decode("latin-1")),
        [b"{% for m in messages %}{% generation %}{{ m['x'] }}{% endgeneration %}{% endfor %}"],
        (),
    ),
    "a record of the DHT": Parser(validate, [packed(PLACE) * 2], ()),
    "a place": Parser(owner_of, [PLACE], ()),
    "a packed recipe": Parser(unpack, [pack(RECIPE)], (RecipeError,)),
    "a recipe": of_wire(from_wire, to_wire(RECIPE), refusals=(RecipeError, ValueError)),
    "a part of a tensor": Parser(tensor, list(tensors())),
}


EXTREMES = [
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"\x81\x01" * 2000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"1e999",
    b"NaN",
    b"-1",
    b"9" * 5000,
    b"../../etc/passwd",
    b"\x00",
    "\ud800".encode("utf-8", "surrogatepass"),
    b"\xc8\x00\x08\x51\x93\x90",
    b"\x91\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x80",
]


TREES = st.recursive(
    st.sampled_from([None, True, 0, -1, 2**63, -(2**63), 1.5, math.nan, math.inf, "", "a", b"", b"x" * 16]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=20,
).map(packed)
"""MessagePack of any shape."""


def damaged(samples):
    """Valid input with up to four pieces removed, inserted or replaced; or something else."""
    piece = st.tuples(
        st.integers(0, LONGEST),
        st.integers(0, 9) | st.just(LONGEST),
        st.binary(max_size=9) | st.sampled_from(EXTREMES) | TREES,
    )
    spoiled = st.builds(spoil, st.sampled_from(samples), st.lists(piece, min_size=1, max_size=4))
    return st.one_of(spoiled, TREES, st.binary(max_size=400))


def spoil(sample, pieces):
    content = bytearray(sample)
    for place, length, instead in pieces:
        start = place % (len(content) + 1)
        content[start : start + length] = instead
    return bytes(content[:LONGEST])


def attempt(parser, content):
    """Try one input; return the failure, or an empty text."""
    began = time.process_time()
    try:
        parser.parse(content)
    except parser.refusals:
        pass
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    seconds = time.process_time() - began
    return f"it took {seconds:.1f} s" if seconds > SLOW_S else ""


@pytest.mark.parametrize("name", PARSERS)
def test_parser_accepts_valid_samples(name):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)


@pytest.mark.parametrize("name", PARSERS)
def test_extreme_input_is_parsed_or_refused(name):
    for content in EXTREMES:
        assert attempt(PARSERS[name], content) == "", content[:9]


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_input_is_parsed_or_refused(name, data):
    assert attempt(PARSERS[name], data.draw(damaged(PARSERS[name].samples))) == ""


def out_of_bounds(value, name=""):
    """Unusable numbers in a parsed value: not finite, or too large to be packed."""
    if isinstance(value, int | float):
        # A norm that is no number is a claim, which other rules leave out.
        if name != "norm" and not (math.isfinite(value) and abs(value) < 2**63):
            yield f"{name}={value}"
    elif isinstance(value, list | tuple):
        for one in value:
            yield from out_of_bounds(one, name)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        for key, one in (value if isinstance(value, dict) else vars(value)).items():
            yield from out_of_bounds(one, str(key))


@pytest.mark.parametrize("name", MESSAGES)
def test_parsed_numbers_stay_in_bounds(name):
    parser = MESSAGES[name]
    for tree in map(unpacked, parser.samples):
        for what, changed in lies(tree):
            content = packed(changed)
            assert attempt(parser, content) == "", what
            with contextlib.suppress(*parser.refusals):
                assert not list(out_of_bounds(parser.parse(content))), what
