//! Joining, being refused, failing and coming back, as lists of events.

use super::*;
use crate::placement::SplitPolicy;
use tidemill_core::NodeId;

const TEXT: [u8; 32] = [4; 32];

fn entry(role: Role, name: &str) -> NodeEntry {
    NodeEntry {
        role,
        address: format!("local:{name}"),
    }
}

fn description(entry: &NodeEntry, incarnation: u128) -> NodeDescription {
    NodeDescription {
        node_id: NodeId::new(entry.address.trim_start_matches("local:")).expect("valid"),
        incarnation: Incarnation(incarnation),
        role: entry.role,
        model_name: "m".into(),
        model_fingerprint: [1; 32],
        text_fingerprint: TEXT,
        layout_fingerprint: [2; 16],
        protocol_revision: PROTOCOL_REVISION,
        vocab_size: 100,
        context_length: 64,
        endpoints: vec![],
        version: "0".into(),
    }
}

fn load_report(entry: &NodeEntry, sequence_number: u64, queued_tokens: u64) -> LoadReport {
    LoadReport {
        node_id: NodeId::new(entry.address.trim_start_matches("local:")).expect("valid"),
        incarnation: Incarnation(1),
        role: entry.role,
        sequence_number,
        n_waiting: 0,
        n_running: 1,
        queued_tokens,
        n_blocks: 10,
        n_blocks_free: 5,
        n_blocks_leased: 0,
        draining: false,
    }
}

struct Rig {
    membership: Membership,
    now: Timestamp,
}

impl Rig {
    fn new() -> Self {
        let config = MembershipConfig {
            text_fingerprint: TEXT,
            split: SplitPolicy::Require,
        };
        Self {
            membership: Membership::new(config),
            now: Timestamp(1),
        }
    }

    /// A router with one pair.
    fn pair() -> (Self, NodeEntry, NodeEntry) {
        let mut rig = Self::new();
        let (prefill, decode) = (entry(Role::Prefill, "p0"), entry(Role::Decode, "d0"));
        rig.apply(Event::Entries(vec![prefill.clone(), decode.clone()]));
        rig.describe(&prefill, 1);
        rig.describe(&decode, 1);
        (rig, prefill, decode)
    }

    fn apply(&mut self, event: Event) -> Vec<Effect> {
        self.membership.apply(event, self.now)
    }

    fn describe(&mut self, entry: &NodeEntry, incarnation: u128) -> Vec<Effect> {
        self.apply(Event::Described {
            entry: entry.clone(),
            result: Ok(description(entry, incarnation)),
        })
    }

    fn names(&self) -> Vec<String> {
        let candidates = self.membership.candidates();
        candidates
            .iter()
            .map(|c| c.target.node_id.to_string())
            .collect()
    }

    fn target(&self, name: &str) -> Target {
        let candidates = self.membership.candidates();
        let known = candidates
            .into_iter()
            .find(|c| c.target.node_id.as_str() == name);
        known.expect("a candidate").target
    }

    fn fail(&mut self, target: &Target, n_times: usize) -> Vec<Effect> {
        (0..n_times)
            .flat_map(|_| self.membership.report(target, Outcome::Failed, self.now))
            .collect()
    }

    /// Moves to the next wake-up and takes its effects.
    fn wake(&mut self) -> Vec<Effect> {
        self.now = self.membership.next_wakeup().expect("something is due");
        self.apply(Event::Tick)
    }
}

#[test]
fn a_node_is_asked_checked_and_watched_before_it_works() {
    let mut rig = Rig::new();
    assert_eq!(
        rig.membership.missing().as_deref(),
        Some("no usable prefill node")
    );
    let prefill = entry(Role::Prefill, "p0");
    let effects = rig.apply(Event::Entries(vec![prefill.clone()]));
    assert_eq!(effects, [Effect::Describe(prefill.clone())]);
    assert!(rig.names().is_empty());
    let effects = rig.describe(&prefill, 1);
    let watch = Effect::Watch {
        entry: prefill.clone(),
        incarnation: Incarnation(1),
    };
    assert!(effects.contains(&watch), "{effects:?}");
    assert_eq!(rig.names(), ["p0"]);
    assert_eq!(
        rig.membership.missing().as_deref(),
        Some("no usable decode node")
    );
}

#[test]
fn a_node_that_fits_none_of_the_other_role_is_told_of() {
    let (mut rig, prefill, decode) = Rig::pair();
    let unpaired = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Tell {
                change: Change::Unpaired(reason),
                ..
            } => Some(reason.clone()),
            _ => None,
        })
    };
    let mut other = description(&decode, 2);
    other.layout_fingerprint = [9; 16];
    let mut join = |entry: &NodeEntry, it: NodeDescription| {
        let (entry, result) = (entry.clone(), Ok(it));
        unpaired(&rig.apply(Event::Described { entry, result }))
    };
    let reason = join(&decode, other).expect("no pair is left");
    assert!(reason.contains("prefill node p0 in KV layout"), "{reason}");
    let mut other = description(&prefill, 3);
    other.model_fingerprint = [9; 32];
    let reason = join(&prefill, other).expect("no pair is left");
    assert!(reason.contains("decode node d0 in model"), "{reason}");
    let mut same = description(&prefill, 4);
    same.layout_fingerprint = [9; 16];
    assert_eq!(join(&prefill, same), None);
}

#[test]
fn a_pair_makes_the_router_ready() {
    let (rig, ..) = Rig::pair();
    assert_eq!(rig.membership.missing(), None);
}

#[test]
fn what_does_not_fit_is_refused_with_its_reason_and_asked_again() {
    let prefill = entry(Role::Prefill, "p0");
    let spoil: [fn(&mut NodeDescription); 3] = [
        |d| d.text_fingerprint = [0; 32],
        |d| d.protocol_revision += 1,
        |d| d.role = Role::Decode,
    ];
    for spoil in spoil {
        let mut rig = Rig::new();
        rig.apply(Event::Entries(vec![prefill.clone()]));
        let mut bad = description(&prefill, 1);
        spoil(&mut bad);
        let effects = rig.apply(Event::Described {
            entry: prefill.clone(),
            result: Ok(bad),
        });
        let is_told = matches!(
            &effects[..],
            [Effect::Tell {
                change: Change::Refused(_),
                ..
            }]
        );
        assert!(is_told, "{effects:?}");
        assert!(rig.names().is_empty());
        assert_eq!(rig.wake(), [Effect::Describe(prefill.clone())]);
    }
}

#[test]
fn two_nodes_of_one_name_are_not_both_used() {
    let (mut rig, prefill, decode) = Rig::pair();
    let other = entry(Role::Prefill, "p9");
    rig.apply(Event::Entries(vec![prefill.clone(), decode, other.clone()]));
    rig.apply(Event::Described {
        entry: other,
        result: Ok(description(&prefill, 9)),
    });
    assert_eq!(rig.names(), ["p0", "d0"]);
}

#[test]
fn an_unreachable_node_is_asked_with_a_growing_bounded_pause() {
    let mut rig = Rig::new();
    let prefill = entry(Role::Prefill, "p0");
    rig.apply(Event::Entries(vec![prefill.clone()]));
    let mut pauses = vec![];
    let mut n_told = 0;
    for _ in 0..9 {
        let effects = rig.apply(Event::Described {
            entry: prefill.clone(),
            result: Err("connection refused".into()),
        });
        n_told += effects.len();
        let before = rig.now;
        rig.wake();
        pauses.push(rig.now.since_us(before));
    }
    assert_eq!(&pauses[..3], [250_000, 500_000, 1_000_000]);
    assert_eq!(pauses.last(), Some(&10_000_000));
    assert_eq!(n_told, 1, "the same reason is told once");
}

#[test]
fn an_answer_that_never_comes_is_asked_for_again() {
    let mut rig = Rig::new();
    let prefill = entry(Role::Prefill, "p0");
    rig.apply(Event::Entries(vec![prefill.clone()]));
    assert_eq!(rig.wake(), [Effect::Describe(prefill)]);
}

#[test]
fn an_old_report_changes_nothing() {
    let (mut rig, prefill, _) = Rig::pair();
    for (number, queued) in [(2, 20), (1, 10)] {
        rig.apply(Event::Reported {
            entry: prefill.clone(),
            report: load_report(&prefill, number, queued),
        });
    }
    assert_eq!(rig.membership.candidates()[0].queued_tokens, 20);
}

#[test]
fn a_report_of_another_life_makes_the_router_ask() {
    let (mut rig, prefill, _) = Rig::pair();
    let mut report = load_report(&prefill, 1, 0);
    report.incarnation = Incarnation(2);
    let effects = rig.apply(Event::Reported {
        entry: prefill.clone(),
        report,
    });
    assert_eq!(effects, [Effect::Describe(prefill.clone())]);
    let effects = rig.describe(&prefill, 2);
    assert!(effects.iter().any(|e| matches!(e, Effect::Watch { .. })));
    assert_eq!(rig.target("p0").incarnation, Incarnation(2));
}

#[test]
fn a_draining_node_gets_no_new_work() {
    let (mut rig, prefill, _) = Rig::pair();
    let mut report = load_report(&prefill, 1, 0);
    report.draining = true;
    rig.apply(Event::Reported {
        entry: prefill,
        report,
    });
    assert_eq!(rig.names(), ["d0"]);
}

#[test]
fn a_lost_watch_takes_the_node_out_until_it_answers_again() {
    let (mut rig, prefill, _) = Rig::pair();
    let ended = |incarnation| Event::WatchEnded {
        entry: prefill.clone(),
        incarnation: Incarnation(incarnation),
    };
    assert!(rig.apply(ended(9)).is_empty(), "an old watch says nothing");
    let effects = rig.apply(ended(1));
    assert!(effects.contains(&Effect::Describe(prefill.clone())));
    assert_eq!(rig.names(), ["d0"]);
    let effects = rig.describe(&prefill, 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::Watch { .. })));
    assert_eq!(rig.names(), ["p0", "d0"]);
}

#[test]
fn an_outlier_is_ejected_probed_and_let_back_in_one_request_at_a_time() {
    let (mut rig, prefill, _) = Rig::pair();
    let target = rig.target("p0");
    assert!(rig.fail(&target, 2).is_empty());
    let effects = rig.fail(&target, 1);
    assert!(matches!(
        &effects[..],
        [Effect::Tell {
            change: Change::Ejected(1_000_000),
            ..
        }]
    ));
    assert_eq!(rig.names(), ["d0"]);
    assert_eq!(rig.wake(), [Effect::Describe(prefill.clone())]);
    rig.describe(&prefill, 1);
    assert_eq!(rig.names(), ["p0", "d0"], "on probation");
    let booking = rig.membership.book(&target, 1, rig.now).expect("known");
    assert_eq!(rig.names(), ["d0"], "one at a time");
    rig.membership.unbook(booking);
    let effects = rig.fail(&target, 1);
    assert!(matches!(
        &effects[..],
        [Effect::Tell {
            change: Change::Ejected(2_000_000),
            ..
        }]
    ));
    rig.wake();
    rig.describe(&prefill, 1);
    rig.membership.report(&target, Outcome::Served, rig.now);
    let _booking = rig.membership.book(&target, 1, rig.now).expect("known");
    assert_eq!(rig.names(), ["p0", "d0"], "trusted again");
}

#[test]
fn a_served_request_forgives_and_an_old_life_is_nobody() {
    let (mut rig, ..) = Rig::pair();
    let target = rig.target("d0");
    for _ in 0..5 {
        rig.fail(&target, 2);
        rig.membership.report(&target, Outcome::Served, rig.now);
    }
    let old = Target {
        incarnation: Incarnation(77),
        ..target
    };
    rig.fail(&old, 5);
    assert_eq!(rig.names(), ["p0", "d0"]);
    assert_eq!(rig.membership.book(&old, 1, rig.now), None);
}

#[test]
fn bookings_count_until_a_report_knows_them_and_end_exactly() {
    let (mut rig, prefill, _) = Rig::pair();
    let target = rig.target("p0");
    let report = |rig: &mut Rig, number| {
        rig.apply(Event::Reported {
            entry: prefill.clone(),
            report: load_report(&prefill, number, 7),
        });
    };
    let first = rig.membership.book(&target, 100, rig.now).expect("known");
    report(&mut rig, 1);
    assert_eq!(
        rig.membership.candidates()[0].queued_tokens,
        107,
        "too young to know"
    );
    rig.now = rig.now.plus_us(100_000);
    report(&mut rig, 2);
    let candidate = &rig.membership.candidates()[0];
    assert_eq!((candidate.queued_tokens, candidate.n_open), (7, 1));
    rig.membership.unbook(first);
    rig.membership.unbook(first);
    assert_eq!(rig.membership.candidates()[0].n_open, 0);
    assert_eq!(rig.membership.n_booked(), 0);
}

#[test]
fn a_booking_of_an_old_life_does_not_touch_the_new_one() {
    let (mut rig, prefill, _) = Rig::pair();
    let target = rig.target("p0");
    let old = rig.membership.book(&target, 100, rig.now).expect("known");
    rig.describe(&prefill, 2);
    let new = rig.target("p0");
    rig.membership.book(&new, 5, rig.now).expect("known");
    rig.membership.unbook(old);
    assert_eq!(rig.membership.candidates()[0].queued_tokens, 5);
}

#[test]
fn what_discovery_drops_is_dropped() {
    let (mut rig, prefill, decode) = Rig::pair();
    let booking = rig
        .membership
        .book(&rig.target("p0"), 1, rig.now)
        .expect("known");
    let effects = rig.apply(Event::Entries(vec![decode]));
    assert!(effects.contains(&Effect::Unwatch(prefill)));
    assert_eq!(rig.names(), ["d0"]);
    rig.membership.unbook(booking);
    assert_eq!(rig.membership.n_booked(), 0);
}
