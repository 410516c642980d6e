"""A student learns a teacher's sentence embeddings: against plain PyTorch in float64, a sentence at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.distill_encoder import DistillEncoderTask, parse_encoder_terms
from tests.ranks import run_ranks
from tests.tasks.encoder_runs import LR, RANKS, bert, projection, run_all
from tests.tasks.normalisation_runs import Weights, difference
from tests.tasks.task_runs import UNEVEN, make_pairs, validation_pairs, windows
from tests.test_examples import run as run_python
from trainer import ConfigError

HEADS = 8  # of the relations; the student has 3 features in each, the teacher 4
TOLERANCE = 1e-6  # 3 SGD steps in float32 against float64
Pairs = list[dict[str, Tensor]]


@pytest.fixture(scope="module", params=RANKS, ids=["1 rank", "2 ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("encoders")
    cases: dict[str, Any] = run_ranks(run_all, request.param, folder=folder, world_size=request.param)[0]
    return cases


def fresh(student: str) -> dict[str, Any]:
    models = {"student": bert(student), "teacher": bert("teacher"), "projection": projection("projection")}
    return {name: model.double() for name, model in models.items()}


def outputs(model: Any, pairs: Pairs) -> list[Any]:
    texts = [pair[f"{field}_input_ids"] for field in ("query", "document") for pair in pairs]
    return [model(input_ids=text[None], output_hidden_states=True) for text in texts]


def values_of(model: Any, layer: int, found: list[Any]) -> list[Tensor]:
    """Returns each sentence's values of a layer, (T, D)."""
    return [model.encoder.layer[layer].attention.self.value(output.hidden_states[layer][0]) for output in found]


def size_of(states: Tensor) -> float:
    return float(states.shape[1] ** 0.5)


def vectors_of(found: list[Any]) -> Tensor:
    means = torch.stack([output.last_hidden_state[0].mean(0) for output in found])
    return means / means.norm(dim=1, keepdim=True)


def cosines(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))


def losses_of(
    models: dict[str, Any], pairs: Pairs, *, projects: bool, temperature: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns each term's mean, and the mean cosine to the teacher."""

    def through(index: int, states: Tensor) -> Tensor:
        return models["projection"].maps[index](states) if projects else states  # type: ignore[no-any-return]

    student = outputs(models["student"], pairs)
    with torch.no_grad():
        teacher = outputs(models["teacher"], pairs)
    mine, theirs = vectors_of(student), vectors_of(teacher)
    count = len(mine)
    own, other = mine @ mine.T, theirs @ theirs.T
    rankings = []
    for index in range(count):
        rest = [column for column in range(count) if column != index]
        p, q = ((matrix[index, rest] / temperature).softmax(0) for matrix in (other, own))
        rankings.append((p * (p / q).log()).sum())
    squares = [
        (through(1, a.hidden_states[0][0]) - b.hidden_states[0][0]).pow(2).mean(1) / 2
        + (through(2, a.hidden_states[1][0]) - b.hidden_states[2][0]).pow(2).mean(1) / 2
        for a, b in zip(student, teacher, strict=True)
    ]
    related = []
    for a, b in zip(values_of(models["student"], 0, student), values_of(models["teacher"], 1, teacher), strict=True):
        parts = [
            (theirs @ theirs.T / size_of(theirs)).softmax(1)
            * ((theirs @ theirs.T / size_of(theirs)).log_softmax(1) - (mine @ mine.T / size_of(mine)).log_softmax(1))
            for mine, theirs in zip(a.chunk(HEADS, 1), b.chunk(HEADS, 1), strict=True)
        ]
        related.append(torch.stack([part.sum(1) for part in parts]).mean(0))
    near = cosines(through(0, mine), theirs)
    means = {
        "near": (1 - near).mean(),
        "ranking": torch.stack(rankings).mean(),
        "matrix": (own - other).pow(2).fill_diagonal_(0).sum(1).div(count - 1).mean(),
        "inner": torch.cat(squares).mean(),
        "related": torch.cat(related).mean(),
    }
    return means, near.mean()


WEIGHTS = {"near": 1.5, "ranking": 0.5, "matrix": 2.0, "inner": 0.25, "related": 0.75}  # of the first step
NEAR, TEMPERATURES = (1.5, 1.0, 0.5), (0.3, 0.4, 0.5)  # of each step


def reference(count: int, *, student: str, projects: bool) -> tuple[dict[str, Weights], list[dict[str, float]]]:
    """Returns all weights after the run, and each step's terms."""
    models, pairs, steps = fresh(student), make_pairs(count), []
    learners = [models["student"], *([models["projection"]] if projects else [])]
    optimizer = torch.optim.SGD([weight for model in learners for weight in model.parameters()], lr=LR)
    for indices, near, temperature in zip(windows(count, 8), NEAR, TEMPERATURES, strict=True):
        chosen, weights = [pairs[index] for index in indices], WEIGHTS | {"near": near}
        means, _ = losses_of(models, chosen, projects=projects, temperature=temperature)
        sum(weights[name] * mean for name, mean in means.items()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        steps.append({name: float(mean.detach()) for name, mean in means.items()})
    return {name: dict(model.state_dict()) for name, model in models.items()}, steps


CASES = {
    "joint": (8, "student", True, {"student": 2, "teacher": None, "projection": 1}),
    "sharded": (UNEVEN[2], "student", True, {"student": 3, "teacher": 3, "projection": 3}),
    "alike": (8, "alike", False, {"student": 2, "teacher": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_that_of_plain_pytorch_on_any_number_of_ranks(found: dict[str, Any], case: str) -> None:
    """Sentences of different length, stages 1 to 3, and on 2 ranks of "sharded" a rank with nothing but a filler."""
    count, student, projects, stages = CASES[case]
    run = found[case]
    weights, steps = reference(count, student=student, projects=projects)
    owner = "joint" if projects else "student"

    assert {name: stage for name, (_, stage) in run["engines"].items()} == stages
    for name in stages:
        assert difference(run["weights"][name], weights[name]) <= TOLERANCE, name
    for step, expected in zip(run["steps"], steps, strict=True):
        assert {name: step[f"train/{owner}/{name}"] for name in WEIGHTS} == pytest.approx(expected, abs=2e-6)
    start = dict(fresh(student)["student"].state_dict())
    assert difference(start, weights["student"]) > 1000 * TOLERANCE, "it did learn"


@pytest.mark.parametrize("case", CASES)
def test_validation_is_over_all_sentences_of_all_ranks(found: dict[str, Any], case: str) -> None:
    """13 pairs, which 8 in a micro-batch of all ranks do not divide; before the first step."""
    _, student, projects, _ = CASES[case]
    models, pairs = fresh(student), validation_pairs()
    with torch.no_grad():
        _, near = losses_of(models, pairs, projects=projects, temperature=TEMPERATURES[-1])
        mine, theirs = (vectors_of(outputs(models[name], pairs)) for name in ("student", "teacher"))
    first, second = torch.triu_indices(26, 26, 1)
    own, other = (mine @ mine.T)[first, second], (theirs @ theirs.T)[first, second]
    ranks = [values.argsort().argsort().double() for values in (own, other)]  # no two are equal
    nearest = (mine[:13] @ mine[13:].T).argmax(1)

    seen = found[case]["validations"][0]

    expected = {
        "cosine": near,
        "similarity_pearson": torch.corrcoef(torch.stack([own, other]))[0, 1],
        "similarity_spearman": torch.corrcoef(torch.stack(ranks))[0, 1],
        "top1_accuracy": (nearest == torch.arange(13)).double().mean(),
    }
    for name, value in expected.items():
        assert seen[f"val/{name}"] == pytest.approx(float(value), abs=1e-5), name


def test_widths_that_differ_are_refused_without_a_projection(found: dict[str, Any]) -> None:
    if "refused" not in found:
        pytest.skip("runs on 1 rank")

    assert (
        "models.student gives vectors of size 24, models.teacher of size 32; train a map between them "
        "(task.projection=projection" in found["refused"]["error"]
    )
    assert "count=3" in found["refused"]["error"]


@pytest.mark.parametrize(
    ("term", "problem"),
    [
        ({"function": "embeding_cosine"}, ".function is 'embeding_cosine'; functions are embedding_cosine, "),
        ({"function": "embeding_cosine"}, "attention_relations; did you mean embedding_cosine?"),
        ({"wieght": 1}, ".wieght is no key of this term; did you mean weight?"),
        ({"weight": -1}, ".weight is -1; it must be at least 0"),
        ({"function": ["similarity_kl"]}, ".function is ['similarity_kl']; functions are"),
        ({"temperature": 10**400}, "000; it must be a finite number"),
        ({"weight": True}, ".weight is True; it must be a finite number"),
        ({"weight": {"start": 1, "end": -1, "steps": 3}}, "it must be at least 0"),
        ({"weight": {"start": 1, "end": 0}}, ".weight.steps is missing"),
        ({"mask": "all"}, ".mask is no key of this term; similarity_kl has function, weight, temperature"),
        ({"temperature": 0}, ".temperature is 0; it must be above 0"),
        ({"function": "similarity_mse", "temperature": 1.0}, ".temperature is no key of this term; similarity_mse has"),
        ({"function": "hidden_mse"}, ".layers is missing; give module paths"),
        ({"layers": {"a": "b"}}, ".layers is no key of this term"),
        ({"function": "hidden_mse", "layers": {"a": 2}}, ".layers is {'a': 2}; give module paths"),
        ({"function": "hidden_mse", "layers": {}}, ".layers is {}; give module paths"),
        ({"function": "attention_relations", "layers": {"a": "b"}, "heads": 0}, ".heads is 0; it must be a whole"),
        ({"heads": 2}, ".heads is no key of this term"),
    ],
)
def test_wrong_terms_are_refused_with_their_key(term: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_encoder_terms({"mine": {"function": "similarity_kl", **term}, "embedding_mse": {}})

    assert "task.terms.mine" in str(caught.value) and problem in str(caught.value)


def test_all_problems_of_the_terms_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_encoder_terms({"a": {"function": "x"}, "b": 3, "embedding_mse": {"weight": "much"}})

    assert all(f"task.terms.{name}" in str(caught.value) for name in ("a", "b", "embedding_mse"))
    with pytest.raises(ConfigError, match="no term with a weight above 0"):
        parse_encoder_terms({"embedding_mse": {"weight": 0}})


def test_a_term_cannot_have_the_name_of_another_metric() -> None:
    for name in ("loss", "cosine", "top1_accuracy"):
        with pytest.raises(ConfigError, match=rf"task\.terms\.{name}: a metric of this name is there already"):
            parse_encoder_terms({name: {"function": "embedding_cosine"}})


@pytest.mark.parametrize("fields", [3, None, [], "query", ["query", "query"], [{"a": 1}], [""], {"query": 1}])
def test_wrong_fields_are_refused_by_key(fields: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DistillEncoderTask(fields=fields, terms={"embedding_cosine": {}})

    assert caught.value.problems == [
        f"task.fields is {fields!r}; it must be a list of the texts of a batch, each once, such as [query, document]"
    ]


def test_values_of_another_type_are_refused_together() -> None:
    wrong: Any = {"student": ["a"], "teacher": None, "projection": ["a"], "fields": "query", "terms": None}
    with pytest.raises(ConfigError) as caught:
        DistillEncoderTask(**wrong)

    starts = ["student is ['a']", "teacher is None", "projection is ['a']", "fields is 'query'", "terms is None"]
    assert [problem.split(";")[0] for problem in caught.value.problems] == [f"task.{start}" for start in starts]


def test_a_term_has_what_its_function_takes() -> None:
    ramp = {"start": 0.0, "end": 1.0, "steps": 3}

    terms = parse_encoder_terms(
        {"similarity_kl": {"weight": ramp}, "embedding_mse": {}, "similarity_mse": {"weight": 0}}
    )

    assert set(terms) == {"similarity_kl", "embedding_mse"}, "what grows counts, what is always zero does not"
    assert [terms["similarity_kl"].weight.at(step) for step in (1, 2, 3)] == [0.0, 0.5, 1.0]
    assert terms["similarity_kl"].temperature.at(1) == 0.05 and terms["embedding_mse"].weight.at(9) == 1.0


def test_a_projection_that_nothing_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match="no term compares states or embeddings directly; set it to null"):
        DistillEncoderTask(projection="projection", terms={"similarity_mse": {}})


def test_wrong_roles_are_refused_before_a_model_is_built() -> None:
    task = DistillEncoderTask(projection="map", terms={"embedding_cosine": {}})

    assert task.check_models({"student": True, "teacher": False, "map": True}, stage="fit") == []
    problems = task.check_models({"student": False, "teacher": True}, stage="fit")
    assert problems == [
        "task.projection=map: models has no map, only student, teacher",
        "models.student.trainable=false, but task.student trains it; set it to true",
        "models.teacher.trainable=true, but task.teacher is frozen; set it to false",
    ]
    with pytest.raises(ConfigError, match="they must differ"):
        DistillEncoderTask(student="a", teacher="a", terms={"embedding_cosine": {}})


SHORT = ["trainer.max_steps=2", "trainer.log_every=1", "data.batch_size=4", "trainer.limit_val_batches=2"]
TINY = ["model@models.student.build=tiny_bert", "data.tokenizer=embedded:bpe-4k", "logger=jsonl", "hydra.run.dir=run"]


@pytest.mark.parametrize(
    ("choice", "width", "trained"),
    [("task=distill_encoder", 192, {"student"}), ("experiment=distill_encoder_thin", 96, {"student", "projection"})],
)
def test_the_task_runs_by_its_name_with_other_encoders(
    choice: str, width: int, trained: set[str], tmp_path: Path
) -> None:
    """Two steps of its defaults, but for models that need no download."""
    teacher = ["model@models.teacher.build=tiny_bert", f"models.teacher.build.config.hidden_size={width}"]
    sizes = ["models.projection.build.student_size=192", f"models.projection.build.teacher_size={width}"]

    result = run_python(
        ["-m", "trainer", choice, *TINY, *teacher, *SHORT, *(sizes if "projection" in trained else [])], folder=tmp_path
    )

    assert result.returncode == 0, result.stderr[-4000:]
    assert {path.name for path in (tmp_path / "run" / "export").iterdir()} == trained
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    scores = {"cosine", "similarity_pearson", "similarity_spearman", "top1_accuracy"}
    expected = {f"val/{score}" for score in scores | {"embedding_cosine", "similarity_kl"}}
    assert summary["before"].keys() == summary["after"].keys() == expected
    assert (summary["status"], summary["reference"]["val/cosine"]) == ("completed", 1.0)
