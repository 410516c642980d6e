"""What a resumed run must keep: every change of it is refused by key, with what to do."""

import json
from pathlib import Path

import pytest

from tests.trainer.saved_runs import compose_with, make_run, write_manifest
from trainer import kept
from trainer.compose import Composition
from trainer.saving.checkpoints import name_of


def changes(
    composition: Composition, *, step: int = 4, saved_ranks: int = 1, ranks: int = 1, may_differ: tuple[str, ...] = ()
) -> list[str]:
    assert composition.problems == []
    return kept.problems(
        composition.saved,
        composition.cfg,
        checkpoint=composition.resumption.candidates[0],
        step=step,
        saved_ranks=saved_ranks,
        ranks=ranks,
        may_differ=may_differ,
    )


def test_changed_models_task_data_and_seed_are_refused_by_key_all_at_once(run: Path) -> None:
    composition = compose_with(
        "resume=run",
        "models.student.dtype=float32",
        "models.student.lora.r=8",
        "models.teacher.build.name=org/large",
        "task.terms.forward_kl.weight=0.25",
        "task.terms.mine={function: forward_kl, weight: 1}",
        "~task.terms.cross_entropy",
        "data.train=other.jsonl",
        "data.block_size=64",
        "seed=3",
        "optimizer@models.student.optimizer=sgd",
    )

    found = changes(composition)

    expected = {
        "models.student.optimizer._target_=torch.optim.SGD": "has torch.optim.AdamW",
        "models.student.dtype=float32": "has auto",
        "models.student.lora.r=8": "has none",
        "models.teacher.build.name=org/large": "has embedded:",
        "task.terms.forward_kl.weight=0.25": "has 1.0",
        "task.terms.mine={function, weight}": "has none",
        "task.terms.cross_entropy is gone": "has {function, weight, temperature, mask}",
        "data.train=other.jsonl": "has embedded:",
        "data.block_size=64": "has ",
        "seed=3": "has 0; a resumed run keeps its models, task, data and seed; drop it, or start a new run",
    }
    assert len(found) == len(expected), found
    for start, text in expected.items():
        assert any(p.startswith(f"{start}: the run that is resumed") and text in p for p in found), (start, found)


def test_ranks_steps_plugins_and_what_is_written_may_change(run: Path) -> None:
    composition = compose_with(
        "resume=run",
        "trainer.max_steps=99",
        "trainer.val_every=3",
        "launch.num_processes=1",
        "plugin@models.student.plugin=zero3",
        "checkpoint.every=2",
        "export.enabled=false",
        "data.num_workers=2",
        "models.student.optimizer.lr=3e-4",
    )

    assert changes(composition) == []


def test_offload_may_change_with_the_optimizer_that_goes_with_it(run: Path) -> None:
    cpu = ("resume=run", "optimizer@models.student.optimizer=cpu_adamw")
    keys = ("lr=0.0003", "weight_decay=0.1", "adamw_mode=false")

    (lr,) = changes(compose_with(*cpu))
    decay, plain = changes(compose_with(*cpu, *(f"models.student.optimizer.{key}" for key in keys)))
    (fused,) = changes(compose_with("resume=run", "models.student.optimizer.fused=true"))

    assert lr.startswith("models.student.optimizer.lr=0.0001: the run that is resumed has 0.0003; ")
    assert "give models.student.optimizer.lr=0.0003" in lr
    assert "weight_decay=0.1" in decay and "adamw_mode=false" in plain
    assert fused.startswith("models.student.optimizer.fused=true: the run that is resumed has none")


def test_the_global_batch_stays_whatever_the_ranks(run: Path) -> None:
    make_run(Path("two"), "data.batch_size=4", world_size=2)

    (halved,) = changes(compose_with("resume=two"), saved_ranks=2, ranks=1)
    (uneven,) = changes(compose_with("resume=two"), saved_ranks=2, ranks=3)
    (doubled,) = changes(compose_with("resume=two", "data.batch_size=8"), saved_ranks=2, ranks=2)
    wider = compose_with("resume=two", "data.batch_size=8")
    longer = compose_with("resume=two", "trainer.gradient_accumulation_steps=2")
    validate = compose_with("resume=two", "mode=validate", "trainer.max_steps=1")

    assert halved.startswith(
        "data.batch_size=4 and trainer.gradient_accumulation_steps=1 on 1 rank instead of 2 make a global batch of 4, "
    )
    assert halved.endswith(
        "but the run that is resumed has 8 (4 x 1 x 2); give data.batch_size=8 or trainer.gradient_accumulation_steps=2"
    )
    assert "on 3 ranks instead of 2 make a global batch of 12" in uneven
    assert uneven.endswith("choose a number of ranks that divides 8")
    assert "on 2 ranks make a global batch of 16" in doubled and doubled.endswith("give data.batch_size=4")
    assert changes(wider, saved_ranks=2, ranks=1) == changes(longer, saved_ranks=2, ranks=1) == []
    assert changes(validate, saved_ranks=2, ranks=1) == [], "nothing is trained"


def test_each_data_set_and_each_models_pace_stays(run: Path) -> None:
    own = ("task=disjoint", "data@models.large.data=text", "models.large.data.train=a.txt", "data.batch_size=4")
    pace = ("trainer.gradient_accumulation_steps=4", "models.small.gradient_accumulation_steps=2")
    make_run(Path("pairs"), *own, *pace, "models.large.data.batch_size=2", world_size=2)

    sizes = changes(compose_with("resume=pairs"), saved_ranks=2, ranks=1)
    longer = changes(compose_with("resume=pairs", "trainer.gradient_accumulation_steps=8"), saved_ranks=2, ranks=1)
    good = compose_with(
        "resume=pairs", "trainer.gradient_accumulation_steps=8", "models.small.gradient_accumulation_steps=4"
    )

    assert [problem.partition("; ")[2] for problem in sizes] == [
        "give data.batch_size=8 or trainer.gradient_accumulation_steps=8",
        "give models.large.data.batch_size=4 or trainer.gradient_accumulation_steps=8",
    ]
    (pace_problem,) = longer
    assert "trainer.gradient_accumulation_steps=8 make 4 updates in a global step, but the run" in pace_problem
    assert pace_problem.endswith("has 2; give models.small.gradient_accumulation_steps=4")
    assert changes(good, saved_ranks=2, ranks=1) == []


def test_a_run_cannot_end_before_its_checkpoint(run: Path) -> None:
    found = changes(compose_with("resume=run", "trainer.max_steps=5", "trainer.stop_at_step=3"), step=6)

    assert [problem.partition(":")[0] for problem in found] == ["trainer.max_steps=5", "trainer.stop_at_step=3"]
    assert "the checkpoint is of step 6" in found[0]
    assert changes(compose_with("resume=run", "trainer.max_steps=6"), step=6) == []


def test_what_a_plugin_says_of_the_arithmetic_stays(run: Path) -> None:
    clipped = changes(compose_with("resume=run", "models.student.plugin.gradient_clipping=0.1"))
    moved = changes(compose_with("resume=run", "models.student.plugin.zero_optimization.stage=3"))
    values = {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp16", "fp16.loss_scale": "8",
              "bf16.bf16_optimizer_states": "true", "zero_optimization.zero_quantized_gradients": "true"}  # fmt: skip
    for word, value in values.items():
        (problem,) = changes(compose_with("resume=run", f"+models.student.plugin.{word}={value}"))
        assert problem.startswith(f"models.student.plugin.{word.partition('.')[0]}") and "resumed has none" in problem

    assert len(clipped) == 1 and clipped[0].startswith("models.student.plugin.gradient_clipping=0.1: the run that is")
    assert moved == []


def test_what_a_task_says_may_differ_may_and_nothing_beside_it(run: Path) -> None:
    keys = ["task.keep_teachers=host", "task.preflight.ranks=false", "task.combine=losses"]
    composition = compose_with("resume=run", *keys)

    assert len(changes(composition)) == 3
    (problem,) = changes(composition, may_differ=("keep_teachers", "preflight", "comb"))
    assert problem.startswith("task.combine=losses: ")


STAGE_2 = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


@pytest.fixture
def file_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose student has its plugin from ds.json, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(STAGE_2))
    choice = ["plugin@models.student.plugin=file", "models.student.plugin.path=ds.json"]
    folder = make_run(Path("run"), *choice, steps=(2,))
    place = folder / "checkpoints" / name_of(2) / kept.plugin_file("student")
    place.write_text(json.dumps(STAGE_2))
    write_manifest(place.parent, step=2, world_size=1)
    return place


def test_what_a_deepspeed_file_says_of_the_arithmetic_stays(file_run: Path) -> None:
    assert changes(compose_with("resume=run"), step=2) == []

    altered = {"type": "Adam", "params": {"lr": 0.001}}
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "optimizer": altered}))
    (problem,) = changes(compose_with("resume=run"), step=2)
    assert problem.startswith("models.student.plugin.optimizer.type=Adam: the run that is resumed has AdamW; ")
    assert problem.endswith("change ds.json back, or start a new run")

    autos = {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}  # as without them
    Path("ds.json").write_text(json.dumps({**STAGE_2, **autos}))
    assert changes(compose_with("resume=run"), step=2) == []

    Path("ds.json").write_text("{")  # check.py says so
    assert changes(compose_with("resume=run"), step=2) == []

    Path("other.json").write_text(json.dumps(STAGE_2))
    assert changes(compose_with("resume=run", "models.student.plugin.path=other.json"), step=2) == []

    Path("other.json").write_text("{}")  # check.py says so
    assert changes(compose_with("resume=run", "models.student.plugin.path=other.json"), step=2) == []

    Path("other.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    gone, clipped = changes(compose_with("resume=run", "models.student.plugin.path=other.json"), step=2)
    assert gone.startswith("models.student.plugin.optimizer is gone: ")
    assert clipped.startswith("models.student.plugin.gradient_clipping=0.5: the run that is resumed has none")

    file_run.unlink()  # of a checkpoint that does not hold it
    write_manifest(file_run.parent, step=2, world_size=1)
    assert changes(compose_with("resume=run", "models.student.plugin.path=other.json"), step=2) == []
