//! Faults that a test can switch on in the shipped code, so that the simulator proves it would notice them.
//!
//! Without the feature `planted-bugs` every question is a constant "no" and costs nothing. With it, a fault is on
//! only in the thread that planted it.

/// A fault of the kind that people met in systems like ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlantedBug {
    /// A read in flight does not own the blocks it reads.
    ReadOwnsNothing,
    /// A read under an old epoch is served.
    EpochUnchecked,
    /// A message for another life of the node is taken.
    IncarnationUnchecked,
    /// A prefill node does not hear cancels.
    CancelLost,
    /// A lease that nobody renews never ends.
    LeaseForEver,
    /// An import counts as complete when the exporter says so, whatever has arrived.
    ImportUncounted,
    /// Copied bytes are not held against their digest.
    DigestUnchecked,
    /// A given-up import keeps its reservation.
    ReservationKept,
    /// Cancelling a sequence frees its blocks while its step is in flight.
    StepOwnsNothing,
    /// A resumed request forgets what it has emitted.
    EmittedForgotten,
    /// A stream's reader leaving is not noticed by a decode node.
    ReaderLossIgnored,
    /// The router leaves an attempt without cancelling its nodes.
    LeftUncancelled,
    /// The router never notices that a decode node stands still.
    StallUnnoticed,
    /// A rebind that was refused, or whose answer was lost, is waited for.
    RebindLossIgnored,
    /// Namespaces share cached prefixes.
    NamespaceForgotten,
    /// A later attempt's prompt log-probabilities reach the client again.
    PromptLogprobsAgain,
}

impl PlantedBug {
    /// Every planted bug.
    pub const ALL: [Self; 16] = [
        Self::ReadOwnsNothing,
        Self::EpochUnchecked,
        Self::IncarnationUnchecked,
        Self::CancelLost,
        Self::LeaseForEver,
        Self::ImportUncounted,
        Self::DigestUnchecked,
        Self::ReservationKept,
        Self::StepOwnsNothing,
        Self::EmittedForgotten,
        Self::ReaderLossIgnored,
        Self::LeftUncancelled,
        Self::StallUnnoticed,
        Self::RebindLossIgnored,
        Self::NamespaceForgotten,
        Self::PromptLogprobsAgain,
    ];

    /// True when this bug is switched on in this thread.
    #[cfg(feature = "planted-bugs")]
    pub fn is_on(self) -> bool {
        PLANTED.get() == Some(self)
    }

    /// True when this bug is switched on: never, in a build without planted bugs.
    #[cfg(not(feature = "planted-bugs"))]
    #[inline(always)]
    pub fn is_on(self) -> bool {
        false
    }
}

#[cfg(feature = "planted-bugs")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<PlantedBug>> = const { std::cell::Cell::new(None) };
}

/// Switches one bug on in this thread, or all off.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<PlantedBug>) {
    PLANTED.set(bug);
}
