//! What the router of a history knows of its nodes: descriptions, load reports, and their loss.

use crate::calls::{BREAK_PER_MILLE, LOSS_PER_MILLE};
use crate::coverage::FaultKind;
use crate::decode_host::process_at;
use crate::network::{End, Process};
use crate::occurrence::Occurrence;
use crate::prefill_host;
use crate::world::World;
use tidemill_core::Role;
use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_proto::convert::NodeDescription;
use tidemill_router::membership;
use tidemill_service::discovery::NodeEntry;

/// Least time between two load reports of a node.
const REPORT_GAP_US: u64 = 20_000;

impl World {
    /// Discovery's list never changes: nodes come back at their addresses.
    pub(crate) fn begin_membership(&mut self) {
        let prefills = (0..self.prefills.len()).map(|i| NodeEntry {
            role: Role::Prefill,
            address: prefill_host::address(i),
        });
        let decodes = (0..self.decodes.len()).map(|i| NodeEntry {
            role: Role::Decode,
            address: crate::decode_host::address(i),
        });
        let entries = prefills.chain(decodes).collect();
        self.membership_event(membership::Event::Entries(entries));
    }

    pub(crate) fn membership_event(&mut self, event: membership::Event) {
        let effects = self.router.membership.apply(event, self.now);
        self.do_membership(effects);
    }

    pub(crate) fn do_membership(&mut self, effects: Vec<membership::Effect>) {
        for effect in effects {
            match effect {
                membership::Effect::Describe(entry) => {
                    if let Some(process) = process_at(&entry.address) {
                        let delay = self
                            .network
                            .delay_us(Process::Router, process, &mut self.rng);
                        self.after(2 * delay, Occurrence::Describe(process));
                    }
                }
                membership::Effect::Watch { entry, incarnation } => {
                    self.router.watched.insert(entry.clone(), incarnation);
                    if let Some(process) = process_at(&entry.address) {
                        self.after(100, Occurrence::LoadReport(self.end_of(process)));
                    }
                }
                membership::Effect::Unwatch(entry) => {
                    self.router.watched.remove(&entry);
                }
                membership::Effect::Tell { .. } => {}
            }
        }
        if let Some(at) = self.router.membership.next_wakeup() {
            let at = at.max(self.now.plus_us(1));
            if self
                .router
                .membership_wake_at
                .is_none_or(|planned| at < planned || planned <= self.now)
            {
                self.router.membership_wake_at = Some(at);
                self.schedule
                    .push(at, Occurrence::Describe(Process::Router));
            }
        }
    }

    fn entry_of(&self, process: Process) -> NodeEntry {
        match process {
            Process::Prefill(i) => NodeEntry {
                role: Role::Prefill,
                address: prefill_host::address(i),
            },
            Process::Decode(i) => NodeEntry {
                role: Role::Decode,
                address: crate::decode_host::address(i),
            },
            Process::Router => unreachable!("the router describes others"),
        }
    }

    /// A describe is answered; for the router itself: membership's time has come.
    pub(crate) fn describe(&mut self, process: Process) {
        if !self.router.is_up {
            return;
        }
        if process == Process::Router {
            self.router.membership_wake_at = None;
            return self.membership_event(membership::Event::Tick);
        }
        let is_reached = self.is_running(process)
            && self.network.is_up(Process::Router, process)
            && !self.strikes(FaultKind::DropMessage, LOSS_PER_MILLE, None);
        let result = if is_reached {
            Ok(self.description(process))
        } else {
            Err("nobody answers".to_owned())
        };
        let entry = self.entry_of(process);
        self.membership_event(membership::Event::Described { entry, result });
    }

    fn description(&self, process: Process) -> NodeDescription {
        let (role, index, incarnation) = match process {
            Process::Prefill(i) => (Role::Prefill, i, self.prefills[i].incarnation),
            Process::Decode(i) => (Role::Decode, i, self.decodes[i].incarnation),
            Process::Router => unreachable!("the router describes others"),
        };
        NodeDescription {
            node_id: tidemill_core::NodeId::new(format!("{}-{index}", role.name())).expect("valid"),
            incarnation,
            role,
            model_name: "simulated".into(),
            model_fingerprint: self.layout.model_fingerprint,
            text_fingerprint: [2; 32],
            layout_fingerprint: self.layout.fingerprint(),
            protocol_revision: PROTOCOL_REVISION,
            vocab_size: prefill_host::facts(&self.layout).vocab_size,
            context_length: prefill_host::facts(&self.layout).context_length,
            endpoints: Vec::new(),
            version: "simulated".into(),
        }
    }

    /// Load reports flow a while after something has changed, never in a flood.
    pub(crate) fn report_load_soon(&mut self, end: End) {
        let reported_at = match end.process {
            Process::Prefill(i) => &mut self.prefills[i].reported_at,
            Process::Decode(i) => &mut self.decodes[i].reported_at,
            Process::Router => return,
        };
        if *reported_at <= self.now {
            *reported_at = self.now.plus_us(REPORT_GAP_US);
            self.schedule
                .push(*reported_at, Occurrence::LoadReport(end));
        }
    }

    pub(crate) fn report_load(&mut self, process: Process) {
        let entry = self.entry_of(process);
        let is_watched = self.router.is_up && self.router.watched.contains_key(&entry);
        if !is_watched || !self.network.is_up(Process::Router, process) {
            return;
        }
        // What a node that stands still would say is what it has said before.
        if self.stands_until(process) > self.now {
            return;
        }
        if self.strikes(FaultKind::DropMessage, BREAK_PER_MILLE, None) {
            return self.end_watch(process);
        }
        let report = match process {
            Process::Prefill(i) => self.prefills[i]
                .core
                .as_mut()
                .map(|core| core.load_report()),
            Process::Decode(i) => self.decodes[i].core.as_mut().map(|core| core.load_report()),
            Process::Router => None,
        };
        if let Some(report) = report {
            self.membership_event(membership::Event::Reported { entry, report });
        }
    }

    /// The router's watches of a process end.
    pub(crate) fn end_watch(&mut self, process: Process) {
        let entry = self.entry_of(process);
        if let Some(incarnation) = self.router.watched.remove(&entry)
            && self.router.is_up
        {
            self.membership_event(membership::Event::WatchEnded { entry, incarnation });
        }
    }
}
