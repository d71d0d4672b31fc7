"""The tier `predicted`: records of other calls answer where nothing was measured, as a guess with a stated chance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from fakes import Listener, call_of, key_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    explain,
    policy_override,
)
from ejkernel.ops.core.description import described
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.errors import NoConfigError
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store.store import StoredEntry

QUIET = AutotunePolicy(allow_autotune=False, allow_predictions=True)


@dataclass(frozen=True)
class Block:
    """A config of one size."""

    size: int


class Sums(Kernel[Block, jax.Array]):
    """The best block depends on the length of the rows, and the heuristic knows nothing of that."""

    op_id = "test.sums"
    version = "1"
    cfg_type = Block

    def run(self, x, *, cfg):
        return x.sum(-1)

    def heuristic_cfg(self, inv):
        return Block(1)

    def candidate_cfgs(self, inv):
        return [Block(1 << power) for power in range(8)]

    def valid_cfg(self, inv, cfg):
        return cfg.size <= inv.args[0].shape[1] or "the block is longer than the rows"


def seconds_of(width, size):
    """Long rows want blocks of 16, short ones blocks of 2."""
    return 1e-5 * (1 + 0.3 * abs(math.log2(size) - (4 if width >= 100 else 1)))


def tuning(width, kernel=None, rows=64, times=seconds_of):
    """Key and entry of a tuning."""
    kernel = kernel or Sums()
    call = call_of(kernel, jnp.zeros((rows, width)))
    sizes = [size for size in (1 << power for power in range(8)) if size <= width]
    trials = tuple(Trial(Block(size), samples_s=(times(width, size),) * 3) for size in sizes)
    best = min(range(len(sizes)), key=lambda i: trials[i].seconds)
    record = Record(trials=trials, winner=best, heuristic=0, clock="counter")
    entry = StoredEntry(
        record.cfg, environment(jax.devices()[0]), "autotune", "forward", summary=record.summary(), call=described(call)
    )
    return Key(*key_of(kernel, call)), entry


WIDTHS = (16, 24, 32, 48, 64, 128, 192, 256, 384, 512, 768, 1024)


@pytest.fixture
def store(tmp_path):
    """A store of twelve tunings."""
    found = PersistentCache("sums", tmp_path / "sums.json", cfg_type=Block)
    for width in WIDTHS:
        found.keep(*tuning(width))
    return found


def selector_over(store, policy=QUIET, **more):
    return ConfigSelectorChain(ConfigCache(), policy, persistent=store, **more)


def ask(selector, width=320, rows=64, kernel=None):
    kernel = kernel or Sums()
    return selector.decide(call_of(kernel, jnp.zeros((rows, width))), kernel)


def why_not(decision):
    assert decision.tier == "heuristics"
    return dict(decision.misses)["predicted"]


def test_a_call_between_tuned_ones_gets_the_cfg_that_they_predict(store):
    """Rows of 320 were never tuned; the records on both sides say blocks of 16, the heuristic says 1."""
    decision = ask(selector_over(store))

    assert (decision.tier, decision.cfg) == ("predicted", Block(16))
    assert not decision.measured


def test_the_event_is_a_guess_with_its_source_and_confidence(store):
    """The event is `heuristics`, and says where the cfg is from, how sure that is, and why nothing was measured."""
    listener = Listener()
    ask(selector_over(store, on_event=listener))
    event, data = listener.last

    assert (event, data["source"]) == ("heuristics", "predicted")
    assert 0.8 <= data["confidence"] <= 1
    assert data["within"] >= 1
    assert data["reason"] == "off (allow_autotune=False)"


def test_a_prediction_is_kept_nowhere(store):
    """Neither memory nor the store has it afterwards."""
    selector = selector_over(store)
    before = store.keys()
    ask(selector)

    assert selector.cache.keys() == []
    assert store.keys() == before


def test_a_prediction_does_not_stop_a_later_tuning(store):
    """Once tuning is on, the call is tuned."""
    selector = selector_over(store)
    ask(selector)
    with policy_override(selector, allow_autotune=True):
        assert ask(selector).tier == "autotune"


def test_a_policy_without_predictions_says_so(store):
    """`allow_predictions=False` leaves the heuristics."""
    decision = ask(selector_over(store, replace(QUIET, allow_predictions=False)))

    assert why_not(decision) == "off (allow_predictions=False)"


def test_predictions_are_off_where_heuristics_are(store):
    """Without heuristics a guess is no answer."""
    with pytest.raises(NoConfigError):
        ask(selector_over(store, replace(QUIET, allow_heuristics=False)))


def test_explain_names_the_calls_that_a_prediction_comes_from(store):
    """The nearest ones, how far away they are, and how sure the answer is."""
    found = explain(Sums(), jnp.zeros((64, 320)), selector=selector_over(store))

    assert found.tier == "predicted"
    assert "within 5% of the best with a chance of" in found.answer
    assert "a guess, never measured" in found.answer
    assert "float32[64,256]" in found.origin["from call 1"] or "float32[64,384]" in found.origin["from call 1"]
    assert "away" in found.origin["from call 1"]


def test_a_store_with_one_record_has_no_answer(tmp_path):
    """One call says nothing about another."""
    store = PersistentCache("sums", tmp_path / "sums.json", cfg_type=Block)
    store.keep(*tuning(128))

    assert why_not(ask(selector_over(store))) == "there are records of 1 call alone; it takes 4"


def test_records_of_another_version_have_no_answer(store):
    """The reason names the version that there are records of."""

    class Newer(Sums):
        version = "2"

    reason = why_not(ask(selector_over(store), kernel=Newer()))
    assert reason == "the records are of test.sums@v1, and this is test.sums@v2"


def test_records_of_other_code_have_no_answer(tmp_path):
    """A kernel without a version of its own is known by its code: entries of other code are not learned from."""

    class Unversioned(Sums):
        version = "0"

    store = PersistentCache("sums", tmp_path / "sums.json", cfg_type=Block)
    for width in WIDTHS:
        key, entry = tuning(width, Unversioned())
        store.keep(key, replace(entry, environment={**entry.environment, "code": "of another day"}))

    reason = why_not(ask(selector_over(store), kernel=Unversioned()))
    assert reason == "12 records of test.sums@v0 are of other code of the kernel"


def test_equal_times_have_no_answer(tmp_path):
    """Where all candidates take the same time nothing can be learned."""
    store = PersistentCache("sums", tmp_path / "sums.json", cfg_type=Block)
    for width in WIDTHS:
        store.keep(*tuning(width, times=lambda width, size: 1e-5))

    assert why_not(ask(selector_over(store))) == "in all records all candidates take the same time"


def test_times_that_are_no_numbers_are_passed_over(store):
    """NaN, texts and zeros in a file count as not there."""
    for width in WIDTHS:
        key, entry = tuning(width)
        times = {**entry.summary["times"], "us": ["nan", 0, -1, True and "x", None, None, None, None]}
        store.keep(key, replace(entry, summary={**entry.summary, "times": times}))

    reason = why_not(ask(selector_over(store)))
    assert reason == "none of 12 entries of test.sums@v1 has the times of its candidates"


def test_a_call_a_thousand_times_larger_has_no_answer(store):
    """The reason names the size and how far it is."""
    reason = why_not(ask(selector_over(store), rows=1, width=1 << 20))
    assert "doublings beyond every record" in reason


def test_another_dtype_than_all_records_have_is_no_answer(store):
    """Nothing says how much the dtype matters."""
    kernel = Sums()
    decision = selector_over(store).decide(call_of(kernel, jnp.zeros((64, 320), jnp.float16)), kernel)

    assert "args[0] is float16" in why_not(decision)


def test_a_cfg_that_the_kernel_rules_out_is_never_predicted(store):
    """The records' best for short rows is no candidate where `valid_cfg` says no."""

    class Strict(Sums):
        def valid_cfg(self, inv, cfg):
            return cfg.size < 8 or "too large today"

    decision = ask(selector_over(store), kernel=Strict())
    assert decision.cfg.size < 8


def test_records_that_come_later_are_learned_from(tmp_path):
    """A selector without an answer has one once the store has grown."""
    store = PersistentCache("sums", tmp_path / "sums.json", cfg_type=Block)
    selector = selector_over(store)
    for width in WIDTHS[:3]:
        store.keep(*tuning(width))
    assert why_not(ask(selector)) == "there are records of 3 calls alone; it takes 4"
    for width in WIDTHS[3:]:
        store.keep(*tuning(width))

    assert ask(selector).tier == "predicted"


def test_tunings_of_this_process_are_learned_from_without_a_store():
    """Records that no store keeps are the selector's own."""
    selector = ConfigSelectorChain(ConfigCache(), QUIET)
    for width in WIDTHS:
        kernel = Sums()
        call = call_of(kernel, jnp.zeros((64, width)))
        _, entry = tuning(width)
        parts = {f"call.{name}": text for name, text in call.parts.items()}
        sizes = [1 << p for p in range(8) if 1 << p <= width]
        trials = tuple(Trial(Block(size), samples_s=(seconds_of(width, size),)) for size in sizes)
        best = sizes.index(entry.cfg.size)
        selector.adopt(call, kernel, Record(key=parts, trials=trials, winner=best, heuristic=0, clock="counter"))

    assert ask(selector).tier == "predicted"


def test_candidates_that_all_failed_are_not_predicted(store):
    """After a tuning in which nothing ran the heuristic serves."""

    class Broken(Sums):
        def run(self, x, *, cfg):
            raise ValueError("cannot run")

    with pytest.warns(UserWarning, match="left no candidate"):
        decision = ask(selector_over(store, AutotunePolicy(allow_predictions=True)), kernel=Broken())
    assert why_not(decision) == "all candidates failed"


def test_a_jitted_call_runs_with_the_prediction(store):
    """The executor runs what the tier answers."""
    executor = Executor(selector_over(store))

    assert executor.choose_config(Sums(), jnp.ones((64, 320))).size > 1
    assert jnp.allclose(executor(Sums(), jnp.ones((64, 320))), 320.0)
