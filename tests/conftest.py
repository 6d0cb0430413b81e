"""What all tests share: one thread, bounded Hypothesis, GPU tests only where there is a GPU."""

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # programs that tests start add their sums in the same order
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and programs started by tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "gluefl",
    max_examples=50,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gluefl")


def pytest_collection_finish() -> None:
    # What was imported for all tests stays: to visit it in every collection of garbage takes most of its time.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "slow" not in item.keywords)  # first, so that no worker waits for another at the end
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
