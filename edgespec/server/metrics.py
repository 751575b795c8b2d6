"""What is counted, for Prometheus. One registry a server, so that two in one process do not mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgespec.results import GenerationResult
from edgespec.serving.records import ServingStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATHS = frozenset(
    {"/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/edgespec/timeline"}
)
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Counters and histograms of requests and batches; gauges are read from the engine when somebody looks.

    serving: the engine's `ServingStats`, or None. memory: bytes of the process. drafts: name -> state in words.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"edgespec_{name}", help, labels, registry=registry)

        self._http = counter("http_requests", "HTTP requests", ("method", "path", "status"))
        self._requests = counter("requests", "Answers by how they ended", ("outcome",))
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._reused = counter("prompt_tokens_reused", "Tokens of prompts whose keys and values were there already")
        self._written = counter("generated_tokens", "Tokens of answers")
        self._batches = counter("batches", "Forward passes of the target that served running answers")
        self._drafted = counter("drafted_tokens", "Tokens that drafts proposed")
        self._accepted = counter("accepted_tokens", "Proposed tokens that the target accepted")
        self._first = self._histogram("time_to_first_token_seconds", "From queued to the first token", _SECONDS)
        self._token = self._histogram("time_per_token_seconds", "Between tokens of one answer, mean", _TOKEN_SECONDS)
        self._gamma = Gauge("edgespec_gamma", "Mean gamma of the last batch", registry=registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"edgespec_{name}", help, buckets=buckets, registry=self.registry)

    def watch(
        self,
        serving: Callable[[], ServingStats | None],
        memory: Callable[[], int],
        drafts: Callable[[], dict[str, str]],
        connections: Callable[[], int],
    ) -> None:
        """Read these at each look."""
        self.registry.register(_Now(serving, memory, drafts, connections))

    def http(self, method: str, path: str, status: int) -> None:
        """Unknown paths and methods are one: a client must not be able to fill memory with labels."""
        shown = path if path in PATHS else "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
        self._http.labels(method if method in METHODS else "other", shown, str(status or 499)).inc()

    def refused(self, status: int) -> None:
        self._requests.labels("queue_full" if status == 429 else "failed" if status >= 500 else "refused").inc()

    def finished(self, result: GenerationResult | None) -> None:
        """result: None if it failed, or ended before it said anything. A prompt counts when it was read to its end."""
        if result is None:
            self._requests.labels("failed").inc()
            return
        stats = result.stats
        self._requests.labels(result.finish_reason).inc()
        self._written.inc(len(result.token_ids))
        if stats.time_to_first_token_s > 0:
            self._prompt.inc(result.prompt_tokens)
            self._reused.inc(stats.reused_tokens)
            self._first.observe(stats.time_to_first_token_s)
        if len(result.token_ids) > 1 and stats.decode_seconds > 0:
            self._token.observe(stats.decode_seconds / (len(result.token_ids) - 1))

    def batch(self, gamma: float, drafted: int, accepted: int) -> None:
        self._batches.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        self._gamma.set(gamma)

    def text(self) -> bytes:
        return generate_latest(_Plain(self.registry))


class _Plain(Collector):
    """Without the time at which each counter was made, which nobody asks for.

    (The package's own switch for it is one for the whole process, which may have metrics that are not ours.)
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Now(Collector):
    """Gauges of this moment. What the engine does not know (yet) is left out."""

    def __init__(
        self,
        serving: Callable[[], ServingStats | None],
        memory: Callable[[], int],
        drafts: Callable[[], dict[str, str]],
        connections: Callable[[], int],
    ) -> None:
        self._serving, self._memory, self._drafts, self._connections = serving, memory, drafts, connections

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is asked of the engine while the server is put together

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("edgespec_memory_bytes", "Resident memory of the process", self._memory())
        yield GaugeMetricFamily("edgespec_connections", "Open connections", self._connections())
        resident = GaugeMetricFamily("edgespec_draft_resident", "1 for a draft that is in memory", labels=("draft",))
        for name, state in self._drafts().items():
            resident.add_metric((name,), float(state == "active"))
        yield resident
        serving = self._serving()
        if serving is None:
            return
        for name, help in (("running", "Answers that are written"), ("queued", "Requests that wait")):
            yield GaugeMetricFamily(f"edgespec_{name}", help, getattr(serving, name))
        yield GaugeMetricFamily("edgespec_drafts_lent", "1 while the drafts' memory serves as KV", float(serving.lent))
        if (pool := serving.pool) is not None:
            blocks = GaugeMetricFamily("edgespec_kv_blocks", "Blocks of keys and values", labels=("state",))
            for state in ("total", "free", "cached", "promised"):
                blocks.add_metric((state,), getattr(pool, state))
            yield blocks
