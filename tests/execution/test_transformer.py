"""A whole training step: found and tuned by one call, then the same program under the result and under a store."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import forked_python
import numpy as np
import pytest
from transformer import LAYERS, Parts, example, make_selector, make_step, text_of

from ejkernel.ops import AutotuneOptions, AutotuningResult, PersistentCache, autotune, policy_override

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
QUIET = AutotuneOptions(progress=False)


def python(code, *argv):
    """What another process prints, on as many devices as there are here."""
    paths = os.pathsep.join(map(str, [REPOSITORY, HERE, HERE.parent]))
    env = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, argv)]
    done = forked_python.run(command, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The step tuned by one call in this process: result, selector, store and step."""
    store = PersistentCache("step", path=tmp_path_factory.mktemp("step") / "store.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path_factory.mktemp("locks")))
        selector = make_selector(store)
        step = make_step(selector)
        return autotune(step, *example(), tuning=QUIET), selector, store, step


def test_every_kernel_of_the_step_is_found_and_tuned(tuned):
    """Inside the scan and outside, with how often each runs."""
    result = tuned[0]
    assert sorted((e.op_id_v, e.count) for e in result.entries) == [
        ("step.attention@v0", LAYERS),
        ("step.matmul@v1", 1),
        ("step.matmul@v1", 2 * LAYERS),
        ("step.rms_norm@v0", LAYERS),
    ]
    assert all(e.source == "autotune" and len(e.record.trials) == 2 and not e.record.failures for e in result.entries)


def test_the_step_runs_and_nothing_is_tuned_any_more(tuned):
    """Its calls have the keys that were tuned, and it learns."""
    _, selector, _, step = tuned
    events = []
    selector.on_event = lambda event, **data: events.append(event)
    params, batch = example()
    first, params = step(params, batch)
    second, _ = step(params, batch)
    assert np.isfinite(first)
    assert second < first
    assert "cache_hit" in events
    assert "autotune_start" not in events


def test_the_result_and_a_saved_store_give_the_program_that_was_tuned(tuned, tmp_path):
    """Equal text: here, under the result, under its file, and in another process under a store that it was saved to."""
    result, _, _, step = tuned
    result.dump(tmp_path / "result.json")
    saved = PersistentCache("saved", path=tmp_path / "saved.json")
    assert result.save(saved) == 4
    saved.close()
    expected = text_of(step)

    untuned = make_selector()
    with policy_override(untuned, allow_autotune=False, allow_heuristics=False):
        for each in (result, AutotuningResult.load(tmp_path / "result.json")):
            with each:
                assert text_of(make_step(untuned)) == expected

    code = (
        "import sys\n"
        "from ejkernel.ops import AutotunePolicy, PersistentCache\n"
        "from transformer import make_selector, make_step, text_of\n"
        "store = PersistentCache('saved', path=sys.argv[1])\n"
        "never = AutotunePolicy(allow_autotune=False, allow_heuristics=False)\n"
        "print(text_of(make_step(make_selector(store, policy=never))))"
    )
    assert python(code, tmp_path / "saved.json") == [expected]


def test_the_text_tells_programs_apart(tuned):
    """The comparison above can fail: other cfgs give another text."""
    result, _, _, step = tuned
    expected = text_of(step)
    others = [replace(e, cfg=Parts(3 - e.cfg.count)) for e in result.entries]
    with AutotuningResult(result.device, others):
        assert text_of(make_step(make_selector())) != expected


RECORD = (
    "import os, sys\n"
    "os.environ['EJKERNEL_OPS_RECORD'] = sys.argv[1]\n"
    "from ejkernel.ops import AutotunePolicy\n"
    "from transformer import *\n"
    "make_step(make_selector(policy=AutotunePolicy(allow_autotune=False))).lower(*example())\n"
)
TUNE = (
    "import sys\n"
    "from ejkernel.ops import *\n"
    "from transformer import make_selector\n"
    "options = AutotuneOptions(selector=make_selector(), progress=False)\n"
    "result = autotune(sys.argv[1], tuning=options)\n"
    "result.dump(sys.argv[2])\n"
    "print(len(result.notes), *(e.source for e in result.entries))\n"
)


def test_the_step_is_recorded_in_one_process_and_tuned_in_another(tuned, tmp_path):
    """The second one has nothing but the file, and finds the same keys; its result serves the step in a third."""
    python(RECORD, tmp_path / "calls.json")
    assert python(TUNE, tmp_path / "calls.json", tmp_path / "result.json") == ["0", *["autotune"] * 4]
    result = AutotuningResult.load(tmp_path / "result.json")
    assert result.by_key().keys() == tuned[0].by_key().keys()
    never = make_selector()
    with policy_override(never, allow_autotune=False, allow_heuristics=False), result:
        # Raises where a call has no cfg.
        make_step(never).lower(*example())
