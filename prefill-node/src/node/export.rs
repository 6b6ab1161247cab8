//! Lending finished blocks: who may read what, and until when. The rules live in kv-transfer's `ExportTable`;
//! here they meet the block pool (a lease and every read are owners) and the streams of the importers.

use super::{Effect, Node};
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    CallId, Digest, Failure, FailureCode, Incarnation, ReadId, RequestId, Slice, Timestamp,
};
use tidemill_engine::block_pool::Owner;
use tidemill_kv_transfer::export::{Claim, ExportEvent, LeaseRef, ReadAsk};

impl Node {
    pub(super) fn claim(&mut self, call: CallId, claim: &Claim, to: Incarnation, now: Timestamp) {
        let answer = self
            .check_life(to)
            .and_then(|()| self.exports.claim(claim, now));
        match answer {
            Err(failure) => self.tell_importer(call, ExportEvent::Failed(failure)),
            Ok(events) => {
                if let Some(former) = self.claim_calls.insert(claim.request_id, call)
                    && former != call
                {
                    let failure =
                        Failure::new(FailureCode::Gone, "claimed again under a newer call");
                    self.tell_importer(former, ExportEvent::Failed(failure));
                }
                for event in events {
                    self.announce(claim.request_id, event);
                }
            }
        }
    }

    pub(super) fn renew(
        &mut self,
        call: CallId,
        importer: Incarnation,
        leases: &[LeaseRef],
        to: Incarnation,
        now: Timestamp,
    ) {
        let renewed = match self.check_life(to) {
            Ok(()) => self.exports.renew(importer, leases, now),
            // Every lease of a former life is gone.
            Err(_) => (leases.iter().map(|lease| lease.request_id).collect(), now),
        };
        let (gone, expires_at) = renewed;
        self.effects.push(Effect::Renewed {
            call,
            gone,
            expires_at,
        });
    }

    pub(super) fn release(&mut self, lease: LeaseRef, to: Incarnation) {
        if self.check_life(to).is_ok() && self.exports.release(&lease) {
            self.free_lease(lease.request_id);
        }
    }

    pub(super) fn rebind(
        &mut self,
        call: CallId,
        lease: LeaseRef,
        to: Incarnation,
        now: Timestamp,
    ) {
        let result = self
            .check_life(to)
            .and_then(|()| self.exports.rebind(&lease, now));
        if result.is_ok()
            && let Some(former) = self.claim_calls.remove(&lease.request_id)
        {
            let failure = Failure::new(FailureCode::Gone, "the lease went to another importer");
            self.tell_importer(former, ExportEvent::Failed(failure));
        }
        self.effects.push(Effect::Rebound { call, result });
    }

    pub(super) fn decide_read(&mut self, call: CallId, ask: &ReadAsk, now: Timestamp) {
        let read = self.new_read();
        let result = self.exports.read(ask, read, now);
        if let Ok(grant) = &result
            && !PlantedBug::ReadOwnsNothing.is_on()
        {
            for block in grant.distinct_blocks() {
                self.pool.share(block, Owner::Read(read));
            }
        }
        self.effects.push(Effect::ReadDecided { call, result });
    }

    pub(super) fn end_read(&mut self, read: ReadId) {
        if self.exports.end_read(read) {
            self.pool.release_all(Owner::Read(read));
        }
    }

    /// Sends newly final slices to be digested. Until the answer the job owns their blocks.
    pub(super) fn digest(&mut self, request_id: RequestId, places: Vec<SlicePlace>) {
        if places.is_empty() {
            return;
        }
        let job = self.new_read();
        for place in &places {
            self.pool.share(place.block, Owner::Read(job));
        }
        self.digest_jobs.insert(job, request_id);
        self.effects.push(Effect::Digest { job, places });
    }

    pub(super) fn take_digests(&mut self, job: ReadId, digests: &[(Slice, Digest)]) {
        let Some(request_id) = self.digest_jobs.remove(&job) else {
            return;
        };
        self.pool.release_all(Owner::Read(job));
        // The export may have ended meanwhile; then nobody wants to know.
        for event in self.exports.digested(request_id, digests) {
            self.announce(request_id, event);
        }
    }

    pub(super) fn expire_leases(&mut self, now: Timestamp) {
        if PlantedBug::LeaseForEver.is_on() {
            return;
        }
        for request_id in self.exports.expire(now) {
            self.close_claim(request_id, "the lease ended unrenewed");
            self.free_lease(request_id);
        }
    }

    /// Ends a lease from our side; a no-op when there is none.
    pub(super) fn end_lease(&mut self, request_id: RequestId, why: &str) {
        if self.exports.cancel(request_id) {
            self.close_claim(request_id, why);
            self.free_lease(request_id);
        }
    }

    fn free_lease(&mut self, request_id: RequestId) {
        self.claim_calls.remove(&request_id);
        self.pool.release_all(Owner::Lease(request_id));
    }

    fn close_claim(&mut self, request_id: RequestId, why: &str) {
        if let Some(call) = self.claim_calls.remove(&request_id) {
            let failure = Failure::new(FailureCode::Gone, why);
            self.tell_importer(call, ExportEvent::Failed(failure));
        }
    }

    /// Passes an announcement to whoever has claimed the lease.
    pub(super) fn announce(&mut self, request_id: RequestId, event: ExportEvent) {
        if let Some(&call) = self.claim_calls.get(&request_id) {
            self.tell_importer(call, event);
        }
    }

    fn tell_importer(&mut self, call: CallId, event: ExportEvent) {
        self.effects.push(Effect::Export { call, event });
    }

    fn new_read(&mut self) -> ReadId {
        self.next_read += 1;
        ReadId(self.next_read)
    }
}
