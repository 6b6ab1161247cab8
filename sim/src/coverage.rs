//! What the faults of many histories have met: a count for each kind of fault and each state of a request. A small
//! one means that a state's way out under a fault was hardly tried, and fails the test that asks.

use std::collections::BTreeMap;
use std::fmt;

/// What can go wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FaultKind {
    /// The prefill node of a request dies, and comes back at the same address.
    CrashPrefill,
    /// The decode node of a request dies, and comes back at the same address.
    CrashDecode,
    /// The router dies; its clients are lost.
    CrashRouter,
    /// A link goes down for a while; open calls on it break.
    CutLink,
    /// Messages on a link take up to seconds.
    SlowLink,
    /// A question or its answer is lost, a stream breaks.
    DropMessage,
    /// A question is heard twice.
    DuplicateMessage,
    /// The client leaves.
    ClientLeaves,
    /// A byte of a slice changes in flight.
    CorruptSlice,
    /// A step takes far too long.
    StallStep,
    /// A step fails as a whole.
    FailStep,
    /// A node does nothing for a while, though its connections live.
    StandStill,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::CrashPrefill,
        Self::CrashDecode,
        Self::CrashRouter,
        Self::CutLink,
        Self::SlowLink,
        Self::DropMessage,
        Self::DuplicateMessage,
        Self::ClientLeaves,
        Self::CorruptSlice,
        Self::StallStep,
        Self::FailStep,
        Self::StandStill,
    ];
}

/// How far a request is, as its client and its nodes see it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// A prefill node has it in its queue.
    Queued,
    /// Its KV handle is out: it is being prefilled.
    Offered,
    /// A decode node has reserved blocks for it.
    Importing,
    /// Its client has the first token, its decode node has not all KV yet.
    FirstToken,
    /// Its decode node has all KV, or prefills by itself.
    Decoding,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 5] = [
        Self::Queued,
        Self::Offered,
        Self::Importing,
        Self::FirstToken,
        Self::Decoding,
    ];
}

/// Pairs that hardly ever meet: once all KV has arrived, only slices for a former attempt still move.
const EXCUSED: [(FaultKind, Phase); 1] = [(FaultKind::CorruptSlice, Phase::Decoding)];

/// Counts over any number of histories.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Coverage {
    counts: BTreeMap<(FaultKind, Phase), u64>,
    n_faults: u64,
}

impl Coverage {
    /// Faults have had their first effect.
    pub(crate) fn add_faults(&mut self, n_faults: u64) {
        self.n_faults += n_faults;
    }

    /// A fault has met a request.
    pub(crate) fn note(&mut self, fault: FaultKind, phase: Phase) {
        *self.counts.entry((fault, phase)).or_default() += 1;
    }

    /// Faults that had an effect.
    pub fn n_faults(&self) -> u64 {
        self.n_faults
    }

    /// Adds another history's counts.
    pub fn add(&mut self, other: &Self) {
        for (pair, n) in &other.counts {
            *self.counts.entry(*pair).or_default() += n;
        }
        self.n_faults += other.n_faults;
    }

    /// Pairs that met fewer than `least` times, though they can meet.
    pub fn scarce(&self, least: u64) -> Vec<(FaultKind, Phase)> {
        let pairs = FaultKind::ALL
            .iter()
            .flat_map(|fault| Phase::ALL.iter().map(|phase| (*fault, *phase)));
        pairs
            .filter(|pair| !EXCUSED.contains(pair))
            .filter(|pair| self.counts.get(pair).is_none_or(|n| *n < least))
            .collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:18}", "fault x phase")?;
        for phase in Phase::ALL {
            write!(f, "{:>12}", format!("{phase:?}"))?;
        }
        for fault in FaultKind::ALL {
            write!(f, "\n{:18}", format!("{fault:?}"))?;
            for phase in Phase::ALL {
                let n = self
                    .counts
                    .get(&(fault, phase))
                    .copied()
                    .unwrap_or_default();
                write!(f, "{n:>12}")?;
            }
        }
        Ok(())
    }
}
