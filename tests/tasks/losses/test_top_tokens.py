"""A sparse teacher's parts, and the temperatures at which it can be used."""

import pytest
import torch

from tasks.losses import TopTokens, forward_kl
from tests.tasks.losses.reference import random_logits


def test_probabilities_at_each_temperature_are_those_of_the_whole_row():
    logits = random_logits(6, 500, seed=0)

    top = TopTokens.from_logits(logits, k=7, temperatures=[0.5, 1, 2.0])

    assert top.log_probs.dtype == torch.float32 and top.ids.dtype == torch.int64
    for temperature in (0.5, 1.0, 2.0):
        whole = torch.log_softmax(logits.double() / temperature, -1).gather(-1, top.ids)
        torch.testing.assert_close(top.at(temperature).double(), whole, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(
            top.tail_at(temperature).double(), (1 - whole.exp().sum(-1)).log(), rtol=1e-6, atol=2e-6
        )
    assert (top.log_normalisers[1.0] == 0).all()


def test_renormalising_the_top_at_another_temperature_would_give_it_all_the_mass():
    logits = random_logits(32, 50000, seed=0, scale=2.97)
    top = TopTokens.from_logits(logits, k=64, temperatures=[2.0])

    mass = {temperature: top.at(temperature).exp().sum(-1).mean().item() for temperature in (1.0, 2.0)}

    assert mass[1.0] == pytest.approx(0.476, abs=0.03)
    assert mass[2.0] == pytest.approx(0.064, abs=0.01)  # where softmax(log_probs / 2) has 1
    too_much = top.log_probs.div(2).softmax(-1) / top.at(2.0).exp()
    torch.testing.assert_close(too_much.mean(-1), 1 / top.at(2.0).exp().sum(-1), rtol=1e-4, atol=0)
    assert too_much.min() > 5


def test_a_temperature_without_its_normaliser_is_refused_with_those_that_are_there():
    top = TopTokens.from_logits(torch.zeros(2, 50), k=5, temperatures=[2.0, 4.0])

    with pytest.raises(ValueError, match=r"temperature 3.0, only for 1.0, 2.0, 4.0"):
        forward_kl(torch.zeros(2, 50), top, temperature=3.0)
    assert torch.equal(forward_kl(torch.zeros(2, 50), top), torch.zeros(2))  # at 1 it is 0 by definition


def test_rows_are_cut_together():
    top = TopTokens.from_logits(random_logits(6, 50, seed=0), k=5, temperatures=[1.0, 2.0])

    part = top[2:4]

    assert len(top) == 6 and len(part) == 2
    assert torch.equal(part.ids, top.ids[2:4]) and torch.equal(part.at(2.0), top.at(2.0)[2:4])
    assert torch.equal(part.tail_at(2.0), top.tail_at(2.0)[2:4])
    assert torch.equal(top[torch.tensor([3, 2])].log_probs, top.log_probs[[3, 2]])


def test_more_tokens_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"k is 51.*1 to 50"):
        TopTokens.from_logits(torch.zeros(2, 50), k=51)


def test_check_names_all_that_is_wrong():
    good = TopTokens.from_logits(random_logits(6, 50, seed=0), k=5, temperatures=[1.0, 2.0])
    good.check(50)
    TopTokens.from_logits(torch.randn(0, 50), k=5).check(50)

    def refused(**changed) -> str:
        parts = {"ids": good.ids, "log_probs": good.log_probs, "log_normalisers": good.log_normalisers}
        with pytest.raises(ValueError, match="no distribution") as error:
            TopTokens(**{**parts, **changed}).check(50)
        return str(error.value)

    twice = good.ids.clone()
    twice[0, 1], twice[1, 0] = twice[0, 0], 50
    message = refused(
        ids=twice,
        log_probs=good.log_probs.half(),
        log_normalisers={2.0: torch.zeros(3)},
        log_tails={4.0: torch.zeros(3)},
    )
    assert "to 50, the vocabulary has 50 tokens" in message
    assert "1 of 6 positions have an id twice" in message
    assert "torch.float16, not (6, 5) float32" in message
    assert "log_normalisers[2.0] is (3,), not (6,)" in message
    assert "log_tails[4.0] is (3,), not (6,)" in message
    assert "mass of 5" in refused(log_probs=torch.zeros(6, 5))
    assert "mass of nan" in refused(log_probs=torch.full((6, 5), torch.nan))
    assert "not (N, K) int64" in refused(ids=good.ids.int())
