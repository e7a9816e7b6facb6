"""Cuts messages into frames: four bytes with the length, most significant byte first, then MessagePack."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""The longest message that is written or read."""
HEAD = 4

_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The other process has sent something that is no message; the connection ends."""


def frame(message: object) -> bytes:
    """Returns a message as one frame."""
    body = _encoder.encode(message)
    if len(body) > MOST_BYTES:
        raise WireError(f"a message has {len(body):,} bytes; may have at most {MOST_BYTES:,}")
    return len(body).to_bytes(HEAD, "big") + body


class FrameReader(Generic[T]):
    """Reads messages out of bytes that may be cut anywhere.

    Args:
        kind: the type of the messages, a `msgspec.Struct` or a union of tagged ones.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Takes more bytes; returns the messages that are complete now.

        Raises:
            WireError: a frame is too long, or holds no message of this kind.
        """
        self._buffer += data
        found, start = [], 0
        while len(self._buffer) - start >= HEAD:
            length = int.from_bytes(self._buffer[start : start + HEAD], "big")
            if length > MOST_BYTES:
                raise WireError(f"a frame says that it has {length:,} bytes; may have at most {MOST_BYTES:,}")
            end = start + HEAD + length
            if len(self._buffer) < end:
                break
            found.append(self._read(bytes(self._buffer[start + HEAD : end])))
            start = end
        del self._buffer[:start]
        return found

    def _read(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        # a deep message raises RecursionError, and one with half of a character UnicodeDecodeError
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"a frame of {len(body):,} bytes holds no message: {error}") from None
