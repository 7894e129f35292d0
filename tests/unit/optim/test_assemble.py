"""What becomes of `hivemind_config.opt`: refusals, defaults, and an optimizer state made without a step."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from hivemind import compression
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.optim.state_averager import dump_optimizer_state, initialize_optimizer_state_
from hivemind.utils import MSGPackSerializer
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from trahiv_cli.errors import RecipeError
from trahiv_cli.optim import assemble
from trahiv_cli.optim.assemble import CODECS, OURS, REFUSED, UPSTREAM, build_optimizer, initialize_state
from trahiv_cli.optim.auto import START_CODEC
from trahiv_cli.optim.codecs import NormalBlocks
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.schema import OptimName, OptSection
from trahiv_cli.swarm.state_averager import adopt_optimizer_state
from trahiv_cli.telemetry.events import Events

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def upstream_s(name, optim_args=None):
    """A factory of the optimizer that transformers makes of a name."""

    def make(groups):
        if name == "stable_adamw":
            pytest.importorskip("optimi", reason="needs `pip install torch-optimi`")
        arguments = TrainingArguments(
            output_dir="unused", optim=name, optim_args=optim_args, learning_rate=0.01, report_to=[]
        )
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimizer = cls(groups, **keywords)
        for group in optimizer.param_groups:
            if (
                "triton" in group
            ):  # optimi 0.3.3 takes Triton's kernels wherever it is installed, for the CPU, too
                group["triton"] = False
        return optimizer

    return make


OPTIMIZERS = {name: upstream_s(name) for name in get_args(OptimName)} | {
    "sgd, momentum": upstream_s("sgd", "momentum=0.9"),
    "sgd, nesterov": upstream_s("sgd", "momentum=0.9,nesterov=true"),
    "adagrad, decaying": upstream_s("adagrad", "lr_decay=0.1"),
    "rmsprop, centered": upstream_s("rmsprop", "momentum=0.9,centered=true"),
    "ademamix, scheduled": upstream_s("ademamix", "t_alpha=4,t_beta3=4"),
    "ademamix_8bit, scheduled": upstream_s("ademamix_8bit", "t_alpha=4,t_beta3=4"),
    "adafactor, relative": Adafactor,
}
IN_8_BITS = [name for name in OPTIMIZERS if "8bit" in name]
SHAPES = (96, 96), (300, 30), (7,)  # bitsandbytes quantizes from 4,096 elements on, in blocks of 256


@pytest.fixture(autouse=True)
def _bitsandbytes_was_told_nothing():
    """Its manager is one for the whole process, and remembers weights by identity and by place."""
    GlobalOptimManager.get_instance().initialize()


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def made(name):
    params = parameters()
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return params, OPTIMIZERS[name](groups)


def step(params, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def settings_of(optimizer):
    """All that a param group says, save what optimi decides or counts there at its first step."""
    left_out = {"params", "setup", "triton", "step"}
    return [{k: v for k, v in group.items() if k not in left_out} for group in optimizer.param_groups]


# -- initialize_state -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_making_the_state_changes_no_weight_gradient_or_setting(name):
    params, optimizer = made(name)
    params[0].grad = torch.ones_like(params[0])
    before = settings_of(optimizer)
    initialize_state(optimizer)
    assert equal(params, parameters())
    assert torch.equal(params[0].grad, torch.ones_like(params[0])) and params[1].grad is None
    assert settings_of(optimizer) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_counted_from_zero(name):
    _, optimizer = made(name)
    initialize_state(optimizer)
    holders = (*optimizer.state.values(), *optimizer.param_groups)
    assert not any(int(holder["step"]) for holder in holders if "step" in holder)


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
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1, 1]


@pytest.mark.parametrize("name", IN_8_BITS)
def test_state_in_8_bits_is_bytes_where_there_are_enough_of_them(name):
    params, optimizer = made(name)
    initialize_state(optimizer)
    stored = [optimizer.state[param]["state1"].dtype for param in params]
    assert stored == [torch.uint8, torch.uint8, torch.float32]


# -- handing the state over -----------------------------------------------------------------------


def sent(optimizer):
    """What arrives of a state: the layout through MessagePack, the tensors in pieces."""
    layout, tensors = dump_optimizer_state(optimizer)
    pieces = [list(split_for_streaming(serialize_torch_tensor(tensor), 1024)) for tensor in tensors]
    return (
        MSGPackSerializer.loads(MSGPackSerializer.dumps(layout)),
        [deserialize_torch_tensor(combine_from_streaming(parts)) for parts in pieces],
    )


def state_of(optimizer):
    layout, tensors = dump_optimizer_state(optimizer)
    return layout, [(str(tensor.dtype), tensor.tolist()) for tensor in tensors]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_was_given_the_state_goes_on_like_its_owner(name):
    (theirs, owner), (ours, heir) = made(name), made(name)
    for seed in range(3):
        step(theirs, owner, seed)
    initialize_state(heir)
    step(ours, heir, seed=77)  # what it had of its own must leave no trace
    with torch.no_grad():
        for mine, given in zip(ours, theirs, strict=True):
            mine.copy_(given)
    adopt_optimizer_state(heir, *sent(owner))
    assert state_of(heir) == state_of(owner)
    for seed in range(10, 13):
        step(theirs, owner, seed)
        step(ours, heir, seed)
        assert equal(ours, theirs)
    assert state_of(heir) == state_of(owner)


# -- refusals -------------------------------------------------------------------------------------


def in_4_bits_by_role():
    return compression.RoleAdaptiveCompression(parameter=NormalBlocks())


def build(optimizer=OPTIMIZERS["adamw_torch"], params=None, /, pace=DEFAULT_PACE, auto_share=None, **options):
    """Build from options; no process is started if they are refused."""
    return build_optimizer(
        OptSection(run_id="run").model_dump() | options,
        dht=SimpleNamespace(client_mode=False),
        params=[{"params": params or parameters()}],
        optimizer=optimizer,
        scheduler=lambda inner: None,
        samples_per_step=4,
        max_grad_norm=1.0,
        pace=pace,
        auto_share=auto_share,
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


@pytest.mark.parametrize("key", ["state_averaging_compression", "load_state_compression"])
@pytest.mark.parametrize("given", ["blockwise4", NormalBlocks(), in_4_bits_by_role()], ids=str)
def test_weights_in_4_bits_are_refused(key, given):
    with pytest.raises(RecipeError, match=f"opt.{key}: 'blockwise4' can't work in a swarm: a tenth") as no:
        build(**{key: given})
    assert "`blockwise8`" in no.value.hint


def test_a_compression_without_that_name_is_refused():
    with pytest.raises(RecipeError, match="int8"):
        build(grad_compression="int8")


@pytest.mark.parametrize("optim_args", ["alpha=0.9", "beta=3", "centered=true"])
def test_settings_that_the_optimizer_does_not_take_are_refused(optim_args):
    with pytest.raises(RecipeError, match="can't be made with these settings") as refused:
        build(upstream_s("rmsprop_bnb", optim_args))
    assert "training.optim_args" in refused.value.hint


# -- what the optimizer is built from -------------------------------------------------------------


@pytest.fixture
def keywords_for(monkeypatch):
    """Return the keywords that the swarm's optimizer would be made with."""
    monkeypatch.setattr(assemble, "SwarmOptimizer", lambda **keywords: keywords)
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
        "max_refresh_period": 3.0,
    }
    assert keywords["averager_opts"] == {"request_timeout": 2.5}
    assert [key for key, value in keywords.items() if value is None] == ["home", "auto_share", "events"]


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
        "max_refresh_period": 3.0,
    }
    assert keywords["delay_state_averaging"] is False


def test_options_are_read_and_not_changed(keywords_for):
    options = {"averager_opts": {"min_group_size": 3}, "grad_compression": "float16"}
    keywords_for(**options)
    assert options == {"averager_opts": {"min_group_size": 3}, "grad_compression": "float16"}


@pytest.mark.parametrize("name", CODECS)
def test_a_compression_is_taken_by_its_name(keywords_for, name):
    assert type(keywords_for(grad_compression=name)["grad_compression"]) is CODECS[name]
    if name == "blockwise4":
        return
    assert type(keywords_for(state_averaging_compression=name)["state_averaging_compression"]) is CODECS[name]
    of_a_download = keywords_for(load_state_compression=name)["load_state_compression"].role_compressions
    assert type(of_a_download.pop(compression.TensorRole.PARAMETER)) is CODECS[name]
    assert {type(codec) for codec in of_a_download.values()} == {compression.NoCompression}


@pytest.mark.parametrize("theirs", UPSTREAM, ids=lambda cls: cls.__name__)
def test_ours_stands_in_for_a_codec_of_hivemind(keywords_for, theirs):
    ours = keywords_for(grad_compression=theirs())["grad_compression"]
    assert type(ours) is CODECS[UPSTREAM[theirs]]


def test_ours_stand_in_for_all_codecs_of_hivemind():
    assert sorted({*UPSTREAM.values(), "blockwise4"}) == sorted(CODECS)


def test_a_recipe_may_say_every_codec_and_no_other():
    schema = OptSection.model_json_schema()["properties"]["grad_compression"]
    assert set(schema["anyOf"][0]["enum"]) == set(CODECS)


def test_gradients_travel_as_they_are_unless_a_codec_is_named(keywords_for):
    assert type(keywords_for()["grad_compression"]) is CODECS["none"]


def test_auto_begins_with_its_own_codec_and_keeps_one_that_is_named(keywords_for):
    pace = Pace("sync", fragments=3)
    keywords = keywords_for(pace=pace, auto_share=0.1)
    assert keywords["pace"] == Pace("overlap", START_CODEC, fragments=3)
    for given in ("float16", compression.Float16Compression()):
        keywords = keywords_for(grad_compression=given, pace=pace, auto_share=0.1)
        assert keywords["pace"] == Pace("overlap", "float16", fragments=3, keeps_codec=True)


def test_auto_refuses_a_codec_whose_messages_it_cannot_reckon_with():
    own = compression.SizeAdaptiveCompression(10, compression.NoCompression(), compression.NoCompression())
    with pytest.raises(RecipeError, match="auto can't reckon with SizeAdaptiveCompression") as refused:
        build(grad_compression=own, auto_share=0.05)
    assert "swarm={'mode': 'overlap'}" in refused.value.hint


@pytest.mark.parametrize("how", [{"auto_share": 0.05}, {"pace": Pace("diloco")}, {"pace": Pace("streaming")}])
def test_local_steps_are_taken_where_the_model_is(keywords_for, how):
    assert keywords_for(**how)["offload_optimizer"] is False
    with pytest.raises(RecipeError, match="wait for the CPU"):
        build(offload_optimizer=True, **how)


def test_ours_stand_in_within_a_choice_by_role(keywords_for):
    half, full = compression.Float16Compression(), compression.NoCompression()
    given = compression.RoleAdaptiveCompression(gradient=half, default=full)
    taken = keywords_for(grad_compression=given)["grad_compression"].role_compressions
    assert {role: type(codec) for role, codec in taken.items()} == {
        role: CODECS["float16"] if role == compression.TensorRole.GRADIENT else CODECS["none"]
        for role in compression.TensorRole
    }
    assert given.role_compressions[compression.TensorRole.GRADIENT] is half


def test_ours_stand_in_within_a_choice_by_size(keywords_for):
    half, full = compression.Float16Compression(), compression.NoCompression()
    given = compression.SizeAdaptiveCompression(threshold=10, less=full, greater_equal=half)
    taken = keywords_for(grad_compression=given)["grad_compression"]
    assert taken.threshold == 10
    assert (type(taken.less), type(taken.greater_equal)) == (CODECS["none"], CODECS["float16"])


def test_a_codec_of_somebody_s_own_is_kept(keywords_for):
    class Own(compression.NoCompression):
        pass

    own = Own()
    assert keywords_for(grad_compression=own)["grad_compression"] is own


def test_only_a_choice_by_role_compresses_the_optimizer_s_state_in_a_download(keywords_for):
    by_role = compression.RoleAdaptiveCompression(optimizer=compression.Float16Compression())
    taken = keywords_for(load_state_compression=by_role)["load_state_compression"].role_compressions
    half = [role for role, chosen in taken.items() if type(chosen) is CODECS["float16"]]
    assert half == [compression.TensorRole.OPTIMIZER]
    alone = keywords_for(load_state_compression=compression.Float16Compression())
    taken = alone["load_state_compression"].role_compressions
    half = [role for role, chosen in taken.items() if type(chosen) is CODECS["float16"]]
    assert half == [compression.TensorRole.PARAMETER]


def test_rules_and_listeners_reach_the_optimizer(monkeypatch):
    said = {
        "schema": b"schema",
        "rules": RoundRules(solo_after_s=1.0),
        "events": Events(),
        "should_leave": lambda: True,
    }
    monkeypatch.setattr(assemble, "SwarmOptimizer", lambda **keywords: keywords)
    keywords = build_optimizer(
        {"run_id": "run", "target_batch_size": 8},
        dht=SimpleNamespace(client_mode=False),
        params=[],
        optimizer=OPTIMIZERS["sgd"],
        scheduler=lambda inner: None,
        samples_per_step=1,
        max_grad_norm=0.0,
        **said,
    )
    assert {name: keywords[name] for name in said} == said


@pytest.mark.parametrize("client_mode", [True, False])
def test_the_optimizer_is_a_client_if_the_dht_is(monkeypatch, client_mode):
    monkeypatch.setattr(assemble, "SwarmOptimizer", lambda **keywords: keywords)
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
    assert [int(state["step"]) for state in inner.state.values()] == [0, 0, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_a_recipe_may_name_is_built(keywords_for, name):
    inner = keywords_for(OPTIMIZERS[name])["optimizer"]([{"params": parameters()}])
    assert len(inner.state) == (0 if name == "sgd" else 3)


@pytest.mark.parametrize(
    ("name", "offloaded"),
    [
        ("adamw_torch", True),
        ("adafactor", True),
        ("stable_adamw", True),
        ("adamw_8bit", False),
        ("paged_adamw_32bit", False),
        ("lion_8bit", False),
    ],
)
def test_state_is_kept_on_the_cpu_unless_it_is_8_bit_or_paged(keywords_for, name, offloaded):
    factory = OPTIMIZERS[name]
    assert keywords_for(factory)["offload_optimizer"] is offloaded
    assert keywords_for(factory, offload_optimizer=not offloaded)["offload_optimizer"] is not offloaded


def holding(value):
    """A factory of an optimizer that has something under its param group's `memory`."""

    def make(groups):
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.param_groups[0]["memory"] = value
        return optimizer

    return make


@pytest.mark.parametrize(
    "value", [torch.ones(2), 3, 0.5, "linear", None, True, [1, torch.ones(1)], (0.9, 0.99)]
)
def test_state_of_plain_tensors_and_values_can_be_given_away(keywords_for, value):
    keywords_for(holding(value))["optimizer"]([{"params": parameters()}])


@pytest.mark.parametrize(
    "value",
    [{"a": torch.ones(1)}, torch.nn.Parameter(torch.ones(1)), np.float64(0.5), len, [{}]],
    ids=["dict", "a tensor of another kind", "numpy", "function", "dict in a list"],
)
def test_an_optimizer_whose_state_cannot_be_given_away_is_refused(keywords_for, value):
    with pytest.raises(RecipeError, match="SGD can't be used in a swarm: part of its state is `memory`"):
        keywords_for(holding(value))["optimizer"]([{"params": parameters()}])


@pytest.mark.filterwarnings("ignore:.*autocast", "ignore:CUDA is not available")
def test_grokadamw_is_refused_because_its_groups_hold_its_state(keywords_for):
    pytest.importorskip("grokadamw", reason="needs `pip install grokadamw`")
    with pytest.raises(RecipeError, match="GrokAdamW can't be used in a swarm: part of its state is `state`"):
        keywords_for(upstream_s("grokadamw"))["optimizer"]([{"params": parameters()}])


@pytest.fixture
def told():
    """Tell bitsandbytes, as the Trainer does, that an embedding's state is of 32 bits."""
    embedding = torch.nn.Embedding(64, 96)
    GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
    return embedding.weight


def test_an_offloaded_copy_of_an_embedding_has_state_of_32_bits_as_the_embedding_has(keywords_for, told):
    copies = [torch.nn.Parameter(param.detach().clone()) for param in (told, parameters()[0])]
    keywords = keywords_for(OPTIMIZERS["adamw_8bit"], [told, parameters()[0]], offload_optimizer=True)
    offloaded = keywords["optimizer"]([{"params": copies}])
    assert [offloaded.state[copy]["state1"].dtype for copy in copies] == [torch.float32, torch.uint8]
    inner = keywords["optimizer"]([{"params": [told, parameters()[0]]}])
    assert [state["state1"].dtype for state in inner.state.values()] == [torch.float32, torch.uint8]


def test_stable_adamw_steps_on_a_cpu_where_triton_is_installed(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("optimi.utils"), "HAS_TRITON", True)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = upstream_s("stable_adamw")([{"params": [weight]}])
    initialize_state(optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert bool((weight < 1).all())
