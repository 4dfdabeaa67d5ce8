from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# These run in vLLM's own environment; elsewhere there is nothing to test.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("vllm_harness")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import vllm_harness

    return vllm_harness.model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Callable[..., Any]:
    """Makes an engine; its arguments are the settings of `vllm_harness.settings_of`."""
    import vllm_harness

    return lambda **settings: vllm_harness.Engine(model, **settings)
