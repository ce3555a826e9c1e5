"""The models that `collect_gpu.py` trains; weights and inputs are random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_variants import ModelTraits
from torch import Tensor, nn


@dataclass(frozen=True)
class TimedModel:
    """`build` returns the module, `draw` a batch; `loss` takes the module and the batch."""

    build: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor]
    batch: int
    adam: bool
    traits: ModelTraits


def _images(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(
        1000, (batch,), device="cuda"
    )


def _loss_of_images(model: Any, drawn: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(drawn[0]), drawn[1])


def _loss_of_text(model: Any, drawn: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(input_ids=drawn[0], labels=drawn[0]).loss
    return loss


def _vision(name: str, batch: int) -> TimedModel:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)()
        return model

    return TimedModel(build, _images, _loss_of_images, batch, False, ModelTraits(True, False))


def _bert(**sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        model: nn.Module = BertForMaskedLM(BertConfig(**sizes))
        return model

    return build


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model


def _words(words: int, length: int) -> Callable[[int], tuple[Tensor, ...]]:
    def draw(count: int) -> tuple[Tensor, ...]:
        return (torch.randint(words, (count, length), device="cuda"),)

    return draw


def _text(build: Callable[[], nn.Module], words: int, batch: int, length: int) -> TimedModel:
    traits = ModelTraits(images=False, recomputes=True)
    return TimedModel(build, _words(words, length), _loss_of_text, batch, True, traits)


class LstmLanguageModel(nn.Module):
    """Embedding, layers of LSTM, and a matrix product back to the words."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])  # type: ignore[no-any-return]


def _loss_of_lstm(model: Any, drawn: tuple[Tensor, ...]) -> Tensor:
    words = drawn[0]
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


LSTM_WORDS = 33278
"""Words of WikiText-2."""
MODELS = {
    "resnet50": _vision("resnet50", 64),
    "vgg19": _vision("vgg19", 64),
    "densenet121": _vision("densenet121", 64),
    "bert_base": _text(_bert(), 30522, 32, 128),
    "bert_large": _text(
        _bert(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
        30522,
        16,
        128,
    ),
    "gpt2": _text(_gpt2, 50257, 8, 512),
    "lstm": TimedModel(
        lambda: LstmLanguageModel(LSTM_WORDS, 1024, 3),
        _words(LSTM_WORDS, 129),
        _loss_of_lstm,
        64,
        True,
        ModelTraits(images=False, recomputes=False),
    ),
}
