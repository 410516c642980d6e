"""Distillation as in Accelerate's guide to several models: one Accelerator, two plugins, a hand-written loop."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.benchmarks.overhead.parts import BATCH, LR, Stopwatch, Tokens, student, teacher


def config(stage: int) -> dict[str, object]:
    """Returns the DeepSpeed configuration of one model."""
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }


def main(num_steps: int) -> None:
    """Trains; the numbers go where the stopwatch writes them."""
    if "RANK" not in os.environ:
        from trainer.distributed import ensure_environment

        ensure_environment()
    plugins = {name: DeepSpeedPlugin(hf_ds_config=config(stage)) for name, stage in (("student", 2), ("teacher", 3))}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(deepspeed_plugins=plugins, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    torch.manual_seed(0)
    model = student()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Tokens(num_steps * BATCH * accelerator.num_processes), batch_size=BATCH, shuffle=True)
    # Without it DeepSpeed refuses torch's AdamW on no ground here.
    accelerator.state.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    frozen = accelerator.prepare(teacher())
    accelerator.state.select_deepspeed_plugin("student")

    frozen.eval()
    model.train()
    stopwatch, batches = Stopwatch(), iter(loader)
    for _ in range(num_steps):
        stopwatch.start_step()
        batch = next(batches)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        with torch.no_grad():
            wanted = frozen(**inputs).logits[:, :-1].float()
        logits = model(**inputs).logits[:, :-1].float()
        loss = F.kl_div(
            F.log_softmax(logits, -1).flatten(0, 1),
            F.log_softmax(wanted, -1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.end_step()
    stopwatch.write()


if __name__ == "__main__":
    main(int(sys.argv[1]))
