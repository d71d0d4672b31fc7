"""A kill storm with maintenance running: processes are killed and stopped at any moment, and nothing is lost."""

from __future__ import annotations

import pytest
from fakes_store import run_script

pytestmark = pytest.mark.one_leg


@pytest.fixture
def raging(tmp_path, monkeypatch):
    """Runs a storm in an interpreter of its own, and says what it counted."""
    monkeypatch.setenv("CAMPAIGN_FOLDER", str(tmp_path))

    def run(deeds, seed, *, large):
        call = f"storm.storm({deeds}, {seed}, large={large})"
        found = run_script(f"import storm, json\nprint(json.dumps({call}))")
        print(f"\n{call}: {found}")
        return found

    return run


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_short_storm_loses_nothing(raging, large):
    """Three writers, two readers and two that fold, compact, verify and prune; a key that was seen never goes back."""
    found = raging(25, seed=1, large=large)

    assert (found["faults"], found["lost"], found["sound"]) == ([], 0, True)
    assert found["put"] > 0


@pytest.mark.slow(at_length=True)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_storm_of_500_kills_and_stops_loses_nothing(raging, large, seed):
    """The same at length."""
    found = raging(500, seed=seed, large=large)

    assert (found["faults"], found["lost"], found["sound"]) == ([], 0, True)
    assert found.get("not acknowledged", 0) <= found["put"] / 100
    assert min(found[name] for name in ("killed", "stopped", "continued", "fold", "compact", "verify", "prune")) > 0
