"""What becomes of `hivemind_config.opt`: refusals, defaults, and an optimizer state made without a step."""

from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from hivemind import compression
from hivemind.optim.state_averager import dump_optimizer_state, initialize_optimizer_state_
from transformers.optimization import Adafactor

from trahiv_cli.errors import RecipeError
from trahiv_cli.optim import assemble
from trahiv_cli.optim.assemble import CODECS, OURS, REFUSED, build_optimizer, initialize_state
from trahiv_cli.recipe.schema import OptSection

torch.set_num_threads(1)

OPTIMIZERS = {
    "adamw_torch": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_torch_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda p: Adafactor(
        p, lr=0.01, scale_parameter=False, relative_step=False, weight_decay=0.1
    ),
    "adafactor, relative": lambda p: Adafactor(p, weight_decay=0.1),
    "adamw_8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1),
}
SHAPES = (96, 96), (7,)  # bitsandbytes quantizes from 4,096 elements on


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def made(name):
    params = parameters()
    return params, OPTIMIZERS[name]([{"params": params}])


def step(params, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- initialize_state -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_making_the_state_changes_no_weight_gradient_or_setting(name):
    params, optimizer = made(name)
    params[0].grad = torch.ones_like(params[0])
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    initialize_state(optimizer)
    assert equal(params, parameters())
    assert torch.equal(params[0].grad, torch.ones_like(params[0])) and params[1].grad is None
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_counted_from_zero(name):
    _, optimizer = made(name)
    initialize_state(optimizer)
    assert [int(state["step"]) for state in optimizer.state.values() if "step" in state] in ([], [0, 0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_has_the_layout_that_it_will_have_after_a_step(name):
    _, initialized = made(name)
    initialize_state(initialized)
    params, stepped = made(name)
    step(params, stepped, seed=1)
    (ours, our_tensors), (theirs, their_tensors) = map(dump_optimizer_state, (initialized, stepped))
    assert [element["type"] for element in ours] == [element["type"] for element in theirs]
    assert [(t.shape, t.dtype) for t in our_tensors] == [(t.shape, t.dtype) for t in their_tensors]


def follow(name):
    """Take the same five steps with an initialized and with an untouched optimizer."""
    (ours, initialized), (theirs, untouched) = made(name), made(name)
    initialize_state(initialized)
    for seed in range(5):
        step(ours, initialized, seed)
        step(theirs, untouched, seed)
        yield equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_of_an_untouched_optimizer(name):
    assert list(follow(name)) == [True] * 5


def test_dampening_is_refused_because_torch_starts_it_from_no_buffer_at_all(monkeypatch):
    dampened = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5)  # noqa: E731
    monkeypatch.setitem(OPTIMIZERS, "sgd, dampened", dampened)
    assert list(follow("sgd, dampened")) != [True] * 5
    with pytest.raises(RecipeError, match="dampening"):
        assemble._require_startable(dampened(parameters()))


def test_upstream_still_decays_the_weights_and_counts_a_step():
    params, optimizer = made("adamw_torch")
    initialize_optimizer_state_(optimizer)
    assert not equal(params, parameters())
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1]


# -- refusals -------------------------------------------------------------------------------------


def build(**options):
    """Build from options; no process is started if they are refused."""
    return build_optimizer(
        OptSection(run_id="run").model_dump() | options,
        dht=SimpleNamespace(client_mode=False),
        params=[{"params": parameters()}],
        optimizer=OPTIMIZERS["adamw_torch"],
        scheduler=lambda inner: None,
        samples_per_step=4,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("key", REFUSED)
def test_what_contradicts_mode_sync_is_refused_with_its_reason(key):
    with pytest.raises(RecipeError, match=f"hivemind_config.opt.{key} can't be used") as refused:
        build(**{key: True})
    assert REFUSED[key] in refused.value.message and refused.value.exit_code == 2


@pytest.mark.parametrize("key", sorted(OURS))
def test_what_the_trainer_decides_is_refused(key):
    with pytest.raises(RecipeError, match=f"hivemind_config.opt.{key} is decided by the Trainer"):
        build(**{key: object()})


def test_a_keyword_that_hivemind_lacks_is_refused():
    with pytest.raises(RecipeError, match="target_batchsize"):
        build(target_batchsize=64)


def test_a_compression_without_that_name_is_refused():
    with pytest.raises(RecipeError, match="int8"):
        build(grad_compression="int8")


# -- what the optimizer is built from -------------------------------------------------------------


@pytest.fixture
def keywords_for(monkeypatch):
    """Return the keywords that the swarm's optimizer would be made with."""
    monkeypatch.setattr(assemble, "SyncOptimizer", lambda **keywords: keywords)
    return build


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused_may_be_switched_off_in_words(keywords_for, key):
    assert key not in keywords_for(**{key: False})


def test_the_defaults_of_a_recipe_build(keywords_for):
    keywords = keywords_for()
    assert keywords["batch_size_per_step"] == 4 and keywords["max_grad_norm"] == 1.0
    assert keywords["delay_state_averaging"] is False
    assert keywords["tracker_opts"] == {
        "metadata_expiration": 20.0,
        "min_refresh_period": 0.25,
        "max_refresh_period": 1.0,
    }
    assert keywords["averager_opts"] == {"request_timeout": 2.5}
    assert None not in keywords.values()


def test_what_was_said_goes_over_our_defaults(keywords_for):
    keywords = keywords_for(
        matchmaking_time=30.0,
        averager_opts={"min_group_size": 3},
        tracker_opts={"metadata_expiration": 5.0},
        delay_state_averaging=True,
    )
    assert keywords["averager_opts"] == {"request_timeout": 3.0, "min_group_size": 3}
    assert keywords["tracker_opts"] == {
        "metadata_expiration": 5.0,
        "min_refresh_period": 0.25,
        "max_refresh_period": 1.0,
    }
    assert keywords["delay_state_averaging"] is False


def test_options_are_read_and_not_changed(keywords_for):
    options = {"averager_opts": {"min_group_size": 3}, "grad_compression": "float16"}
    keywords_for(**options)
    assert options == {"averager_opts": {"min_group_size": 3}, "grad_compression": "float16"}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("none", compression.NoCompression),
        ("float16", compression.Float16Compression),
        ("meanstd16", compression.ScaledFloat16Compression),
        ("uniform8", compression.Uniform8BitQuantization),
        ("quantile8", compression.Quantile8BitQuantization),
        ("blockwise8", compression.BlockwiseQuantization),
    ],
)
@pytest.mark.parametrize("key", ["grad_compression", "state_averaging_compression", "load_state_compression"])
def test_a_compression_is_taken_by_its_name(keywords_for, key, name, cls):
    assert type(keywords_for(**{key: name})[key]) is cls


def test_a_recipe_may_say_every_codec_and_no_other():
    schema = OptSection.model_json_schema()["properties"]["grad_compression"]
    assert set(schema["enum"]) == set(CODECS)


def test_a_compression_may_be_hivemind_s_own_object(keywords_for):
    own = compression.RoleAdaptiveCompression(gradient=compression.Float16Compression())
    assert keywords_for(grad_compression=own)["grad_compression"] is own


@pytest.mark.parametrize("client_mode", [True, False])
def test_the_optimizer_is_a_client_if_the_dht_is(monkeypatch, client_mode):
    monkeypatch.setattr(assemble, "SyncOptimizer", lambda **keywords: keywords)
    keywords = build_optimizer(
        {"run_id": "run", "target_batch_size": 8, "offload_optimizer": False},
        dht=SimpleNamespace(client_mode=client_mode),
        params=[],
        optimizer=OPTIMIZERS["sgd"],
        scheduler=lambda inner: None,
        samples_per_step=1,
        max_grad_norm=0.0,
    )
    assert keywords["client_mode"] is client_mode


def test_the_inner_optimizer_comes_with_its_state(keywords_for):
    inner = keywords_for()["optimizer"]([{"params": parameters()}])
    assert [int(state["step"]) for state in inner.state.values()] == [0, 0]


@pytest.mark.parametrize(
    ("name", "offloaded"), [("adamw_torch", True), ("adafactor", True), ("adamw_8bit", False)]
)
def test_state_is_kept_on_the_cpu_unless_it_is_8_bit(monkeypatch, keywords_for, name, offloaded):
    monkeypatch.setitem(OPTIMIZERS, "adamw_torch", OPTIMIZERS[name])
    assert keywords_for()["offload_optimizer"] is offloaded
    assert keywords_for(offload_optimizer=not offloaded)["offload_optimizer"] is not offloaded
