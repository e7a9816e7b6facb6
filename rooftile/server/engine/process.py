"""The engine's process: `python -m rooftile.server.engine.process FD`, with its settings as JSON on stdin.

The socket FD is one end of a pair that the server made, so no other process can connect. When the other end closes, this process
ends at once, also in the middle of a step: no engine outlives its server and keeps a GPU. Signals of a terminal or of a service
manager are the server's to obey; this process obeys the server only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from rooftile.engine.loop.pauses import freeze_garbage
from rooftile.engine.ranks.lines import say_goodbye
from rooftile.engine.ranks.meeting import hosted
from rooftile.engine.ranks.parent_watch import exit_with
from rooftile.engine.ranks.place import placed
from rooftile.engine.settings.table import FLAGS, ranks_of
from rooftile.engine.start.replica import share_machine
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.words import rename
from rooftile.server.engine.link import SocketLink
from rooftile.server.engine.messages import FAILED, EmbeddingFacts, Failed, Reading, Ready
from rooftile.server.observe.log import log, start_log

if TYPE_CHECKING:
    from rooftile.engine.embedding.model import EmbeddingModel
    from rooftile.engine.llm import LLM


def ready_message(llm: LLM, model: str, folder: str | None) -> Ready:
    """Describes the engine to the server."""
    from rooftile.engine.start.checkpoint import RECOMMENDED

    if llm.embedding is not None and llm.embedding.is_alone:
        return embedding_ready(llm.embedding, llm.config.max_num_seqs, model, folder)
    engine, params = llm.engine, llm.get_default_sampling_params()
    return Ready(
        cache=str(llm.caches), folder=folder, max_len=engine.max_len, vocabulary=engine.runner.decoder.config.vocab_size,
        max_answers=engine.max_answers, blocks=engine.pool.total, block_size=engine.pool.size,
        defaults={name: getattr(params, name) for name in RECOMMENDED},
        has_template=llm.tokenizer is not None and llm.tokenizer.has_template,
    )  # fmt: skip


def embedding_ready(model: EmbeddingModel, most_texts: int, place: str, folder: str | None) -> Ready:
    """Describes a model that embeds to the server."""
    embedder = model.embedder
    facts = EmbeddingFacts(place, embedder.config.encoder is None, embedder.width, embedder.is_cross)
    return Ready(
        cache="nothing", folder=folder, max_len=model.reader.max_len, vocabulary=embedder.config.vocab_size,
        max_answers=most_texts, blocks=0, block_size=16, defaults={}, embedding=facts,
    )  # fmt: skip


def serve(link: SocketLink, settings: dict[str, Any]) -> None:
    """Reads the model, and answers requests for ever."""
    reported = -1

    def report_progress(share: float) -> None:
        nonlocal reported
        if int(share * 100) > reported:
            reported = int(share * 100)
            link.write(Reading(reported))

    # here and not above: it takes seconds, in which this process already looks whether its server is there
    from rooftile.engine.llm import LLM
    from rooftile.engine.loop.loop import Loop
    from rooftile.engine.start.checkpoint import find_folder
    from rooftile.models.checkpoints.weights import reporting_progress
    from rooftile.server.limits import COMPILING_S

    machine = settings.pop("machine", None)
    if machine is not None:
        share_machine(machine["replicas"], settings, machine["visible"])
    model = find_folder(settings.pop("model"), download=settings.get("download", False))
    # a cluster's scheduler that starts the other ranks gives a listener
    listener = settings.pop("listener", None)
    place = None if listener is None else hosted(socket.socket(fileno=listener), ranks_of(settings))
    with reporting_progress(report_progress), placed(place):
        llm = LLM(model, **settings)
    folder = None if llm.tokenizer is None else str(llm.config.tokenizer or model)
    freeze_garbage()
    link.write(ready_message(llm, str(model), folder))
    if llm.embedding is not None and llm.embedding.is_alone:
        # here and not above: it imports torch
        from rooftile.server.engine.embedding_loop import EmbeddingLoop

        EmbeddingLoop(llm.embedding.embedder, link, llm.config.max_num_seqs).run()
    Loop(llm.engine, link, compiling_s=COMPILING_S).run()


def main() -> None:
    """Runs until the server goes away or the engine fails."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.load(sys.stdin)
    start_log(as_json=settings.pop("json_log", False), queued=False)
    threading.Thread(target=exit_with, args=(connection, say_goodbye), daemon=True).start()
    link = SocketLink(connection)
    try:
        serve(link, settings)
    except (InvalidInput, Unsupported) as error:
        # its reader has typed flags
        link.write(Failed(rename(str(error), FLAGS), wrong=True))
    except Exception as error:
        log.exception("the engine has failed")
        link.write(Failed(f"{type(error).__name__}: {error}"))
    # threads of a device may be stuck, and must not keep this process
    os._exit(FAILED)


if __name__ == "__main__":
    main()
