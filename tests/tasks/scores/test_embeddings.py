"""Pooling, retrieval and correlations of sentence embeddings against plain loops."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tasks.scores.embeddings import pair_similarities, pearson, retrieval_ranks, run_encoder, sentence_vectors, spearman
from trainer import ConfigError


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_sentence_is_the_mean_of_its_attended_tokens_as_a_unit_vector():
    states, mask = draw(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])

    vectors = sentence_vectors(SimpleNamespace(last_hidden_state=states), mask)

    for row, length in ((0, 2), (1, 4)):
        mean = states[row, :length].mean(0)
        torch.testing.assert_close(vectors[row], mean / mean.norm())


def test_a_model_without_a_state_per_token_is_refused():
    model = type("Model", (), {"name": "student", "__call__": lambda self, **_: SimpleNamespace(logits=1)})()
    batch = {"text_input_ids": torch.ones(1, 2), "text_attention_mask": torch.ones(1, 2)}

    with pytest.raises(ConfigError, match=r"models.student gives SimpleNamespace.*models.student.build=encoder"):
        run_encoder(model, batch, "text")


def test_correlations_are_those_of_the_textbook():
    first, second = draw(200), draw(200, seed=1)
    second = (second + first).round(decimals=1)  # with ties

    def ranks(values: Tensor) -> Tensor:
        numbers = values.tolist()
        return torch.tensor([sum(o < v for o in numbers) + (numbers.count(v) + 1) / 2 for v in numbers])

    assert len(second.unique()) < 100
    assert pearson(first, second) == pytest.approx(float(torch.corrcoef(torch.stack([first, second]).double())[0, 1]))
    exact = torch.corrcoef(torch.stack([ranks(first), ranks(second)]).double())[0, 1]
    assert spearman(first, second) == pytest.approx(float(exact))
    assert spearman(first, first.exp()) == pytest.approx(1.0) and pearson(first, -first) == pytest.approx(-1.0)


def test_numbers_that_are_all_alike_correlate_with_nothing():
    assert pearson(torch.ones(5), draw(5)) == spearman(draw(5), torch.ones(5)) == 0.0


def test_every_pair_stands_once():
    vectors = draw(4, 8)

    expected = [float(vectors[i] @ vectors[j]) for i in range(4) for j in range(i + 1, 4)]
    assert pair_similarities(vectors).tolist() == pytest.approx(expected)


def test_own_document_stands_behind_all_that_are_as_near():
    documents = torch.eye(3)
    queries = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 0]])

    assert retrieval_ranks(queries, documents).tolist() == [1, 3, 3]
