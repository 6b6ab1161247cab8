//! One import: which slices have been announced, are on their way, are here and were right.
//!
//! The importer's half of the hand-off as a pure machine. It hands out pulls that are as large as what has been
//! announced allows (while two are on their way, announcements gather into the next), gives a bad slice three tries,
//! and says that it is done only when every slice is here with the announced digest and the exporter's word over all
//! of them agrees. What it waits for has a deadline: a transfer that makes no progress, an exporter that is silent.

#[cfg(test)]
mod tests;

use crate::export::{Complete, READ_SLICES_MAX, digest_of_digests};
use crate::transport::{PullResult, TransferError};
use std::collections::VecDeque;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    Digest, Failure, FailureCode, KvLayout, LayerGroupIdx, SampledToken, Slice, Timestamp,
};

/// Tries of one slice before the import fails.
pub const SLICE_TRIES_MAX: u8 = 3;
/// How long pulls may be on their way without one good slice before the import fails.
pub const PROGRESS_US_MAX: u64 = 10_000_000;
/// How long an exporter may say nothing at all; it is asked to renew three times as often.
pub const SILENCE_US_MAX: u64 = LEASE_TTL_US;
/// Pulls of one import at a time: one on the wire, one behind it.
pub const PULLS_PER_IMPORT_MAX: u32 = 2;
/// Most bytes in one pull, unless a single slice is larger.
pub const PULL_BYTES_MAX: u64 = 8 << 20;

/// Bytes that all imports of a node may have on their way together, so that copies do not queue up.
#[derive(Debug)]
pub struct Credits {
    n_bytes_max: u64,
    n_bytes: u64,
}

impl Credits {
    /// Nothing is on its way; at most `n_bytes_max` will be, or one slice.
    pub fn new(n_bytes_max: u64) -> Self {
        Self {
            n_bytes_max,
            n_bytes: 0,
        }
    }

    /// Bytes on their way.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Gives back what a pull took; called once for each pull, also for those of a given-up import.
    ///
    /// # Panics
    /// When more is given back than was taken.
    pub fn put_back(&mut self, n_bytes: u64) {
        self.n_bytes = self
            .n_bytes
            .checked_sub(n_bytes)
            .expect("a pull gives back once what it took");
    }

    /// One more slice fits, or nothing else is on its way.
    fn fits(&self, n_bytes: u64) -> bool {
        self.n_bytes == 0 || self.n_bytes.saturating_add(n_bytes) <= self.n_bytes_max
    }
}

/// Slices to be read in one go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pull {
    /// What to read.
    pub slices: Vec<Slice>,
    /// Their bytes together: what `Credits::put_back` gets at the end.
    pub n_bytes: u64,
}

/// The end of a good import.
#[derive(Clone, PartialEq, Debug)]
pub struct Imported {
    /// What the exporter sampled after the last position.
    pub first_token: SampledToken,
    /// Bytes that were copied here and right.
    pub n_bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not announced.
    Awaited,
    /// Announced and in the queue.
    Ready,
    /// On its way.
    Pulling,
    /// Copied and right, or never moved because the block was here before.
    Here,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    state: State,
    digest: Option<Digest>,
    n_tries: u8,
}

/// The import of one request's KV.
#[derive(Debug)]
pub struct Import {
    n_tokens: u32,
    n_groups: u32,
    group_bytes: Vec<u64>,
    /// By (ordinal, group).
    entries: Vec<Entry>,
    ready: VecDeque<Slice>,
    n_pulls: u32,
    n_announced: usize,
    n_here: usize,
    n_bytes: u64,
    n_bad_slices: u64,
    first_token: Option<SampledToken>,
    heard_at: Timestamp,
    progress_at: Timestamp,
}

impl Import {
    /// An import of `n_tokens` positions whose first `n_local_blocks` blocks are here already.
    pub fn new(layout: &KvLayout, n_tokens: u32, n_local_blocks: u32, now: Timestamp) -> Self {
        let n_groups = layout.n_groups();
        let n_blocks = layout.n_blocks_for(n_tokens);
        let n_local = (n_local_blocks.min(n_blocks) * n_groups) as usize;
        let entry = |idx| Entry {
            state: if idx < n_local {
                State::Here
            } else {
                State::Awaited
            },
            digest: None,
            n_tries: 0,
        };
        Self {
            n_tokens,
            n_groups,
            group_bytes: (0..n_groups)
                .map(|group| layout.group_byte_range(LayerGroupIdx(group)).len() as u64)
                .collect(),
            entries: (0..(n_blocks * n_groups) as usize).map(entry).collect(),
            ready: VecDeque::new(),
            n_pulls: 0,
            n_announced: 0,
            n_here: n_local,
            n_bytes: 0,
            n_bad_slices: 0,
            first_token: None,
            heard_at: now,
            progress_at: now,
        }
    }

    /// The exporter is alive (it has answered a claim or a renewal).
    pub fn heard(&mut self, now: Timestamp) {
        self.heard_at = self.heard_at.max(now);
    }

    /// Slices are final at the exporter. The same announcement again (after a second claim) changes nothing.
    ///
    /// # Errors
    /// `transfer_failed` for a slice that does not exist or that was announced with another digest.
    pub fn announce(&mut self, slices: &[(Slice, Digest)], now: Timestamp) -> Result<(), Failure> {
        self.heard(now);
        for &(slice, digest) in slices {
            let entry = self.entry(slice)?;
            match entry.digest {
                Some(known) if known == digest => {}
                Some(_) => {
                    return Err(failed(format!(
                        "slice (ordinal {}, group {}) was announced with two digests",
                        slice.ordinal, slice.group.0
                    )));
                }
                None => {
                    entry.digest = Some(digest);
                    let is_awaited = entry.state == State::Awaited;
                    if is_awaited {
                        entry.state = State::Ready;
                        self.ready.push_back(slice);
                    }
                    self.n_announced += 1;
                }
            }
        }
        Ok(())
    }

    /// The exporter says that it has announced everything.
    ///
    /// # Errors
    /// `transfer_failed` when that does not agree with what was announced.
    pub fn complete(&mut self, complete: &Complete, now: Timestamp) -> Result<(), Failure> {
        self.heard(now);
        if complete.n_tokens != self.n_tokens {
            return Err(failed(format!(
                "complete.n_tokens is {}; the handle said {}",
                complete.n_tokens, self.n_tokens
            )));
        }
        if self.n_announced != self.entries.len() {
            return Err(failed(format!(
                "the exporter says complete after {} of {} slices",
                self.n_announced,
                self.entries.len()
            )));
        }
        let digests = self.entries.iter().filter_map(|entry| entry.digest);
        if digest_of_digests(digests) != complete.digest {
            return Err(failed(
                "complete.digest differs from the digest of what was announced".into(),
            ));
        }
        self.first_token = Some(complete.first_token.clone());
        Ok(())
    }

    /// The next slices to read, within the bounds of this import and of the node; `None` while there is nothing to
    /// read or no room. Each pull is answered with `pulled` and gives its credits back.
    pub fn next_pull(&mut self, credits: &mut Credits, now: Timestamp) -> Option<Pull> {
        if self.n_pulls >= PULLS_PER_IMPORT_MAX {
            return None;
        }
        let mut pull = Pull {
            slices: Vec::new(),
            n_bytes: 0,
        };
        while let Some(&slice) = self.ready.front() {
            let n_bytes = self.group_bytes[slice.group.0 as usize];
            let is_full = pull.slices.len() == READ_SLICES_MAX
                || (!pull.slices.is_empty() && pull.n_bytes + n_bytes > PULL_BYTES_MAX);
            if is_full || !credits.fits(n_bytes) {
                break;
            }
            credits.n_bytes += n_bytes;
            pull.n_bytes += n_bytes;
            pull.slices.push(slice);
            self.ready.pop_front();
            let idx = self.idx(slice);
            self.entries[idx].state = State::Pulling;
        }
        if pull.slices.is_empty() {
            return None;
        }
        if self.n_pulls == 0 {
            self.progress_at = now;
        }
        self.n_pulls += 1;
        Some(pull)
    }

    /// A pull of this import has ended; `slices` are those it was asked for.
    ///
    /// # Errors
    /// `gone` when the exporter says that the lease is no more; `transfer_failed` when a slice has used up its
    /// tries.
    pub fn pulled(
        &mut self,
        slices: &[Slice],
        result: &PullResult,
        now: Timestamp,
    ) -> Result<(), Failure> {
        self.n_pulls = self
            .n_pulls
            .checked_sub(1)
            .expect("a pull is answered once");
        match result {
            Ok(outcome) => {
                for &slice in slices {
                    let copied = outcome.digests.iter().find(|(of, _)| *of == slice);
                    self.take_slice(slice, copied.map(|(_, digest)| *digest), now)?;
                }
                Ok(())
            }
            Err(TransferError::Refused(failure)) if failure.code == FailureCode::Gone => {
                Err(failure.clone())
            }
            Err(error) => {
                for &slice in slices {
                    self.try_again(slice, error)?;
                }
                Ok(())
            }
        }
    }

    fn take_slice(
        &mut self,
        slice: Slice,
        copied: Option<Digest>,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let idx = self.idx(slice);
        let announced = self.entries[idx].digest;
        let is_right = copied.is_some() && copied == announced;
        if !is_right && !PlantedBug::DigestUnchecked.is_on() {
            self.n_bad_slices += 1;
            return self.try_again(slice, &TransferError::Digest);
        }
        self.entries[idx].state = State::Here;
        self.n_here += 1;
        self.n_bytes += self.group_bytes[slice.group.0 as usize];
        self.progress_at = self.progress_at.max(now);
        Ok(())
    }

    fn try_again(&mut self, slice: Slice, error: &TransferError) -> Result<(), Failure> {
        let idx = self.idx(slice);
        let entry = &mut self.entries[idx];
        entry.n_tries += 1;
        if entry.n_tries >= SLICE_TRIES_MAX {
            return Err(failed(format!(
                "slice (ordinal {}, group {}) failed {SLICE_TRIES_MAX} times, last: {error}",
                slice.ordinal, slice.group.0
            )));
        }
        entry.state = State::Ready;
        // In front: what others already wait behind comes first.
        self.ready.push_front(slice);
        Ok(())
    }

    /// The end of the import, once everything is here and the exporter has said complete.
    pub fn imported(&self) -> Option<Imported> {
        let first_token = self.first_token.clone()?;
        let is_whole = self.n_here == self.entries.len() || PlantedBug::ImportUncounted.is_on();
        is_whole.then_some(Imported {
            first_token,
            n_bytes: self.n_bytes,
        })
    }

    /// When `check_progress` fails if nothing happens before.
    pub fn deadline(&self) -> Timestamp {
        let silence = self.heard_at.plus_us(SILENCE_US_MAX);
        if self.n_pulls == 0 {
            // Waiting for announcements or for credits: the exporter need only be alive.
            return silence;
        }
        silence.min(self.progress_at.plus_us(PROGRESS_US_MAX))
    }

    /// Is anything late?
    ///
    /// # Errors
    /// `transfer_failed`, and what is late.
    pub fn check_progress(&self, now: Timestamp) -> Result<(), Failure> {
        if now < self.deadline() {
            return Ok(());
        }
        Err(failed(format!(
            "{} of {} slices are here and {} were announced; nothing came for {} ms",
            self.n_here,
            self.entries.len(),
            self.n_announced,
            now.since_us(self.progress_at.max(self.heard_at)) / 1000
        )))
    }

    /// Bytes copied here so far, and right.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Slices whose copied bytes did not have the announced digest.
    pub fn n_bad_slices(&self) -> u64 {
        self.n_bad_slices
    }

    /// Pulls without an answer.
    pub fn n_pulls(&self) -> u32 {
        self.n_pulls
    }

    fn entry(&mut self, slice: Slice) -> Result<&mut Entry, Failure> {
        let n_blocks = self.entries.len() / self.n_groups as usize;
        if slice.ordinal as usize >= n_blocks || slice.group.0 >= self.n_groups {
            return Err(failed(format!(
                "slice (ordinal {}, group {}) does not exist; the request has {n_blocks} blocks of {} groups",
                slice.ordinal, slice.group.0, self.n_groups
            )));
        }
        let idx = self.idx(slice);
        Ok(&mut self.entries[idx])
    }

    fn idx(&self, slice: Slice) -> usize {
        slice.ordinal as usize * self.n_groups as usize + slice.group.0 as usize
    }
}

fn failed(message: String) -> Failure {
    Failure::new(FailureCode::TransferFailed, message)
}
