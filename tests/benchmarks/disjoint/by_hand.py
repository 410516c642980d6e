"""One model trained by a hand-written Accelerate loop: what a user starts twice who has no trainer for two."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.benchmarks.overhead.by_hand import config
from tests.benchmarks.overhead.parts import BATCH, LR, Stopwatch, Tokens, student, teacher

MODELS = {"small": (student, 1), "large": (teacher, 2)}  # and its ZeRO stage


def main(num_steps: int, name: str) -> None:
    """Trains the model on the next token; the numbers go where the stopwatch writes them."""
    if "RANK" not in os.environ:
        from trainer.distributed import ensure_environment

        ensure_environment()
    build, stage = MODELS[name]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)),
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Tokens(num_steps * BATCH * accelerator.num_processes), batch_size=BATCH, shuffle=True)
    accelerator.state.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    stopwatch, batches = Stopwatch(), iter(loader)
    for _ in range(num_steps):
        stopwatch.start_step()
        batch = next(batches)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        logits = model(**inputs).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.end_step()
    stopwatch.write()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
