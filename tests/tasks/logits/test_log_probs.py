from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tasks.logits.log_probs
from tasks.logits.heads import Head
from tasks.logits.log_probs import (
    Reading,
    TokenLogProbs,
    log_probs_of_hidden,
    log_probs_of_logits,
    row_sums,
    token_log_probs,
)
from tasks.text.language import completion_mask, next_tokens
from tests.tasks.logits import test_heads as heads
from tests.tasks.logits.log_prob_runs import CASES, plain_weights
from tests.tasks.logits.test_fused import FAMILIES, LABELS, H, N, V, draw, leaves, make_head, relative, textbook_logits

# Log-probabilities of float32 logits of size 10 differ by 1e-6 at a few roundings each; the tests' numbers are below.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
READINGS = {
    "plain": Reading(),
    "temperature": Reading(temperature=0.7),
    "entropy": Reading(temperature=1.3, entropy=True),
    "entropy's gradient": Reading(temperature=1.3, entropy=True, entropy_gradient=True),
}
UPSTREAM = draw(2, 20, seed=30)  # what a loss makes of log p and of the entropy


def textbook(logits: Tensor, labels: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / reading.temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_of(log_probs: Tensor, entropy: Tensor | None, reading: Reading) -> Tensor:
    of_log_probs, of_entropy = UPSTREAM[:, : len(log_probs)].to(log_probs.dtype)
    loss = (of_log_probs * log_probs).sum()
    return loss + (of_entropy * entropy).sum() if reading.entropy_gradient and entropy is not None else loss


def check(found: TokenLogProbs, right: tuple[Tensor, Tensor], reading: Reading) -> None:
    torch.testing.assert_close(found.log_probs, right[0], check_dtype=False, **CLOSE)
    assert (found.entropy is not None) == reading.entropy
    if found.entropy is not None:
        torch.testing.assert_close(found.entropy, right[1], check_dtype=False, **CLOSE)
        assert found.entropy.requires_grad == reading.entropy_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", READINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_float64(
    family: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = READINGS[kind]
    exact, hidden = make_head(H, seed=0, **FAMILIES[family]), draw(N, H, seed=20).requires_grad_()
    right = textbook(textbook_logits(hidden, exact), LABELS, reading)
    expected = torch.autograd.grad(loss_of(*right, reading), leaves(hidden, exact))

    head = make_head(H, seed=0, dtype=dtype, **FAMILIES[family])
    states = hidden.detach().to(dtype).requires_grad_()
    ways = {"dense": log_probs_of_logits(head.logits(states) * 1, LABELS, reading)}
    for rows, kept in ((1, 0), (3, 0), (3, 4 * V), (3, N * V), (100, N * V)):
        monkeypatch.setattr(tasks.logits.log_probs, "KEPT", kept)
        ways[f"{rows}, {kept}"] = log_probs_of_hidden(states, head, LABELS, reading, tile_rows=rows)

    for found in ways.values():
        check(found, right, reading)
        assert found.log_probs.dtype == dtype
        gradients = torch.autograd.grad(loss_of(found.log_probs, found.entropy, reading), leaves(states, head))
        for value, gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(value, gradient, check_dtype=False, **CLOSE)


@pytest.mark.parametrize("kind", READINGS)
def test_logits_of_minus_infinity_have_no_probability_and_no_gradient(kind: str) -> None:
    reading = READINGS[kind]
    logits = draw(N, V, seed=1, dtype=torch.float32) * 20
    logits[:, 4] = -torch.inf
    others = [column for column in range(V) if column != 4]
    exact = logits[:, others].double().requires_grad_()
    right = textbook(exact, LABELS - (LABELS > 4).long(), reading)
    (expected,) = torch.autograd.grad(loss_of(*right, reading), exact)

    given = logits.clone().requires_grad_()
    found = log_probs_of_logits(given * 1, LABELS, reading)
    check(found, right, reading)
    (gradient,) = torch.autograd.grad(loss_of(found.log_probs, found.entropy, reading), given)

    assert gradient[:, 4].tolist() == [0] * N
    torch.testing.assert_close(gradient[:, others].double(), expected, **CLOSE)


def test_far_logits_keep_their_gradient() -> None:
    """A token of log p = -200, whose probability float32 rounds to 0, is pushed with full force."""
    logits = torch.zeros(1, V)
    logits[0, 3] = 200.0
    given = logits.clone().requires_grad_()

    found = log_probs_of_logits(given * 1, torch.tensor([0]), Reading(entropy=True))
    found.log_probs.sum().backward()

    assert found.log_probs.item() == -200.0
    assert given.grad is not None and given.grad[0, [0, 3]].tolist() == [1.0, -1.0]
    assert found.entropy is not None and 0 <= found.entropy.item() < 1e-6


def test_of_no_row_comes_nothing_with_a_graph() -> None:
    head, hidden = make_head(H, seed=0, bias=True), draw(0, H, seed=20).requires_grad_()
    for found in (
        log_probs_of_hidden(hidden, head, LABELS[:0], Reading(entropy=True)),
        log_probs_of_logits(head.logits(hidden), LABELS[:0], Reading(entropy=True)),
    ):
        assert found.log_probs.shape == (0,) and found.entropy is not None and found.entropy.shape == (0,)
        gradients = torch.autograd.grad(found.log_probs.sum(), leaves(hidden, head))
        assert [float(gradient.abs().sum()) for gradient in gradients] == [0, 0, 0]


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    head, hidden = make_head(H, seed=0, bias=True), draw(N, H, seed=20)
    values = dict(zip(("hidden", "weight", "bias"), leaves(hidden, head), strict=True))
    for name, value in values.items():
        value.requires_grad_(name == trained)

    log_probs_of_hidden(hidden, head, LABELS, Reading(), tile_rows=3).log_probs.sum().backward()

    assert {name for name, value in values.items() if value.grad is not None} == {trained}


def test_without_gradient_nothing_is_kept() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20).requires_grad_()
    with torch.no_grad():
        found = log_probs_of_hidden(hidden, head, LABELS, Reading())

    assert found.log_probs.grad_fn is None


def test_a_second_backward_is_refused_where_the_first_wrote_over_the_logits() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20).requires_grad_()
    for found in (
        log_probs_of_logits(head.logits(hidden), LABELS, Reading()),
        log_probs_of_hidden(hidden, head, LABELS, Reading()),
    ):
        loss = found.log_probs.sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_no_more_logits_are_held_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20).requires_grad_()
    monkeypatch.setattr(tasks.logits.log_probs, "KEPT", 4 * V)
    sizes: list[int] = []

    def note(saved: Tensor) -> Tensor:
        sizes.append(saved.numel() * (saved.ndim == 2 and saved.shape[1] == V))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        log_probs_of_hidden(hidden, head, LABELS, Reading(), tile_rows=2)

    assert [size for size in sizes if size] == [2 * V, 2 * V]


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0\.0; it must be above 0"):
        Reading(temperature=0.0)


def bfloat16_case() -> tuple[Tensor, Head, Tensor, list[Tensor]]:
    """Returns many rows in bfloat16, and the gradients of their summed log p by float64."""
    labels = torch.randint(0, 64, (2048,), generator=torch.Generator().manual_seed(5))
    head = Head(weight=draw(64, 32, seed=1, dtype=torch.bfloat16).requires_grad_())
    hidden = draw(2048, 32, seed=2, dtype=torch.bfloat16).requires_grad_()
    exact = [hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    right = textbook(exact[0] @ exact[1].T, labels, Reading())[0]
    return hidden, head, labels, list(torch.autograd.grad(right.sum(), exact))


def test_bfloat16_adds_up_in_float32_however_small_the_tiles() -> None:
    hidden, head, labels, (of_hidden, of_weight) = bfloat16_case()
    rounding = relative(of_weight.bfloat16(), of_weight)

    for rows in (1, 16, 2048):
        found = log_probs_of_hidden(hidden, head, labels, Reading(), tile_rows=rows).log_probs
        gradients = torch.autograd.grad(found.sum(), [hidden, head.weight])
        assert found.dtype == torch.float32
        assert relative(gradients[1], of_weight) < 4 * rounding  # of which most is the logits' own rounding
        assert relative(gradients[0], of_hidden) < 0.01


def test_under_autocast_the_product_is_the_models_and_the_rest_float32() -> None:
    bfloat16, head16, labels, (of_hidden, of_weight) = bfloat16_case()
    hidden = bfloat16.detach().float().requires_grad_()
    head = Head(weight=head16.weight.detach().float().requires_grad_())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        tiled = log_probs_of_hidden(hidden, head, labels, Reading(), tile_rows=100).log_probs
        dense = log_probs_of_logits(F.linear(hidden, head.weight).float(), labels, Reading()).log_probs
    gradients = torch.autograd.grad(tiled.sum(), [hidden, head.weight])

    torch.testing.assert_close(tiled, dense)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    assert relative(gradients[0], of_hidden) < 0.01
    assert relative(gradients[1], of_weight) < 0.01


def test_row_sums_are_of_each_row() -> None:
    counted = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)

    sums = row_sums(values, counted)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()

    assert sums.tolist() == [3.0, 0.0, 4.0]
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 100.0]


@pytest.mark.parametrize("vocabulary", [None, 30])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "granite"])
def test_a_models_log_probs_are_the_same_with_and_without_its_logits(family: str, vocabulary: int | None) -> None:
    """The gradients of all weights, also of a tied embedding, against the model's own logits in float64."""
    reading = READINGS["entropy's gradient"]
    model, batch = heads.build(heads.FAMILIES[family][0], dtype=torch.float64), heads.make_batch()
    batch["labels"] = batch["labels"].clamp(max=29)
    counted = completion_mask(batch)
    logits = model.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    right = textbook(logits[:, :-1][counted][:, :vocabulary], next_tokens(batch, counted), reading)
    loss_of(*right, reading).backward()
    expected = heads.gradients(model)

    for tap in (heads.tapped(model), None):
        model.module.zero_grad()
        options: dict[str, Any] = {"temperature": 1.3, "tap": tap, "vocabulary": vocabulary, "entropy_gradient": True}
        found = token_log_probs(model, batch, counted, **options)
        check(found, right, reading)
        loss_of(found.log_probs, found.entropy, reading).backward()
        gradients = heads.gradients(model)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=name)  # logits are float32


def test_entropy_stands_beside_only_when_asked_for() -> None:
    model, batch = heads.build(heads.FAMILIES["llama"][0]), heads.make_batch()
    counted = completion_mask(batch)
    tap = heads.tapped(model)

    for found in (token_log_probs(model, batch, counted, tap=tap), token_log_probs(model, batch, counted)):
        assert found.entropy is None and found.log_probs.requires_grad
    with torch.no_grad():
        for found in (token_log_probs(model, batch, counted, tap=way, entropy=True) for way in (tap, None)):
            assert found.entropy is not None and not found.log_probs.requires_grad


# Through real engines


@pytest.mark.parametrize("case", CASES)
def test_training_through_engines_equals_plain_pytorch(token_ranks: list[dict[str, Any]], case: str) -> None:
    """With accumulation, tied heads and checkpointing; under ZeRO-3 the head is whole in the backward."""
    stage, kind, _ = CASES[case]
    ranks = [rank["log-probs"] for rank in token_ranks]

    assert ranks[0][case]["engines"] == {"student": ("DeepSpeedEngine", stage)}
    for name, value in plain_weights(kind).items():
        torch.testing.assert_close(
            ranks[0][case]["weights"]["student"][name].double(), value, rtol=0, atol=1e-6, msg=name
        )
    assert sum(rank[case]["empty"] for rank in ranks) > 0  # micro-batches that count no token
    assert max(rank[case]["drift"] for rank in ranks) == 0  # the numbers without gradient are those with
