"""Which teacher an example learns from."""

import pytest
import torch

from tasks.teaching.routes import Routes
from trainer import ConfigError

TEACHERS = ["large", "code"]


def test_a_source_leads_to_its_teacher_and_the_star_takes_the_rest():
    routes = Routes({"github": "code", "*": "large"}, teachers=TEACHERS)
    batch = {"input_ids": torch.zeros(3, 4), "source": torch.tensor([[1, 1, 1, -1], [0, 0, -1, -1], [2, 2, 2, 2]])}

    assert routes.owners(batch, ["books", "github", "news"]).tolist() == [1, 0, 0]


def test_rows_without_sources_go_to_the_star():
    routes = Routes({"github": "code", "*": "large"}, teachers=TEACHERS)

    assert routes.owners({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, []).tolist() == [0, 0]


def test_packed_rows_of_several_sources_are_refused():
    routes = Routes({"*": "large"}, teachers=TEACHERS)
    batch = {"input_ids": torch.zeros(1, 4), "source": torch.tensor([[0, 0, 1, 1]])}

    with pytest.raises(ConfigError, match=r"data\.packing=false"):
        routes.owners(batch, ["books", "github"])


TYPO = {"gihub": "code", "*": "large"}


@pytest.mark.parametrize(
    ("routes", "sets", "words"),
    [
        ({"github": "code"}, (["books", "github"], ["news"]), "no teacher for books, news"),
        ({"github": "code"}, (["", "github"], []), "no teacher for rows without a source"),
        ({"github": "code"}, (["github"], []), "needs rows with a `source` column, which some data lack"),
        ({"github": "code"}, ([], []), "task.routes.github: no row has this source; no row has any"),
        (TYPO, (["github"], []), "task.routes.gihub: no row has this source; did you mean github?"),
        (
            {"web": "code", "*": "large"},
            (["a/b", "c"], []),
            "task.routes.web: no row has this source; there are a/b, c",
        ),
    ],
)
def test_routes_and_sources_that_do_not_meet_are_refused(routes, sets, words):
    with pytest.raises(ConfigError) as caught:
        Routes(routes, teachers=TEACHERS).check(*sets)

    assert words in str(caught.value)


def test_sources_are_met_as_the_rows_say_them():
    routes = Routes({"org/code": "code", "*": "large"}, teachers=TEACHERS)

    routes.check(["org/code", "wiki"], [])

    batch = {"input_ids": torch.zeros(2, 2), "source": torch.tensor([[0, 0], [1, 1]])}
    assert routes.owners(batch, ["org/code", "wiki"]).tolist() == [1, 0]
