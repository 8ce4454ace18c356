"""One rank of TRL's GRPOTrainer in `grpo_step.py`: the same weights, prompts, sizes and update.

python grpo_step_trl.py FOLDER      FOLDER has size.txt, base.pt and prompts.json
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from grpo_step_sizes import LEARNING_RATE, SIZES
from grpo_step_turns import Turns
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from megatron_rl.agent.environments.reasoning_gym import last_number
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.hub import local_folder

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
END, PADDING = "$", "_"


class Timed(GRPOTrainer):
    """GRPOTrainer that times generation."""

    generate_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.generate_s = time.perf_counter() - started
        return result

    def answer_length(self) -> float:
        return self._metrics["train"]["completions/mean_length"][-1]


class TakingTurns(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: Timed

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.ready()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turns.step_ended(answer_length=self.trainer.answer_length(), generate_s=self.trainer.generate_s)


def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent()
    turns = Turns() if RANK == 0 else None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if RANKS > 1:
        store = dist.FileStore(str(folder / "trl-rendezvous"), RANKS)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
    config = SIZES[(folder / "size.txt").read_text(encoding="utf-8")].config()
    tokenizer = load_tokenizer(config)
    trainer = Timed(
        model=load(config, tokenizer, folder / "base.pt"),
        reward_funcs=last_number_matches if config.environment.name == "reasoning-gym" else exact_match,
        args=arguments(config, folder),
        train_dataset=Dataset.from_list(json.loads((folder / "prompts.json").read_text(encoding="utf-8"))),
        processing_class=tokenizer,
        peft_config=adapters(config),
    )
    if turns is not None:
        callback = TakingTurns(turns)
        callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train()


def arguments(config: RunConfig, folder: Path) -> GRPOConfig:
    grpo = config.grpo
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=grpo.prompts_per_step * grpo.group_size // RANKS,
        num_generations=grpo.group_size,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        beta=grpo.kl_beta,
        epsilon=grpo.clip_range[0],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=config.optimizer.clip_grad,
        max_steps=config.training.steps,
        shuffle_dataset=False,
        bf16=config.model.dtype == "bf16",
        use_cpu=True,
        gradient_checkpointing=False,
        # Our side does not spend time on these either, or less: no logging, saving or progress bar.
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def adapters(config: RunConfig) -> LoraConfig | None:
    if (lora := config.model.lora) is None:
        return None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        lora_dropout=lora.dropout,
        use_rslora=lora.rs,
        task_type="CAUSAL_LM",
    )


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerFast:
    path = config.tokenizer.path
    return (
        AutoTokenizer.from_pretrained(local_folder(path, "tokenizer.path", "tokenizer.json"), padding_side="left")
        if path
        else characters(config)
    )


def characters(config: RunConfig) -> PreTrainedTokenizerFast:
    """megatron_rl.model.tokenizer.CharacterTokenizer as a transformers tokenizer."""
    vocabulary = {character: index for index, character in enumerate(config.tokenizer.alphabet + END + PADDING)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, padding_side="left")


def load(config: RunConfig, tokenizer: PreTrainedTokenizerFast, base: Path) -> PreTrainedModel:
    """Our side's weights. Raises AssertionError if their logits differ from our side's."""
    ours = torch.load(base, weights_only=True)
    model = published(config) if config.model.init == "huggingface" else exported(config, tokenizer, ours["weights"])
    if config.model.dtype == "fp32":
        with torch.no_grad():
            torch.testing.assert_close(model(ours["tokens"][None]).logits[0], ours["logits"], rtol=1e-4, atol=1e-3)
    return model


def published(config: RunConfig) -> PreTrainedModel:
    """Weights that our side reads too."""
    assert config.model.huggingface is not None
    return AutoModelForCausalLM.from_pretrained(
        local_folder(config.model.huggingface, "model.huggingface", "config.json"), dtype=torch.float32
    )


def exported(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, weights: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """Weights written by our side."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.model.hidden_size,
            intermediate_size=config.model.ffn_hidden_size,
            num_hidden_layers=config.model.num_layers,
            num_attention_heads=config.model.num_attention_heads,
            num_key_value_heads=config.model.num_query_groups,
            max_position_embeddings=config.model.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.model.rope_base},
            rms_norm_eps=config.model.layernorm_epsilon,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    return model


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.partition(END)[0] == right) for text, right in zip(completions, answer, strict=True)]


def last_number_matches(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(last_number(text) == last_number(right)) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
