"""Encoder distillation: a student learns the sentence embeddings of a frozen teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.logits.taps import find_module
from tasks.losses.features import attention_relations, hidden_cosine, hidden_mse, similarity_kl, similarity_mse
from tasks.roles import find_member_problems
from tasks.scores.embeddings import (
    pair_similarities,
    pearson,
    retrieval_ranks,
    run_encoder,
    sentence_vectors,
    spearman,
)
from tasks.terms.reading import ONE, RELATIONS, STATE_LOSSES, Reading, StateLoss, read_terms
from tasks.terms.schedule import Schedule
from tasks.values import collected, find_role_problems
from trainer import (
    Batch,
    ConfigError,
    Metric,
    ModelHandle,
    StepOutput,
    TaskModule,
    did_you_mean,
    gather_with_gradient,
)

Place = tuple[str, str] | None  # paths of a module of the student and of the teacher; None: the sentence embeddings

EMBEDDING: dict[str, StateLoss] = {"embedding_cosine": hidden_cosine, "embedding_mse": hidden_mse}
SIMILARITY = ("similarity_kl", "similarity_mse")
OF_TOKENS = (*STATE_LOSSES, RELATIONS)
FUNCTIONS = (*EMBEDDING, *SIMILARITY, *OF_TOKENS)
OWN_KEYS = {
    "similarity_kl": ("temperature",),
    RELATIONS: ("layers", "heads"),
    **dict.fromkeys(STATE_LOSSES, ("layers",)),
}
METRICS = {
    "cosine": "cosine to the teacher",
    "similarity_pearson": "Pearson of similarities",
    "similarity_spearman": "Spearman of similarities",
    "top1_accuracy": "top-1 retrieval",
}  # of a validation, beside its terms
TEMPERATURE = 0.05
MAX_PAIRED = 4096  # sentences whose pairs are correlated: their square fits into memory


@dataclass(kw_only=True)
class EncoderTerm:
    """One part of the loss: weight * the mean of `function` over the global batch's sentences or tokens.

    Args:
        temperature: Of similarity_kl.
        layers: Of the functions of tokens: paths of the student's modules to the teacher's, whose outputs are compared.
        heads: Of attention_relations: into how many the outputs are cut, of both models alike.
    """

    function: str
    weight: Schedule
    temperature: Schedule
    layers: Mapping[str, str]
    heads: int

    @property
    def places(self) -> list[Place]:
        """Where it compares features one by one, so that widths must be equal."""
        if self.function in EMBEDDING:
            return [None]
        return [*self.layers.items()] if self.function in STATE_LOSSES else []


@dataclass(kw_only=True)
class Encoded:
    """What a model makes of N sentences; of a filler none.

    Args:
        vectors: Unit vectors, (N, D) in float32.
        masks: The attended tokens of each field, (B, T) bool.
        states: The outputs of modules by their path, (B, T, D), of each field.
    """

    vectors: Tensor
    masks: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]

    def tokens(self, path: str) -> Tensor:
        """Returns a module's outputs at the attended tokens, (tokens, D)."""
        return torch.cat([states[path][mask] for states, mask in zip(self.states, self.masks, strict=True)])


class DistillEncoderTask(TaskModule):
    """Trains the student on the weighted sum of terms between its sentence embeddings and the teacher's.

    The embedding is the mean over attended tokens, as a unit vector. Batches have `<field>_input_ids` and
    `<field>_attention_mask`, (B, T), for each field; every text of every field is a sentence.

    Args:
        student: Name of the trained encoder.
        teacher: Name of the frozen encoder.
        projection: Name of a trained `Projection` from the student's width to the teacher's; None: they are equal. It
            stands where embedding_... and hidden_... terms compare; other terms need none.
        fields: Of two, the text of the second is what that of the first should find.
        terms: Name of a term to its `function` (default: the term's name), `weight`, and what the function takes:
            `temperature`, `layers`, `heads`. Weight and temperature are numbers or schedules; validation is at the
            temperature in the end. A term of weight 0 is not computed.
    """

    reads_one_batch = True

    def __init__(
        self,
        *,
        student: str = "student",
        teacher: str = "teacher",
        projection: str | None = None,
        fields: Sequence[str] = ("query", "document"),
        terms: Mapping[str, Mapping[str, Any]],
    ) -> None:
        roles = {"student": student, "teacher": teacher, "projection": projection}
        if projection is None:
            del roles["projection"]
        problems = find_role_problems(roles)
        if not problems and len(set(roles.values())) < len(roles):
            problems.append(
                f"task.student, task.teacher and task.projection are {', '.join(map(str, roles.values()))}; they must "
                "differ"
            )
        problems += _find_field_problems(fields)
        with collected(problems):
            self.terms = parse_encoder_terms(terms)
        if problems:
            raise ConfigError(*problems)
        self.student, self.teacher, self.projection, self.fields = student, teacher, projection, tuple(fields)
        self.reference = teacher
        self.one_loss = [student] if projection is None else [student, projection]
        self.metric_labels = {**METRICS, "cosine": f"cosine to {teacher}"}
        self.batch_fields = tuple(f"{name}_{part}" for name in fields for part in ("input_ids", "attention_mask"))
        self.places = list(dict.fromkeys(place for term in self.terms.values() for place in term.places))
        if projection is not None and not self.places:
            raise ConfigError(
                f"task.projection={projection}: no term compares states or embeddings directly; set it to null and "
                f"leave models.{projection} out"
            )
        self._seen: list[tuple[Tensor, Tensor]] = []  # of the running validation: (B, fields, D) of student and teacher
        self._scores: list[dict[str, float]] = []

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        trained = [("student", self.student), *([("projection", self.projection)] if self.projection else [])]
        return find_member_problems(trainable, trained=trained, frozen=[("teacher", self.teacher)], stage=stage)

    def setup(self, stage: str) -> None:
        mine, theirs = (_config(self.models[name], "hidden_size") for name in (self.student, self.teacher))
        if self.places and self.projection is None and None not in (mine, theirs) and mine != theirs:
            raise ConfigError(
                f"models.{self.student} gives vectors of size {mine}, models.{self.teacher} of size {theirs}; train a "
                f"map between them (task.projection=projection, model@models.projection.build=projection with "
                f"student_size={mine} teacher_size={theirs} count={len(self.places)}), or use only "
                "similarity_... and attention_relations"
            )
        for name in (self.student, self.teacher):
            for term in self.terms.values():
                for pair in term.layers.items():
                    find_module(self.models[name], pair[name == self.teacher])
            _check_tokens(self.models[name], self.trainer.tokenizer)

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        sentences = sum(len(batch[f"{name}_input_ids"]) for name in self.fields)
        tokens = sum(batch[f"{name}_attention_mask"].sum() for name in self.fields)
        return {
            self._key(name): tokens if term.function in OF_TOKENS else sentences for name, term in self.terms.items()
        }

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        # The teacher first: the student's graph is not there yet.
        teacher, student = self._encode(self.teacher, batch), self._encode(self.student, batch)
        output, step = StepOutput(), self.trainer.global_step + 1
        temperatures = {name: term.temperature.at(step) for name, term in self.terms.items()}
        for name, values in self._compare(student, teacher, temperatures)[0].items():
            # Of a filler no row is left, and the sum of none is a zero that keeps its graph.
            output.sums[self._key(name)] = self.terms[name].weight.at(step) * values.sum()
            output.metrics[self._key(name)] = (values.detach().sum(), len(values))
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        if batch_idx == 0:
            self._seen.clear()
        teacher, student = self._encode(self.teacher, batch), self._encode(self.student, batch)
        pair = [self._by_field(encoded.vectors) for encoded in (student, teacher)]
        self._seen.append((pair[0], pair[1]))
        # Of one temperature whatever the step, or the scores could not be compared.
        temperatures = {name: term.temperature.end for name, term in self.terms.items()}
        values, vectors = self._compare(student, teacher, temperatures)
        metrics: dict[str, Metric] = {name: (value.sum(), len(value)) for name, value in values.items()}
        metrics |= {f"reference/{name}": (0.0, len(value)) for name, value in values.items()}
        if vectors.shape == teacher.vectors.shape:
            count = len(vectors)
            metrics["cosine"] = ((1 - hidden_cosine(vectors, teacher.vectors)).sum(), count)
            metrics["reference/cosine"] = (float(count), count)
        return metrics

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns what needs all sentences of the validation at once, of the student in the first call.

        The correlations are between the student's and the teacher's cosines, over all pairs of sentences, and are those
        of the student's own vectors, without a projection.
        """
        if self._seen:
            self._scores = self._score_validation()
        return self._scores.pop(0)

    def _score_validation(self) -> list[dict[str, float]]:
        """Returns the metrics of student and teacher, on every rank alike."""
        student, teacher = (gather_with_gradient(torch.cat(parts))[0] for parts in zip(*self._seen, strict=True))
        self._seen.clear()
        mine, theirs = (pair_similarities(rows) for rows in _some(student.flatten(0, 1), teacher.flatten(0, 1)))
        scores = [
            {"similarity_pearson": pearson(mine, theirs), "similarity_spearman": spearman(mine, theirs)},
            {"similarity_pearson": 1.0, "similarity_spearman": 1.0},
        ]
        if len(self.fields) == 2:
            for score, rows in zip(scores, (student, teacher), strict=True):
                first, second = rows.unbind(1)
                score["top1_accuracy"] = (retrieval_ranks(first, second) == 1).float().mean().item()
        return scores

    def _by_field(self, vectors: Tensor) -> Tensor:
        """Returns sentences, (fields * B, D), as (B, fields, D)."""
        count = len(self.fields)
        return vectors.view(count, len(vectors) // count, -1).transpose(0, 1)

    def _key(self, term: str) -> str:
        return f"{self.student if self.projection is None else 'joint'}/{term}"

    def _encode(self, name: str, batch: Batch) -> Encoded:
        model, side = self.models[name], int(name == self.teacher)
        paths = list(dict.fromkeys(pair[side] for term in self.terms.values() for pair in term.layers.items()))
        vectors, masks, states = [], [], []
        for field in self.fields:
            mask = batch[f"{field}_attention_mask"]
            output, inner = run_encoder(model, batch, field, paths=paths)
            vectors.append(sentence_vectors(output, mask))
            masks.append(mask.bool())
            states.append(inner)
        count = 0 if self.trainer.is_filler else None
        return Encoded(vectors=torch.cat(vectors)[:count], masks=masks, states=states)

    def _compare(
        self, student: Encoded, teacher: Encoded, temperatures: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Returns each term's values, (N,) or (tokens,), and the student's vectors as the terms compare them."""
        taken = [student.vectors if place is None else student.tokens(place[0]) for place in self.places]
        if self.projection is not None:
            taken = self.models[self.projection](taken)
        mine = dict(zip(self.places, taken, strict=True))
        theirs = {place: teacher.vectors if place is None else teacher.tokens(place[1]) for place in self.places}
        everyone: dict[str, Any] = {}
        if any(term.function in SIMILARITY for term in self.terms.values()):
            students, first = gather_with_gradient(student.vectors)
            everyone = {"students": students, "teachers": gather_with_gradient(teacher.vectors)[0], "first": first}
        values = {}
        for name, term in self.terms.items():
            if term.function == "similarity_kl":
                given = {**everyone, "temperature": temperatures[name]}
                values[name] = similarity_kl(student.vectors, teacher.vectors, **given)
            elif term.function == "similarity_mse":
                values[name] = similarity_mse(student.vectors, teacher.vectors, **everyone)
            elif term.function == RELATIONS:
                parts = [_relations(student, teacher, pair, heads=term.heads) for pair in term.layers.items()]
                values[name] = torch.stack(parts).mean(0)
            else:
                loss = {**EMBEDDING, **STATE_LOSSES}[term.function]
                values[name] = torch.stack([loss(mine[place], theirs[place]) for place in term.places]).mean(0)
        count = 0 if self.trainer.is_filler else None
        return {name: value[:count] for name, value in values.items()}, mine.get(None, student.vectors)


def _relations(student: Encoded, teacher: Encoded, pair: tuple[str, str], *, heads: int) -> Tensor:
    """Returns the losses of all attended tokens, (tokens,)."""
    fields = zip(student.states, teacher.states, student.masks, strict=True)
    return torch.cat(
        [
            attention_relations(mine[pair[0]], theirs[pair[1]], heads=heads, mask=mask)[mask]
            for mine, theirs, mask in fields
        ]
    )


def _find_field_problems(fields: Any) -> list[str]:
    is_list = isinstance(fields, Sequence) and not isinstance(fields, str)  # a text would be read letter by letter
    names = list(fields) if is_list else []
    if names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names):
        return []
    rule = "it must be a list of the texts of a batch, each once, such as [query, document]"
    return [f"task.fields is {fields!r}; {rule}"]


def parse_encoder_terms(terms: Mapping[str, Mapping[str, Any]]) -> dict[str, EncoderTerm]:
    """Returns the terms that count, or raises one ConfigError with everything that is wrong in them."""
    return read_terms(terms, _read_term, taken=METRICS)


def _read_term(reading: Reading) -> EncoderTerm | None:
    function = reading.function
    if function not in FUNCTIONS:
        reading.refuse("function", f"functions are {', '.join(FUNCTIONS)}{did_you_mean(str(function), FUNCTIONS)}")
        return None
    own = OWN_KEYS.get(function, ())
    reading.allow(("function", "weight", *own))
    return EncoderTerm(
        function=function,
        weight=reading.weight(),
        temperature=reading.temperature(TEMPERATURE) if "temperature" in own else ONE,
        layers=reading.layers(example="encoder.layer.-1") if "layers" in own else {},
        heads=reading.heads() if "heads" in own else 1,
    )


def _config(model: ModelHandle, name: str) -> int | None:
    """Returns a number of the config of a transformers model, None of other models."""
    value = getattr(getattr(model.module, "config", None), name, None)
    return value if isinstance(value, int) else None


def _check_tokens(model: ModelHandle, tokenizer: Any) -> None:
    size = _config(model, "vocab_size")
    if size is not None and tokenizer is not None and len(tokenizer) > size:
        raise ConfigError(
            f"data.tokenizer has {len(tokenizer)} tokens, models.{model.name} knows {size}; both encoders read the "
            "tokens of one tokenizer, the teacher's own"
        )


def _some(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of at most MAX_PAIRED sentences, the same ones however many ranks had them."""
    if len(teacher) <= MAX_PAIRED:
        return student, teacher
    spread = torch.linspace(0, len(teacher) - 1, MAX_PAIRED, device=teacher.device).long()
    chosen = teacher[:, 0].argsort()[spread]
    return student[chosen], teacher[chosen]
