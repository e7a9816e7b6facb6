"""Prometheus's series. The series of `LIKE_VLLM` are vLLM's, too, under the same names after the prefix.

Each has the label `model_name`, the name of the served model; with several engines they are sums, and those of a replica have
the label `replica`, too. No label has a value that a client chose, so clients cannot make
new series.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rooftile.engine.requests.stats import EngineStats
from rooftile.engine.speculation.settings import Speculation
from rooftile.server.observe.log import AccessRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ENDS = ("stop", "length", "abort", "error")
# series that count the same in vLLM, with the endings that Prometheus adds. The page docs/how-to/run-a-server.md lists them
LIKE_VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
    "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "request_success_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
)  # fmt: skip


class Metrics:
    """The server's series, in a registry of their own.

    Args:
        prefix: the first word of each name.
        model: the name of the served model.
        speculative: how the engine guesses tokens, a setting of `LLM`.
    """

    def __init__(self, prefix: str, model: str, speculative: object = None) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._model = model
        self._seen: dict[int, EngineStats] = {}
        self.running = self._gauge("num_requests_running", "answers that run")
        self.waiting = self._gauge("num_requests_waiting", "answers that wait")
        self.queued = self._gauge("queued_prompt_tokens", "prompt tokens that wait")
        self.usage = self._gauge("kv_cache_usage_perc", "share of the KV cache's blocks that answers hold, from 0 to 1")
        self.waste = self._gauge("kv_waste_ratio", "share of the slots in used blocks that hold no token")
        self.blocks = Gauge(f"{prefix}:kv_blocks", "blocks of the KV cache", [*_LABELS, "state"], registry=self._registry)
        self.lag = self._histogram("loop_lag_seconds", "how late the server's event loop was, twenty times per second", _SHORT)
        self.up = self._gauge("engine_up", "whether the engine answers requests")
        self.prompt = self._counter("prompt_tokens", "tokens of prompts")
        self.generated = self._counter("generation_tokens", "tokens of answers")
        self.preemptions = self._counter("num_preemptions", "requests that gave up their blocks")
        self.queries = self._counter("prefix_cache_queries", "prompt tokens that were looked up in the prefix cache")
        self.hits = self._counter("prefix_cache_hits", "prompt tokens that the prefix cache had")
        self.pages = self._counter("prefix_cache_pages", "prompt tokens whose blocks the prefix cache had")
        self.kept = self._gauge("kept_states", "states of recurrences that are kept for prefixes")
        self.drafts = self._counter("spec_decode_num_drafts", "drafts that were checked")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "tokens that were drafted")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "drafted tokens that were accepted")
        self.draft_tokens = self._gauge("draft_tokens", "tokens that a draft may have now; 0 where drafts do not pay")
        speculation = Speculation.of(speculative)
        if speculation is not None:
            said = "1 beside the method by which tokens are guessed"
            method = Gauge(f"{prefix}:draft_method", said, [*_LABELS, "method"], registry=self._registry)
            method.labels(model, speculation.method).set(1)
        self.replicas = [
            Gauge(f"{prefix}:replica_{name}", said, [*_LABELS, "replica"], registry=self._registry)
            for name, said in (
                ("up", "whether a replica answers requests"), ("requests", "prompts that a replica has"),
                ("starts", "how often a replica has been started again"), ("adapters", "adapters that a replica has"),
            )
        ]  # fmt: skip
        self.replica_hits = Counter(
            f"{prefix}:replica_prefix_cache_hits", "prompt tokens that a replica's prefix cache had", [*_LABELS, "replica"],
            registry=self._registry,
        )  # fmt: skip
        self.ended = Counter(
            f"{prefix}:request_success", "answers that ended", [*_LABELS, "finished_reason"], registry=self._registry
        )
        self.rejected = Counter(f"{prefix}:rejected", "requests that were refused", [*_LABELS, "reason"], registry=self._registry)
        self.first = self._histogram("time_to_first_token_seconds", "from a request to its first token", _LONG)
        self.gaps = self._histogram("inter_token_latency_seconds", "between neighbouring tokens of an answer", _SHORT)
        self.whole = self._histogram("e2e_request_latency_seconds", "from a request to its last token", _LONG)
        self.step = self._histogram("step_seconds", "one step of the engine", _SHORT)
        self.host = self._histogram("host_step_seconds", "the work of the engine's process beside a step", _SHORT)
        for end in _ENDS:
            self.ended.labels(model, end)

    def note_stats(self, number: int, stats: EngineStats) -> None:
        """Takes an engine's counts after a step. The series have the sums of all engines.

        Args:
            number: the replica, from 1 on.
            stats: its counts; fewer than before mean that it has been started again.
        """
        seen = self._seen.get(number, EngineStats())
        if stats.steps < seen.steps:
            seen = EngineStats()
        self._seen[number] = stats
        now = list(self._seen.values())
        self.running.set(sum([each.running for each in now]))
        used = sum([each.used_blocks for each in now])
        blocks = {
            "free": sum([each.free_blocks for each in now]), "used": used, "cached": sum([each.cached_blocks for each in now])
        }  # fmt: skip
        self.usage.set(used / max(1, sum(blocks.values())))
        self.waste.set(sum([each.waste * each.used_blocks for each in now]) / max(1, used))
        for name, count in blocks.items():
            self.blocks.labels(self._model, name).set(count)
        self.preemptions.inc(stats.preemptions - seen.preemptions)
        self.queries.inc(stats.prefix_queries - seen.prefix_queries)
        self.hits.inc(stats.prefix_hits - seen.prefix_hits)
        self.replica_hits.labels(self._model, str(number)).inc(stats.prefix_hits - seen.prefix_hits)
        self.pages.inc(stats.prefix_pages - seen.prefix_pages)
        self.kept.set(sum([each.kept_states for each in now]))
        self.drafts.inc(stats.drafts - seen.drafts)
        self.drafted.inc(stats.drafted - seen.drafted)
        self.accepted.inc(stats.accepted - seen.accepted)
        self.draft_tokens.set(max([each.draft_tokens for each in now]))
        if stats.steps > seen.steps:
            self.step.observe(stats.step_s)
            self.host.observe(stats.host_s)

    def note_replica(self, number: int, *, up: bool, requests: int, starts: int, adapters: int) -> None:
        """Notes how a replica stands."""
        for gauge, value in zip(self.replicas, (up, requests, starts, adapters), strict=True):
            gauge.labels(self._model, str(number)).set(value)

    def note_end(self, end: str) -> None:
        """Counts an answer that has ended."""
        self.ended.labels(self._model, end if end in _ENDS else "error").inc()

    def note_refusal(self, reason: str) -> None:
        """Counts a request that was refused."""
        self.rejected.labels(self._model, reason).inc()

    def note_request(self, access: AccessRecord) -> None:
        """Counts the prompt and the time of a request that the engine has taken."""
        self.prompt.inc(access.prompt_tokens)
        if access.first_token_s is not None:
            self.first.observe(access.first_token_s)
        self.whole.observe(access.seconds)

    def text(self) -> bytes:
        """Returns all series as Prometheus reads them."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, said: str) -> Gauge:
        return Gauge(f"{self._prefix}:{name}", said, _LABELS, registry=self._registry).labels(self._model)

    def _counter(self, name: str, said: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", said, _LABELS, registry=self._registry).labels(self._model)

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{self._prefix}:{name}", said, _LABELS, buckets=buckets, registry=self._registry).labels(self._model)
