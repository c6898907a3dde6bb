"""What all tests share: the environment, the fork server's early start, toy shards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.runs import Toy

# Before torch is imported, here and in every process that a test starts: no GPU, no network, and one thread each, since
# tests and their ranks share few cores.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
for launcher_variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(launcher_variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server's imports take many seconds; they can pass while other tests run."""
    modules = {getattr(item, "module", None) for item in session.items}
    if not session.config.option.collectonly and any(hasattr(module, "run_ranks") for module in modules):
        from tests.helpers.ranks import start_server

        start_server()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """512 drawn scenes in 4 shards and 64 held out, with their token table."""
    from tests.helpers.runs import make_toy_shards

    return make_toy_shards(tmp_path_factory.mktemp("toy"))
