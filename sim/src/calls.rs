//! Calls between processes, and how they go wrong as gRPC's do.
//!
//! TCP keeps the order and the wholeness of a stream, so within one no message is lost, doubled or overtaken: the
//! stream breaks, after any message, and each side hears of it in its own time. A question with one answer (rebind,
//! renew) can be lost on its way there, or be heard while its answer is lost; its client waits for its deadline. It
//! can also be heard twice, as when somebody between repeats it; its client hears the first answer. A connection
//! breaks with every call on it (`fault`: cut links and crashes). Load reports are told at once: they promise nothing.

use crate::coverage::FaultKind;
use crate::message::{ToClient, ToServer};
use crate::network::{End, Process};
use crate::occurrence::Occurrence;
use crate::world::World;
use tidemill_core::{CallId, Timestamp};
use tidemill_decode_node::node as decode;
use tidemill_prefill_node::node as prefill;

/// How often a message of a stream breaks it while messages are lost, per mille.
pub(crate) const BREAK_PER_MILLE: u64 = 40;
/// How often a question, or an answer to one, is lost or doubled at such a time, per mille.
pub(crate) const LOSS_PER_MILLE: u64 = 400;
/// Until a client gives up a connection that does not come about.
const CONNECT_US_MAX: u64 = 2_000_000;

impl World {
    /// Opens a call. Nobody there, or a cut link: the client hears of it later.
    pub(crate) fn open_call(
        &mut self,
        client: Process,
        server: Process,
        message: ToServer,
    ) -> CallId {
        let ends = (self.end_of(client), self.end_of(server));
        let about = message.request_id();
        let (call, at) = self.network.open(ends, about, self.now, &mut self.rng);
        if !self.is_running(server) {
            let delay = self.rng.between(50, 2_000);
            self.after(delay, Occurrence::ClientLoses(call, ends.0));
        } else if !self.network.is_up(client, server) {
            self.after(CONNECT_US_MAX, Occurrence::ClientLoses(call, ends.0));
        } else if let Some(answer_us_max) = message.answer_us_max() {
            self.ask(call, at, message, answer_us_max);
        } else if self.strikes(FaultKind::DropMessage, BREAK_PER_MILLE, about) {
            self.break_call(call);
        } else {
            self.schedule
                .push(at, Occurrence::ToServer(call, Box::new(message)));
        }
        call
    }

    /// Sends a question, which may be lost and doubled.
    fn ask(&mut self, call: CallId, at: Timestamp, message: ToServer, answer_us_max: u64) {
        let Some(open) = self.network.call(call) else {
            return;
        };
        let about = message.request_id();
        if self.strikes(FaultKind::DropMessage, LOSS_PER_MILLE, about) {
            self.after(answer_us_max, Occurrence::ClientLoses(call, open.client));
            return;
        }
        if self.strikes(FaultKind::DuplicateMessage, LOSS_PER_MILLE, about) {
            let later = at.plus_us(self.rng.between(1, 3_000_000));
            let unheard = self.network.unheard();
            let again =
                Occurrence::HeardAgain(open.server.process, unheard, Box::new(message.clone()));
            self.schedule.push(later, again);
        }
        self.schedule
            .push(at, Occurrence::ToServer(call, Box::new(message)));
    }

    /// Sends an answer; into nowhere when the call is over.
    pub(crate) fn answer(&mut self, call: CallId, message: ToClient) {
        let Some(open) = self.network.call(call) else {
            return;
        };
        self.check_cached(open, &message);
        if message.answers_question() {
            if self.strikes(FaultKind::DropMessage, LOSS_PER_MILLE, open.about) {
                // Longer than any client waits for an answer.
                self.after(5_000_000, Occurrence::ClientLoses(call, open.client));
                return;
            }
        } else if self.strikes(FaultKind::DropMessage, BREAK_PER_MILLE, open.about) {
            self.break_call(call);
            return;
        }
        if let Some(at) = self.network.reach_client(call, self.now, &mut self.rng) {
            self.schedule
                .push(at, Occurrence::ToClient(call, Box::new(message)));
        }
    }

    /// The client listens no more.
    pub(crate) fn leave_call(&mut self, call: CallId) {
        let Some(open) = self.network.call(call) else {
            return;
        };
        if let Some(at) = self.network.leave(call, self.now, &mut self.rng) {
            self.schedule
                .push(at, Occurrence::ServerLoses(call, open.server));
        }
    }

    /// The connection under a call breaks, or the call alone; each side hears of it in its own time.
    pub(crate) fn break_call(&mut self, call: CallId) {
        let Some(open) = self.network.close(call) else {
            return;
        };
        let delay = self.break_delay_us();
        self.after(delay, Occurrence::ServerLoses(call, open.server));
        if !open.client_gone {
            let delay = self.break_delay_us();
            self.after(delay, Occurrence::ClientLoses(call, open.client));
        }
    }

    /// A reset is heard at once, a silent loss by the missing PING.
    fn break_delay_us(&mut self) -> u64 {
        if self.rng.chance(700) {
            self.rng.between(20, 2_000)
        } else {
            self.rng.between(1_000_000, 10_000_000)
        }
    }

    pub(crate) fn reach_server(&mut self, call: CallId, message: ToServer) {
        let Some(open) = self.network.call(call) else {
            return;
        };
        self.hear(open.server.process, call, message);
    }

    /// A process hears a question or the request of a stream.
    pub(crate) fn hear(&mut self, process: Process, call: CallId, message: ToServer) {
        match process {
            Process::Prefill(i) => self.ask_prefill(i, call, message),
            Process::Decode(i) => self.ask_decode(i, call, message),
            Process::Router => {}
        }
    }

    pub(crate) fn reach_client(&mut self, call: CallId, message: ToClient) {
        let Some(open) = self.network.call(call) else {
            return;
        };
        if message.is_last() {
            self.network.close(call);
            // The server hears of the end of its own answer too, as a no-op.
            self.after(10, Occurrence::ServerLoses(call, open.server));
        }
        if open.client_gone {
            return;
        }
        match open.client.process {
            Process::Router => self.answer_router(call, message),
            Process::Decode(i) => self.answer_decode(i, call, message),
            Process::Prefill(_) => {}
        }
    }

    pub(crate) fn server_loses(&mut self, call: CallId, server: End) {
        self.network.close(call);
        if !self.is_alive(server) {
            return;
        }
        match server.process {
            Process::Prefill(i) => {
                self.end_lent_read(i, call);
                self.prefill_event(i, prefill::Event::CallEnded { call });
            }
            Process::Decode(i) => {
                self.decode_event(i, decode::Event::CallEnded { call });
                self.check_abandoned(i, call);
            }
            Process::Router => {}
        }
    }

    pub(crate) fn client_loses(&mut self, call: CallId, client: End) {
        self.network.close(call);
        if !self.is_alive(client) {
            return;
        }
        match client.process {
            Process::Router => self.router_loses(call),
            Process::Decode(i) => self.decode_loses(i, call),
            Process::Prefill(_) => {}
        }
    }
}
