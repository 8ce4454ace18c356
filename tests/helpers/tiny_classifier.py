"""A sequence classifier with one class, and its values by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hf_helpers import SIZES, tokenizer

TOKENS = 80
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{% endfor %}"
"""Roles are their first letters: the vocabulary has one token per character from 0 on."""
SHAPE = SIZES | {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "num_labels": 1}


def write_classifier(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, "vocab_size": TOKENS, "pad_token_id": 0})
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = tokenizer(TOKENS)
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return folder


def classified(folder: Path, texts: Sequence[str]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    values = []
    with torch.no_grad():
        for text in texts:
            tokens = words(text, return_tensors="pt", add_special_tokens=False)
            values.append(float(model(input_ids=tokens["input_ids"]).logits[0, 0]))
    return values
