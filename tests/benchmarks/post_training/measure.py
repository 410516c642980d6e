"""What the benchmarks of post-training share: the model, a tokenizer and the table of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.benchmarks.distill.contenders import VOCABULARY, llama
from tests.benchmarks.distill.measure import Numbers
from tests.benchmarks.stopwatch import CPU_TIME, MEMORY, STEP_TIME

# Of TRL's. The processor's time, of all threads, means something on a busy machine too.
AIMS = {STEP_TIME: 0.95, CPU_TIME: 0.95, MEMORY: 0.9}
LR = 1e-4  # slow enough that the loss is not near 0 after some steps


def policy(dtype: torch.dtype = torch.float32, *, is_quick: bool = False) -> PreTrainedModel:
    """Returns the model that is trained, and that a reference is a copy of: random, the same in each process."""
    torch.manual_seed(1)
    return llama(width=64 if is_quick else 256, num_layers=1 if is_quick else 6)


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a word for each id, such as TRL asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def table_of(
    found: Mapping[str, Numbers], pairs: Sequence[tuple[str, str]], *, title: str, results: Sequence[str] = ()
) -> Table:
    """Returns a row per contender, and for each pair of ours and theirs the ratios.

    Args:
        results: Names of numbers that show what was computed.
    """
    table = Table("", *AIMS, *results, title=title)
    for name, numbers in found.items():
        table.add_row(name, *(f"{numbers[key]:.4g}" for key in AIMS), *(f"{numbers[key]:.4f}" for key in results))
    blank = [""] * len(results)
    for ours, theirs in pairs:
        ratios = (f"{found[ours][key] / found[theirs][key]:.2f}" for key in AIMS)
        table.add_row(f"{ours} / {theirs}", *ratios, *blank)
    table.add_row("aim", *(f"{aim}" for aim in AIMS.values()), *blank)
    return table
