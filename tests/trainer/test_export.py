"""Exports from two ranks: whole, loadable without this project, and proven to score as the model in memory did."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.ranks import run_ranks
from tests.trainer.test_assets import TOKENS, tiny_llama
from tests.trainer.test_trainer import reset_accelerate
from trainer import ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.export import ExportError, _replaced, export_model, rescore

Found = dict[str, Any]
BUILD = {"_target_": "tests.trainer.test_export.tied_net", "width": 6}
LLAMA = tiny_llama().config
PRESET = yaml.safe_load((Path(__file__).parents[2] / "conf" / "plugin" / "zero3.yaml").read_text(encoding="utf-8"))
SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


class Tied(nn.Module):
    """Two names for one weight, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.outer.weight = self.inner.weight
        self.register_buffer("offset", torch.arange(float(width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh()) + self.offset


def tied_net(width: int = 6, *, dtype: torch.dtype, seed: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return Tied(width).to(dtype)


def teacher_llama() -> nn.Module:
    torch.manual_seed(5)
    return LlamaForCausalLM(LLAMA)


def reward_llama() -> nn.Module:
    torch.manual_seed(6)
    return LlamaForSequenceClassification(LLAMA)


def other_reward_llama() -> nn.Module:
    torch.manual_seed(7)
    return LlamaForSequenceClassification(LLAMA)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TOKENS[2], pad_token=TOKENS[2])


class LogitsTask(TaskModule):
    """Any trained model follows its teacher."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses={"student": self.error(batch)})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"error": self.error(batch)}

    def error(self, batch: dict[str, Tensor]) -> Tensor:
        student, teacher = (self.outputs(name, batch) for name in ("student", "teacher"))
        return (student - teacher).pow(2).mean()

    def outputs(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        if "x" in batch:
            return self.models[name](batch["x"])
        return self.models[name](input_ids=batch["input_ids"]).logits


def make_items(kind: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    if kind == "x":
        return [{"x": torch.randn(6, generator=generator)} for _ in range(8)]
    return [{"input_ids": torch.randint(3, 200, (6,), generator=generator)} for _ in range(8)]


def trained(student: Any, teacher: Any, *, stage: int, items: str) -> MultiModelTrainer:
    reset_accelerate()
    # The teacher's plugin comes first, so that ZeRO-3 is the selected one while the student is written.
    student_plugin = PRESET if stage == 3 else {"zero_optimization": {"stage": stage}}
    plugins = {"teacher": SHARDED, "student": student_plugin}
    trainer = MultiModelTrainer(plugins, max_steps=2)
    models = {
        "teacher": ModelSpec(build=teacher, trainable=False, dtype=torch.float32),
        "student": ModelSpec(
            build=student, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), dtype=torch.float32
        ),
    }
    data = TrainingData(train=make_items(items), validation=make_items(items), batch_size=4 // trainer.world_size)
    trainer.fit(LogitsTask(), models=models, data=data)
    return trainer


def check_causal_lm(folder: Path, stage: int) -> Found:
    trainer = trained(tiny_llama, teacher_llama, stage=stage, items="tokens")
    target = folder / "export" / f"zero{stage}"
    student, batch = trainer.models["student"], make_items("tokens")[0]["input_ids"][None]
    trainer.evaluate()  # the last use before the export
    export_model(student, target, tokenizer=tiny_tokenizer(), build={})
    scores = rescore(trainer, "student", target, build=tiny_llama, tolerance=1e-4)
    student.set_training(False)
    with torch.no_grad():
        logits = student(input_ids=batch).logits
    return {
        "engine": type(student.engine.optimizer).__name__,
        "logits": logits,
        "scores": scores,
        "after": trainer.after,
        "student is back": trainer.models["student"] is student,
    } | {f"tampered {kind}": tamper(trainer, target, kind) for kind in ("slightly", "nan")}


def tamper(trainer: MultiModelTrainer, folder: Path, kind: str) -> str:
    """Returns how an export with one wrong tensor is refused; the file is put right again."""
    from trainer import distributed

    file = folder / "model.safetensors"
    right = load_file(file)
    wrong = {key: value.clone() for key, value in right.items()}
    wrong["model.norm.weight"] *= float("nan") if kind == "nan" else 1.05
    distributed.barrier()
    if distributed.is_main():
        save_file(wrong, file, metadata={"format": "pt"})
    distributed.barrier()
    try:
        rescore(trainer, "student", folder, build=tiny_llama, tolerance=1e-3)
    except ExportError as error:
        return str(error)
    finally:
        distributed.barrier()
        if distributed.is_main():
            save_file(right, file, metadata={"format": "pt"})
        distributed.barrier()
    return "not noticed"


def check_plain_module(folder: Path, stage: int) -> Found:
    trainer = trained(tied_net, functools.partial(tied_net, seed=8), stage=stage, items="x")
    target = folder / "export" / f"plain{stage}"
    student = trainer.models["student"]
    export_model(student, target, tokenizer=None, build=BUILD)
    scores = rescore(trainer, "student", target, build=tied_net, tolerance=1e-5)
    with torch.no_grad():
        return {"outputs": student(make_items("x")[0]["x"]), "scores": scores, "after": trainer.after}


def check_reward_model(folder: Path) -> Found:
    """A transformers model that is no causal language model."""
    trainer = trained(reward_llama, other_reward_llama, stage=2, items="tokens")
    target = folder / "export" / "reward"
    export_model(trainer.models["student"], target, tokenizer=None, build={})
    scores = rescore(trainer, "student", target, build=reward_llama, tolerance=1e-5)
    return {"scores": scores, "after": trainer.after}


def run_checks(folder: Path) -> dict[str, Found]:
    found = {f"causal {stage}": check_causal_lm(folder, stage) for stage in (1, 3)}
    found |= {f"plain {stage}": check_plain_module(folder, stage) for stage in (1, 3)}
    return found | {"reward": check_reward_model(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Found]]:
    return run_ranks(run_checks, folder, folder=folder, world_size=2)


@pytest.mark.parametrize("stage", [1, 3])
def test_language_model_loads_without_us_and_gives_the_same_logits(
    ranks: list[dict[str, Found]], folder: Path, stage: int
) -> None:
    expected = "DeepSpeedZeroOptimizer" if stage == 1 else "DeepSpeedZeroOptimizer_Stage3"
    assert ranks[0][f"causal {stage}"]["engine"] == expected

    loaded = AutoModelForCausalLM.from_pretrained(folder / "export" / f"zero{stage}")

    assert isinstance(loaded, LlamaForCausalLM)
    with torch.no_grad():
        logits = loaded(input_ids=make_items("tokens")[0]["input_ids"][None]).logits
    for rank in ranks:
        torch.testing.assert_close(logits, rank[f"causal {stage}"]["logits"], rtol=0, atol=1e-5)
    assert (logits - tiny_llama()(input_ids=make_items("tokens")[0]["input_ids"][None]).logits).abs().max() > 1e-3


@pytest.mark.parametrize("stage", [1, 3])
def test_export_keeps_weights_tied_and_has_the_tokenizer(
    ranks: list[dict[str, Found]], folder: Path, stage: int
) -> None:
    target = folder / "export" / f"zero{stage}"

    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("case", ["causal 1", "causal 3", "plain 1", "plain 3", "reward"])
def test_reloaded_model_scores_as_the_one_in_memory(ranks: list[dict[str, Found]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["scores"] == pytest.approx(rank[case]["after"], rel=1e-4)
        assert rank[case]["scores"]["val/error"] > 1e-3


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["slightly", "nan"])
def test_tampered_export_is_refused_on_every_rank(ranks: list[dict[str, Found]], stage: int, kind: str) -> None:
    for rank in ranks:
        assert rank[f"causal {stage}"][f"tampered {kind}"].startswith("student scores val/error ")
        assert "export.tolerance=0.001" in rank[f"causal {stage}"][f"tampered {kind}"]
        assert rank[f"causal {stage}"]["student is back"]


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_module_is_its_weights_and_how_to_build_it(
    ranks: list[dict[str, Found]], folder: Path, stage: int
) -> None:
    target = folder / "export" / f"plain{stage}"

    weights = load_file(target / "model.safetensors")

    assert yaml.safe_load((target / "build.yaml").read_text()) == BUILD
    assert set(weights) == {"inner.weight", "inner.bias", "outer.bias", "offset"}  # the tied one once
    net = tied_net(dtype=torch.float32)
    net.load_state_dict(weights, strict=False)
    torch.testing.assert_close(net(make_items("x")[0]["x"]), ranks[0][f"plain {stage}"]["outputs"], rtol=0, atol=1e-6)


def test_model_with_empty_tensors_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.weight.data = torch.empty(0)
    handle: Any = SimpleNamespace(name="student", settle=lambda: None, module=module)

    with pytest.raises(ExportError, match=r"student: 1 of 2 tensors are empty, such as \['weight'\]"):
        export_model(handle, tmp_path / "export", tokenizer=None, build={})

    assert not (tmp_path / "export").exists()


def test_an_export_takes_the_place_of_an_earlier_one_once_it_is_whole(tmp_path: Path):
    folder = tmp_path / "export" / "student"
    for word in ("first", "second"):
        with _replaced(folder) as part:
            (part / word).touch()

    with suppress(OSError), _replaced(folder) as part:
        (part / "third").touch()
        raise OSError("disk full")

    assert [path.name for path in folder.iterdir()] == ["second"]
    with _replaced(folder):
        pass
    assert [path.name for path in folder.parent.iterdir()] == ["student"], "nothing half-written stays"
