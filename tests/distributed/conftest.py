import sys
from pathlib import Path

import cloudpickle
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the ranks inherit it, and find what tests import from here

from pool import Pool


@pytest.fixture(scope="session")
def _pool():
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(_pool, request):
    """Run a function of the test's module on W real gloo ranks."""
    cloudpickle.register_pickle_by_value(request.module)
    return _pool
