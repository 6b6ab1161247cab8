//! Fetching KV from a prefill node: reserve, claim, pull, check, join the running batch. What a transfer may do
//! when lives in kv-transfer's `Import`; here it meets the block pool (an import owns its target blocks until its
//! last pull has ended, even when it was given up) and the tasks that talk to exporters.

use super::{ClaimId, Effect, Exporter, GenerateEvent, KvReady, Node, PullId, count};
use tidemill_core::bounds::HASH_BLOCK_TOKENS;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    BlockHash, BlockIdx, CallId, Failure, FailureCode, KvHandle, KvLayout, RequestId, SequenceSpec,
    Timestamp,
};
use tidemill_engine::block_pool::Owner;
use tidemill_engine::sequence::{FinishAfter, Sequence};
use tidemill_kv_transfer::export::{Claim, LeaseRef};
use tidemill_kv_transfer::import::{Import, Pull};
use tidemill_kv_transfer::transport::{PullRequest, PullResult};

/// How long an import waits for blocks before another node had better take it.
const RESERVATION_US_MAX: u64 = 10_000_000;

/// An import that has not ended yet.
pub(super) struct Importing {
    pub(super) spec: SequenceSpec,
    hashes: Vec<BlockHash>,
    pub(super) handle: KvHandle,
    stage: Stage,
}

enum Stage {
    /// Waits for its reservation.
    Queued {
        /// Until when.
        deadline: Timestamp,
    },
    /// Blocks are reserved, the lease is claimed.
    Fetching(Box<Fetch>),
}

pub(super) struct Fetch {
    claim: ClaimId,
    pub(super) import: Import,
    /// By ordinal; those not yet assigned are covered by `n_reserved`.
    blocks: Vec<Option<BlockIdx>>,
    n_reserved: u32,
    n_local_blocks: u32,
    /// The exporter has said everything.
    pub(super) is_complete: bool,
}

/// A pull in flight.
pub(super) struct Pulling {
    pub(super) request_id: RequestId,
    pull: Pull,
}

impl Importing {
    /// When it fails unless something happens before.
    pub(super) fn deadline(&self) -> Timestamp {
        let stage = match &self.stage {
            Stage::Queued { deadline } => *deadline,
            Stage::Fetching(fetch) => fetch.import.deadline(),
        };
        stage.min(self.spec.deadline)
    }

    pub(super) fn heard(&mut self, now: Timestamp) {
        if let Some(fetch) = self.fetch() {
            fetch.import.heard(now);
        }
    }

    fn fetch(&mut self) -> Option<&mut Fetch> {
        match &mut self.stage {
            Stage::Queued { .. } => None,
            Stage::Fetching(fetch) => Some(fetch),
        }
    }

    fn lateness(&self, now: Timestamp) -> Failure {
        if self.spec.deadline <= now {
            return Failure::new(
                FailureCode::DeadlineExceeded,
                "the deadline passed while KV was being fetched",
            );
        }
        let late = match &self.stage {
            Stage::Queued { .. } => None,
            Stage::Fetching(fetch) => fetch.import.check_progress(now).err(),
        };
        late.unwrap_or_else(|| {
            Failure::new(
                FailureCode::Overloaded,
                format!(
                    "no KV blocks became free within {} s; ask another node",
                    RESERVATION_US_MAX / 1_000_000
                ),
            )
        })
    }
}

impl Node {
    pub(super) fn enqueue_import(
        &mut self,
        call: CallId,
        spec: SequenceSpec,
        handle: KvHandle,
        hashes: Vec<BlockHash>,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let n_blocks = self.config.facts.layout.n_blocks_for(handle.n_tokens + 1);
        if n_blocks > self.config.n_blocks {
            return Err(Failure::new(
                FailureCode::Overloaded,
                format!(
                    "the context and one token need {n_blocks} blocks; the pool has {}; raise --kv-bytes",
                    self.config.n_blocks
                ),
            ));
        }
        let n_waiting_max = self.config.scheduler.max_waiting as usize;
        if self.reserving.len() >= n_waiting_max {
            return Err(Failure::new(
                FailureCode::Overloaded,
                format!("{n_waiting_max} imports wait for blocks already; ask another node"),
            ));
        }
        let exporter = Exporter {
            control_address: handle.control_address.clone(),
            incarnation: handle.incarnation,
        };
        let lender = Some((exporter, lease_of(&handle)));
        let request_id = spec.request_id;
        self.remember(request_id, call, lender, count(spec.emitted.len()));
        self.plan_renewal(handle.expires_at, now);
        let deadline = now.plus_us(RESERVATION_US_MAX);
        let importing = Importing {
            spec,
            hashes,
            handle,
            stage: Stage::Queued { deadline },
        };
        self.imports.insert(request_id, importing);
        self.reserving.push_back(request_id);
        Ok(())
    }

    /// In arrival order: whoever waits for many blocks is not overtaken for ever by those who need few.
    pub(super) fn reserve_waiting(&mut self, now: Timestamp) {
        while let Some(&request_id) = self.reserving.front() {
            // Whoever lost its blocks to an older sequence comes before any newcomer.
            if self.scheduler.n_preempted() > 0 || !self.reserve(request_id, now) {
                break;
            }
            self.reserving.pop_front();
        }
    }

    /// Pins what is here already, reserves the rest and claims the lease; false when there are too few blocks.
    fn reserve(&mut self, request_id: RequestId, now: Timestamp) -> bool {
        let layout = &self.config.facts.layout;
        let importing = self.imports.get_mut(&request_id).expect("audited pair");
        let n_tokens = importing.handle.n_tokens;
        let n_blocks = layout.n_blocks_for(n_tokens + 1);
        let hashes = hashes_by_block(&importing.hashes, layout);
        let run = self.pool.peek(&hashes);
        let n_missing = n_blocks - run.n_blocks;
        if self.pool.n_free() < n_missing + run.n_unowned {
            return false;
        }
        let owner = Owner::Import(request_id);
        let local = self.pool.look_up(&hashes, owner);
        let n_local_blocks = count(local.len());
        let n_reserved = n_blocks - n_local_blocks;
        let reserved = self.pool.reserve(n_reserved);
        assert!(reserved, "n_free was compared with what is taken");
        let mut blocks: Vec<Option<BlockIdx>> = local.into_iter().map(Some).collect();
        blocks.resize(n_blocks as usize, None);
        self.next_claim += 1;
        let claim = ClaimId(self.next_claim);
        importing.stage = Stage::Fetching(Box::new(Fetch {
            claim,
            import: Import::new(layout, n_tokens, n_local_blocks, now),
            blocks,
            n_reserved,
            n_local_blocks,
            is_complete: false,
        }));
        let ask = Claim {
            request_id,
            capability: importing.handle.capability,
            epoch: importing.handle.epoch,
            importer: self.config.node_id.clone(),
            importer_incarnation: self.config.incarnation,
            layout_fingerprint: layout.fingerprint(),
            deadline: importing.spec.deadline,
        };
        let traceparent = importing.spec.traceparent.clone();
        let request = &self.requests[&request_id];
        let (exporter, _) = request.lender.clone().expect("an import has a lender");
        let call = request.call;
        self.claims.insert(claim, request_id);
        self.tell_router(call, GenerateEvent::Accepted);
        self.effects.push(Effect::Claim {
            claim,
            exporter,
            ask,
            traceparent,
        });
        true
    }

    /// Starts every pull that there is something to read and room for.
    pub(super) fn start_pulls(&mut self, now: Timestamp) {
        for (&request_id, importing) in &mut self.imports {
            let Stage::Fetching(fetch) = &mut importing.stage else {
                continue;
            };
            while let Some(pull) = fetch.import.next_pull(&mut self.credits, now) {
                let mut places = Vec::with_capacity(pull.slices.len());
                for &slice in &pull.slices {
                    let block = fetch.blocks[slice.ordinal as usize].get_or_insert_with(|| {
                        fetch.n_reserved -= 1;
                        self.pool.allocate_reserved(Owner::Import(request_id))
                    });
                    let block = *block;
                    places.push(SlicePlace { slice, block });
                }
                let handle = &importing.handle;
                let ask = PullRequest {
                    request_id,
                    capability: handle.capability,
                    epoch: handle.epoch,
                    exporter: handle.incarnation,
                    endpoints: handle.endpoints.clone(),
                    places,
                };
                self.next_pull += 1;
                let id = PullId(self.next_pull);
                self.pulls.insert(id, Pulling { request_id, pull });
                self.effects.push(Effect::Pull { pull: id, ask });
            }
        }
    }

    pub(super) fn end_pull(&mut self, pull: PullId, result: &PullResult, now: Timestamp) {
        let Some(Pulling { request_id, pull }) = self.pulls.remove(&pull) else {
            return;
        };
        self.credits.put_back(pull.n_bytes);
        let Some(importing) = self.imports.get_mut(&request_id) else {
            self.free_given_up(request_id);
            return;
        };
        let fetch = importing.fetch().expect("only a fetching import pulls");
        match fetch.import.pulled(&pull.slices, result, now) {
            Ok(()) => self.finish_import(request_id),
            Err(failure) => self.fail_request(request_id, failure),
        }
    }

    /// Lets the sequence join once everything is here; before, a no-op.
    pub(super) fn finish_import(&mut self, request_id: RequestId) {
        let Some(imported) = self.fetch_of(request_id).import.imported() else {
            return;
        };
        let importing = self.imports.remove(&request_id).expect("just seen");
        let Stage::Fetching(fetch) = importing.stage else {
            unreachable!("only a fetching import is complete")
        };
        self.close_claim(fetch.claim);
        let owner = Owner::Import(request_id);
        let blocks: Vec<BlockIdx> = fetch
            .blocks
            .into_iter()
            .map(|block| block.unwrap_or_else(|| self.pool.allocate_reserved(owner)))
            .collect();
        let sequence_id = self.new_sequence();
        self.pool.transfer(owner, Owner::Sequence(sequence_id));
        let first_token = imported.first_token;
        let n_local_tokens = fetch.n_local_blocks * self.config.facts.layout.block_tokens;
        let ready = KvReady {
            first_token: first_token.clone(),
            bytes_moved: imported.n_bytes,
            n_local_tokens,
        };
        let request = self.requests.get_mut(&request_id).expect("audited pair");
        request.n_output = first_token.output_idx + 1;
        let call = request.call;
        self.tell_router(call, GenerateEvent::KvReady(ready));
        self.attach_sequence(request_id, sequence_id);
        let sequence = Sequence::new(
            sequence_id,
            importing.spec,
            importing.hashes,
            FinishAfter::Conditions,
        )
        .with_kv(blocks, first_token.token);
        self.scheduler.submit_ready(sequence);
    }

    /// Ends what fetches for a request that is given up; a no-op when nothing does.
    pub(super) fn drop_import(&mut self, request_id: RequestId) {
        let Some(importing) = self.imports.remove(&request_id) else {
            return;
        };
        match importing.stage {
            Stage::Queued { .. } => self.reserving.retain(|waiting| *waiting != request_id),
            Stage::Fetching(fetch) => {
                self.close_claim(fetch.claim);
                if !PlantedBug::ReservationKept.is_on() {
                    self.pool.unreserve(fetch.n_reserved);
                }
                self.free_given_up(request_id);
            }
        }
    }

    /// Frees the blocks of a given-up import once nobody writes to them any more.
    fn free_given_up(&mut self, request_id: RequestId) {
        if !self.is_pulling(request_id) {
            self.pool.release_all(Owner::Import(request_id));
        }
    }

    pub(super) fn is_pulling(&self, request_id: RequestId) -> bool {
        self.pulls
            .values()
            .any(|pulling| pulling.request_id == request_id)
    }

    pub(super) fn expire_imports(&mut self, now: Timestamp) {
        let late: Vec<(RequestId, Failure)> = self
            .imports
            .iter()
            .filter(|(_, importing)| importing.deadline() <= now)
            .map(|(request_id, importing)| (*request_id, importing.lateness(now)))
            .collect();
        for (request_id, failure) in late {
            self.fail_request(request_id, failure);
        }
    }

    /// The transfer of a claimed import.
    pub(super) fn fetch_of(&mut self, request_id: RequestId) -> &mut Fetch {
        self.imports
            .get_mut(&request_id)
            .and_then(Importing::fetch)
            .expect("a claim belongs to a fetching import")
    }

    /// Proves that every import has its reservation, its claim and its pulls.
    pub(super) fn audit_imports(&self) -> Result<(), String> {
        let mut n_reserved = 0;
        for (request_id, importing) in &self.imports {
            let is_queued = self.reserving.contains(request_id);
            match &importing.stage {
                Stage::Queued { .. } if !is_queued => {
                    return Err(format!("import {request_id} waits for blocks in no queue"));
                }
                Stage::Fetching(_) if is_queued => {
                    return Err(format!("import {request_id} has blocks and waits for them"));
                }
                Stage::Queued { .. } => {}
                Stage::Fetching(fetch) => {
                    let n_open = count(fetch.blocks.iter().filter(|b| b.is_none()).count());
                    if n_open != fetch.n_reserved {
                        return Err(format!(
                            "import {request_id} lacks {n_open} blocks but reserved {}",
                            fetch.n_reserved
                        ));
                    }
                    n_reserved += fetch.n_reserved;
                }
            }
        }
        if self.reserving.len() > self.imports.len() {
            return Err("somebody waits for blocks who imports nothing".to_owned());
        }
        if n_reserved != self.pool.n_reserved() {
            return Err(format!(
                "imports reserved {n_reserved} blocks, the pool {}",
                self.pool.n_reserved()
            ));
        }
        for (claim, request_id) in &self.claims {
            let stage = self.imports.get(request_id).map(|i| &i.stage);
            if !matches!(stage, Some(Stage::Fetching(fetch)) if fetch.claim == *claim) {
                return Err(format!("{claim:?} belongs to no import"));
            }
        }
        let n_bytes: u64 = self.pulls.values().map(|p| p.pull.n_bytes).sum();
        if n_bytes != self.credits.n_bytes() {
            return Err(format!(
                "{n_bytes} bytes are on their way but {} are counted",
                self.credits.n_bytes()
            ));
        }
        Ok(())
    }
}

fn lease_of(handle: &KvHandle) -> LeaseRef {
    LeaseRef {
        request_id: handle.request_id,
        capability: handle.capability,
        epoch: handle.epoch,
    }
}

/// Hashes of full storage blocks; none when the hash chain does not fall on their borders.
fn hashes_by_block(hashes: &[BlockHash], layout: &KvLayout) -> Vec<BlockHash> {
    let block_tokens = layout.block_tokens as usize;
    if !block_tokens.is_multiple_of(HASH_BLOCK_TOKENS) {
        return Vec::new();
    }
    let n_links = block_tokens / HASH_BLOCK_TOKENS;
    hashes
        .chunks_exact(n_links)
        .filter_map(|links| links.last().copied())
        .collect()
}
