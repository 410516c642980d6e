"""The distillation task: its update against plain float64 PyTorch, its masks, metrics and refusals."""

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tasks.distill import DistillTask
from tasks.language import all_mask, completion_mask
from trainer.config import ConfigError

VOCABULARY, PAD = 61, 0
FORWARD_KL = {"kl": {"function": "forward_kl"}}
# (prompt length, completion length) of each example; the fifth has no token to learn.
EXAMPLES = [(3, 1), (5, 4), (1, 9), (6, 2), (7, 0), (2, 7)]


class Handle:
    """What the task sees of a model, without an engine."""

    def __init__(self, name: str, module: nn.Module, *, trainable: bool) -> None:
        self.name = name
        self.module, self.trainable, self.widths = module.train(trainable), trainable, []

    def __call__(self, **kwargs):
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            output = self.module(**kwargs)
        self.widths.append((output if isinstance(output, Tensor) else output.logits).shape[1])
        return output


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


def ready_task(student: nn.Module, teacher: nn.Module, terms: dict, *, tokenizer=None) -> DistillTask:
    task = DistillTask(terms=terms)
    task.models = {
        "student": Handle("student", student, trainable=True),
        "teacher": Handle("teacher", teacher, trainable=False),
    }
    task.trainer = SimpleNamespace(tokenizer=tokenizer, is_main=True, before={}, reference={})
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
    for batch in (batch for micro_batches in ranks for batch in micro_batches):
        sums = task.training_step(batch, 0).sums
        loss = sum(value * len(ranks) / counts[key] for key, value in sums.items())
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
    for key, weight in (("student/kl", 0.7), ("student/ce", 0.3)):
        total, count = output.metrics[key]
        assert count == counts[key] and not total.requires_grad
        assert output.sums[key].item() == pytest.approx(weight * total.item())


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

    torch.testing.assert_close(together.sums, separate.sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [llama, gpt2])  # rotary and absolute positions
def test_padding_on_either_side_changes_nothing(build):
    task = ready_task(build(0), build(1), TWO_TERMS)
    task.models["student"].module.eval()  # GPT-2 has dropout

    outputs = [
        task.training_step(collate(examples(), side=side, extra=extra), 0)
        for side, extra in (("right", 0), ("right", 5), ("left", 0), ("left", 5))
    ]

    for output in outputs[1:]:
        torch.testing.assert_close(output.sums, outputs[0].sums, rtol=1e-5, atol=1e-5)


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
    task = ready_task(llama(0), llama(1), FORWARD_KL)
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

    torch.testing.assert_close(without.sums, with_columns.sums)


def test_no_token_to_learn_gives_a_zero_whose_backward_reaches_every_weight():
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    batch = collate([examples()[4]])

    output = task.training_step(batch, 0)
    output.sums["student/kl"].backward()

    assert task.models["student"].widths == [1]  # not an empty product, which some kernels refuse
    assert output.sums["student/kl"].item() == 0 and output.metrics["student/kl"][1] == 0
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
    assert metrics == {name: (pytest.approx(float(total), rel=1e-5), len(q)) for name, total in expected.items()}
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
    student, teacher, _ = task._score(batch, completion_mask(batch))

    total, count = task.training_step(batch, 0).metrics["student/mine"]

    assert total.item() == pytest.approx(3 * (student - teacher).square().sum().item(), rel=1e-5)
    assert count == len(student)


def test_a_users_function_that_reduces_is_refused_by_name():
    task = ready_task(llama(0), llama(1), {"mine": {"function": f"{__name__}.summed"}})

    with pytest.raises(ValueError, match=r"task.terms.mine.function returned \(\).*one loss per token, \(23,\)"):
        task.training_step(collate(examples()), 0)


def test_all_problems_of_all_terms_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        DistillTask(
            terms={
                "a": {"function": "foward_kl", "wieght": 1.0},
                "forward_kl": {"weight": -1, "temperature": 0, "mask": "completions"},
                "ce": {"function": "cross_entropy", "temperature": 2.0, "weight": "much"},
                "reverse_kl": 0.5,
                "nan": {"function": "reverse_kl", "weight": math.nan, "temperature": True},
            }
        )

    expected = [
        "task.terms.a.wieght is no key of a term; did you mean weight?",
        "task.terms.a.function: 'foward_kl' is no loss function; did you mean forward_kl?",
        "task.terms.forward_kl.weight is -1; it must be a number of at least 0",
        "task.terms.forward_kl.temperature is 0; it must be a number above 0",
        "task.terms.forward_kl.mask is 'completions'; did you mean completion? masks are completion, all",
        "task.terms.ce.weight is 'much'; it must be a number of at least 0",
        "task.terms.ce.temperature is 2.0; cross_entropy has none; leave it at 1",
        "task.terms.reverse_kl is 0.5; it must be a mapping such as {weight: 1.0}",
        "task.terms.nan.weight is nan; it must be a number of at least 0",
        "task.terms.nan.temperature is True; it must be a number above 0",
    ]
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("terms", [{}, {"forward_kl": {"weight": 0}}])
def test_a_loss_without_a_term_is_refused(terms):
    with pytest.raises(ConfigError, match="no term with a weight above 0"):
        DistillTask(terms=terms)


def test_a_terms_function_is_its_name_unless_given():
    task = DistillTask(terms={"reverse_kl": {}})

    assert task.terms["reverse_kl"].weight == 1.0 and task.terms["reverse_kl"].mask == "completion"


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


def test_a_teacher_in_training_mode_is_refused():
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    task.models["teacher"].module = llama(1).train()

    with pytest.raises(ConfigError, match=r"models\.teacher is in training mode"):
        task.setup("fit")


def test_a_frozen_student_can_be_validated():
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    task.models["student"].trainable = False

    task.setup("validate")


def warnings_of(caplog, before: dict, reference: dict) -> str:
    task = ready_task(llama(0), llama(1), FORWARD_KL)
    task.trainer.before, task.trainer.reference = before, reference
    with caplog.at_level(logging.WARNING):
        task.on_train_start()
    return caplog.text


def test_a_teacher_no_better_than_chance_is_warned_of_with_the_numbers(caplog):
    text = warnings_of(caplog, {}, {"val/cross_entropy": 4.05})

    assert "models.teacher knows no more than chance: its cross-entropy is 4.05 nats, a uniform guess has 4.11" in text


def test_a_student_equal_to_its_teacher_is_warned_of(caplog):
    same = {"val/cross_entropy": 1.5, "val/top1_agreement": 1.0}

    assert "models.student and models.teacher predict the same" in warnings_of(caplog, same, same)


@pytest.mark.parametrize("reference", [{}, {"val/cross_entropy": 1.5, "val/top1_agreement": 1.0}])
def test_a_good_teacher_and_a_missing_validation_are_quiet(caplog, reference):
    assert warnings_of(caplog, {"val/cross_entropy": 2.5, "val/top1_agreement": 0.4}, reference) == ""
