"""Outputs that hold only what is new: `AsyncEngine.generate(..., deltas=True)`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from rooftile.engine.requests.output import CompletionOutput, RequestOutput
from rooftile.engine.text.growing import TextSnapshot


@dataclass(slots=True)
class _Seen:
    """The part of one answer that its reader has."""

    tokens: int = 0
    text: TextSnapshot | None = None
    ended: bool = False


async def growth_of(outputs: AsyncGenerator[RequestOutput, None], *, at_end: bool) -> AsyncGenerator[RequestOutput, None]:
    """Yields the growth of answers from outputs that hold everything so far.

    Args:
        outputs: the outputs of one request.
        at_end: whether growing answers may still change, as the answers of a search do; then only the last output is yielded.
    """
    seen: dict[int, _Seen] = {}
    # whoever closes this iterator aborts the request
    async with aclosing(outputs):
        async for output in outputs:
            if at_end and not output.finished:
                continue
            grown = [each for one in output.outputs if (each := _growth(one, seen.setdefault(one.index, _Seen()))) is not None]
            if grown or output.finished:
                yield replace(output, outputs=grown)


def _growth(output: CompletionOutput, seen: _Seen) -> CompletionOutput | None:
    """Returns what is new of an answer, and notes that it was seen; None if nothing is."""
    snapshot, ends = output._snapshot, output.finish_reason is not None
    if seen.ended or (snapshot.stays == seen.tokens and not ends):
        return None
    first = snapshot.first + seen.tokens
    logprobs = None if snapshot.logprobs is None else snapshot.logprobs[seen.tokens : snapshot.stays]
    found = CompletionOutput(
        index=output.index,
        text="" if snapshot.text is None else snapshot.text.after(seen.text),
        token_ids=snapshot.ids[first : snapshot.first + snapshot.stays],
        cumulative_logprob=output.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        score=output.score,
    )
    seen.tokens, seen.text, seen.ended = snapshot.stays, snapshot.text, ends
    return found
