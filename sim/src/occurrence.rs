//! What can happen at a point in virtual time.

use crate::fault::Fault;
use crate::host::StepWork;
use crate::left::Place;
use crate::message::{Notice, ToClient, ToServer};
use crate::network::{End, Process};
use crate::questions::Cancelling;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{CallId, ReadId, Timestamp};
use tidemill_engine::executor::LayerProgress;

/// Something that happens at a point in time.
pub(crate) enum Occurrence {
    Arrive(usize),
    ClientLeaves(usize),
    ToServer(CallId, Box<ToServer>),
    ToClient(CallId, Box<ToClient>),
    /// The server of a call hears that its client is gone.
    ServerLoses(CallId, End),
    /// The client of a call hears that it is lost.
    ClientLoses(CallId, End),
    /// A question is heard once more.
    HeardAgain(Process, CallId, Box<ToServer>),
    Notice(Process, Notice),
    CancelAgain(Cancelling),
    /// Long enough ago the router has left an attempt at this node.
    MustBeGone(Place),
    /// Whether a request still listens to this silent call.
    CheckSilence(usize, CallId),
    Wake(End),
    WakeRequest(usize, Timestamp),
    Layers(End, LayerProgress),
    StepEnds(End, u64, StepWork),
    Digest(End, ReadId, Vec<SlicePlace>),
    CopyOut(CallId, usize),
    CopyIn(CallId, usize, Vec<u8>),
    LoadReport(End),
    Describe(Process),
    Fault(Fault),
    Restart(Process),
    Heal(Process, Process),
}

impl Occurrence {
    /// Its kind.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Arrive(_) => "arrive",
            Self::ClientLeaves(_) => "client leaves",
            Self::ToServer(..) => "to server",
            Self::ToClient(..) => "to client",
            Self::ServerLoses(..) => "server loses",
            Self::ClientLoses(..) => "client loses",
            Self::HeardAgain(..) => "heard again",
            Self::Notice(..) => "notice",
            Self::CancelAgain(_) => "cancel again",
            Self::MustBeGone(_) => "must be gone",
            Self::CheckSilence(..) => "check silence",
            Self::Wake(_) => "wake",
            Self::WakeRequest(..) => "wake request",
            Self::Layers(..) => "layers",
            Self::StepEnds(..) => "step ends",
            Self::Digest(..) => "digest",
            Self::CopyOut(..) => "copy out",
            Self::CopyIn(..) => "copy in",
            Self::LoadReport(_) => "load report",
            Self::Describe(_) => "describe",
            Self::Fault(_) => "fault",
            Self::Restart(_) => "restart",
            Self::Heal(..) => "heal",
        }
    }

    /// For a person who follows a history.
    pub(crate) fn describe(&self) -> String {
        let name = self.name();
        match self {
            Self::Arrive(i) | Self::ClientLeaves(i) | Self::WakeRequest(i, _) => {
                format!("{name}: request {i}")
            }
            Self::ToServer(call, message) => format!("{name}: {call:?} {message:?}"),
            Self::ToClient(call, message) => format!("{name}: {call:?} {message:?}"),
            Self::ServerLoses(call, end) | Self::ClientLoses(call, end) => {
                format!("{name}: {call:?} {end:?}")
            }
            Self::HeardAgain(to, call, message) => format!("{name}: {to:?} {call:?} {message:?}"),
            Self::CancelAgain(cancel) => format!("{name}: {cancel:?}"),
            Self::MustBeGone(place) => format!("{name}: {place:?}"),
            Self::CheckSilence(i, call) => format!("{name}: request {i} {call:?}"),
            Self::Notice(to, notice) => format!("{name}: {to:?} {notice:?}"),
            Self::Wake(end) | Self::LoadReport(end) => format!("{name}: {end:?}"),
            Self::Layers(end, progress) => format!("{name}: {end:?} {progress:?}"),
            Self::StepEnds(end, step_id, _) => format!("{name}: {end:?} step {step_id}"),
            Self::Digest(end, job, places) => {
                format!("{name}: {end:?} {job:?} {} slices", places.len())
            }
            Self::CopyOut(call, i) | Self::CopyIn(call, i, _) => {
                format!("{name}: {call:?} slice {i}")
            }
            Self::Describe(process) | Self::Restart(process) => format!("{name}: {process:?}"),
            Self::Fault(fault) => format!("{name}: {:?}", fault.kind),
            Self::Heal(a, b) => format!("{name}: {a:?} {b:?}"),
        }
    }
}
