"""API keys: a file of names and digests. No key is stored, and none is ever shown again."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from rooftile.errors import InvalidInput

PREFIX = "rt-"
SHORTEST = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Keys:
    """The keys that open the server, by name.

    Args:
        digests: the SHA-256 of each key in hexadecimal, by the key's name; none means that everybody is let in.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = dict(digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str | None) -> str | None:
        """Returns the name of the key in an Authorization header; None if it holds no key of ours, "" if no key is needed.

        The digest is compared with every key's in constant time, so the time tells nothing about any of them.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        # headers are read as latin-1, which keeps each byte that came
        given = sha256(key.strip().encode("latin-1", errors="replace")).hexdigest()
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest) and scheme.lower() == "bearer":
                found = name
        return found


def new_key(name: str) -> tuple[str, str]:
    """Returns a fresh key and its line for the file of keys.

    Raises:
        InvalidInput: the name is no short word.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"the key's name is {name[:80]!r}; must be 1 to 64 letters, digits, dots, hyphens and underscores")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f"{name}:{_digest(key)}"


def read_keys(file: Path | None, from_environment: str | None = None, given: Sequence[str] = ()) -> Keys:
    """Reads the file of --api-key-file, the key of ROOFTILE_API_KEY, whose name is "environment", and the keys of --api-key.

    The first key of --api-key has the name "command-1", the second "command-2".

    Raises:
        InvalidInput: the file cannot be read, holds no key, or has a line that is no name with a digest.
    """
    found = {}
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidInput(f"--api-key-file {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidInput(f"--api-key-file {file} cannot be read: it is no text in UTF-8") from None
        for number, line in enumerate(lines, 1):
            name, _, digest = line.strip().partition(":")
            if not name or name.startswith("#"):
                continue
            # the line is not repeated: it may be a key that was written here by mistake
            if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest) or name in found:
                raise InvalidInput(
                    f"{file}, line {number}: must be a name of its own and a SHA-256 in hexadecimal, name:digest; "
                    "`rooftile serve --new-key NAME` prints one"
                )
            found[name] = digest
        if not found:
            raise InvalidInput(f"--api-key-file {file} holds no key; `rooftile serve --new-key NAME` prints a line for it")
    others = {} if from_environment is None else {"environment": ("ROOFTILE_API_KEY", from_environment)}
    others |= {f"command-{number}": ("--api-key", key) for number, key in enumerate(given, 1)}
    for name, (source, key) in others.items():
        if len(key) < SHORTEST:
            raise InvalidInput(f"{source} is too short; must have at least {SHORTEST} characters")
        if name in found:
            raise InvalidInput(f"{file} has a key named {name}, which is the name of {source}'s; give it another")
        found[name] = _digest(key)
    return Keys(found)


def _digest(key: str) -> str:
    # the environment may hold bytes that are no text
    return sha256(key.encode(errors="surrogateescape")).hexdigest()
