"""What a resumed run must keep: every change of it is refused by key, with what to do."""

from pathlib import Path

from tests.trainer.saved_runs import compose_with, make_run
from trainer import kept
from trainer.compose import Composition


def changes(composition: Composition, *, step: int = 4, saved_ranks: int = 1, ranks: int = 1) -> list[str]:
    assert composition.problems == []
    return kept.problems(composition.saved, composition.cfg, step=step, saved_ranks=saved_ranks, ranks=ranks)


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

    assert len(clipped) == 1 and clipped[0].startswith("models.student.plugin.gradient_clipping=0.1: the run that is")
    assert moved == []
