import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

_spec = importlib.util.spec_from_file_location("gradsieve_test_pool", Path(__file__).with_name("pool.py"))
assert _spec
pool = importlib.util.module_from_spec(_spec)
sys.modules["gradsieve_test_pool"] = pool
_spec.loader.exec_module(pool)


@pytest.fixture(scope="session")
def _pool():
    ranks = pool.Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(_pool, request):
    """Run a function of the test's module on W real gloo ranks."""
    cloudpickle.register_pickle_by_value(request.module)
    return _pool
