"""The functions that a term may name."""

import pytest
import torch.nn.functional as F

from tasks.losses import FUNCTIONS, find_function
from trainer.config import ConfigError


def test_a_function_is_found_by_name_or_dotted_path():
    assert find_function("forward_kl") is FUNCTIONS["forward_kl"]
    assert find_function("torch.nn.functional.kl_div") is F.kl_div


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foward_kl", "did you mean forward_kl"),
        ("xyz", "use forward_kl, reverse_kl, cross_entropy, or the dotted path"),
        ("", "is no loss function"),
        (".kl", "is no loss function"),
        (None, "is no loss function"),
        (["forward_kl"], "is no loss function"),
        ("no_such_package.loss", "cannot be imported: No module named 'no_such_package'"),
        ("torch.nn.functional.kl_dev", "torch.nn.functional has no callable kl_dev"),
        ("math.pi", "math has no callable pi"),
    ],
)
def test_an_unknown_function_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        find_function(name)
