//! Keeping leases alive: one message for all leases at one exporter, also for imports that still wait for blocks.
//! The answer tells two things: which leases are no more, and that the exporter lives.

use super::{Effect, Exporter, Node};
use std::collections::BTreeMap;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::{RequestId, Timestamp};
use tidemill_kv_transfer::export::LeaseRef;
use tidemill_kv_transfer::lease;

/// How often leases are renewed: two renewals may be lost.
const RENEWAL_US: u64 = LEASE_TTL_US / 3;
/// Most leases in one renewal.
const LEASES_PER_RENEWAL_MAX: usize = 4096;

impl Node {
    /// A lease has come in. One that was handed on may be near its end.
    pub(super) fn plan_renewal(&mut self, expires_at: Timestamp, now: Timestamp) {
        let aged_at = Timestamp(expires_at.0.saturating_sub(2 * RENEWAL_US));
        let renewal = aged_at.max(now).min(now.plus_us(RENEWAL_US));
        let planned = self.next_renewal.map_or(renewal, |at| at.min(renewal));
        self.next_renewal = Some(planned);
    }

    pub(super) fn renew_leases(&mut self, now: Timestamp) {
        if self.next_renewal.is_none_or(|at| now < at) {
            return;
        }
        let mut by_exporter: BTreeMap<&Exporter, Vec<LeaseRef>> = BTreeMap::new();
        for (exporter, lease) in self.requests.values().filter_map(|r| r.lender.as_ref()) {
            by_exporter.entry(exporter).or_default().push(*lease);
        }
        let is_lent = !by_exporter.is_empty();
        for (exporter, leases) in by_exporter {
            for leases in leases.chunks(LEASES_PER_RENEWAL_MAX) {
                self.effects.push(Effect::Renew {
                    exporter: exporter.clone(),
                    leases: leases.to_vec(),
                });
            }
        }
        self.next_renewal = is_lent.then(|| now.plus_us(RENEWAL_US));
    }

    pub(super) fn hear_renewal(&mut self, exporter: &Exporter, gone: &[RequestId], now: Timestamp) {
        for &request_id in gone {
            if !self.is_lent_by(request_id, exporter) {
                continue;
            }
            if self.imports.contains_key(&request_id) {
                self.fail_request(request_id, lease::gone(request_id));
            } else if let Some(request) = self.requests.get_mut(&request_id) {
                // Everything is here: nothing is left to be given back.
                request.lender = None;
            }
        }
        let importing: Vec<RequestId> = self.imports.keys().copied().collect();
        for request_id in importing {
            if self.is_lent_by(request_id, exporter)
                && let Some(import) = self.imports.get_mut(&request_id)
            {
                import.heard(now);
            }
        }
    }

    fn is_lent_by(&self, request_id: RequestId, exporter: &Exporter) -> bool {
        let lender = self
            .requests
            .get(&request_id)
            .and_then(|r| r.lender.as_ref());
        lender.is_some_and(|(of, _)| of == exporter)
    }
}
