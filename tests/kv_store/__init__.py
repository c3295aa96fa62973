import pytest

pytest.register_assert_rewrite("tests.kv_store.conformance")
