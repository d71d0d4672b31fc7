"""The executor that is there without being made."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
from fakes import Blocks, Doubling, TableTuner

from ejkernel.ops import OperationStores, default_executor, default_selector
from ejkernel.ops.execution.default import forget_default


class Tripling(Doubling):
    """Another operation, with the same cfg."""

    op_id = "tripling"
    cfg_type = Blocks

    def run(self, x, *, cfg):
        return x * 3.0


class Twice(Doubling):
    """The first operation, with its cfg type declared."""

    cfg_type = Blocks


def test_the_default_executor_is_one_per_process():
    """Ten threads that ask for it at once get the same."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(default_executor())) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(map(id, found))) == 1
    assert found[0].chooser is default_selector()


def test_each_operation_is_kept_in_a_file_of_its_own(tmp_path):
    """What two kernels were tuned to is in two files of the cache folder, and the next process finds both."""
    default_selector().tuner = TableTuner()
    x = jnp.ones(4)
    assert np.array_equal(default_executor()(Twice(), x), 2 * x)
    assert np.array_equal(default_executor()(Tripling(), x), 3 * x)

    assert OperationStores().operations() == ["doubling", "tripling"]
    assert (tmp_path / "cache" / "tripling.json").exists()
    forget_default()
    told = []
    default_selector().on_event = lambda event, **data: told.append((event, data["op_id"], data["cfg"]))
    default_executor()(Twice(), x)
    default_executor()(Tripling(), x)
    assert told == [("cache_hit", "doubling@v3", Blocks(2)), ("cache_hit", "tripling@v3", Blocks(2))]


def test_the_keys_of_a_folder_are_those_of_all_its_operations(tmp_path):
    """`keys` sees what other processes put there too; an operation named like a file stays in the folder."""
    stores, other = OperationStores(tmp_path), OperationStores(tmp_path)
    stores.put("cpu|a", "matmul@v1", "01", {"block": 1})
    other.put("cpu|a", "odd.json@v1", "02", {"block": 2})

    assert stores.keys() == [("cpu|a", "matmul@v1", "01"), ("cpu|a", "odd.json@v1", "02")]
    assert {path.name for path in tmp_path.glob("*.json")} <= {"matmul.json", "odd.json.json"}
    assert stores.get("cpu|a", "odd.json@v1", "02") == {"block": 2}
