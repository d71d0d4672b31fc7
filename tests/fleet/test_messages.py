"""Messages between processes: a cfg that would not arrive as it was sent is refused."""

from __future__ import annotations

import pytest
from fakes import Blocks, Doubling, call_of

from ejkernel.ops.core.errors import AgreementError
from ejkernel.ops.core.request import ask
from ejkernel.ops.fleet.manifest import manifest_of
from ejkernel.ops.fleet.messages import Verdict


class Loose(Doubling):
    """A kernel whose cfgs are dicts, so that nothing says what their values are."""

    op_id = "messages.loose"

    def heuristic_cfg(self, inv):
        return {"blocks": 1}


def request_of(kernel):
    return ask(call_of(kernel), kernel, "forward")


def verdict(request, cfg):
    return Verdict(0, "autotune", cfg, "forward", manifest_of(request), measured=True)


CHANGED = {
    "a tuple": ({"blocks": (1, 2)}, r"JSON makes \{'blocks': \[1, 2\]\} of it"),
    "a tuple inside": ({"blocks": [(1, 2)]}, "JSON makes"),
    "an object": ({"blocks": Blocks(2)}, r"JSON makes \{'blocks': \{'size': 2\}\} of it"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_cfg_that_json_changes_is_refused(case):
    """The others would run with another cfg than the process that measured it; the error says what to do."""
    cfg, why = CHANGED[case]
    request = request_of(Loose())
    with pytest.raises(AgreementError, match=rf"cannot be sent to the other processes: {why}.*cfg_type"):
        verdict(request, cfg).dumps(request)


@pytest.mark.parametrize(
    ("kernel", "cfg"), [(Loose(), {"blocks": [1, 2], "way": None}), (Doubling(), Blocks(4))], ids=["plain", "rebuilt"]
)
def test_a_cfg_that_arrives_as_it_was_is_sent(kernel, cfg):
    """Rebuilt on the other side as the kernel's own type."""
    request = request_of(kernel)
    assert Verdict.loads(verdict(request, cfg).dumps(request)).rebuilt(request).cfg == cfg
