//! When a node tells its load: often enough for placement, seldom enough to cost nothing.
//!
//! A report is published at once when the last one is older than the shortest interval and something has
//! happened, and after the longest interval whatever happens, so that a silent node is a dead one. The same
//! counts are the node's gauges at the admin port.

use crate::health::Admin;
use prometheus_client::metrics::gauge::Gauge;
use std::time::Duration;
use tidemill_core::{LoadReport, Timestamp};
use tokio::sync::watch;

/// Reports follow each other no faster.
const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Nor slower.
const INTERVAL_MAX: Duration = Duration::from_millis(100);

/// The place where a node's loop puts its load reports.
pub struct LoadBoard {
    reports: watch::Sender<LoadReport>,
    published_at: Timestamp,
    gauges: Gauges,
}

/// What a report says, as metrics.
#[derive(Default)]
struct Gauges {
    waiting: Gauge,
    running: Gauge,
    queued: Gauge,
    blocks: Gauge,
    free: Gauge,
    leased: Gauge,
}

impl Gauges {
    fn register(report: &LoadReport, admin: &Admin) -> Self {
        let gauges = Self::default();
        let named = [
            ("sequences_waiting", "Sequences that wait", &gauges.waiting),
            (
                "sequences_running",
                "Sequences in the running batch",
                &gauges.running,
            ),
            (
                "queued_tokens",
                "Prompt tokens not yet computed",
                &gauges.queued,
            ),
            ("blocks", "KV blocks of the pool", &gauges.blocks),
            ("blocks_free", "KV blocks free or evictable", &gauges.free),
            (
                "blocks_leased",
                "KV blocks lent to importers",
                &gauges.leased,
            ),
        ];
        admin.register(|registry| {
            let label = ("node_id".into(), report.node_id.to_string().into());
            let registry = registry.sub_registry_with_label(label);
            for (name, help, gauge) in named {
                let name = format!("tidemill_{}_{name}", report.role.name());
                registry.register(name, help, gauge.clone());
            }
        });
        gauges.set(report);
        gauges
    }

    fn set(&self, report: &LoadReport) {
        self.waiting.set(i64::from(report.n_waiting));
        self.running.set(i64::from(report.n_running));
        self.queued
            .set(i64::try_from(report.queued_tokens).unwrap_or(i64::MAX));
        self.blocks.set(i64::from(report.n_blocks));
        self.free.set(i64::from(report.n_blocks_free));
        self.leased.set(i64::from(report.n_blocks_leased));
    }
}

impl LoadBoard {
    /// A board that shows `first`, here and at the admin port, and the receiver for `NodeService`.
    pub fn new(
        first: LoadReport,
        admin: &Admin,
        now: Timestamp,
    ) -> (watch::Receiver<LoadReport>, Self) {
        let gauges = Gauges::register(&first, admin);
        let (reports, receiver) = watch::channel(first);
        let board = Self {
            reports,
            published_at: now,
            gauges,
        };
        (receiver, board)
    }

    /// True when the loop, having just done something, should publish.
    pub fn is_due(&self, now: Timestamp) -> bool {
        Duration::from_micros(now.since_us(self.published_at)) >= INTERVAL_MIN
    }

    /// Shows a report.
    pub fn publish(&mut self, report: LoadReport, now: Timestamp) {
        self.published_at = now;
        self.gauges.set(&report);
        self.reports.send_replace(report);
    }

    /// How long the loop may wait: until `wakeup` or until the next report must be shown.
    pub fn wait_until(&self, wakeup: Option<Timestamp>, now: Timestamp) -> Duration {
        let longest = u64::try_from(INTERVAL_MAX.as_micros()).expect("a tenth of a second");
        let report_at = self.published_at.plus_us(longest);
        wakeup
            .map_or(report_at, |at| at.min(report_at))
            .left_from(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::{Incarnation, NodeId, Role};

    fn report(sequence_number: u64) -> LoadReport {
        LoadReport {
            node_id: NodeId::new("decode-0").expect("a valid name"),
            incarnation: Incarnation(1),
            role: Role::Decode,
            sequence_number,
            n_waiting: 0,
            n_running: 0,
            queued_tokens: 0,
            n_blocks: 1,
            n_blocks_free: 1,
            n_blocks_leased: 0,
            draining: false,
        }
    }

    #[test]
    fn reports_keep_their_distance_and_never_stay_away() {
        let start = Timestamp(1_000_000);
        let (seen, mut board) = LoadBoard::new(report(1), &Admin::default(), start);
        assert!(!board.is_due(start.plus_us(9_999)));
        assert!(board.is_due(start.plus_us(10_000)));
        assert_eq!(board.wait_until(None, start), Duration::from_millis(100));
        let early = Some(start.plus_us(2_000));
        assert_eq!(board.wait_until(early, start), Duration::from_millis(2));
        let late = Some(start.plus_us(3_000_000));
        assert_eq!(board.wait_until(late, start), Duration::from_millis(100));
        board.publish(report(2), start.plus_us(50_000));
        assert_eq!(seen.borrow().sequence_number, 2);
        assert!(!board.is_due(start.plus_us(50_001)));
    }

    #[test]
    fn the_admin_port_shows_the_same_counts() {
        let admin = Admin::default();
        let (_seen, mut board) = LoadBoard::new(report(1), &admin, Timestamp(0));
        let mut busy = report(2);
        busy.n_running = 3;
        board.publish(busy, Timestamp(1));
        let mut text = String::new();
        let encoded = admin
            .register(|registry| prometheus_client::encoding::text::encode(&mut text, registry));
        encoded.expect("encodes");
        let line = "tidemill_decode_sequences_running{node_id=\"decode-0\"} 3";
        assert!(text.contains(line), "{text}");
    }
}
