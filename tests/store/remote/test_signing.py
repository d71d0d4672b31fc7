"""Signatures: what is signed, and what a wrong key, a moved entry or a hostile signature comes to."""

from __future__ import annotations

import sys

import pytest
from fakes_remote import OTHER_SECRET, SECRET

from ejkernel.ops import OpsError
from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store.remote.signing import is_signed, signed, signer_of

NAME = "gpu|H200|matmul@v2|abc"
ENTRY = {"cfg": {"block": 64}, "environment": {"jaxlib": "0.12"}, "when": "2026-01-01", "seq": 3}

TOOL = """
import hashlib, sys
text = sys.stdin.buffer.read()
word = hashlib.sha256(b"tool" + text).hexdigest()
if sys.argv[1] == "sign":
    print(word)
else:
    sys.exit(sys.argv[2] != word)
"""


def test_an_entry_is_signed_with_its_key():
    """The same secret calls it right; content, and the key that it is kept under, cannot be changed."""
    signer = signer_of(SECRET)
    entry = signed(NAME, ENTRY, signer)
    assert is_signed(NAME, entry, signer)
    assert not is_signed(NAME.replace("abc", "abd"), entry, signer)
    for field, value in [("cfg", {"block": 128}), ("seq", 4), ("when", "2027-01-01"), ("environment", {})]:
        assert not is_signed(NAME, {**entry, field: value}, signer)
    assert not is_signed(NAME, {**entry, "more": 1}, signer)


def test_another_secret_or_none_calls_nothing_right():
    """A signature counts only for those that share the secret."""
    entry = signed(NAME, ENTRY, signer_of(SECRET))
    assert not is_signed(NAME, entry, signer_of(OTHER_SECRET))
    assert not is_signed(NAME, entry, None)
    assert not is_signed(NAME, signed(NAME, ENTRY, None), signer_of(SECRET))


@pytest.mark.parametrize("signature", ["", "hmac-sha256:", "\ud800", None, 7, ["x"], "command:eA=="], ids=ascii)
def test_a_hostile_signature_is_wrong_and_no_error(signature):
    """Whatever stands there."""
    assert not is_signed(NAME, {**ENTRY, "signature": signature}, signer_of(SECRET))


def test_a_file_holds_the_keys_and_the_first_signs(tmp_path):
    """So a key can be replaced: the old one verifies until its line is removed."""
    file = tmp_path / "keys"
    file.write_text(f"# new\n{OTHER_SECRET}\n\n{SECRET}\n")
    both = signer_of(f"file:{file}")
    assert is_signed(NAME, signed(NAME, ENTRY, signer_of(SECRET)), both)
    assert is_signed(NAME, signed(NAME, ENTRY, both), signer_of(OTHER_SECRET))
    assert not is_signed(NAME, signed(NAME, ENTRY, both), signer_of(SECRET))


def test_a_command_signs_and_verifies(tmp_path):
    """`COMMAND sign` prints a signature, and `COMMAND verify SIGNATURE` ends with 0 where it is right."""
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL)
    signer = signer_of(f"command:{sys.executable} {tool}")
    entry = signed(NAME, ENTRY, signer)
    assert is_signed(NAME, entry, signer)
    assert not is_signed(NAME, {**entry, "seq": 9}, signer)
    assert not is_signed(NAME, {**entry, "signature": "command:LS1oZWxw"}, signer)
    assert not is_signed(NAME, {**entry, "signature": "command:not base64"}, signer)


def test_a_command_that_fails_says_so(tmp_path):
    """A status other than 0, or a command that is not there, is an error that names the command."""
    tool = tmp_path / "tool.py"
    tool.write_text("import sys; sys.exit('no card in the reader')")
    with pytest.raises(StoreError, match="no card in the reader"):
        signed(NAME, ENTRY, signer_of(f"command:{sys.executable} {tool}"))
    with pytest.raises(StoreError, match="no-such-tool cannot be run"):
        signed(NAME, ENTRY, signer_of("command:no-such-tool"))


def test_no_key_is_no_signer():
    """Nothing, or blanks."""
    assert signer_of(None) is None
    assert signer_of("  ") is None


def test_a_key_that_cannot_serve_says_what_to_do(tmp_path):
    """Short, missing, empty, or a path without its prefix; the key itself is never in the message."""
    (tmp_path / "empty").write_text("\n# nothing\n")
    for text, words in [
        ("tooshort", "openssl rand"),
        (f"file:{tmp_path}/missing", "cannot be read"),
        (f"file:{tmp_path}/empty", "holds no key"),
        ("command: ", "names no command"),
        (str(tmp_path / "empty"), "use file:"),
    ]:
        with pytest.raises(ValueError, match=words) as caught:
            signer_of(text)
        assert isinstance(caught.value, OpsError)
        assert "tooshort" not in str(caught.value)


def test_a_signer_does_not_print_its_key():
    """Neither in logs nor in tracebacks."""
    assert SECRET not in repr(signer_of(SECRET))
