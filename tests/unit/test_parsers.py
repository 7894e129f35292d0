"""Parsers of a network's bytes, or of a user's file, answer or refuse.

Each parser is given valid samples, and a few hundred damaged inputs. A failure is anything but an
answer or the parser's own refusal, and an input that takes more than `SLOW_S`.
"""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

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
from pydantic.v1 import BaseModel

from tests.kit.lies import lies
from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import AssetError, NotAdmitted, RecipeError, SetupError, Unreachable
from trahiv_cli.files import write_private
from trahiv_cli.members.invitation import Invitation, read_invitation
from trahiv_cli.members.membership import KEY_BYTES, Grant, Owner, Policy, Role, certified, mark_of
from trahiv_cli.members.records import OwnersOnly, Quota, Readable, content_of, own_subkey, owner_of
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.progress.reports import CommitPath, PeerProgress, Report
from trahiv_cli.progress.scores import Scores
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.files import read_rows
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import from_wire, pack, to_wire, unpack
from trahiv_cli.recipe.upstream import mistake_in
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.rounds.replay_log import Header, decoded
from trahiv_cli.rounds.vote import Vote
from trahiv_cli.run.folder import read_run
from trahiv_cli.state.snapshot import Manifest, StateOffer
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.member_list import read_roll
from trahiv_cli.wire import unpacked

ROOT = Path(__file__).parents[2]
SLOW_S = 2.0
LONGEST = 64 * 1024


@dataclass(frozen=True)
class Parser:
    """A parser, bytes that it accepts, and errors by which it may refuse others."""

    parse: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = (ValueError,)


def _packed(*values: object) -> tuple[bytes, ...]:
    return tuple(MSGPackSerializer.dumps(value) for value in values)


def _json(value: object) -> tuple[bytes, ...]:
    return (json.dumps(value).encode(),)


def _of_wire(read: Callable[[object], object]) -> Callable[[bytes], object]:
    return lambda content: read(unpacked(content))


OWNER = Owner(bytes(range(KEY_BYTES)))
DECIDES = b"trahiv: the owner decides "
HOME = OWNER.invite()
PEER = PeerID(b"\x12\x20" + b"a" * 32)
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
LINE = Invitation((ADDRESS,), OWNER.invite(Role.watcher, expires=10**9), "run-1", "ab" * 8).to_text().encode()
POLICY = Policy(3, frozenset({mark_of(b"1")}), frozenset({mark_of(b"2")}), frozenset({mark_of(b"3")}))
PLACE = own_subkey(RSAPrivateKey())
RUN = resolve(load_recipe("quickstart", ["hivemind_config.opt.run_id=run-1"]).recipe)
MANIFEST = Manifest((3, b"x"), b"\x80", (("float32", (2,), 0, 8),), (bytes(16),))


def _in_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """Turn a reader of a file with this name into a parser of bytes."""

    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            write_private(Path(folder) / name, content)
            return read(Path(folder) / name)

    return parse


def _validate(content: bytes) -> object:
    cut = content[0] if content else 0
    record = DHTRecord(bytes(20), content[1 : 1 + 2 * cut], content[1 + 2 * cut :], swarm_time() + 60)
    return OwnersOnly().validate(record) and Readable().validate(record) and Quota().has_room(record)


def _tensor(content: bytes) -> object:
    message = runtime_pb2.Tensor()
    try:
        message.ParseFromString(content)
    except Exception as error:  # noqa: BLE001 - protobuf's, which the framework answers
        raise ValueError("no protobuf") from error
    return list(decoded([message], [torch.zeros(64)]))


def _tensors() -> Iterator[bytes]:
    values = torch.linspace(-1, 1, 64)
    for codec in CODECS.values():
        with contextlib.suppress(ValueError):
            yield codec().compress(values, CompressionInfo.from_tensor(values)).SerializeToString()


def _report(content: bytes) -> object:
    report = Report.parse_obj(unpacked(content))
    told = PeerProgress.of("Qm", report, 0)
    return report, told, Spans.from_wire(report.leases), PeerID(report.peer_id)


WAY = CommitPath()
WAY.go_on(History(1, 10, b"1" * 16))
WAY.attest(History(1, 10, b"1" * 16), b"12345678")
STANDS = {"epoch": 1, "samples_committed": 10, "history": b"1" * 16, "leases": [0, 5], "time": 1.0}
TRAINS = {"samples_accumulated": 3, "samples_per_second": 1.5, "client_mode": False}
REPORT = {"peer_id": PEER.to_bytes()} | STANDS | TRAINS | WAY.to_wire()


PARSERS: dict[str, Parser] = {
    "an invitation": Parser(
        lambda content: Invitation.parse(content.decode("latin-1")), (LINE,), (Unreachable,)
    ),
    "a file with an invitation": Parser(
        _in_file(lambda path: read_invitation([f"@{path}"]), "friend"),
        (LINE, b"trahiv join --peer " + LINE, ADDRESS.encode()),
        (Unreachable, SetupError, NotAdmitted),
    ),
    "a grant": Parser(Grant.parse, (HOME.grant.to_bytes(),)),
    "a certificate": Parser(
        lambda content: certified(OWNER.public, PEER.to_bytes(), content),
        (HOME.certify(PEER.to_bytes()),),
        (),
    ),
    "a policy": Parser(lambda content: Policy.parse(content, OWNER.public), (POLICY.to_bytes(OWNER),)),
    "a policy that is signed": Parser(
        lambda content: Policy.parse(OWNER.sign(DECIDES + content) + content, OWNER.public),
        (POLICY.to_bytes(OWNER)[64:],),
    ),
    "the roll's file": Parser(
        _in_file(lambda path: read_roll(path.parent), "members.json"),
        _json({"version": 1, "members": {str(PEER): {"grant": HOME.grant.to_bytes().hex(), "since": 1.0}}}),
        (),
    ),
    "the file of acquaintances": Parser(
        _in_file(lambda path: KnownPeers(path).addresses, "peers.json"),
        _json({"version": 1, "ports": {}, "peers": {str(PEER): {"maddrs": [ADDRESS], "seen": 1}}}),
        (),
    ),
    "a recipe's file": Parser(
        _in_file(load_recipe, "recipe.yaml"),
        ((ROOT / "configs/quickstart.yaml").read_bytes(),),
        (RecipeError,),
    ),
    "the recipe of a run": Parser(
        _in_file(lambda path: read_run(path.parent), "recipe.json"),
        (RUN.recipe.model_dump_json().encode(),),
        (SetupError,),
    ),
    "the first rows of data": Parser(
        _in_file(read_rows, "rows.jsonl"),
        (b'{"text": "a"}\n{"text": "b"}\n', b'[{"text": "a"}, "b"]'),
        (AssetError,),
    ),
    "a chat template": Parser(
        lambda content: mistake_in(content.decode("latin-1")),
        (b"{% for m in messages %}{% generation %}{{ m['x'] }}{% endgeneration %}{% endfor %}",),
        (),
    ),
    "a record of the DHT": Parser(
        _validate, (bytes([len(MSGPackSerializer.dumps(PLACE)) // 2]) + MSGPackSerializer.dumps(PLACE),), ()
    ),
    "a place": Parser(owner_of, (PLACE,), ()),
    "a packed recipe": Parser(unpack, (pack(RUN),), (RecipeError,)),
    "a recipe": Parser(_of_wire(from_wire), _packed(to_wire(RUN)), (RecipeError, ValueError)),
    "a report": Parser(_report, _packed(REPORT), (ValueError, TypeError)),
    "a history": Parser(_of_wire(History.from_wire), _packed(History(3, 4, bytes(16)).to_wire())),
    "a ledger": Parser(_of_wire(Ledger.from_wire), _packed(Ledger().to_wire(), [[0, 5, 9, 12], 3])),
    "spans": Parser(_of_wire(Spans.from_wire), _packed([0, 5, 9, 12], [])),
    "a pace": Parser(_of_wire(Pace.from_wire), _packed(DEFAULT_PACE.to_wire())),
    "a claim": Parser(
        Claim.parse, tuple(Claim(5, 5.0, 1.0, bytes(16), score=one).to_bytes() for one in (None, 0.5))
    ),
    "scores": Parser(_of_wire(Scores.from_wire), _packed([], [[2, 0.5], [4, 0.25]])),
    "a statement": Parser(content_of, _packed([b"a key", b"a signature", b"what is said"])),
    "a vote": Parser(Vote.parse, (Vote(b"x" * 32, "late", {"Qm": "why"}, "Qm").to_bytes(),)),
    "an offer of a state": Parser(
        _of_wire(StateOffer.from_wire), _packed(StateOffer((3, b"x"), bytes(16)).to_wire())
    ),
    "a manifest": Parser(Manifest.from_bytes, (MANIFEST.to_bytes(),)),
    "the header of a round": Parser(Header.from_wire, _packed([[b"a"], [b"b"], bytes(32), 1, 100])),
    "a part of a tensor": Parser(_tensor, tuple(_tensors())),
}


EXTREMES = (
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xf0" + bytes(6)),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\x91" * 2000, b"\x81\x01" * 2000, b"[" * 3000, b'{"a":' * 2000, b"1e999", b"NaN", b"-1", b"9" * 5000),
    *(b"../../etc/passwd", b"\x00", "\ud800".encode("utf-8", "surrogatepass"), b"\xc8\x00\x08\x51\x93\x90"),
)

LEAVES = [None, True, 0, -1, 2**63, -(2**63), 1.5, math.nan, math.inf, "", "a", b"", b"x" * 16]
TREES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=20,
).map(MSGPackSerializer.dumps)
"""MessagePack of any shape."""


def damaged(parser: Parser) -> st.SearchStrategy[bytes]:
    """Valid input with up to four pieces removed, inserted or replaced; or something else."""
    place, length = st.integers(0, LONGEST), st.integers(0, 9) | st.just(LONGEST)
    piece = st.tuples(place, length, st.binary(max_size=9) | st.sampled_from(EXTREMES) | TREES)
    spoiled = st.builds(_spoiled, st.sampled_from(parser.samples), st.lists(piece, min_size=1, max_size=4))
    return st.one_of(spoiled, TREES, st.binary(max_size=400))


def _spoiled(sample: bytes, pieces: list[tuple[int, int, bytes]]) -> bytes:
    content = bytearray(sample)
    for place, length, instead in pieces:
        start = place % (len(content) + 1)
        content[start : start + length] = instead
    return bytes(content[:LONGEST])


def attempt(parser: Parser, content: bytes) -> str:
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


FOUND = (b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, bytes.fromhex("9192cb7ff800000000000080"))
"""Inputs from hours of damaging that made a parser fail by another error than its own."""


@pytest.mark.parametrize("name", PARSERS)
def test_parser_accepts_samples_and_survives_regressions(name):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)
    for content in FOUND:
        assert attempt(PARSERS[name], content) == "", content[:9]


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_input_is_parsed_or_refused(name, data):
    assert attempt(PARSERS[name], data.draw(damaged(PARSERS[name]))) == ""


MESSAGES = [
    *("a report", "a history", "a ledger", "spans", "a pace", "a claim", "a statement", "a vote"),
    *("an offer of a state", "a manifest", "the header of a round"),
]
MAY_BE_ANYTHING = {"norm"}
"""Fields that are judged by other rules: a norm that is not a number is a claim, and left out."""


def out_of_bounds(value: Any, name: str = "") -> Iterator[str]:
    """Unusable numbers in a parsed value: not finite, or too large to be packed."""
    if is_dataclass(value):
        for field in fields(value):
            yield from out_of_bounds(getattr(value, field.name), field.name)
    elif isinstance(value, BaseModel):
        yield from out_of_bounds(value.dict())
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from out_of_bounds(one, str(key))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from out_of_bounds(one, name)
    elif isinstance(value, (int, float)) and name not in MAY_BE_ANYTHING:
        if not math.isfinite(value) or abs(value) >= 2**63:
            yield f"{name}={value}"


@pytest.mark.parametrize("name", MESSAGES)
def test_parsed_numbers_stay_in_bounds(name):
    parser = PARSERS[name]
    for tree in map(unpacked, parser.samples):
        for what, changed in lies(tree):
            content = MSGPackSerializer.dumps(changed)
            assert attempt(parser, content) == "", what
            with contextlib.suppress(*parser.refusals):
                assert not list(out_of_bounds(parser.parse(content))), what
