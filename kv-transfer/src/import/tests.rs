use super::*;
use crate::transport::PullOutcome;
use proptest::prelude::*;
use tidemill_core::KvDtype;

const NOW: Timestamp = Timestamp(1_000);

/// Two layer groups of 512 bytes in a block of 16 positions.
fn layout() -> KvLayout {
    let mut layout = KvLayout::new([1; 32], 2, 1, 8, KvDtype::F16).expect("valid");
    layout.group_layers = 1;
    layout
}

fn digest_of(slice: Slice) -> Digest {
    Digest(u64::from(slice.ordinal) * 100 + u64::from(slice.group.0) + 1)
}

fn announced(slices: impl Iterator<Item = Slice>) -> Vec<(Slice, Digest)> {
    slices.map(|slice| (slice, digest_of(slice))).collect()
}

fn word(n_tokens: u32) -> Complete {
    Complete {
        n_tokens,
        digest: digest_of_digests(layout().slices_for(n_tokens).map(digest_of)),
        first_token: SampledToken {
            token: 7,
            output_idx: 0,
            logprob: None,
            top: Vec::new(),
            logits_digest: None,
        },
    }
}

fn arrived(pull: &Pull) -> PullResult {
    Ok(PullOutcome {
        digests: announced(pull.slices.iter().copied()),
        n_bytes: pull.n_bytes,
    })
}

fn lost() -> PullResult {
    Err(TransferError::Lost {
        address: "a".into(),
        reason: "b".into(),
    })
}

#[test]
fn it_is_done_when_every_slice_is_right_and_the_exporter_agrees() {
    let mut import = Import::new(&layout(), 40, 0, NOW);
    let mut credits = Credits::new(1 << 20);
    assert_eq!(import.next_pull(&mut credits, NOW), None);
    let slices: Vec<Slice> = layout().slices_for(40).collect();
    import
        .announce(&announced(slices[..4].iter().copied()), NOW)
        .expect("fits");
    let first = import.next_pull(&mut credits, NOW).expect("announced");
    assert_eq!(first.slices, slices[..4]);
    assert_eq!(first.n_bytes, 4 * 512);
    import
        .announce(&announced(slices[4..].iter().copied()), NOW)
        .expect("fits");
    import.complete(&word(40), NOW).expect("agrees");
    let second = import.next_pull(&mut credits, NOW).expect("announced");
    assert_eq!(credits.n_bytes(), 6 * 512);
    for pull in [second, first] {
        assert_eq!(import.imported(), None);
        credits.put_back(pull.n_bytes);
        import
            .pulled(&pull.slices, &arrived(&pull), NOW)
            .expect("right");
    }
    let imported = import.imported().expect("everything is here");
    assert_eq!(imported.n_bytes, 6 * 512);
    assert_eq!(imported.first_token.token, 7);
    assert_eq!(credits.n_bytes(), 0);
}

#[test]
fn blocks_that_are_here_are_not_moved_but_still_agreed_on() {
    let mut import = Import::new(&layout(), 40, 2, NOW);
    let mut credits = Credits::new(1 << 20);
    import
        .announce(&announced(layout().slices_for(40)), NOW)
        .expect("fits");
    let pull = import
        .next_pull(&mut credits, NOW)
        .expect("the third block");
    assert!(pull.slices.iter().all(|slice| slice.ordinal == 2));
    import
        .pulled(&pull.slices, &arrived(&pull), NOW)
        .expect("right");
    import.complete(&word(40), NOW).expect("agrees");
    assert_eq!(import.imported().expect("done").n_bytes, 2 * 512);
}

/// B049: while two pulls are on their way, what is announced gathers into one.
#[test]
fn announcements_gather_into_few_pulls() {
    let n_tokens = 16 * 64;
    let mut import = Import::new(&layout(), n_tokens, 0, NOW);
    let mut credits = Credits::new(1 << 30);
    let mut pulls = Vec::new();
    for slice in layout().slices_for(n_tokens) {
        import
            .announce(&announced([slice].into_iter()), NOW)
            .expect("fits");
        pulls.extend(import.next_pull(&mut credits, NOW));
    }
    assert_eq!(pulls.len(), 2, "two on their way");
    let first = pulls.remove(0);
    import
        .pulled(&first.slices, &arrived(&first), NOW)
        .expect("right");
    let rest = import.next_pull(&mut credits, NOW).expect("gathered");
    assert_eq!(rest.slices.len(), 126);
}

#[test]
fn pulls_are_bounded_in_bytes_and_slices() {
    // 65,536 bytes a slice.
    let mut wide = KvLayout::new([1; 32], 1, 64, 16, KvDtype::F16).expect("valid");
    wide.group_layers = 1;
    let n_tokens = 16 * 300;
    let mut import = Import::new(&wide, n_tokens, 0, NOW);
    let slices: Vec<(Slice, Digest)> = announced(wide.slices_for(n_tokens));
    import.announce(&slices, NOW).expect("fits");
    let mut credits = Credits::new(u64::MAX);
    let pull = import.next_pull(&mut credits, NOW).expect("announced");
    assert_eq!(pull.n_bytes, PULL_BYTES_MAX);

    let n_tokens = 16 * 2000;
    let mut import = Import::new(&layout(), n_tokens, 0, NOW);
    let slices = announced(layout().slices_for(n_tokens));
    import.announce(&slices, NOW).expect("fits");
    let pull = import.next_pull(&mut credits, NOW).expect("announced");
    assert_eq!(pull.slices.len(), READ_SLICES_MAX);
}

#[test]
fn credits_are_shared_and_one_slice_always_fits() {
    let mut credits = Credits::new(3 * 512);
    let mut imports: Vec<Import> = (0..2)
        .map(|_| {
            let mut import = Import::new(&layout(), 32, 0, NOW);
            import
                .announce(&announced(layout().slices_for(32)), NOW)
                .expect("fits");
            import
        })
        .collect();
    let first = imports[0].next_pull(&mut credits, NOW).expect("credit");
    assert_eq!(first.slices.len(), 3);
    assert_eq!(imports[1].next_pull(&mut credits, NOW), None);
    assert_eq!(imports[0].next_pull(&mut credits, NOW), None);
    credits.put_back(first.n_bytes);
    assert!(imports[1].next_pull(&mut credits, NOW).is_some());

    let mut tiny = Credits::new(1);
    let pull = imports[0].next_pull(&mut tiny, NOW).expect("never stuck");
    assert_eq!(pull.slices.len(), 1);
}

/// B045: a flipped byte is a bad slice; three of them end the import.
#[test]
fn a_bad_slice_is_fetched_again_and_given_up_after_three_tries() {
    let mut import = Import::new(&layout(), 16, 0, NOW);
    let mut credits = Credits::new(1 << 20);
    import
        .announce(&announced(layout().slices_for(16)), NOW)
        .expect("fits");
    for n_try in 1..=3 {
        let pull = import.next_pull(&mut credits, NOW).expect("again");
        let mut digests = announced(pull.slices.iter().copied());
        let bad = digests
            .iter_mut()
            .find(|(slice, _)| slice.group.0 == 1)
            .expect("asked again");
        bad.1.0 ^= 1;
        let result = Ok(PullOutcome {
            digests,
            n_bytes: pull.n_bytes,
        });
        let taken = import.pulled(&pull.slices, &result, NOW);
        assert_eq!(import.n_bad_slices(), n_try);
        match n_try {
            1 | 2 => assert_eq!(taken, Ok(())),
            _ => {
                let failure = taken.expect_err("three tries");
                assert_eq!(failure.code, FailureCode::TransferFailed);
                assert!(failure.message.contains("group 1"), "{failure}");
            }
        }
        assert_eq!(import.imported(), None);
    }
    assert_eq!(import.n_bytes(), 512, "the good one was taken once");
}

#[test]
fn an_answer_that_lacks_a_slice_is_a_bad_slice() {
    let mut import = Import::new(&layout(), 16, 0, NOW);
    let mut credits = Credits::new(1 << 20);
    import
        .announce(&announced(layout().slices_for(16)), NOW)
        .expect("fits");
    let pull = import.next_pull(&mut credits, NOW).expect("announced");
    let nothing = Ok(PullOutcome {
        digests: Vec::new(),
        n_bytes: 0,
    });
    import.pulled(&pull.slices, &nothing, NOW).expect("a retry");
    assert_eq!(import.n_bad_slices(), 2);
    let again = import.next_pull(&mut credits, NOW).expect("again");
    assert_eq!(again.slices.len(), 2);
}

#[test]
fn a_lost_connection_is_tried_again_but_a_gone_lease_is_not() {
    let mut import = Import::new(&layout(), 16, 0, NOW);
    let mut credits = Credits::new(1 << 20);
    import
        .announce(&announced(layout().slices_for(16)), NOW)
        .expect("fits");
    let pull = import.next_pull(&mut credits, NOW).expect("announced");
    import.pulled(&pull.slices, &lost(), NOW).expect("a retry");
    let pull = import.next_pull(&mut credits, NOW).expect("again");
    let gone = Failure::new(FailureCode::Gone, "released");
    let failure = import
        .pulled(
            &pull.slices,
            &Err(TransferError::Refused(gone.clone())),
            NOW,
        )
        .expect_err("no use");
    assert_eq!(failure, gone);
}

#[test]
fn what_the_exporter_says_must_agree_with_itself() {
    let code = |failure: Failure| {
        assert_eq!(failure.code, FailureCode::TransferFailed, "{failure}");
        failure.message
    };
    let mut import = Import::new(&layout(), 32, 0, NOW);
    for bad in [
        Slice {
            ordinal: 2,
            group: LayerGroupIdx(0),
        },
        Slice {
            ordinal: 0,
            group: LayerGroupIdx(2),
        },
        Slice {
            ordinal: u32::MAX,
            group: LayerGroupIdx(u32::MAX),
        },
    ] {
        let text = code(
            import
                .announce(&announced([bad].into_iter()), NOW)
                .expect_err("none such"),
        );
        assert!(text.contains("does not exist"), "{text}");
    }
    let slices = announced(layout().slices_for(32));
    import.announce(&slices[..3], NOW).expect("fits");
    import.announce(&slices[..3], NOW).expect("the same again");
    let text = code(import.complete(&word(32), NOW).expect_err("one is missing"));
    assert!(text.contains("3 of 4"), "{text}");
    let changed = [(slices[0].0, Digest(999))];
    code(import.announce(&changed, NOW).expect_err("two digests"));
    import.announce(&slices[3..], NOW).expect("fits");
    let mut wrong = word(32);
    wrong.digest.0 ^= 1;
    code(import.complete(&wrong, NOW).expect_err("digest"));
    let mut wrong = word(32);
    wrong.n_tokens = 31;
    let text = code(import.complete(&wrong, NOW).expect_err("count"));
    assert!(text.contains("31") && text.contains("32"), "{text}");
    import.complete(&word(32), NOW).expect("right");
}

#[test]
fn a_transfer_without_progress_and_a_silent_exporter_are_late() {
    let mut import = Import::new(&layout(), 32, 0, NOW);
    let mut credits = Credits::new(1 << 20);
    assert_eq!(import.deadline(), NOW.plus_us(SILENCE_US_MAX));
    let later = NOW.plus_us(SILENCE_US_MAX - 1);
    import.check_progress(later).expect("not yet");
    import.heard(later);
    import
        .announce(&announced(layout().slices_for(32)), later)
        .expect("fits");
    // Waiting for credits costs no progress.
    import
        .check_progress(later.plus_us(PROGRESS_US_MAX))
        .expect("the exporter is alive");
    let start = later.plus_us(5);
    let pull = import.next_pull(&mut credits, start).expect("announced");
    assert_eq!(import.deadline(), start.plus_us(PROGRESS_US_MAX));
    let failure = import
        .check_progress(start.plus_us(PROGRESS_US_MAX))
        .expect_err("stalled");
    assert_eq!(failure.code, FailureCode::TransferFailed);
    assert!(failure.message.contains("0 of 4"), "{failure}");
    import
        .pulled(&pull.slices, &arrived(&pull), start)
        .expect("right");
    assert_eq!(import.n_pulls(), 0);
}

proptest! {
    /// In whatever order things are announced, pulled, lost and spoilt: each slice that counts was right, no more
    /// than the credits is on its way, and the import ends done or failed, never stuck.
    #[test]
    fn every_order_ends(seed in proptest::collection::vec(0_u8..=255, 1..200), n_tokens in 1_u32..80) {
        let mut import = Import::new(&layout(), n_tokens, u32::from(seed[0] % 3), NOW);
        let mut credits = Credits::new(4 * 512);
        let mut unannounced = announced(layout().slices_for(n_tokens));
        let mut pulls: Vec<Pull> = Vec::new();
        let mut steps = seed.iter().copied().chain(std::iter::repeat(0));
        for _ in 0..10_000 {
            let step = steps.next().expect("endless");
            if unannounced.is_empty() && import.complete(&word(n_tokens), NOW).is_ok() && import.imported().is_some() {
                return Ok(());
            }
            if !unannounced.is_empty() {
                let n = (step as usize % 3 + 1).min(unannounced.len());
                let at = (step as usize) % (unannounced.len() - n + 1);
                let part: Vec<_> = unannounced.drain(at..at + n).collect();
                import.announce(&part, NOW).expect("fits");
            }
            pulls.extend(import.next_pull(&mut credits, NOW));
            prop_assert!(credits.n_bytes() <= 4 * 512);
            if !pulls.is_empty() && step % 2 == 0 {
                let pull = pulls.remove(step as usize % pulls.len());
                credits.put_back(pull.n_bytes);
                let result = if step % 16 == 6 { lost() } else { arrived(&pull) };
                if import.pulled(&pull.slices, &result, NOW).is_err() {
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "stuck");
    }
}
