"""Loss terms as configuration: what they read and what is refused, all at once."""

import pytest
import torch

from tasks.losses import forward_kl, generalised_jsd
from tasks.terms.term import LogitsTerm, RelationsTerm, StatesTerm, parse_terms
from trainer import ConfigError

LAYERS = {"model.layers.-1": "model.layers.3"}


def test_a_term_is_found_by_its_own_name_or_its_function():
    terms = parse_terms({"forward_kl": {}, "mine": {"function": "forward_kl", "temperature": 2.0}})
    student, teacher = torch.randn(3, 7), torch.randn(3, 7)

    for name, temperature in (("forward_kl", 1.0), ("mine", 2.0)):
        term = terms[name]
        assert isinstance(term, LogitsTerm) and term.temperature.at(1) == temperature and term.mask == "completion"
        values = term.loss(student, teacher, torch.zeros(3, dtype=torch.long), temperature=temperature)
        torch.testing.assert_close(values, forward_kl(student, teacher, temperature=temperature))


def test_options_of_a_function_are_bound():
    terms = parse_terms({"jsd": {"function": "generalised_jsd", "beta": 0.3, "top_k": 4}})
    student, teacher = torch.randn(3, 7), torch.randn(3, 7)

    values = terms["jsd"].loss(student, teacher, torch.zeros(3, dtype=torch.long), temperature=1.0)

    torch.testing.assert_close(values, generalised_jsd(student, teacher, beta=0.3, top_k=4))


def test_terms_on_inner_states_know_their_layers():
    terms = parse_terms(
        {
            "hidden": {"function": "hidden_mse", "layers": LAYERS, "projection": "bridge", "mask": "all"},
            "queries": {"function": "attention_relations", "layers": LAYERS, "heads": 4, "weight": 0.1},
        }
    )

    hidden, queries = terms["hidden"], terms["queries"]
    assert isinstance(hidden, StatesTerm) and hidden.layers == LAYERS and hidden.projection == "bridge"
    assert isinstance(queries, RelationsTerm) and queries.heads == 4 and queries.weight.at(7) == 0.1


def test_weights_and_temperatures_may_change_over_the_run():
    ramp = {"start": 1.0, "end": 0.5, "steps": 3}

    term = parse_terms({"forward_kl": {"weight": ramp, "temperature": {"start": 4.0, "end": 1.0, "steps": 2}}})[
        "forward_kl"
    ]

    assert [term.weight.at(step) for step in (1, 2, 3)] == [1.0, 0.75, 0.5]
    assert [term.temperature.at(step) for step in (1, 2)] == [4.0, 1.0]


def test_a_term_that_is_always_zero_is_left_out_and_one_that_grows_is_not():
    ramp = {"start": 0.0, "end": 1.0, "steps": 5}

    assert set(parse_terms({"forward_kl": {"weight": ramp}, "cross_entropy": {"weight": 0}})) == {"forward_kl"}


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"forward_kl": 1.0}, "task.terms.forward_kl is 1.0; it must be a mapping"),
        ({"forwad_kl": {}}, "did you mean forward_kl?"),
        (
            {"forward_kl": {"wieght": 1.0}},
            "wieght is no option of forward_kl; did you mean weight?",
        ),
        ({"forward_kl": {"weight": -1}}, "task.terms.forward_kl.weight is -1; it must be at least 0"),
        ({"forward_kl": {"weight": {"start": 1, "end": -1, "steps": 3}}}, "it must be at least 0"),
        ({"forward_kl": {"temperature": 0}}, "task.terms.forward_kl.temperature is 0; it must be above 0"),
        ({"forward_kl": {"mask": "completions"}}, "did you mean completion?"),
        ({"cross_entropy": {"temperature": 2.0}}, "cross_entropy has none"),
        ({"generalised_jsd": {"beta": 2.0}}, "beta"),
        ({"hidden_mse": {}}, "task.terms.hidden_mse.layers is missing; give module paths"),
        ({"hidden_mse": {"layers": ["a"]}}, "task.terms.hidden_mse.layers is ['a']"),
        ({"hidden_mse": {"layers": {"a": ""}}}, "task.terms.hidden_mse.layers is {'a': ''}"),
        ({"hidden_mse": {"layers": LAYERS, "temperature": 2.0}}, "temperature is no key of this term"),
        (
            {"hidden_mse": {"layers": LAYERS, "projection": 3}},
            "projection is 3; it must be the name of a trained model",
        ),
        ({"attention_relations": {"layers": LAYERS, "heads": 0}}, "heads is 0"),
        ({"forward_kl": {"weight": 0}}, "no term with a weight above 0"),
        ({}, "no term with a weight above 0"),
        (None, "task.terms is None; it must be a mapping of names to terms"),
        ([{"forward_kl": {}}], "task.terms is [{'forward_kl': {}}]; it must be a mapping"),
        ({"x": {"function": ["forward_kl"]}}, "task.terms.x: ['forward_kl'] is no loss function"),
        ({"x": {"function": 3}}, "task.terms.x: 3 is no loss function"),
        ({"x": {"function": "os.getcwd"}}, "task.terms.x: os.getcwd cannot be called as a loss"),
        ({"forward_kl": {"weight": 10**400}}, "000; it must be a finite number"),
        ({"forward_kl": {"temperature": 10**400}}, "000; it must be a finite number"),
        ({"forward_kl": {"mask": ["all"]}}, "task.terms.forward_kl.mask is ['all']; masks are"),
        ({1: {"function": "forward_kl"}}, "task.terms has a term named 1; a name is text"),
        ({"": {"function": "forward_kl"}}, "task.terms has a term named ''"),
        ({"a/b": {"function": "forward_kl"}}, "task.terms has a term named 'a/b'"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(terms, words):
    with pytest.raises(ConfigError) as caught:
        parse_terms(terms)

    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "updates", "skipped_updates", "loss_scale"])
def test_a_term_cannot_have_the_name_of_what_the_trainer_logs(name):
    with pytest.raises(ConfigError, match=rf"task\.terms\.{name}: a metric of this name is there already"):
        parse_terms({name: {"function": "forward_kl"}})


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_terms({"forward_kl": {"weight": -1, "mask": "some"}, "nothing": {}, "hidden_mse": {}})

    assert len(caught.value.problems) == 4


def test_a_term_without_a_function_tells_its_other_problems_as_well():
    with pytest.raises(ConfigError) as caught:
        parse_terms({"nothing": {"weight": -1, "mask": "some"}})

    assert len(caught.value.problems) == 3
