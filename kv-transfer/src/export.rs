//! Everything that one node lends: which slices are final, who may read them, and until when.
//!
//! An export opens when the first chunk of its prompt is scheduled and follows the computation: a layer group
//! that is final up to a position makes slices final, a digest makes a final slice announced, and only what is
//! announced may be read. Its lease begins to run out when the prompt is complete; before, the sequence that
//! computes owns the blocks. A granted read outlives its lease: the caller keeps the blocks until `end_read`.

mod messages;
#[cfg(test)]
mod tests;

use crate::lease::{Lease, gone};
use std::collections::{BTreeMap, BTreeSet};
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{
    BlockIdx, Capability, Digest, Failure, FailureCode, Incarnation, KvLayout, LayerGroupIdx,
    ReadId, RequestId, SampledToken, Slice, Timestamp,
};

pub use self::messages::{
    Claim, Complete, ExportEvent, Opened, ReadAsk, ReadGrant, digest_of_digests,
};
pub use crate::lease::LeaseRef;

/// Most slices in one read: bounds the message and how long a read holds its blocks.
pub const READ_SLICES_MAX: usize = 1024;
/// Most reads of one lease at a time.
pub const READS_PER_LEASE_MAX: u32 = 64;
/// Most slices in one announcement, so that no message grows with the prompt.
const ANNOUNCED_SLICES_MAX: usize = 8192;

/// One request's KV on loan.
struct Export {
    lease: Lease,
    n_tokens: u32,
    /// Filled while chunks are scheduled; in the end one for each block of `n_tokens`.
    blocks: Vec<BlockIdx>,
    /// For each layer group: blocks that are final in it, from the first on.
    n_blocks_final: Vec<u32>,
    /// By (ordinal, group); set means announced.
    digests: Vec<Option<Digest>>,
    n_announced: usize,
    /// Set when the computation is over; from then on the lease runs out.
    first_token: Option<SampledToken>,
    n_reads: u32,
}

impl Export {
    fn is_live(&self, now: Timestamp) -> bool {
        self.first_token.is_none() || now < self.lease.expires_at()
    }

    fn complete(&self) -> Option<Complete> {
        let first_token = self.first_token.clone()?;
        if self.n_announced < self.digests.len() {
            return None;
        }
        Some(Complete {
            n_tokens: self.n_tokens,
            digest: digest_of_digests(self.digests.iter().flatten().copied()),
            first_token,
        })
    }
}

/// All exports of a node.
pub struct ExportTable {
    layout: KvLayout,
    n_groups: u32,
    fingerprint: [u8; 16],
    exports: BTreeMap<RequestId, Export>,
    /// Reads in flight, also those whose lease has ended.
    reads: BTreeMap<ReadId, RequestId>,
}

impl ExportTable {
    /// An empty table of a pool with this layout.
    pub fn new(layout: KvLayout) -> Self {
        Self {
            n_groups: layout.n_groups(),
            fingerprint: layout.fingerprint(),
            layout,
            exports: BTreeMap::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Opens an export of `n_tokens` positions, at least one.
    ///
    /// # Panics
    /// When the request is exported already: callers check with `contains`.
    pub fn open(
        &mut self,
        request_id: RequestId,
        capability: Capability,
        n_tokens: u32,
        now: Timestamp,
    ) -> Opened {
        let lease = Lease::new(capability, now);
        let opened = Opened {
            epoch: lease.epoch(),
            expires_at: lease.expires_at(),
        };
        let n_slices = self.layout.n_blocks_for(n_tokens) as usize * self.n_groups as usize;
        let former = self.exports.insert(
            request_id,
            Export {
                lease,
                n_tokens,
                blocks: Vec::new(),
                n_blocks_final: vec![0; self.n_groups as usize],
                digests: vec![None; n_slices],
                n_announced: 0,
                first_token: None,
                n_reads: 0,
            },
        );
        assert!(former.is_none(), "request {request_id} is exported twice");
        opened
    }

    /// Takes over the block table of the sequence that computes, as far as it has got. A no-op when the export has
    /// ended meanwhile.
    pub fn set_blocks(&mut self, request_id: RequestId, blocks: &[BlockIdx]) {
        if let Some(export) = self.exports.get_mut(&request_id) {
            let n_blocks = self.layout.n_blocks_for(export.n_tokens) as usize;
            let blocks = &blocks[..blocks.len().min(n_blocks)];
            let known = export.blocks.len();
            assert_eq!(
                blocks.get(..known),
                Some(&export.blocks[..]),
                "the blocks of request {request_id} changed under its export"
            );
            export.blocks.extend_from_slice(&blocks[known..]);
        }
    }

    /// A layer group is final up to position `n_tokens`. Returns the slices that became final by it, to be digested.
    /// Telling the same or less again returns nothing.
    pub fn layers_done(
        &mut self,
        request_id: RequestId,
        group: LayerGroupIdx,
        n_tokens: u32,
    ) -> Vec<SlicePlace> {
        let Some(export) = self.exports.get_mut(&request_id) else {
            return Vec::new();
        };
        let n_final = if n_tokens >= export.n_tokens {
            self.layout.n_blocks_for(export.n_tokens)
        } else {
            n_tokens / self.layout.block_tokens
        };
        let from = export.n_blocks_final[group.0 as usize];
        if n_final <= from {
            return Vec::new();
        }
        export.n_blocks_final[group.0 as usize] = n_final;
        (from..n_final)
            .map(|ordinal| SlicePlace {
                slice: Slice { ordinal, group },
                block: export.blocks[ordinal as usize],
            })
            .collect()
    }

    /// Takes digests of final slices in, which makes them readable. Returns what a claimant must hear: the
    /// announcement, and `Complete` when it was the last one.
    pub fn digested(
        &mut self,
        request_id: RequestId,
        digests: &[(Slice, Digest)],
    ) -> Vec<ExportEvent> {
        let Some(export) = self.exports.get_mut(&request_id) else {
            return Vec::new();
        };
        let mut news = Vec::with_capacity(digests.len());
        for &(slice, digest) in digests {
            let idx = slice_idx(slice, self.n_groups);
            let entry = &mut export.digests[idx];
            if entry.is_none() {
                *entry = Some(digest);
                export.n_announced += 1;
                news.push((slice, digest));
            }
        }
        if news.is_empty() {
            return Vec::new();
        }
        let mut events = announcements(&news);
        events.extend(export.complete().map(ExportEvent::Complete));
        events
    }

    /// The computation is over: the blocks now belong to the lease, whose time starts here. Returns `Complete` for a
    /// claimant unless digests are still missing. A no-op when the export has ended meanwhile.
    pub fn complete(
        &mut self,
        request_id: RequestId,
        first_token: SampledToken,
        now: Timestamp,
    ) -> Vec<ExportEvent> {
        let Some(export) = self.exports.get_mut(&request_id) else {
            return Vec::new();
        };
        export.first_token = Some(first_token);
        export.lease.extend(now);
        export
            .complete()
            .map(ExportEvent::Complete)
            .into_iter()
            .collect()
    }

    /// Binds a lease to an importer and returns everything that it has missed.
    ///
    /// # Errors
    /// `gone` without a live right; `deadline_exceeded`; `invalid_request` when the layouts differ.
    pub fn claim(&mut self, claim: &Claim, now: Timestamp) -> Result<Vec<ExportEvent>, Failure> {
        if claim.deadline <= now {
            return Err(Failure::new(
                FailureCode::DeadlineExceeded,
                format!("the claim of request {} came late", claim.request_id),
            ));
        }
        if claim.layout_fingerprint != self.fingerprint {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!(
                    "layout_fingerprint of importer {} differs from this node's; both need the same model \
                     files, KV type and release",
                    claim.importer
                ),
            ));
        }
        let n_groups = self.n_groups;
        let export = self.live(claim.request_id, now)?;
        export
            .lease
            .claim(&claim.lease(), claim.importer_incarnation, now)?;
        let mut events = vec![ExportEvent::Claimed {
            n_tokens: export.n_tokens,
            expires_at: export.lease.expires_at(),
        }];
        let announced: Vec<(Slice, Digest)> = export
            .digests
            .iter()
            .enumerate()
            .filter_map(|(idx, digest)| Some((slice_at(idx, n_groups), (*digest)?)))
            .collect();
        events.extend(announcements(&announced));
        events.extend(export.complete().map(ExportEvent::Complete));
        Ok(events)
    }

    /// Starts the time of these leases again. Returns those that are no more, and when the others end.
    pub fn renew(
        &mut self,
        importer: Incarnation,
        leases: &[LeaseRef],
        now: Timestamp,
    ) -> (Vec<RequestId>, Timestamp) {
        let mut gone = Vec::new();
        for lease in leases {
            let renewed = self
                .live(lease.request_id, now)
                .and_then(|export| export.lease.renew(lease, importer, now));
            if renewed.is_err() {
                gone.push(lease.request_id);
            }
        }
        (gone, now.plus_us(tidemill_core::bounds::LEASE_TTL_US))
    }

    /// Ends the lease that is named under its present epoch. False when there is none such (any more).
    pub fn release(&mut self, lease: &LeaseRef) -> bool {
        let is_named = self
            .exports
            .get(&lease.request_id)
            .is_some_and(|export| export.lease.is_named_by(lease));
        is_named && self.cancel(lease.request_id)
    }

    /// Gives a lease to whoever claims it under the new epoch of `lease`.
    ///
    /// # Errors
    /// `gone` without a live right; `invalid_request` when the epoch is not higher.
    pub fn rebind(&mut self, lease: &LeaseRef, now: Timestamp) -> Result<(), Failure> {
        self.live(lease.request_id, now)?.lease.rebind(lease, now)
    }

    /// Ends an export by the node's own decision. False when there is none.
    pub fn cancel(&mut self, request_id: RequestId) -> bool {
        self.exports.remove(&request_id).is_some()
    }

    /// Ends every complete export whose lease has run out, and names them.
    pub fn expire(&mut self, now: Timestamp) -> Vec<RequestId> {
        let ended: Vec<RequestId> = self
            .exports
            .iter()
            .filter(|(_, export)| !export.is_live(now))
            .map(|(request_id, _)| *request_id)
            .collect();
        for request_id in &ended {
            self.exports.remove(request_id);
        }
        ended
    }

    /// Grants a read of announced slices, all or none. The caller makes `read` an owner of the blocks and reports
    /// its end with `end_read`.
    ///
    /// # Errors
    /// `gone` without a live right; `invalid_request` for slices that do not exist or are not announced;
    /// `overloaded` when the lease has too many reads in flight.
    pub fn read(
        &mut self,
        ask: &ReadAsk,
        read: ReadId,
        now: Timestamp,
    ) -> Result<ReadGrant, Failure> {
        let n_groups = self.n_groups;
        let lease = LeaseRef {
            request_id: ask.request_id,
            capability: ask.capability,
            epoch: ask.epoch,
        };
        let export = self.live(ask.request_id, now)?;
        export.lease.check_read(&lease, ask.importer)?;
        if ask.slices.is_empty() || ask.slices.len() > READ_SLICES_MAX {
            return Err(invalid(format!(
                "slices has {} entries; 1 to {READ_SLICES_MAX} are allowed",
                ask.slices.len()
            )));
        }
        if export.n_reads >= READS_PER_LEASE_MAX {
            return Err(Failure::new(
                FailureCode::Overloaded,
                format!(
                    "request {} has {} reads in flight; at most {READS_PER_LEASE_MAX} are allowed",
                    ask.request_id, export.n_reads
                ),
            ));
        }
        let places = ask
            .slices
            .iter()
            .map(|&slice| place(export, slice, n_groups))
            .collect::<Result<_, _>>()?;
        export.n_reads += 1;
        let former = self.reads.insert(read, ask.request_id);
        assert!(former.is_none(), "read ids are drawn once");
        Ok(ReadGrant { read, places })
    }

    /// A read is over. False when it is unknown (ended before).
    pub fn end_read(&mut self, read: ReadId) -> bool {
        let Some(request_id) = self.reads.remove(&read) else {
            return false;
        };
        if let Some(export) = self.exports.get_mut(&request_id) {
            export.n_reads = export.n_reads.saturating_sub(1);
        }
        true
    }

    /// True while the request is exported.
    pub fn contains(&self, request_id: RequestId) -> bool {
        self.exports.contains_key(&request_id)
    }

    /// True when nothing is lent and nothing is read.
    pub fn is_empty(&self) -> bool {
        self.exports.is_empty() && self.reads.is_empty()
    }

    /// Distinct blocks that are held by leases alone (their computation is over).
    pub fn n_blocks(&self) -> u32 {
        let leased: BTreeSet<BlockIdx> = self
            .exports
            .values()
            .filter(|export| export.first_token.is_some())
            .flat_map(|export| export.blocks.iter().copied())
            .collect();
        u32::try_from(leased.len()).expect("block indices are 32 bits")
    }

    /// Reads in flight.
    pub fn n_reads(&self) -> usize {
        self.reads.len()
    }

    /// Reads in flight: each owns the blocks that it was granted.
    pub fn reads(&self) -> impl Iterator<Item = ReadId> {
        self.reads.keys().copied()
    }

    /// When the next lease runs out.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.exports
            .values()
            .filter(|export| export.first_token.is_some())
            .map(|export| export.lease.expires_at())
            .min()
    }

    /// Proves that the counts agree with what they count.
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn audit(&self) -> Result<(), String> {
        for (request_id, export) in &self.exports {
            let n_announced = export.digests.iter().flatten().count();
            if n_announced != export.n_announced {
                return Err(format!(
                    "request {request_id} announced {n_announced} slices but counts {}",
                    export.n_announced
                ));
            }
            for (idx, _) in export
                .digests
                .iter()
                .enumerate()
                .filter(|(_, d)| d.is_some())
            {
                let slice = slice_at(idx, self.n_groups);
                if slice.ordinal >= export.n_blocks_final[slice.group.0 as usize] {
                    return Err(format!(
                        "request {request_id} announced {slice:?} too early"
                    ));
                }
            }
            let n_blocks = self.layout.n_blocks_for(export.n_tokens) as usize;
            if export.first_token.is_some() && export.blocks.len() != n_blocks {
                return Err(format!(
                    "request {request_id} is complete with {} of {n_blocks} blocks",
                    export.blocks.len()
                ));
            }
        }
        Ok(())
    }

    fn live(&mut self, request_id: RequestId, now: Timestamp) -> Result<&mut Export, Failure> {
        self.exports
            .get_mut(&request_id)
            .filter(|export| export.is_live(now))
            .ok_or_else(|| gone(request_id))
    }
}

/// Where an announced slice lies.
fn place(export: &Export, slice: Slice, n_groups: u32) -> Result<SlicePlace, Failure> {
    let n_blocks = export.digests.len() / n_groups as usize;
    if slice.ordinal as usize >= n_blocks || slice.group.0 >= n_groups {
        return Err(invalid(format!(
            "slice (ordinal {}, group {}) does not exist; the request has {n_blocks} blocks of {n_groups} \
             groups",
            slice.ordinal, slice.group.0
        )));
    }
    if export.digests[slice_idx(slice, n_groups)].is_none() {
        return Err(invalid(format!(
            "slice (ordinal {}, group {}) is not final yet; wait for its announcement",
            slice.ordinal, slice.group.0
        )));
    }
    Ok(SlicePlace {
        slice,
        block: export.blocks[slice.ordinal as usize],
    })
}

fn announcements(news: &[(Slice, Digest)]) -> Vec<ExportEvent> {
    news.chunks(ANNOUNCED_SLICES_MAX)
        .map(|part| ExportEvent::SlicesFinal(part.to_vec()))
        .collect()
}

fn slice_idx(slice: Slice, n_groups: u32) -> usize {
    slice.ordinal as usize * n_groups as usize + slice.group.0 as usize
}

fn slice_at(idx: usize, n_groups: u32) -> Slice {
    let n_groups = n_groups as usize;
    let narrow = |n: usize| u32::try_from(n).expect("a slice index comes from 32-bit parts");
    Slice {
        ordinal: narrow(idx / n_groups),
        group: LayerGroupIdx(narrow(idx % n_groups)),
    }
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureCode::InvalidRequest, message)
}
