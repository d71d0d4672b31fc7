"""Signatures of entries: a secret key of the team, or a command of the user's that signs and verifies. No JAX here."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from ...core.errors import SettingError, StoreError

# Shorter keys can be guessed.
_LEAST_BYTES = 16
# A key file is a line or two; what is larger is another file.
_LARGEST_KEY_FILE = 1 << 16
# A command that hangs must not hang the program.
_COMMAND_SECONDS = 10.0


class Signer(Protocol):
    """Makes signatures, and checks those of others that have the same secret."""

    def sign(self, content: bytes) -> str:
        """The signature of a text, as one short word."""

    def verify(self, content: bytes, signature: str) -> bool:
        """Was this signature made with the secret, for this very text?"""


@final
@dataclass(frozen=True)
class HmacKeys:
    """HMAC-SHA256 with a shared secret; the first key signs, all of them verify, so that a key can be replaced."""

    keys: tuple[bytes, ...] = field(repr=False)

    def sign(self, content: bytes) -> str:
        """The signature of a text."""
        return _hmac(self.keys[0], content)

    def verify(self, content: bytes, signature: str) -> bool:
        """Is it the signature by any of the keys?"""
        given = signature.encode("utf-8", "backslashreplace")
        return any(hmac.compare_digest(_hmac(key, content).encode(), given) for key in self.keys)


def _hmac(key: bytes, content: bytes) -> str:
    return "hmac-sha256:" + hmac.new(key, content, hashlib.sha256).hexdigest()


@final
@dataclass(frozen=True)
class SigningCommand:
    """A command of the user's: `COMMAND sign` and `COMMAND verify SIGNATURE`, with the text on standard input.

    `sign` prints the signature; `verify` ends with status 0 where it is right.
    """

    words: tuple[str, ...]

    def sign(self, content: bytes) -> str:
        """The signature that the command prints."""
        done = self._run("sign", content=content)
        if done.returncode != 0 or not done.stdout.strip():
            said = done.stderr.decode("utf-8", "replace").strip()[:200]
            raise StoreError(f"`{self.words[0]} sign` ended with status {done.returncode} and no signature: {said}")
        return "command:" + base64.b64encode(done.stdout.strip()).decode()

    def verify(self, content: bytes, signature: str) -> bool:
        """Does the command call it right?"""
        if not signature.startswith("command:"):
            return False
        try:
            # As text, so that a hostile signature is one argument and nothing else.
            word = base64.b64decode(signature.removeprefix("command:"), validate=True).decode("ascii")
        except (binascii.Error, ValueError):
            return False
        # It must not be read as an option, nor end early.
        if not word.isprintable() or word.startswith("-"):
            return False
        return self._run("verify", word, content=content).returncode == 0

    def _run(self, *more: str, content: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [*self.words, *more]
        try:
            return subprocess.run(command, input=content, capture_output=True, timeout=_COMMAND_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StoreError(f"the signing command {self.words[0]} cannot be run: {error}") from error


def signer_of(text: str | None) -> Signer | None:
    """The signer of a setting: `file:PATH`, `command:COMMAND`, or the secret itself; None where nothing is given."""
    if not text or not text.strip():
        return None
    text = text.strip()
    if text.startswith("command:"):
        words = tuple(shlex.split(text.removeprefix("command:")))
        if not words:
            raise SettingError("a remote key of command: names no command; use command:/path/to/tool")
        return SigningCommand(words)
    if text.startswith("file:"):
        return HmacKeys(_keys_in(os.path.expanduser(text.removeprefix("file:"))))
    if os.sep in text and os.path.exists(os.path.expanduser(text)):
        raise SettingError(f"the remote key {text} is a path; use file:{text} for the keys in that file")
    return HmacKeys((_checked(text.encode(), "the remote key"),))


def _keys_in(path: str) -> tuple[bytes, ...]:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_KEY_FILE + 1)
    except OSError as error:
        raise SettingError(
            f"the remote key file {path} cannot be read ({error.strerror}); give file:PATH of a text file with the key"
        ) from error
    lines = [line.strip() for line in data.splitlines() if line.strip() and not line.lstrip().startswith(b"#")]
    if not lines or len(data) > _LARGEST_KEY_FILE:
        raise SettingError(f"the remote key file {path} holds no key; write one a line, the newest first")
    return tuple(_checked(line, f"a key in {path}") for line in lines)


def _checked(key: bytes, what: str) -> bytes:
    if len(key) < _LEAST_BYTES:
        raise SettingError(
            f"{what} has {len(key)} bytes, and one of fewer than {_LEAST_BYTES} can be guessed; "
            "make one with `openssl rand -hex 32`"
        )
    return key


def signed(name: str, raw: Mapping[str, Any], signer: Signer | None) -> dict[str, Any]:
    """An entry with its signature over key and content; without a signer as it is."""
    plain = {field: value for field, value in raw.items() if field not in _AROUND}
    return plain if signer is None else {**plain, "signature": signer.sign(_text(name, plain))}


def is_signed(name: str, raw: Mapping[str, Any], signer: Signer | None) -> bool:
    """Was this very entry, under this very key, signed with the secret?"""
    signature = raw.get("signature")
    return signer is not None and isinstance(signature, str) and signer.verify(_text(name, raw), signature)


# What is around the content: the checksum covers the signature, and a fold by another user adds its owner.
_AROUND = frozenset({"signature", "sha256", "owner"})


def _text(name: str, raw: Mapping[str, Any]) -> bytes:
    content = {field: value for field, value in raw.items() if field not in _AROUND}
    return json.dumps(["ejkernel entry", name, content], sort_keys=True).encode()
