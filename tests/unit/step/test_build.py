"""How `hivemind_config.opt` is used: refusals, defaults, and optimizer state created without a step."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from hivemind import compression
from hivemind.compression import TensorRole
from hivemind.optim.state_averager import dump_optimizer_state
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from trahiv_cli.errors import RecipeError
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.recipe.schema import OptimName, OptSection
from trahiv_cli.rounds.codecs import CODECS, EightBitStatistics
from trahiv_cli.state.inner_optimizer import initialize_state
from trahiv_cli.step import build as assemble
from trahiv_cli.step.auto import START_CODEC
from trahiv_cli.step.build import REFUSED, TRACKER_OPTIONS, UPSTREAM, OptKeywords, build_optimizer
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.telemetry.events import Events

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def upstream_s(name, optim_args=None):
    """Return a factory of the optimizer that transformers makes for a name."""

    def make(groups):
        if name == "stable_adamw":
            pytest.importorskip("optimi", reason="needs `pip install torch-optimi`")
        arguments = TrainingArguments("unused", optim=name, optim_args=optim_args, learning_rate=0.01)
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
        return cls(groups, **keywords)

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
SHAPES = (96, 96), (300, 30), (7,)  # bitsandbytes quantizes from 4,096 elements on, in blocks of 256
AUTO = {"pace": Pace("sync", fragments=3), "auto_share": 0.1}
FULL = compression.NoCompression()
HALF = compression.Float16Compression()
BY_SIZE = compression.SizeAdaptiveCompression(10, FULL, FULL)
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(autouse=True)
def _bitsandbytes_was_told_nothing():
    """Reset its manager: there is one per process, and it remembers weights by identity and by position."""
    GlobalOptimManager.get_instance().initialize()


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def made(name):
    params = parameters()
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return params, OPTIMIZERS[name](groups)


@each_optimizer
def test_initialized_optimizer_steps_like_fresh_one(name, monkeypatch):
    if name == "stable_adamw":  # it must work without Triton on a CPU
        monkeypatch.setattr(pytest.importorskip("optimi.utils"), "HAS_TRITON", True)
    ours, initialized = made(name)
    theirs, untouched = made(name)
    ours[0].grad = torch.ones_like(ours[0])
    initialize_state(initialized)
    assert all(map(torch.equal, ours, theirs))
    assert (ours[0].grad == 1).all()
    assert ours[1].grad is None
    for group in untouched.param_groups:
        group |= {"triton": False} if "triton" in group else {}
    layout, tensors = dump_optimizer_state(initialized)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        initialized.step()
        untouched.step()
        assert all(map(torch.equal, ours, theirs))
    stepped_layout, stepped = dump_optimizer_state(untouched)
    assert [element["type"] for element in layout] == [element["type"] for element in stepped_layout]
    assert [(t.shape, t.dtype) for t in tensors] == [(t.shape, t.dtype) for t in stepped]


@pytest.fixture
def keywords_for(monkeypatch):
    """Return the keyword arguments that the swarm's optimizer would be created with."""

    def build(
        optimizer=OPTIMIZERS["adamw_torch"], params=None, /, only_dials=False, settings=(), told=(), **options
    ):
        return build_optimizer(
            OptKeywords.model_validate({"run_id": "run"} | options),
            RunSettings(**dict(settings)),
            dht=SimpleNamespace(),
            params=[{"params": params or parameters()}],
            optimizer=optimizer,
            samples_per_step=4,
            only_dials=only_dials,
            **dict(told),
        )

    monkeypatch.setattr(assemble, "SwarmOptimizer", lambda **keywords: keywords)
    return build


@pytest.fixture
def inner_for(keywords_for):
    """Return the inner optimizer that is made of a factory."""

    def make(optimizer, params=None, stepped=None):
        return keywords_for(optimizer, params)["optimizer"]([{"params": stepped or parameters()}])

    return make


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_managed_options_are_refused_unless_off(keywords_for, key):
    with pytest.raises(RecipeError, match=f"hivemind_config.opt.{key} can't be used") as refused:
        keywords_for(**{key: object()})
    assert "swarm.mode" in refused.value.message
    assert refused.value.exit_code == 2
    keywords_for(**{key: False})


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"target_batchsize": 64}, "target_batchsize: hivemind.Optimizer has no", "remove it"),
        ({"averager_opts": {"timeout": 1}}, "averager_opts.timeout: hivemind's averagers", "remove it"),
        ({"grad_compression": BY_SIZE, "settings": AUTO}, "can't reckon with SizeAdaptive", "'overlap'"),
        ({"settings": AUTO, "offload_optimizer": True}, "wait for the CPU", "sync"),
        ({"settings": {"pace": Pace("diloco")}, "offload_optimizer": True}, "wait for the CPU", "sync"),
    ],
)
def test_impossible_options_are_refused(keywords_for, options, message, hint):
    with pytest.raises(RecipeError, match=message) as refused:
        keywords_for(**options)
    assert hint in refused.value.hint


@pytest.mark.parametrize("only_dials", [True, False])
def test_given_options_override_defaults(keywords_for, only_dials):
    told = {"events": Events(), "should_leave": lambda: True, "when_no_group_is_found": lambda: None}
    run = {"schema": b"schema", "rules": RoundRules(1.0), "max_steps": 7, "max_grad_norm": 1.0}
    keywords = keywords_for(only_dials=only_dials, delay_state_averaging=True, settings=run, told=told)
    expected = told | {
        "batch_size_per_step": 4,
        "client_mode": only_dials,
        "delay_state_averaging": False,
        "tracker_opts": TRACKER_OPTIONS,
        "averager_opts": {"request_timeout": 2.5},
        "offload_optimizer": False,
    }
    assert expected.items() <= keywords.items()
    assert run.items() <= vars(keywords["settings"]).items()
    assert "state_averaging_compression" not in keywords, "nothing is compressed that is never averaged"
    assert type(keywords["grad_compression"]) is CODECS["none"]
    assert keywords_for(only_dials=only_dials, client_mode=False)["client_mode"] is False


def test_nested_options_are_merged_with_defaults(keywords_for):
    options = {"averager_opts": {"min_group_size": 3}, "tracker_opts": {"metadata_expiration": 5.0}}
    keywords = keywords_for(matchmaking_time=30.0, **options)
    assert keywords["averager_opts"] == {"request_timeout": 3.0, "min_group_size": 3}
    assert keywords["tracker_opts"] == TRACKER_OPTIONS | {"metadata_expiration": 5.0}
    assert options["averager_opts"] == {"min_group_size": 3}, "options are read and not changed"


def test_codec_names_map_to_own_codecs(keywords_for):
    assert sorted({*UPSTREAM.values(), "blockwise4"}) == sorted(CODECS)
    schema = OptSection.model_json_schema()["properties"]["grad_compression"]
    assert set(schema["anyOf"][0]["enum"]) == set(CODECS), "a recipe may say every codec and no other"

    def taken(given):
        return keywords_for(grad_compression=given)["grad_compression"]

    assert all(type(taken(name)) is cls for name, cls in CODECS.items())
    assert all(type(taken(theirs())) is CODECS[name] for theirs, name in UPSTREAM.items())
    by_size = taken(compression.SizeAdaptiveCompression(threshold=10, less=FULL, greater_equal=HALF))
    assert (by_size.threshold, type(by_size.less)) == (10, CODECS["none"])
    assert type(by_size.greater_equal) is CODECS["float16"]
    own = type("Own", (compression.NoCompression,), {})()
    assert taken(own) is own


def test_downloads_compress_optimizer_state_by_role(keywords_for):
    def chosen(**options):
        return keywords_for(**options)["load_state_compression"].role_compressions

    by_role = compression.RoleAdaptiveCompression(optimizer=HALF)
    for choice, role in ((by_role, TensorRole.OPTIMIZER), (HALF, TensorRole.PARAMETER)):
        codecs = chosen(load_state_compression=choice)
        assert [one for one, codec in codecs.items() if type(codec) is CODECS["float16"]] == [role]
    assert by_role.role_compressions[TensorRole.OPTIMIZER] is HALF, "what was given is not changed"
    codecs = chosen(settings={"pace": Pace("diloco")})
    assert type(codecs[TensorRole.OPTIMIZER]) is EightBitStatistics
    assert len({*map(type, codecs.values())}) > 1


def test_auto_mode_keeps_named_codec(keywords_for):
    assert keywords_for(settings=AUTO)["settings"].pace == Pace("overlap", START_CODEC, fragments=3)
    for given in ("float16", HALF):
        keywords = keywords_for(grad_compression=given, settings=AUTO)
        assert keywords["settings"].pace == Pace("overlap", "float16", fragments=3, keeps_codec=True)


class OnGpu(torch.nn.Parameter):
    """A weight that says it is on a GPU."""

    is_cuda = True


@each_optimizer
def test_each_optimizer_is_built_with_state(keywords_for, inner_for, name):
    def offloads(*params, **options):
        return keywords_for(OPTIMIZERS[name], *params, **options)["offload_optimizer"]

    inner = inner_for(OPTIMIZERS[name])
    assert len(inner.state) == (0 if name == "sgd" else 3)
    assert offloads(offload_optimizer=True) is True
    on_gpu = [OnGpu(torch.zeros(1))]
    is_small = type(inner).__module__.startswith("bitsandbytes")  # its state is 8-bit or paged
    assert offloads(on_gpu) is not is_small
    assert offloads(on_gpu, settings=AUTO) is False
    assert offloads(on_gpu, settings={"pace": Pace("overlap")}) is False


def holding(value):
    """Return a factory of an optimizer with `value` as `memory` in its param group."""

    def make(groups):
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.param_groups[0]["memory"] = value
        return optimizer

    return make


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        *(
            (holding(value), "SGD can't be used in a swarm: part of its state is `memory`")
            for value in ({"a": torch.ones(1)}, OnGpu(torch.ones(1)), np.float64(0.5), len, [{}])
        ),
        (upstream_s("sgd", "momentum=0.9,dampening=0.5"), "SGD with dampening"),
    ],
    ids=["dict", "other tensor", "numpy", "function", "dict in a list", "dampening"],
)
def test_unshareable_optimizer_state_is_refused(inner_for, factory, message):
    with pytest.raises(RecipeError, match=message):
        inner_for(factory)


@pytest.mark.parametrize(
    "value", [torch.ones(2), 3, 0.5, "linear", None, True, [1, torch.ones(1)], (0.9, 0.99)]
)
def test_plain_optimizer_state_is_shareable(inner_for, value):
    inner_for(holding(value))


def test_offloaded_embedding_keeps_32_bit_state(inner_for):
    embedding = torch.nn.Embedding(64, 96)
    # As the Trainer does.
    GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
    own = [embedding.weight, parameters()[0]]
    copies = [torch.nn.Parameter(param.detach().clone()) for param in own]
    for stepped in (copies, own):
        inner = inner_for(OPTIMIZERS["adamw_8bit"], own, stepped)
        assert [inner.state[one]["state1"].dtype for one in stepped] == [torch.float32, torch.uint8]
