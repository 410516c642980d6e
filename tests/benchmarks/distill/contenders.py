"""What the trainers have in common: the models, the tokens and what each must have learnt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCABULARY = 49_152  # of SmolLM2
LR = 1e-3


def llama(*, width: int, num_layers: int) -> PreTrainedModel:
    """Returns a random Llama with tied heads, as small models have."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def student(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the model that is trained, the same for each contender."""
    torch.manual_seed(1)
    return llama(width=256, num_layers=3)


def teacher(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the frozen model: wider, deeper, and sure of something, as a random one is not."""
    torch.manual_seed(2)
    model = llama(width=512, num_layers=6)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5.0)
    return model


def tokens(length: int) -> Tensor:
    """Returns the one row that every example is: whatever the order, all contenders see the same batches."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


class Rows(Dataset[dict[str, Tensor]]):
    """The same row of tokens, again and again."""

    def __init__(self, num_examples: int, length: int) -> None:
        self.num_examples, self.row = num_examples, tokens(length)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.num_examples:
            raise IndexError(index)
        return {"input_ids": self.row, "labels": self.row, "attention_mask": torch.ones_like(self.row)}


def divergence(model: nn.Module, length: int) -> float:
    """Returns KL(teacher || model) per token of the row, from logits, by torch's own functions."""
    row = tokens(length)[None]
    with torch.no_grad():
        log_q, log_p = (torch.log_softmax(m(input_ids=row).logits[0, :-1], dim=-1) for m in (model.eval(), teacher()))
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()
