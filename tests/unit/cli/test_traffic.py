"""How much a run sends, against what the codecs make."""

import pytest
import torch
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.compression import CompressionInfo

from tests.unit.assets.conftest import LORA, recipe
from trahiv_cli.assets.model import require_memory
from trahiv_cli.cli.traffic import encoded_bytes, traffic_of
from trahiv_cli.optim.auto import CODECS_BY_LOSS
from trahiv_cli.swarm.codecs import CODECS


def sent_by(**sections):
    """The traffic of a recipe, and what is known of its memory."""
    wanted = recipe(**sections)
    needed = require_memory(wanted)
    return traffic_of(wanted, needed), needed


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_tensors_are_as_long_as_hivemind_makes_them(codec):
    tensors = [torch.randn(shape) for shape in ((300, 1000), (700, 1000), (64,))]
    make = CODECS[codec]()
    ratio = make.estimate_compression_ratio(CompressionInfo.from_tensor(tensors[0]))
    parts = [part for one in tensors for part in one.view(-1).split(int(DEFAULT_PART_SIZE_BYTES / 4 / ratio))]
    values = tuple(tensor.numel() for tensor in tensors)
    for has_parts, pieces in ((True, parts), (False, tensors)):
        length = sum(len(make.compress(one, CompressionInfo.from_tensor(one)).buffer) for one in pieces)
        assert encoded_bytes(values, codec, has_parts=has_parts) == length


@pytest.mark.parametrize(
    ("mode", "steps", "fragments", "copies_to_join"),
    [("sync", 1, 1, 3), ("auto", 1, 1, 4), ("diloco", 50, 1, 2.5), ("streaming", 13, 4, 2.5)],
)
def test_modes_with_local_steps_exchange_less_and_give_a_joiner_more(mode, steps, fragments, copies_to_join):
    """With local steps it gets momentum, too, and statistics in 8 bits."""
    traffic, needed = sent_by(swarm={"mode": mode}, hivemind_config={"opt": {"grad_compression": "none"}})
    assert (traffic.steps_per_round, traffic.num_fragments) == (steps, fragments)
    sent = [fragments * traffic.sent_in_round(peers) / needed.trainable_bytes for peers in (1, 2, 4, 1000)]
    assert sent == pytest.approx([0, 1, 1.5, 1.998], abs=1e-4), "many peers send it almost twice"
    assert traffic.state_bytes / needed.trainable_bytes == pytest.approx(copies_to_join, abs=0.05)


def test_what_auto_chooses_from_is_told():
    traffic, _ = sent_by()
    sizes = traffic.sent_by_choice(1000)
    assert list(sizes) == [*CODECS_BY_LOSS, "a fragment"]
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert sizes["float16"] == traffic.sent_in_round(1000)
    named, _ = sent_by(hivemind_config={"opt": {"grad_compression": "blockwise8"}})
    assert list(named.by_choice) == ["blockwise8", "a fragment"]


def test_only_what_is_trained_travels():
    opt = {"opt": {"grad_compression": "float16", "load_state_compression": "float16"}}
    how = {"swarm": {"mode": "overlap"}, "training": {"optim": "adamw_8bit"}}
    traffic, needed = sent_by(peft=LORA, hivemind_config=opt, **how)
    assert 2 * needed.num_trainable < traffic.gradient_bytes < 2.02 * needed.num_trainable < needed.num_frozen
    assert traffic.state_bytes == traffic.gradient_bytes + needed.optimizer_bytes
