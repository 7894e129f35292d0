"""TRL's trainers in a swarm: one peer equals TRL alone, for preferences too, with and without adapters."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.kit.stand_ins import write_llama
from trahiv_cli import SwarmDPOTrainer, SwarmSFTTrainer
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_model, build_tokenizer
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.train.tasks import CHECKPOINTING
from trahiv_cli.train.trainer import in_swarm

pytestmark = pytest.mark.timeout(240)

HIVEMIND_CONFIG = {
    "dht": {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False},
    "opt": {"run_id": "trl", "target_batch_size": 8},
}


def chat(number):
    answer = f"{2 * number}, " + "really " * (number % 5)
    question = {"role": "user", "content": f"What is {number} and {number}?"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def preference(number):
    worse = f"{2 * number + 1} or so " * (1 + number % 3)
    return {"prompt": f"What is {number} and {number}? ", "chosen": f"{2 * number}", "rejected": worse}


CHATS = Dataset.from_list([chat(number) for number in range(64)])


def judgement(number):
    good = number % 3 > 0
    answer = f"{2 * number + (not good)}"
    return {"prompt": f"What is {number} and {number}? ", "completion": answer, "label": good}


JUDGEMENTS = Dataset.from_list([judgement(number) for number in range(64)])
PREFERENCES = Dataset.from_list([preference(number) for number in range(64)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


def arguments(config, folder, **changes):
    options = dict(
        output_dir=str(folder), max_steps=6, max_length=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, weight_decay=0.1, warmup_steps=2,
        lr_scheduler_type="cosine", max_grad_norm=0.5, optim="adamw_torch_fused", seed=1,
        train_sampling_strategy="sequential", bf16=False, **{CHECKPOINTING: False},
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return config(**options | changes)


def build(trainer, config, data, llama, folder, lora, **more):
    torch.manual_seed(1)  # for the head of a reward model
    if config is RewardConfig:
        options = {"num_labels": 1, "dtype": torch.float32}
        model = AutoModelForSequenceClassification.from_pretrained(llama, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    if lora:
        kind = "SEQ_CLS" if config is RewardConfig else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type=kind)
    elif config in (DPOConfig, KTOConfig):
        more["ref_model"] = copy.deepcopy(model)
    return trainer(
        model,
        args=arguments(config, folder),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(llama),
        **more,
    )


def trainable(trainer):
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "trl, ours, config, data",
    [
        (SFTTrainer, SwarmSFTTrainer, SFTConfig, CHATS),
        (DPOTrainer, SwarmDPOTrainer, DPOConfig, PREFERENCES),
        (KTOTrainer, in_swarm(KTOTrainer), KTOConfig, JUDGEMENTS),
        (RewardTrainer, in_swarm(RewardTrainer), RewardConfig, PREFERENCES),
    ],
    ids=["sft", "dpo", "kto", "reward"],
)
def test_one_peer_equals_trl(tmp_path, llama, trl, ours, config, data, lora):
    torch.set_num_threads(1)
    alone = build(trl, config, data, llama, tmp_path / "alone", lora)
    before = trainable(alone)
    alone.train()
    peer = build(ours, config, data, llama, tmp_path / "swarm", lora, hivemind_config=HIVEMIND_CONFIG)
    assert torch.equal(trainable(peer), before), "both begin with the same weights"
    peer.train()
    assert peer.swarm_optimizer.local_epoch == 6
    assert (trainable(alone) - before).abs().max() > 1e-3, "the comparison would prove nothing"
    assert (trainable(peer) - trainable(alone)).abs().max() <= 1e-6


def test_one_peer_equals_trl_with_pictures(tmp_path):
    torch.set_num_threads(1)
    recipe = load_recipe("shapes-sft", ["data.eval.test_split_size=0"]).recipe
    splits = build_datasets(recipe, build_tokenizer(recipe), peer_seed=0)

    def seeing(trainer, folder, **more):
        # A key's bias has no gradient but rounding errors, which AdamW would enlarge.
        args = arguments(SFTConfig, folder, optim="sgd", learning_rate=0.1)
        reader = splits.processor
        model = build_model(recipe, splits.tokenizer)
        return trainer(model, args=args, train_dataset=splits.train, processing_class=reader, **more)

    alone = seeing(SFTTrainer, tmp_path / "alone")
    before = trainable(alone)
    alone.train()
    peer = seeing(SwarmSFTTrainer, tmp_path / "swarm", hivemind_config=HIVEMIND_CONFIG)
    assert torch.equal(trainable(peer), before), "both begin with the same weights"
    peer.train()
    assert (trainable(alone) - before).abs().max() > 1e-3, "the comparison would prove nothing"
    assert (trainable(peer) - trainable(alone)).abs().max() <= 1e-6
