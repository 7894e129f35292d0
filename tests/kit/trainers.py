"""Trainers and models as people bring them: one row of docs/trainers.md each, with a tiny model and its data.

A row makes a class of trainers and its keywords. It draws the same model and data each time, without dropout:
then a swarm must end with the same weights as the trainer alone. The optimizer is AdamW. It is SGD where the
gradient of a weight is zero except for rounding, such as a bias before a softmax: AdamW divides by its size.
"""

import functools
from dataclasses import dataclass

import torch
from datasets import Dataset
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.kit.stand_ins import chat_tokenizer
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_model, build_tokenizer
from trahiv_cli.recipe.load import load_recipe

NUM_SAMPLES = 64
BATCH = 4
USUAL = {"bf16": False, "optim": "adamw_torch", "learning_rate": 0.01}
SGD = {"optim": "sgd", "learning_rate": 0.1}
STEPS = 6

ROWS = {}
"""Maps the name of a row to a function that returns its class, the class of its arguments, and keywords.

Two of the keywords are for the kit: `fields` of the arguments, and `positional` arguments of the class.
"""


def row(name):
    """Enter a function into `ROWS`."""

    def enter(function):
        ROWS[name] = function
        return function

    return enter


def parts_of(name, folder):
    """Make a row's class of trainers, and the positional arguments and the keywords for it."""
    cls, config, keywords = ROWS[name]()
    own = keywords.pop("fields", {})
    positional = keywords.pop("positional", ())
    args = config(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, warmup_steps=2, seed=1,
        lr_scheduler_type="cosine", max_grad_norm=1.0, train_sampling_strategy="sequential",
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, use_cpu=True,
        dataloader_pin_memory=False, **USUAL | own,
    )  # fmt: skip
    return cls, positional, {"args": args, **keywords}


def drawn(model_class, config):
    """Make a model; each time with the same weights."""
    torch.manual_seed(0)
    return model_class(config)


def draw(*shape, high=60, low=3):
    """Draw integers for each sample, always the same ones: lists of `shape`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (NUM_SAMPLES, *shape), generator=generator).tolist()


def floats(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_SAMPLES, *shape, generator=generator).tolist()


def table(**columns):
    return Dataset.from_dict(columns).with_format("torch")


# -- transformers' Trainer -----------------------------------------------------------------------------

LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
BERT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def llama():
    return drawn(LlamaForCausalLM, LlamaConfig(**LLAMA, vocab_size=64))


def bert(model_class, **more):
    return drawn(model_class, BertConfig(**BERT, **more))


def texts():
    return table(input_ids=draw(12), labels=draw(12))


def of_trainer(model, data, cls=Trainer, **more):
    return cls, TrainingArguments, {"model": model, "train_dataset": data, **more}


@row("causal language model")
def causal():
    return of_trainer(llama(), texts())


@row("masked language model")
def masked():
    return of_trainer(bert(BertForMaskedLM), texts())


@row("sequence classification")
def sequences():
    data = table(input_ids=draw(12), labels=draw(high=3, low=0))
    return of_trainer(bert(BertForSequenceClassification, num_labels=3), data)


@row("regression")
def regression():
    data = table(input_ids=draw(12), labels=floats())
    return of_trainer(bert(BertForSequenceClassification, num_labels=1), data)


@row("token classification")
def tokens():
    data = table(input_ids=draw(12), labels=draw(12, high=3, low=0))
    return of_trainer(bert(BertForTokenClassification, num_labels=3), data)


@row("multiple choice")
def choices():
    data = table(input_ids=draw(3, 12), labels=draw(high=3, low=0))
    return of_trainer(bert(BertForMultipleChoice), data, fields=SGD)


@row("question answering")
def answers():
    spans = {"start_positions": draw(high=6, low=0), "end_positions": draw(high=12, low=6)}
    return of_trainer(bert(BertForQuestionAnswering), table(input_ids=draw(12), **spans), fields=SGD)


@row("image classification (ViT)")
def images():
    config = ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16,
        patch_size=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data = table(pixel_values=floats(3, 16, 16), labels=draw(high=3, low=0))
    return of_trainer(drawn(ViTForImageClassification, config), data, fields=SGD)


@row("speech recognition (wav2vec2, CTC)")
def speech():
    config = Wav2Vec2Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
    )  # fmt: skip
    data = table(input_values=floats(1600), labels=draw(5, high=16, low=1))
    return of_trainer(drawn(Wav2Vec2ForCTC, config), data)


class Regressor(nn.Module):
    """A module of torch's that knows nothing of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)}


@row("a plain torch module")
def plain():
    return of_trainer(Regressor(), table(x=floats(8), labels=floats()))


@row("Seq2SeqTrainer, T5")
def t5():
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    keywords = {"model": drawn(T5ForConditionalGeneration, config), "train_dataset": texts()}
    return Seq2SeqTrainer, Seq2SeqTrainingArguments, keywords


@row("Seq2SeqTrainer, Whisper")
def whisper():
    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    data = table(input_features=floats(8, 32), labels=draw(10))
    keywords = {"model": drawn(WhisperForConditionalGeneration, config), "train_dataset": data}
    return Seq2SeqTrainer, Seq2SeqTrainingArguments, keywords


# -- adapters ------------------------------------------------------------------------------------------

LINEAR = ["q_proj", "v_proj"]
ADAPTERS = {
    "LoRA": functools.partial(LoraConfig, r=4, target_modules=LINEAR),
    "DoRA": functools.partial(LoraConfig, r=4, target_modules=LINEAR, use_dora=True),
    "IA3": functools.partial(
        IA3Config, target_modules=[*LINEAR, "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": functools.partial(VeraConfig, r=4, target_modules=LINEAR),
    "OFT": functools.partial(OFTConfig, oft_block_size=4, target_modules=LINEAR, use_cayley_neumann=False),
    "prompt tuning": functools.partial(PromptTuningConfig, num_virtual_tokens=4),
}


def adapted(make):
    torch.manual_seed(0)
    return of_trainer(get_peft_model(llama(), make(task_type="CAUSAL_LM")), texts())


for name, make in ADAPTERS.items():
    ROWS[f"peft, {name}"] = functools.partial(adapted, make)


# -- TRL -----------------------------------------------------------------------------------------------


def chat_model(model_class=LlamaForCausalLM, **more):
    tokenizer = chat_tokenizer()
    sizes = LLAMA | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return drawn(model_class, LlamaConfig(**sizes, **more))


def of_trl(trainer, config, data, model=None, *, reference=False):
    keywords = {"model": model or chat_model(), "train_dataset": Dataset.from_list(data)}
    keywords["processing_class"] = chat_tokenizer()
    if reference:
        keywords["ref_model"] = chat_model()
    checkpointing = next(name for name in CHECKPOINTING if hasattr(config, name))
    return trainer, config, keywords | {"fields": {"max_length": 48, checkpointing: False}}


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def preferences():
    return [
        {"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1} or so" * (1 + n % 3)}
        for n in range(NUM_SAMPLES)
    ]


@row("TRL, SFT")
def sft():
    return of_trl(SFTTrainer, SFTConfig, [{"text": f"{n} and {n} are {2 * n}."} for n in range(NUM_SAMPLES)])


@row("TRL, SFT with pictures (LLaVA)")
def pictures():
    recipe = load_recipe("shapes-sft", ["data.eval.test_split_size=0"]).recipe
    splits = build_datasets(recipe, build_tokenizer(recipe), peer_seed=0)
    data = splits.train.select(range(NUM_SAMPLES))
    trainer, config, keywords = of_trl(SFTTrainer, SFTConfig, [], build_model(recipe, splits.tokenizer))
    # A key's bias has no gradient but rounding errors, which AdamW would enlarge.
    fields = keywords["fields"] | SGD
    return trainer, config, keywords | {
        "train_dataset": data, "processing_class": splits.processor, "fields": fields,
    }  # fmt: skip


@row("TRL, DPO")
def dpo():
    return of_trl(DPOTrainer, DPOConfig, preferences(), reference=True)


@row("TRL, KTO")
def kto():
    data = [
        {"prompt": f"{n} + {n} =", "completion": f" {2 * n + n % 2}", "label": n % 2 == 0}
        for n in range(NUM_SAMPLES)
    ]
    return of_trl(KTOTrainer, KTOConfig, data, reference=True)


@row("TRL, Reward")
def reward():
    model = chat_model(LlamaForSequenceClassification, num_labels=1)
    return of_trl(RewardTrainer, RewardConfig, preferences(), model)


@row("TRL, ORPO")
def orpo():
    return of_trl(ORPOTrainer, ORPOConfig, preferences())


@row("TRL, CPO")
def cpo():
    return of_trl(CPOTrainer, CPOConfig, preferences())


class FixedCompletions:
    """Draws completions of 3 to 7 tokens from those of their prompt, where a trainer would generate them."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        completions = []
        for number, tokens in enumerate(prompt_ids):
            draws = torch.Generator().manual_seed(2 * sum(tokens) + number % self.num_generations)
            length = 3 + int(torch.randint(5, (), generator=draws))
            completions.append(torch.randint(5, 60, (length,), generator=draws).tolist())
        return (completions, None) if isinstance(self, GRPOTrainer) else completions


class GRPO(FixedCompletions, GRPOTrainer):
    pass


class RLOO(FixedCompletions, RLOOTrainer):
    pass


def sum_of_letters(completions, **_):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


@row("TRL, GRPO")
def grpo(trainer=GRPO, config=GRPOConfig):
    prompts = [{"prompt": f"{n} + {n} ="} for n in range(NUM_SAMPLES)]
    trainer, config, keywords = of_trl(trainer, config, prompts)
    fields = keywords["fields"] | {"num_generations": 2, "max_completion_length": 8, "beta": 0.0}
    del fields["max_length"]
    return trainer, config, keywords | {"reward_funcs": sum_of_letters, "fields": fields}


@row("TRL, RLOO")
def rloo():
    return grpo(RLOO, RLOOConfig)


class OnlineDPO(OnlineDPOTrainer):
    """Takes two completions of each prompt from a generator, where a trainer would generate them."""

    def _generate(self, model, prompts, images=None):
        options = {"return_tensors": "pt", "padding_side": "left", "add_special_tokens": False}
        read = self.processing_class(text=prompts, padding=True, **options)
        seeds = [2 * sum(map(ord, prompt)) + copy for copy in range(2) for prompt in prompts]
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        written = torch.stack([torch.randint(5, 60, (5,), generator=draws) for draws in generators])
        ids, mask = (read[name].repeat(2, 1) for name in ("input_ids", "attention_mask"))
        return ids, mask, written, torch.ones_like(written), None


@row("TRL, online DPO")
def online_dpo():
    prompts = [{"prompt": f"{n} + {n} ="} for n in range(NUM_SAMPLES)]
    trainer, config, keywords = of_trl(OnlineDPO, OnlineDPOConfig, prompts, reference=True)
    fields = keywords["fields"] | {"max_new_tokens": 5}
    return trainer, config, keywords | {"reward_funcs": sum_of_letters, "fields": fields}


@row("TRL, GKD")
def gkd():
    talks = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}]
        for n in range(NUM_SAMPLES)
    ]
    trainer, config, keywords = of_trl(GKDTrainer, GKDConfig, [{"messages": talk} for talk in talks])
    fields = keywords["fields"] | {"lmbda": 0.0}  # the completions of the data
    torch.manual_seed(1)
    teacher = LlamaForCausalLM(keywords["model"].config)
    return trainer, config, keywords | {"teacher_model": teacher, "fields": fields}


# -- the ways in which people subclass -----------------------------------------------------------------


def subclass(cls):
    """Make a row of a subclass of `Trainer`, with a small llama."""
    ROWS[f"subclass: {cls.__doc__.rstrip('.')}"] = lambda: of_trainer(llama(), texts(), cls)
    return cls


@subclass
class OwnLoss(Trainer):
    """own `compute_loss` without `super()`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


@subclass
class PenalizedLoss(Trainer):
    """`compute_loss` that adds to the loss of `super()`."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Distilling(Trainer):
    """distillation, with an argument of its own before the Trainer's."""

    def __init__(self, teacher, *args, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval()
        self.temperature = temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            target = (self.teacher(**inputs).logits / self.temperature).softmax(-1)
        log_probs = (outputs.logits / self.temperature).log_softmax(-1)
        loss = nn.functional.kl_div(log_probs.flatten(0, 1), target.flatten(0, 1), reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


@row("subclass: distillation, with an argument of its own before the Trainer's")
def distilling():
    torch.manual_seed(7)
    teacher = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=64))
    return of_trainer(llama(), texts(), Distilling, positional=(teacher,))


@subclass
class OwnOptimizer(Trainer):
    """own `create_optimizer` with two rates."""

    def create_optimizer(self, model=None):
        head = {"params": self.model.lm_head.parameters(), "lr": 1e-1}
        self.optimizer = torch.optim.SGD([{"params": self.model.model.parameters()}, head], lr=1e-2)
        return self.optimizer


@subclass
class OwnSchedule(Trainer):
    """own `create_scheduler`."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return self.lr_scheduler


@subclass
class OwnInputs(Trainer):
    """`_prepare_inputs` that changes a batch."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] < 10, -100)
        return inputs


@subclass
class OwnStep(Trainer):
    """`training_step` around that of `super()`."""

    num_batches = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.num_batches += 1
        return super().training_step(model, inputs, num_items_in_batch)


@subclass
class OwnLog(Trainer):
    """`log` that adds a value of its own."""

    def log(self, logs, *args, **kwargs):
        super().log(logs | {"mine": 1.0}, *args, **kwargs)


class PositionWeights:
    """A loss function for `compute_loss_func`."""

    def __call__(self, outputs, labels, num_items_in_batch=None):
        losses = nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
        )
        return losses / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


@row("`compute_loss_func`")
def loss_function():
    return of_trainer(llama(), texts(), compute_loss_func=PositionWeights())


@row("`optimizers=(optimizer, schedule)`")
def given_optimizer():
    model = llama()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return of_trainer(model, texts(), optimizers=(optimizer, schedule))


@row("`model_init`")
def model_init():
    return of_trainer(None, texts(), model_init=llama)


@dataclass
class Collator:
    """A data collator that pads by hand."""

    pad: int = 0

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        filled = {"input_ids": self.pad, "labels": -100}
        return {
            name: torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])
            for name, value in filled.items()
        }


@row("own collator, texts of unlike length")
def collator():
    data = [{"input_ids": row[: 3 + i % 9], "labels": row[: 3 + i % 9]} for i, row in enumerate(draw(12))]
    return of_trainer(llama(), Dataset.from_list(data), data_collator=Collator())
