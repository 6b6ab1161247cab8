use super::*;
use tidemill_core::KvDtype;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::{Epoch, NodeId};

const REQUEST: RequestId = RequestId(1);
const CAPABILITY: Capability = Capability(77);
const IMPORTER: Incarnation = Incarnation(5);
const FIRST: Epoch = Epoch(1);

/// Two layer groups, 16 positions a block.
fn layout() -> KvLayout {
    let mut layout = KvLayout::new([1; 32], 2, 1, 8, KvDtype::F16).expect("valid");
    layout.group_layers = 1;
    layout
}

fn token(token: u32) -> SampledToken {
    SampledToken {
        token,
        output_idx: 0,
        logprob: None,
        top: Vec::new(),
        logits_digest: None,
    }
}

fn slice(ordinal: u32, group: u32) -> Slice {
    Slice {
        ordinal,
        group: LayerGroupIdx(group),
    }
}

fn digest_of(slice: Slice) -> Digest {
    Digest(u64::from(slice.ordinal) * 100 + u64::from(slice.group.0))
}

fn lease(epoch: Epoch) -> LeaseRef {
    LeaseRef {
        request_id: REQUEST,
        capability: CAPABILITY,
        epoch,
    }
}

fn claim() -> Claim {
    Claim {
        request_id: REQUEST,
        capability: CAPABILITY,
        epoch: FIRST,
        importer: NodeId::new("decode-0").expect("valid"),
        importer_incarnation: IMPORTER,
        layout_fingerprint: layout().fingerprint(),
        deadline: Timestamp(u64::MAX),
    }
}

fn ask(slices: Vec<Slice>) -> ReadAsk {
    ReadAsk {
        request_id: REQUEST,
        capability: CAPABILITY,
        epoch: FIRST,
        importer: IMPORTER,
        slices,
    }
}

/// An export of `n_tokens` whose blocks are 10, 11, ...
fn open(n_tokens: u32) -> ExportTable {
    let mut table = ExportTable::new(layout());
    table.open(REQUEST, CAPABILITY, n_tokens, Timestamp(0));
    let blocks: Vec<BlockIdx> = (0..layout().n_blocks_for(n_tokens))
        .map(|i| BlockIdx(10 + i))
        .collect();
    table.set_blocks(REQUEST, &blocks);
    table
}

fn finish_group(table: &mut ExportTable, group: u32, n_tokens: u32) -> Vec<ExportEvent> {
    let places = table.layers_done(REQUEST, LayerGroupIdx(group), n_tokens);
    let digests: Vec<(Slice, Digest)> = places
        .iter()
        .map(|place| (place.slice, digest_of(place.slice)))
        .collect();
    table.digested(REQUEST, &digests)
}

/// Computed, digested and complete at time 100.
fn whole(n_tokens: u32) -> ExportTable {
    let mut table = open(n_tokens);
    for group in 0..2 {
        finish_group(&mut table, group, n_tokens);
    }
    table.complete(REQUEST, token(9), Timestamp(100));
    table.audit().expect("sound");
    table
}

#[test]
fn slices_become_final_block_by_block_and_the_tail_with_the_last_token() {
    let mut table = open(20);
    let group = LayerGroupIdx(0);
    assert!(table.layers_done(REQUEST, group, 15).is_empty());
    let first = table.layers_done(REQUEST, group, 16);
    assert_eq!(
        first,
        [SlicePlace {
            slice: slice(0, 0),
            block: BlockIdx(10)
        }]
    );
    assert!(
        table.layers_done(REQUEST, group, 19).is_empty(),
        "told before"
    );
    let tail = table.layers_done(REQUEST, group, 20);
    assert_eq!(tail[0].slice, slice(1, 0));
    assert_eq!(tail[0].block, BlockIdx(11));
    assert!(table.layers_done(REQUEST, group, 20).is_empty());
}

#[test]
fn complete_comes_last_whichever_of_token_and_digests_is_later() {
    let mut table = open(16);
    table.claim(&claim(), Timestamp(1)).expect("live");
    let events = finish_group(&mut table, 0, 16);
    assert_eq!(
        events,
        [ExportEvent::SlicesFinal(vec![(
            slice(0, 0),
            digest_of(slice(0, 0))
        )])]
    );
    assert!(table.complete(REQUEST, token(9), Timestamp(2)).is_empty());
    let events = finish_group(&mut table, 1, 16);
    let expected = Complete {
        n_tokens: 16,
        digest: digest_of_digests([Digest(0), Digest(1)].into_iter()),
        first_token: token(9),
    };
    assert_eq!(events.len(), 2);
    assert_eq!(events[1], ExportEvent::Complete(expected));

    // The other order.
    let mut table = open(16);
    finish_group(&mut table, 0, 16);
    assert_eq!(finish_group(&mut table, 1, 16).len(), 1);
    let events = table.complete(REQUEST, token(9), Timestamp(2));
    assert!(matches!(events[..], [ExportEvent::Complete(_)]));
}

#[test]
fn the_digest_of_digests_is_xxh3_over_little_endian_words() {
    let bytes: Vec<u8> = [3_u64, 5]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let expected = Digest(xxhash_rust::xxh3::xxh3_64(&bytes));
    assert_eq!(
        digest_of_digests([Digest(3), Digest(5)].into_iter()),
        expected
    );
}

#[test]
fn a_late_or_second_claim_hears_everything_it_missed() {
    let mut table = whole(40);
    for at in [200, 300] {
        let events = table.claim(&claim(), Timestamp(at)).expect("live");
        assert!(matches!(
            events[0],
            ExportEvent::Claimed { n_tokens: 40, expires_at } if expires_at == Timestamp(at + LEASE_TTL_US)
        ));
        let ExportEvent::SlicesFinal(slices) = &events[1] else {
            panic!("{events:?}")
        };
        assert_eq!(slices.len(), 6);
        assert!(events[2].is_last());
    }
}

#[test]
fn announcements_have_a_bounded_length() {
    let n_tokens = 16 * 5000;
    let mut table = whole(n_tokens);
    let events = table.claim(&claim(), Timestamp(200)).expect("live");
    let lengths: Vec<usize> = events
        .iter()
        .filter_map(|event| match event {
            ExportEvent::SlicesFinal(slices) => Some(slices.len()),
            _ => None,
        })
        .collect();
    assert_eq!(lengths, [8192, 1808]);
}

#[test]
fn a_claim_without_a_right_is_refused() {
    let mut table = whole(16);
    let gone = |claim: Claim, table: &mut ExportTable| {
        let failure = table.claim(&claim, Timestamp(200)).expect_err("no right");
        assert_eq!(failure.code, FailureCode::Gone, "{failure}");
    };
    gone(
        Claim {
            capability: Capability(78),
            ..claim()
        },
        &mut table,
    );
    gone(
        Claim {
            epoch: Epoch(2),
            ..claim()
        },
        &mut table,
    );
    gone(
        Claim {
            request_id: RequestId(2),
            ..claim()
        },
        &mut table,
    );
    table.claim(&claim(), Timestamp(200)).expect("live");
    gone(
        Claim {
            importer_incarnation: Incarnation(6),
            ..claim()
        },
        &mut table,
    );
    let other_layout = Claim {
        layout_fingerprint: [0; 16],
        ..claim()
    };
    let failure = table
        .claim(&other_layout, Timestamp(200))
        .expect_err("differs");
    assert_eq!(failure.code, FailureCode::InvalidRequest);
    assert!(failure.message.contains("layout_fingerprint"));
    let late = Claim {
        deadline: Timestamp(200),
        ..claim()
    };
    let failure = table.claim(&late, Timestamp(200)).expect_err("late");
    assert_eq!(failure.code, FailureCode::DeadlineExceeded);
}

/// B112: nobody ever claims.
#[test]
fn an_unclaimed_lease_ends_at_its_time_and_a_late_claim_is_gone() {
    let mut table = whole(16);
    let end = Timestamp(100 + LEASE_TTL_US);
    assert_eq!(table.next_deadline(), Some(end));
    assert!(table.expire(Timestamp(end.0 - 1)).is_empty());
    // Late by time, though nobody has swept yet.
    let failure = table.claim(&claim(), end).expect_err("late");
    assert_eq!(failure.code, FailureCode::Gone);
    assert_eq!(table.expire(end), [REQUEST]);
    assert!(table.is_empty());
    assert_eq!(table.next_deadline(), None);
}

#[test]
fn a_lease_does_not_run_out_while_its_prompt_is_computed() {
    let mut table = open(16);
    let late = Timestamp(10 * LEASE_TTL_US);
    assert_eq!(table.next_deadline(), None);
    assert!(table.expire(late).is_empty());
    table.claim(&claim(), late).expect("still computed");
}

/// B005: the leases of queued importers are renewed before they claim.
#[test]
fn renewing_moves_the_end_for_queued_importers_too() {
    let mut table = whole(16);
    let half = Timestamp(100 + LEASE_TTL_US / 2);
    let unknown = LeaseRef {
        request_id: RequestId(2),
        ..lease(FIRST)
    };
    let (gone, expires_at) = table.renew(IMPORTER, &[lease(FIRST), unknown], half);
    assert_eq!(gone, [RequestId(2)]);
    assert_eq!(expires_at, half.plus_us(LEASE_TTL_US));
    assert!(table.expire(Timestamp(100 + LEASE_TTL_US)).is_empty());
    assert_eq!(table.next_deadline(), Some(expires_at));
    // Once bound, only its importer renews.
    table.claim(&claim(), half).expect("live");
    let (gone, _) = table.renew(Incarnation(6), &[lease(FIRST)], half);
    assert_eq!(gone, [REQUEST]);
}

#[test]
fn a_release_is_idempotent_and_needs_the_right() {
    let mut table = whole(16);
    let wrong = LeaseRef {
        capability: Capability(1),
        ..lease(FIRST)
    };
    assert!(!table.release(&wrong));
    assert!(!table.release(&lease(Epoch(2))));
    assert!(table.release(&lease(FIRST)));
    assert!(!table.release(&lease(FIRST)));
    assert!(table.is_empty());
    // What the computation still tells of it changes nothing.
    table.set_blocks(REQUEST, &[BlockIdx(1)]);
    assert!(table.layers_done(REQUEST, LayerGroupIdx(0), 16).is_empty());
    assert!(
        table
            .digested(REQUEST, &[(slice(0, 0), Digest(1))])
            .is_empty()
    );
    assert!(table.complete(REQUEST, token(1), Timestamp(5)).is_empty());
}

#[test]
fn a_rebind_moves_the_right_to_another_importer() {
    let mut table = whole(16);
    table.claim(&claim(), Timestamp(200)).expect("live");
    assert_eq!(table.rebind(&lease(Epoch(2)), Timestamp(300)), Ok(()));
    let failure = table
        .read(&ask(vec![slice(0, 0)]), ReadId(1), Timestamp(301))
        .expect_err("void");
    assert_eq!(failure.code, FailureCode::Gone);
    assert!(
        !table.release(&lease(FIRST)),
        "the former epoch ends nothing"
    );
    let second = Claim {
        epoch: Epoch(2),
        importer_incarnation: Incarnation(6),
        ..claim()
    };
    let events = table.claim(&second, Timestamp(302)).expect("rebound");
    assert_eq!(events.len(), 3);
    let repeated = table.rebind(&lease(Epoch(2)), Timestamp(303));
    assert_eq!(
        repeated.expect_err("not higher").code,
        FailureCode::InvalidRequest
    );
}

#[test]
fn a_read_needs_right_and_announcement_and_is_all_or_nothing() {
    let mut table = open(32);
    finish_group(&mut table, 0, 16);
    let mut ask_at = |ask: &ReadAsk| table.read(ask, ReadId(1), Timestamp(1));
    let code = |result: Result<ReadGrant, Failure>| result.expect_err("refused").code;
    let one = ask(vec![slice(0, 0)]);
    assert_eq!(code(ask_at(&one)), FailureCode::Gone, "not claimed");

    table.claim(&claim(), Timestamp(1)).expect("live");
    let mut ask_at = |ask: &ReadAsk| table.read(ask, ReadId(1), Timestamp(1));
    for bad in [
        ask(vec![]),
        ask(vec![slice(0, 0), slice(0, 1)]),
        ask(vec![slice(2, 0)]),
        ask(vec![slice(0, 2)]),
        ask(vec![slice(u32::MAX, u32::MAX)]),
        ask(vec![slice(0, 0); READ_SLICES_MAX + 1]),
    ] {
        assert_eq!(code(ask_at(&bad)), FailureCode::InvalidRequest, "{bad:?}");
    }
    let stranger = ReadAsk {
        importer: Incarnation(6),
        ..one.clone()
    };
    assert_eq!(code(ask_at(&stranger)), FailureCode::Gone);
    let guess = ReadAsk {
        capability: Capability(1),
        ..one.clone()
    };
    assert_eq!(code(ask_at(&guess)), FailureCode::Gone);
    assert_eq!(table.n_reads(), 0, "a refusal leaves nothing");

    let grant = table.read(&one, ReadId(1), Timestamp(1)).expect("right");
    assert_eq!(grant.places[0].block, BlockIdx(10));
    assert!(table.end_read(ReadId(1)));
    assert!(!table.end_read(ReadId(1)));
}

/// B041: a cancel ends the lease, not the read that is in flight.
#[test]
fn a_read_outlives_its_lease() {
    let mut table = whole(40);
    table.claim(&claim(), Timestamp(200)).expect("live");
    let grant = table
        .read(
            &ask(vec![slice(2, 1), slice(0, 0), slice(2, 0)]),
            ReadId(4),
            Timestamp(201),
        )
        .expect("right");
    let order: Vec<u32> = grant.places.iter().map(|p| p.block.0).collect();
    assert_eq!(order, [12, 10, 12], "in the order asked");
    assert_eq!(grant.distinct_blocks().len(), 2);
    assert!(table.cancel(REQUEST));
    assert!(!table.cancel(REQUEST));
    assert!(!table.is_empty(), "somebody still reads");
    let failure = table
        .read(&ask(vec![slice(0, 0)]), ReadId(5), Timestamp(202))
        .expect_err("ended");
    assert_eq!(failure.code, FailureCode::Gone);
    assert!(table.end_read(ReadId(4)));
    assert!(table.is_empty());
}

#[test]
fn reads_of_one_lease_are_bounded() {
    let mut table = whole(16);
    table.claim(&claim(), Timestamp(200)).expect("live");
    let one = ask(vec![slice(0, 0)]);
    for read in 0..u64::from(READS_PER_LEASE_MAX) {
        table
            .read(&one, ReadId(read), Timestamp(201))
            .expect("room");
    }
    let failure = table
        .read(&one, ReadId(1000), Timestamp(201))
        .expect_err("full");
    assert_eq!(failure.code, FailureCode::Overloaded);
    assert!(table.end_read(ReadId(0)));
    table
        .read(&one, ReadId(1000), Timestamp(201))
        .expect("room again");
}

#[test]
fn only_finished_exports_count_as_leased() {
    let mut table = open(40);
    assert_eq!(table.n_blocks(), 0);
    for group in 0..2 {
        finish_group(&mut table, group, 40);
    }
    table.complete(REQUEST, token(1), Timestamp(1));
    assert_eq!(table.n_blocks(), 3);
    // A second lease on a shared first block.
    table.open(RequestId(2), Capability(1), 20, Timestamp(1));
    table.set_blocks(RequestId(2), &[BlockIdx(10), BlockIdx(30)]);
    table.complete(RequestId(2), token(1), Timestamp(1));
    assert_eq!(table.n_blocks(), 4);
}

#[test]
fn the_block_list_only_grows() {
    let mut table = ExportTable::new(layout());
    table.open(REQUEST, CAPABILITY, 20, Timestamp(0));
    table.set_blocks(REQUEST, &[BlockIdx(3)]);
    // A table may be longer than the prompt: its next block takes the first token.
    table.set_blocks(REQUEST, &[BlockIdx(3), BlockIdx(4), BlockIdx(5)]);
    let places = table.layers_done(REQUEST, LayerGroupIdx(0), 20);
    let blocks: Vec<u32> = places.iter().map(|place| place.block.0).collect();
    assert_eq!(blocks, [3, 4]);
}
