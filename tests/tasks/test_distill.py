"""The distillation task: its update against plain float64 PyTorch, its masks, metrics and refusals."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tasks.distill import DistillTask
from tasks.text.language import all_mask, completion_mask
from tests.tasks.tiny_tokenizers import SPECIAL, make_tokenizer
from trainer import ModelHandle
from trainer.config import ConfigError

VOCABULARY, PAD = 61, 0
FORWARD_KL = {"kl": {"function": "forward_kl"}}
# (prompt length, completion length) of each example; the fifth has no token to learn.
EXAMPLES = [(3, 1), (5, 4), (1, 9), (6, 2), (7, 0), (2, 7)]


class Handle:
    """What the task sees of a model, without an engine."""

    stage, dtype, has_ended = None, torch.float32, False

    def __init__(self, name: str, module: nn.Module, *, trainable: bool) -> None:
        self.name = name
        self.module, self.trainable, self.widths = module.train(trainable), trainable, []

    def __call__(self, *args, **kwargs):
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            output = self.module(*args, **kwargs)
        if isinstance(output, Tensor) or "logits" in output:
            self.widths.append((output if isinstance(output, Tensor) else output.logits).shape[1])
        return output

    def set_training(self, mode: bool) -> None:
        self.module.train(mode and self.trainable)

    evaluating = ModelHandle.evaluating


def llama(seed: int, *, vocab_size: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # far from a uniform distribution
    )
    return LlamaForCausalLM(config)


def gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    )


def ready_task(
    student: nn.Module, teacher: nn.Module, terms: dict, *, tokenizer=None, teachers_tokenizer=None, **options
) -> DistillTask:
    task = DistillTask(terms=terms, **options)
    task.models = {
        "student": Handle("student", student, trainable=True),
        "teacher": Handle("teacher", teacher, trainable=False),
    }
    task.trainer = SimpleNamespace(
        tokenizer=tokenizer,
        global_step=0,
        device=torch.device("cpu"),
        loss_weight=lambda key: torch.tensor(1.0),
        train_loader=None,
        validation_loader=None,
        tokenizers={"student": tokenizer, "teacher": teachers_tokenizer or tokenizer},
    )
    task.setup("fit")
    return task


def examples() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each example, the prompt without a label."""
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for prompt, completion in EXAMPLES:
        tokens = torch.randint(1, VOCABULARY, (prompt + completion,), generator=generator)
        pairs.append((tokens, torch.where(torch.arange(len(tokens)) < prompt, -100, tokens)))
    return pairs


def collate(pairs: list[tuple[Tensor, Tensor]], *, side: str = "right", extra: int = 0) -> dict[str, Tensor]:
    width = max(len(tokens) for tokens, _ in pairs) + extra
    rows = []
    for tokens, labels in pairs:
        padding = width - len(tokens)
        edges = (padding, 0) if side == "left" else (0, padding)
        attended = torch.ones(len(tokens), dtype=torch.long)
        rows.append(
            [nn.functional.pad(row, edges, value=fill) for row, fill in ((tokens, PAD), (labels, -100), (attended, 0))]
        )
    names = ("input_ids", "labels", "attention_mask")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def global_gradient(task: DistillTask, ranks: list[list[dict]]) -> dict[str, Tensor]:
    """The student's gradient of one window, items weighted as the trainer does, averaged over ranks as engines do."""
    counts: dict[str, int] = {}
    for batch in (batch for micro_batches in ranks for batch in micro_batches):
        for key, count in task.count_items(batch).items():
            counts[key] = counts.get(key, 0) + int(count)
    student = task.models["student"].module
    student.zero_grad()
    task.trainer.loss_weight = lambda key: torch.tensor(len(ranks) / counts[key])
    for batch in (batch for micro_batches in ranks for batch in micro_batches):
        (loss,) = task.training_step(batch, 0).shares.values()
        (loss / len(ranks)).backward()
    return {name: parameter.grad.clone() for name, parameter in student.named_parameters()}


def reference_gradient(student: nn.Module, teacher: nn.Module) -> dict[str, Tensor]:
    """0.7 * forward KL at T = 2 on completions + 0.3 * cross-entropy on all: row by row, unpadded, in float64."""
    student, teacher = (copy.deepcopy(model).double().eval() for model in (student, teacher))
    kl, ce = [], []
    for tokens, labels in examples():
        q, p = (torch.softmax(model(tokens[None]).logits[0] / 2, -1) for model in (student, teacher))
        log_likely = student(tokens[None]).logits[0].softmax(-1).log()
        for t in range(len(tokens) - 1):
            ce.append(-log_likely[t, tokens[t + 1]])
            if labels[t + 1] != -100:
                kl.append(4 * (p[t] * (p[t] / q[t]).log()).sum())
    loss = 0.7 * sum(kl) / len(kl) + 0.3 * sum(ce) / len(ce)
    loss.backward()
    return {name: parameter.grad for name, parameter in student.named_parameters()}


TWO_TERMS = {
    "kl": {"function": "forward_kl", "weight": 0.7, "temperature": 2.0},
    "ce": {"function": "cross_entropy", "weight": 0.3, "mask": "all"},
}
CUTS = {
    "one batch": [[[0, 1, 2, 3, 4, 5]]],
    "two unequal micro-batches": [[[0, 1, 2, 3], [4, 5]]],
    "two ranks, three micro-batches, one without a token to learn": [[[0], [1], [2]], [[4], [3], [5]]],
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("cut", CUTS)
def test_update_is_the_mean_over_the_global_batch_however_it_is_cut(cut, side):
    student, teacher, pairs = llama(0), llama(1), examples()
    task = ready_task(student, teacher, TWO_TERMS)

    ranks = [[collate([pairs[i] for i in rows], side=side) for rows in rank] for rank in CUTS[cut]]
    ours, exact = global_gradient(task, ranks), reference_gradient(student, teacher)

    for name, gradient in exact.items():  # float32 against float64: 2 layers leave about 1e-6 of the largest entry
        torch.testing.assert_close(ours[name].double(), gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_logged_terms_are_unweighted_and_averaged_over_their_own_tokens():
    batch = collate(examples())
    task = ready_task(llama(0), llama(1), TWO_TERMS)

    output = task.training_step(batch, 0)
    counts = task.count_items(batch)

    assert counts == {"student/kl": sum(n for _, n in EXAMPLES), "student/ce": sum(n + m - 1 for n, m in EXAMPLES)}
    totals = {key: output.metrics[key] for key in counts}
    assert all(count == counts[key] and not total.requires_grad for key, (total, count) in totals.items())
    expected = 0.7 * totals["student/kl"][0] + 0.3 * totals["student/ce"][0]
    torch.testing.assert_close(output.shares["student"].detach(), expected)


def test_a_term_of_weight_zero_costs_nothing_and_is_not_logged():
    task = ready_task(llama(0), llama(1), {**FORWARD_KL, "ce": {"function": "cross_entropy", "weight": 0}})
    batch = collate(examples())

    assert set(task.training_step(batch, 0).metrics) == set(task.count_items(batch)) == {"student/kl"}


def test_student_equal_to_its_teacher_gets_no_gradient():
    task = ready_task(llama(0), llama(0), {"kl": {"function": "forward_kl"}, "rkl": {"function": "reverse_kl"}})

    gradients = global_gradient(task, [[collate(examples())]])

    assert all((gradient == 0).all() for gradient in gradients.values())


def test_teacher_gets_no_gradient():
    task = ready_task(llama(0), llama(1), FORWARD_KL)

    global_gradient(task, [[collate(examples())]])

    assert all(parameter.grad is None for parameter in task.models["teacher"].module.parameters())


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_count_for_the_token_after_theirs(side):
    tokens, labels = torch.tensor([5, 6, 7, 8]), torch.tensor([-100, -100, -100, 8])

    batch = collate([(tokens, labels)], side=side, extra=2)

    start = 2 if side == "left" else 0
    assert completion_mask(batch)[0].nonzero().flatten().tolist() == [start + 2]  # the logits after token 7
    assert all_mask(batch)[0].nonzero().flatten().tolist() == [start, start + 1, start + 2]  # no edge, no padding
    assert (batch["labels"][:, :-1] != -100)[0].nonzero().flatten().tolist() != [start + 2]  # the mask unshifted: none


def test_first_token_counts_nowhere_even_with_a_label():
    tokens = torch.tensor([5, 6, 7])

    for side in ("left", "right"):
        batch = collate([(tokens, tokens)], side=side, extra=3)
        assert completion_mask(batch).sum() == 2  # left padding would predict it from a pad


def test_packed_documents_do_not_predict_each_other():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}

    assert all_mask(batch).tolist() == completion_mask(batch).tolist() == [[True, True, False, True]]


@pytest.mark.parametrize("build", [llama, gpt2])
def test_packed_rows_score_like_separate_ones(build):
    first, second = torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10, 11])
    task = ready_task(build(0).eval(), build(1), FORWARD_KL)
    task.models["student"].module.eval()
    packed = {"input_ids": torch.cat([first, second])[None], "labels": torch.cat([first, second])[None]}
    packed["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])

    separate = task.training_step(collate([(first, first), (second, second)]), 0)
    together = task.training_step(packed, 0)

    torch.testing.assert_close(together.shares, separate.shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [llama, gpt2])  # rotary and absolute positions
def test_padding_on_either_side_changes_nothing(build):
    task = ready_task(build(0), build(1), TWO_TERMS)
    task.models["student"].module.eval()  # GPT-2 has dropout

    outputs = [
        task.training_step(collate(examples(), side=side, extra=extra), 0)
        for side, extra in (("right", 0), ("right", 5), ("left", 0), ("left", 5))
    ]

    for output in outputs[1:]:
        torch.testing.assert_close(output.shares, outputs[0].shares, rtol=1e-5, atol=1e-5)


def test_prompt_tokens_do_not_count():
    task = ready_task(llama(0), llama(1), {"ce": {"function": "cross_entropy"}})
    batch = collate(examples())
    student = task.models["student"].module
    hidden = student.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    logits = student.lm_head(hidden)

    output = task.training_step(batch, 0)

    # transformers' own loss: shifted, and without the labels of -100
    mean = student.loss_function(logits=logits, labels=batch["labels"], vocab_size=VOCABULARY)
    total, count = output.metrics["student/ce"]
    assert total.item() / count == pytest.approx(mean.item(), rel=1e-5)


def test_only_positions_that_count_get_logits():
    task = ready_task(llama(0), llama(1), FORWARD_KL, fused=False)
    pairs = examples()

    task.training_step(collate([pairs[0], pairs[3]]), 0)  # labels at positions 3, and 6 and 7

    assert task.models["student"].widths == task.models["teacher"].widths == [3]


class PlainModel(nn.Module):
    """A user's own module: no config, no logits_to_keep, a bare tensor."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, attention_mask=attention_mask).logits


class IgnoresColumns(PlainModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs) -> Tensor:
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("wrapper", [PlainModel, IgnoresColumns])
def test_a_model_that_gives_all_logits_gets_the_same_loss(wrapper):
    batch = collate(examples())
    with_columns = ready_task(llama(0), llama(1), TWO_TERMS).training_step(batch, 0)

    without = ready_task(wrapper(llama(0)), wrapper(llama(1)), TWO_TERMS).training_step(batch, 0)

    torch.testing.assert_close(without.shares, with_columns.shares)


@pytest.mark.parametrize("fused", [True, False])
def test_no_token_to_learn_gives_a_zero_whose_backward_reaches_every_weight(fused):
    task = ready_task(llama(0), llama(1), FORWARD_KL, fused=fused)
    batch = collate([examples()[4]])

    output = task.training_step(batch, 0)
    output.shares["student"].backward()

    if not fused:
        assert task.models["student"].widths == [1]  # not an empty product, which some kernels refuse
    assert output.shares["student"].item() == 0 and output.metrics["student/kl"][1] == 0
    assert all((parameter.grad == 0).all() for parameter in task.models["student"].module.parameters())
    assert all(count == 0 and value == 0 for value, count in task.validation_step(batch, 0).values())


def test_a_padded_vocabulary_is_cut_to_the_tokens_of_both():
    student, teacher = llama(0), llama(1, vocab_size=VOCABULARY + 3)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"last": VOCABULARY - 2})
    task = ready_task(student, teacher, FORWARD_KL, tokenizer=tokenizer)
    batch = collate([pair for pair in examples() if pair[0].max() < VOCABULARY - 1])

    (total, count), mask = task.training_step(batch, 0).metrics["student/kl"], completion_mask(batch)

    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    q, p = (
        model(**inputs).logits[:, :-1][mask][:, : VOCABULARY - 1].double().softmax(-1) for model in (student, teacher)
    )
    assert total.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5) and count > 0


@pytest.mark.parametrize("fused", [True, False])
def test_tokens_that_both_know_are_compared_under_their_own_ids_and_the_rest_as_one(fused):
    own, other = (make_tokenizer(("t h", "i n"), special=special) for special in SPECIALS)
    student, teacher = (llama(seed, vocab_size=len(own.get_vocab())) for seed in (0, 1))
    terms = {"kl": {"function": "forward_kl", "temperature": 2.0}, "ce": {"function": "cross_entropy"}}
    task = ready_task(student, teacher, terms, tokenizer=own, teachers_tokenizer=other, fused=fused)
    known = [(tokens.clamp(min=6, max=50), labels) for tokens, labels in examples()]
    batch = collate([(tokens, torch.where(labels == -100, labels, tokens)) for tokens, labels in known])

    metrics, scores = task.training_step(batch, 0).metrics, task.validation_step(batch, 0)

    mine, theirs = own.get_vocab(), other.get_vocab()
    shared = [token for token in mine if token in theirs]
    to_teacher = torch.tensor([theirs.get(token, 0) for token, _ in sorted(mine.items(), key=lambda pair: pair[1])])
    mask, attended = completion_mask(batch), batch["attention_mask"]
    z = student(batch["input_ids"], attention_mask=attended).logits[:, :-1][mask].double()
    w = teacher(to_teacher[batch["input_ids"]], attention_mask=attended).logits[:, :-1][mask].double()

    def kl(temperature: float) -> float:
        found = []
        for logits, ids in ((w, theirs), (z, mine)):
            probabilities = (logits / temperature).softmax(-1)[:, [ids[token] for token in shared]]
            found.append(torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)], -1))
        p, q = found
        return temperature**2 * float((p * (p / q).log()).sum())

    entropy = -float(z.log_softmax(-1).gather(-1, batch["labels"][:, 1:][mask].unsqueeze(-1)).sum())
    assert metrics["student/kl"][0].item() == pytest.approx(kl(2.0), rel=1e-5)
    assert scores["forward_kl"][0] == pytest.approx(kl(1.0), rel=1e-5)
    assert metrics["student/ce"][0].item() == pytest.approx(entropy, rel=1e-5)
    assert float(scores["cross_entropy"][0]) == pytest.approx(entropy, rel=1e-5)


SPECIALS = ((*SPECIAL, "<mine>"), ("<theirs>", *SPECIAL[::-1]))  # the same tokens under other ids, and one more each


def test_tokenizers_that_have_little_in_common_are_refused_with_what_to_do():
    own, other = make_tokenizer(("t h", "i n")), make_tokenizer(characters="абвгдежзийклмнопрст ")
    task = DistillTask(terms=FORWARD_KL)

    (problem,) = task.check_tokenizers({"student": own, "teacher": other})

    assert "have different tokenizers" in problem
    assert "task=distill_sequence" in problem and "task=distill_unaligned" in problem


def test_unequal_vocabularies_without_a_tokenizer_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"61 logits, models\.teacher has 64"):
        ready_task(llama(0), llama(1, vocab_size=64), FORWARD_KL)


def test_validation_scores_completions_at_temperature_one_whatever_the_terms():
    student, teacher, batch = llama(0).eval(), llama(1), collate(examples())
    task = ready_task(student, teacher, {"kl": {"function": "forward_kl", "temperature": 4.0, "mask": "all"}})

    with torch.no_grad():
        metrics = {name: (float(total), count) for name, (total, count) in task.validation_step(batch, 0).items()}

    mask, inputs = completion_mask(batch), {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        q, p = (model(**inputs).logits[:, :-1][mask].double().softmax(-1) for model in (student, teacher))
    rows, labels = torch.arange(len(q)), batch["labels"][:, 1:][mask]
    expected = {
        "cross_entropy": -q[rows, labels].log().sum(),
        "forward_kl": (p * (p / q).log()).sum(),
        "reverse_kl": (q * (q / p).log()).sum(),
        "top1_agreement": (q.argmax(-1) == p.argmax(-1)).sum(),
        "reference/cross_entropy": -p[rows, labels].log().sum(),
        "reference/forward_kl": 0,
        "reference/reverse_kl": 0,
        "reference/top1_agreement": len(q),
    }
    for name, total in expected.items():
        assert metrics[name] == (pytest.approx(float(total), rel=1e-5), len(q))
    assert all("by_length/" in name or "_gap_" in name for name in metrics.keys() - expected.keys())
    assert task.reference == "teacher"


def test_perplexity_follows_from_the_cross_entropy():
    task = DistillTask(terms=FORWARD_KL)

    assert task.derive_metrics({"cross_entropy": 2.0, "forward_kl": 1.0}) == {"perplexity": pytest.approx(math.exp(2))}
    assert task.derive_metrics({"cross_entropy": 1000.0}) == {"perplexity": math.inf}


def summed(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    return (student - teacher).square().sum()


def squared(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    return temperature * (student - teacher).square().sum(-1)


def test_a_users_own_function_is_a_term_by_its_dotted_path():
    batch = collate(examples())
    task = ready_task(llama(0), llama(1), {"mine": {"function": f"{__name__}.squared", "temperature": 3.0}})
    inputs, mask = {key: batch[key] for key in ("input_ids", "attention_mask")}, completion_mask(batch)
    student, teacher = (task.models[name].module(**inputs).logits[:, :-1][mask] for name in ("student", "teacher"))

    total, count = task.training_step(batch, 0).metrics["student/mine"]

    assert total.item() == pytest.approx(3 * (student - teacher).square().sum().item(), rel=1e-5)
    assert count == len(student)


def test_a_users_function_that_reduces_is_refused_by_name():
    task = ready_task(llama(0), llama(1), {"mine": {"function": f"{__name__}.summed"}})

    with pytest.raises(ValueError, match=r"task.terms.mine.function returned \(\).*one loss per token, \(23,\)"):
        task.training_step(collate(examples()), 0)


def test_wrong_roles_are_refused_by_key_before_models_are_built():
    task = DistillTask(terms=FORWARD_KL)

    assert task.check_models({"student": True, "teacher": False}, stage="fit") == []
    assert task.check_models({"student": False, "teacher": True}, stage="fit") == [
        "models.student.trainable=false, but task.student trains it; set it to true",
        "models.teacher.trainable=true, but task.teacher is frozen; set it to false",
    ]
    assert DistillTask(teacher="techer", terms=FORWARD_KL).check_models(
        {"student": True, "teacher": False}, stage="fit"
    ) == ["task.teacher=techer: models has no techer, only student, teacher"]
    with pytest.raises(ConfigError, match=r"task\.student and task.teacher are both 'model'"):
        DistillTask(student="model", teacher="model", terms=FORWARD_KL)


def test_a_wrong_option_is_refused_by_its_key():
    with pytest.raises(ConfigError) as caught:
        DistillTask(
            terms={"forward_kl": {"weight": -1}},
            fused="yes",
            keep_teachers="disk",
            combine="loses",
            length_edges=[5, 5],
            cache={"topk": 3},
            preflight={"mask": False},
        )

    starts = [
        "task.length_edges=[5, 5]: must be whole numbers above 0",
        "task.combine is 'loses'; it must be one of distributions, losses, routes; did you mean losses?",
        "task.terms.forward_kl.weight is -1; it must be at least 0",
        "task.cache.topk: there is no such key; did you mean top_k?",
        "task.preflight.mask is no check; did you mean masks?",
        "task.fused is 'yes'; it must be auto, true or false",
        "task.keep_teachers is 'disk'; it must be device or host",
    ]
    assert len(caught.value.problems) == len(starts)
    for problem, start in zip(caught.value.problems, starts, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fused": 0}, "task.fused is 0; it must be auto, true or false"),
        ({"fused": 1}, "task.fused is 1; it must be auto, true or false"),
        ({"fused": ["auto"]}, "task.fused is ['auto']; it must be auto, true or false"),
        ({"preflight": False}, "task.preflight is False; it must be a mapping of checks to true or false"),
        ({"student": ["a"]}, "task.student is ['a']; it must be the name of a model"),
        ({"teacher": None}, "task.teacher is None; give a model's name"),
        ({"teacher": ["teacher"]}, "task.teacher is ['teacher']; give a model's name"),
        ({"teacher": {"a": "x"}}, "task.teacher.a is 'x'; it must be a number above 0"),
        ({"combine": 3}, "task.combine is 3; it must be one of"),
        ({"combine": "routes", "routes": "teacher"}, "task.routes is 'teacher'; give the teacher of each source"),
        ({"keep_teachers": ["host"]}, "task.keep_teachers is ['host']; it must be device or host"),
        ({"terms": None}, "task.terms is None; it must be a mapping"),
        ({"terms": {"loss": {"function": "forward_kl"}}}, "task.terms.loss: a metric of this name is there already"),
        ({"length_edges": 16}, "task.length_edges=16: must be whole numbers"),
        ({"length_edges": None}, "task.length_edges=None: must be whole numbers"),
    ],
)
def test_a_value_of_another_type_is_one_sentence(options, problem):
    with pytest.raises(ConfigError) as caught:
        DistillTask(**{"terms": FORWARD_KL, **options})

    (found,) = caught.value.problems
    assert found.startswith(problem)


class Odd(LlamaForCausalLM):
    """A family whose forward does something to its logits that no configuration tells."""

    def forward(self, **kwargs):
        output = super().forward(**kwargs)
        output.logits = output.logits + 0.1 * output.logits.roll(1, -1)
        return output


def test_a_head_that_is_not_understood_is_left_alone_or_refused(caplog):
    batch = collate(examples())
    odd = Odd(llama(0).config)
    dense = ready_task(copy.deepcopy(odd), llama(1), TWO_TERMS, fused=False).training_step(batch, 0)

    with caplog.at_level("INFO"):
        left_alone = ready_task(odd, llama(1), TWO_TERMS).training_step(batch, 0)

    assert "the logits of all tokens are built at once: models.student does something unknown" in caplog.text
    torch.testing.assert_close(left_alone.shares, dense.shares)
    with pytest.raises(ConfigError, match=r"task\.fused=true, but models\.student does something unknown"):
        ready_task(odd, llama(1), TWO_TERMS, fused=True)


def test_tiles_and_whole_logits_give_the_same_update():
    ranks = [[collate(examples())]]

    fused, dense = (
        global_gradient(ready_task(llama(0), llama(1), TWO_TERMS, fused=fused), ranks) for fused in (True, False)
    )

    for name, gradient in dense.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_teacher_in_training_mode_is_refused():
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    task.models["teacher"].module = llama(1).train()

    with pytest.raises(ConfigError, match=r"models\.teacher is in training mode"):
        task.setup("fit")


def test_a_frozen_student_can_be_validated():
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    task.models["student"].trainable = False

    task.setup("validate")
