"""Drops the gradients that a DeepSpeed engine holds, as its own step does with those that overflow."""

from __future__ import annotations

from typing import Any


def discard_gradients(engine: Any) -> None:
    """Leaves the engine as it is right after a step that it skipped; weights, schedule and loss scale stay.

    To be called where a step could be: after the backward of an accumulation boundary. DeepSpeed has no method for it.
    Its `step()` with infinite gradients would do the same, but halve the loss scale of a float16 model, which a loss
    that is NaN says nothing about. `optimizer.zero_grad()` alone forgets what has not been reduced yet.

    Buffers that outlive a step are zeroed, which DeepSpeed leaves out: a weight that gets no gradient in the next
    window would take what is in them.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _discard_stage3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _discard_stage1_and_2(optimizer)
    else:  # ZeRO-0 and the optimizer of bfloat16: all of it hangs on the weights or is zeroed with them
        optimizer.zero_grad()
    engine.zero_grad()  # the weights that the optimizer does not have


def _discard_stage3(optimizer: Any) -> None:
    optimizer._pre_step()  # micro_step_id, the weights in the buckets, those that were offloaded
    optimizer._overflow_clean_up(optimizer.loss_scale)
    optimizer.grad_partitions_flat_buffer.zero_()
    for partition in optimizer.fp32_partitioned_groups_flat:
        _zero_gradient(partition)


def _discard_stage1_and_2(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer.zero_grad(set_to_none=True)
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
        for partition in optimizer.single_partition_of_fp32_groups:
            _zero_gradient(partition)
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None


def _zero_gradient(partition: Any) -> None:
    if partition.grad is not None:
        partition.grad.zero_()
