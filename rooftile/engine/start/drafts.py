"""The parts of an engine that draft tokens: the runner of a draft model, and the speculator."""

from __future__ import annotations

from rooftile.engine.caches.cost import cost_of
from rooftile.engine.speculation.draft_model import DraftModel
from rooftile.engine.speculation.features import Features
from rooftile.engine.speculation.forecast import Forecast, rates_of
from rooftile.engine.speculation.head_runner import HeadRunner
from rooftile.engine.speculation.settings import Speculation
from rooftile.engine.speculation.speculator import Speculator
from rooftile.engine.start.blueprint import Blueprint
from rooftile.engine.steps.runner import Runner
from rooftile.kvcache import BlockPool
from rooftile.kvcache.caches import Caches
from rooftile.models import Decoder
from rooftile.models.drafts.head import DraftHead


def add_draft(
    runner: Runner, blueprint: Blueprint, decoder: Decoder | DraftHead, caches: Caches, answers: int, tokens: int
) -> None:  # fmt: skip
    """Adds a draft model, or a head, to the runner of a larger model.

    Args:
        runner: runs the larger model.
        blueprint: the draft model's.
        decoder: its weights.
        caches: what it keeps, in as many blocks as the larger model has.
        answers: the most answers that run at once.
        tokens: the most tokens of a draft.
    """
    runner.caches.draft = caches.pages
    graphs = not blueprint.config.enforce_eager
    if isinstance(decoder, DraftHead):
        runner.features = Features(decoder, runner.pages)
        runner.draft = HeadRunner(
            decoder, caches, blueprint.mixers, answers, blueprint.max_len, graphs=graphs, drafted=tokens, beside=runner
        )
        return
    # it reads one token or two of an answer, so a step has at most two rows of each
    runner.draft = Runner(
        decoder, caches, blueprint.mixers, answers, blueprint.max_len, graphs=graphs, drafted=1, beside=runner
    )  # fmt: skip


def speculator_of(blueprint: Blueprint, runner: Runner, pool: BlockPool) -> Speculator | None:
    """Returns what drafts tokens of answers; None if no drafts are asked for.

    Args:
        blueprint: the engine's.
        runner: runs its model.
        pool: the blocks.
    """
    asked, draft = Speculation.of(blueprint.config.speculative), blueprint.draft
    if asked is None:
        return None
    costs = [cost_of(each.decoder, each.caches) for each in (runner, runner.draft) if each is not None]
    forecast = Forecast(costs[0], rates_of(runner.device, runner.decoder.embedding.dtype), *costs[1:])
    drafter = None
    if draft is not None and runner.draft is not None:
        most, vocab = blueprint.config.max_batched_tokens, runner.decoder.config.vocab_size
        few = 2 if draft.head is None else asked.tokens + 1
        drafter = DraftModel(runner.draft, pool, max_len=draft.max_len, most_tokens=most, vocab=vocab, few=few)
    return Speculator(asked, forecast, runner.most_rows, drafter)
