//! When a node tells its load: often enough for placement, seldom enough to cost nothing.
//!
//! A report is published at once when the last one is older than the shortest interval and something has
//! happened, and after the longest interval whatever happens, so that a silent node is a dead one. The same
//! counts are the node's gauges at the admin port.

use crate::health::Admin;
use prometheus_client::metrics::counter::Counter;
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
struct Gauges {
    waiting: Gauge,
    running: Gauge,
    queued: Gauge,
    blocks: Gauge,
    free: Gauge,
    leased: Gauge,
    after_cancel: Counter,
}

impl Gauges {
    fn register(report: &LoadReport, admin: &Admin) -> Self {
        let full_name = |name| format!("tidemill_{}_{name}", report.role.name());
        let gauge = |name, help| admin.node_gauge(&full_name(name), help, &report.node_id);
        let counter = |name, help| admin.node_counter(&full_name(name), help, &report.node_id);
        let gauges = Self {
            waiting: gauge("sequences_waiting", "Sequences that wait"),
            running: gauge("sequences_running", "Sequences in the running batch"),
            queued: gauge("queued_tokens", "Prompt tokens not yet computed"),
            blocks: gauge("blocks", "KV blocks of the pool"),
            free: gauge("blocks_free", "KV blocks free or evictable"),
            leased: gauge("blocks_leased", "KV blocks lent to importers"),
            after_cancel: counter(
                "tokens_after_cancel",
                "Tokens computed for requests that had been given up",
            ),
        };
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

    /// Shows how many tokens this node has computed for nobody, in all.
    pub fn show_tokens_after_cancel(&self, n_tokens: u64) {
        let shown = self.gauges.after_cancel.get();
        self.gauges
            .after_cancel
            .inc_by(n_tokens.saturating_sub(shown));
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
    use std::collections::{BTreeMap, BTreeSet};
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

    fn scraped(admin: &Admin) -> String {
        let mut text = String::new();
        let encoded = admin
            .register(|registry| prometheus_client::encoding::text::encode(&mut text, registry));
        encoded.expect("encodes");
        text
    }

    #[test]
    fn the_admin_port_shows_the_same_counts() {
        let admin = Admin::default();
        let (_seen, mut board) = LoadBoard::new(report(1), &admin, Timestamp(0));
        let mut busy = report(2);
        busy.n_running = 3;
        board.publish(busy, Timestamp(1));
        board.show_tokens_after_cancel(5);
        board.show_tokens_after_cancel(7);
        let text = scraped(&admin);
        for line in [
            "tidemill_decode_sequences_running{node_id=\"decode-0\"} 3",
            "tidemill_decode_tokens_after_cancel_total{node_id=\"decode-0\"} 7",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    /// Reads the text as a scraper does: each family once, its samples below it, no series twice.
    fn series(text: &str) -> BTreeMap<String, f64> {
        let (mut told, mut series) = (BTreeSet::new(), BTreeMap::new());
        let mut family = "";
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.splitn(3, ' ');
                let (kind, name) = (words.next().expect("a kind"), words.next().expect("a name"));
                assert!(["HELP", "TYPE"].contains(&kind), "{line}");
                assert!(told.insert((kind, name)), "told twice: {line}\n{text}");
                family = name;
                continue;
            }
            let (sample, value) = line.rsplit_once(' ').expect("a sample");
            let name = sample.split('{').next().expect("a name");
            assert!(
                [name, name.trim_end_matches("_total")].contains(&family),
                "{line}"
            );
            let value = value.parse().expect("a number");
            assert!(
                series.insert(sample.to_owned(), value).is_none(),
                "twice: {line}"
            );
        }
        series
    }

    #[test]
    fn nodes_of_one_process_share_their_families() {
        let admin = Admin::default();
        let board = |role: Role, node_idx: u32| {
            let mut first = report(1);
            first.role = role;
            first.node_id = NodeId::new(format!("{}-{node_idx}", role.name())).expect("valid");
            first.n_blocks = 10 + node_idx;
            LoadBoard::new(first, &admin.part(), Timestamp(0)).1
        };
        let roles = [Role::Prefill, Role::Decode];
        let _boards: Vec<LoadBoard> = roles
            .into_iter()
            .flat_map(|role| [board(role, 0), board(role, 1)])
            .collect();
        let series = series(&scraped(&admin));
        assert_eq!(series.len(), 4 * 7, "{series:?}");
        for role in ["prefill", "decode"] {
            for (node_idx, n_blocks) in [(0, 10.0), (1, 11.0)] {
                let name = format!("tidemill_{role}_blocks{{node_id=\"{role}-{node_idx}\"}}");
                assert_eq!(series[&name], n_blocks);
            }
        }
    }
}
