"""Files to rows, rows to token examples, examples to windows of micro-batches."""

from trainer.data.collate import PaddingCollator, model_inputs
from trainer.data.files import check_source, load_rows
from trainer.data.loader import MicroBatch, TrainLoader, ValidationLoader
from trainer.data.order import BatchPlan
from trainer.data.split import deduplicate, split_rows
from trainer.data.text import TextDataset, build_text_dataset, render_prompt
from trainer.data.tokenizers import check_same_vocabulary, load_tokenizer

__all__ = [
    "BatchPlan",
    "MicroBatch",
    "PaddingCollator",
    "TextDataset",
    "TrainLoader",
    "ValidationLoader",
    "build_text_dataset",
    "check_same_vocabulary",
    "check_source",
    "deduplicate",
    "load_rows",
    "load_tokenizer",
    "model_inputs",
    "render_prompt",
    "split_rows",
]
