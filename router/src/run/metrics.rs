//! What the router counts: requests by their end, what recovery did, tokens and bytes, and the two times that a
//! client feels, TTFT and ITL.

use crate::dispatch::{Note, Usage};
use crate::placement::Candidate;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tidemill_core::Role;

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct EndLabels {
    end: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct NoteLabels {
    event: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

/// Nodes that take work, by role: what an operator watches while nodes come and go.
#[derive(Default)]
pub(super) struct NodeCounts(Family<RoleLabels, Gauge>);

impl NodeCounts {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let counts = Self::default();
        let family = counts.0.clone();
        registry.register("tidemill_router_nodes", "Nodes that take work now", family);
        counts.set(&[]);
        counts
    }

    pub(super) fn set(&self, candidates: &[Candidate]) {
        for role in [Role::Prefill, Role::Decode] {
            let n_nodes = candidates.iter().filter(|node| node.role == role).count();
            let labels = RoleLabels { role: role.name() };
            let count = i64::try_from(n_nodes).unwrap_or(i64::MAX);
            self.0.get_or_create(&labels).set(count);
        }
    }
}

/// The router's metrics. Clones share them.
#[derive(Clone)]
pub(super) struct Metrics {
    requests: Family<EndLabels, Counter>,
    events: Family<NoteLabels, Counter>,
    open: Gauge,
    prompt_tokens: Counter,
    output_tokens: Counter,
    cached_tokens: Counter,
    prefill_computed_tokens: Counter,
    decode_computed_tokens: Counter,
    kv_moved: Counter,
    ttft: Histogram,
    itl: Histogram,
}

impl Metrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            events: Family::default(),
            open: Gauge::default(),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            prefill_computed_tokens: Counter::default(),
            decode_computed_tokens: Counter::default(),
            kv_moved: Counter::default(),
            ttft: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            itl: Histogram::new(exponential_buckets(0.000_5, 2.0, 16)),
        };
        for note in Note::ALL {
            drop(
                metrics
                    .events
                    .get_or_create(&NoteLabels { event: note.name() }),
            );
        }
        metrics.register(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let mut counter = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("tidemill_router_{name}"), help, counter.clone());
        };
        counter(
            "prompt_tokens",
            "Prompt tokens of ended requests",
            &self.prompt_tokens,
        );
        counter(
            "output_tokens",
            "Output tokens of ended requests",
            &self.output_tokens,
        );
        counter(
            "cached_tokens",
            "Context tokens from prefix caches",
            &self.cached_tokens,
        );
        counter(
            "prefill_computed_tokens",
            "Context tokens computed on prefill nodes",
            &self.prefill_computed_tokens,
        );
        counter(
            "decode_computed_tokens",
            "Context tokens computed on decode nodes",
            &self.decode_computed_tokens,
        );
        counter(
            "kv_moved_bytes",
            "KV bytes moved between nodes",
            &self.kv_moved,
        );
        let requests = self.requests.clone();
        registry.register(
            "tidemill_router_requests",
            "Ended requests by their end",
            requests,
        );
        let events = self.events.clone();
        registry.register(
            "tidemill_router_dispatch_events",
            "What recovery did",
            events,
        );
        registry.register(
            "tidemill_router_open_requests",
            "Requests in work",
            self.open.clone(),
        );
        let help = "From the permit to the first token";
        registry.register("tidemill_router_ttft_seconds", help, self.ttft.clone());
        let help = "Between two tokens of a stream";
        registry.register("tidemill_router_itl_seconds", help, self.itl.clone());
    }

    /// A request begins; the guard takes it out again, however it ends.
    pub(super) fn open(&self) -> OpenRequest {
        self.open.inc();
        OpenRequest(self.open.clone())
    }

    pub(super) fn ended(&self, end: &'static str) {
        self.requests.get_or_create(&EndLabels { end }).inc();
    }

    pub(super) fn noted(&self, note: Note) {
        self.events
            .get_or_create(&NoteLabels { event: note.name() })
            .inc();
    }

    pub(super) fn account(&self, usage: &Usage) {
        self.prompt_tokens.inc_by(u64::from(usage.n_prompt_tokens));
        self.output_tokens.inc_by(u64::from(usage.n_output_tokens));
        self.cached_tokens.inc_by(u64::from(usage.n_cached_tokens));
        self.prefill_computed_tokens
            .inc_by(u64::from(usage.n_prefill_computed_tokens));
        self.decode_computed_tokens
            .inc_by(u64::from(usage.n_decode_computed_tokens));
        self.kv_moved.inc_by(usage.bytes_moved);
    }

    pub(super) fn first_token(&self, after_us: u64) {
        self.ttft.observe(after_us as f64 / 1e6);
    }

    pub(super) fn next_token(&self, after_us: u64) {
        self.itl.observe(after_us as f64 / 1e6);
    }
}

/// One request in work.
pub(super) struct OpenRequest(Gauge);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::FailureCode;

    #[test]
    fn every_metric_is_encoded_under_the_routers_name() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        let open = metrics.open();
        metrics.ended("stop");
        metrics.noted(Note::TakeOver);
        metrics.first_token(2_000);
        metrics.account(&Usage {
            bytes_moved: 7,
            ..Usage::default()
        });
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "tidemill_router_requests_total{end=\"stop\"} 1",
            "tidemill_router_dispatch_events_total{event=\"take_over\"} 1",
            "tidemill_router_dispatch_events_total{event=\"split_exception\"} 0",
            "tidemill_router_kv_moved_bytes_total 7",
            "tidemill_router_open_requests 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        drop(open);
        assert_eq!(metrics.open.get(), 0);
    }

    #[test]
    fn b051_every_failure_is_counted_under_its_code() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        for code in [FailureCode::NumericFault, FailureCode::Internal] {
            metrics.ended(code.name());
        }
        metrics.ended(FailureCode::NumericFault.name());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "tidemill_router_requests_total{end=\"numeric_fault\"} 2",
            "tidemill_router_requests_total{end=\"internal\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
