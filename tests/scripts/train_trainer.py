"""A script of transformers' Trainer on a small BERT."""

import sys
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 8) % 50
        return {"input_ids": tokens, "labels": torch.tensor(index % 2)}


sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config = BertConfig(vocab_size=50, intermediate_size=16, max_position_embeddings=16, **sizes)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=1_000_000,
    per_device_train_batch_size=4,
    use_cpu=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
model = BertForSequenceClassification(config)
Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
