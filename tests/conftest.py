"""What holds for all tests, and how the whole suite is spread over two processes."""

import os
import sys
from collections.abc import Iterator

import pytest
from xdist.scheduler import LoadScopeScheduling

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER += ("TORCHELASTIC_USE_AGENT_STORE",)
AT_START = {name: os.environ.get(name) for name in LAUNCHER}

# Files that share ranks which a conftest.py spawns, by a name for all of them: one worker of pytest-xdist runs them.
TOGETHER = {
    "tests/tasks ranks": ("test_disjoint.py", "test_dual_encoder.py", "test_mutual.py"),
    "tests/tasks token_ranks": ("logits/test_log_probs.py", "test_sft.py"),
    "tests/trainer ranks": ("test_engines.py", "test_handle.py"),
}
UNITS = {f"{unit.split()[0]}/{name}": unit for unit, names in TOGETHER.items() for name in names}
# What takes longest, so that no worker is left alone with it at the end.
LONG = (
    "tests/trainer/test_faults.py",
    "tests/trainer/test_routing.py",
    "tests/test_quality.py",
    "tests/tasks ranks",
    "tests/test_docs.py",
    "tests/trainer/saving/test_content.py",
    "tests/trainer/test_launch.py",
    "tests/trainer ranks",
)


@pytest.fixture(autouse=True)
def no_launcher_left() -> Iterator[None]:
    """Takes back what a trainer in this process set for its only rank, or later command lines would see a launcher."""
    yield
    for name, value in AT_START.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def no_plugin_left() -> None:
    """Forgets the DeepSpeed plugin of a trainer in another file, which TRL and transformers would ask about."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def unit_of(nodeid: str) -> str:
    """Returns the file of a test, or the name of those that share ranks with it."""
    file = nodeid.partition("::")[0]
    return UNITS.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {unit: place for place, unit in enumerate(LONG)}
    items.sort(key=lambda item: places.get(unit_of(item.nodeid), len(LONG)))


class ByUnit(LoadScopeScheduling):
    """Gives a worker whole files, or all of those that share ranks, so that their fixtures are made once."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns 2 for the suite as CI runs it, else 0: what is named, slow or on a GPU runs in this process."""
    is_suite = config.args == config.getini("testpaths") and "not slow" in config.option.markexpr
    return 2 if is_suite else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByUnit:
    config.option.loadscopereorder = False  # or those of many tests would begin: `LONG` do
    return ByUnit(config, log)
