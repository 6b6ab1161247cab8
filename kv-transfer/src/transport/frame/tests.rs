use super::*;
use proptest::prelude::*;
use std::path::PathBuf;

fn layout() -> KvLayout {
    KvLayout::new([7; 32], 30, 3, 64, KvDtype::F16).expect("valid")
}

fn hello() -> Frame {
    Frame::Hello(Hello {
        exporter: Incarnation(1),
        importer: Incarnation(2),
        layout: layout(),
    })
}

fn read(n_slices: u32) -> Frame {
    Frame::Read(Read {
        request_id: RequestId(3),
        capability: Capability(4),
        epoch: Epoch(5),
        importer: Incarnation(2),
        slices: (0..n_slices)
            .map(|ordinal| Slice {
                ordinal,
                group: LayerGroupIdx(ordinal % 5),
            })
            .collect(),
    })
}

fn samples() -> Vec<(&'static str, Frame)> {
    let refused = |code, message: &str| Frame::Refused(Failure::new(code, message));
    vec![
        ("hello", hello()),
        (
            "welcome",
            Frame::Welcome {
                exporter: Incarnation(u128::MAX),
            },
        ),
        ("read-1", read(1)),
        ("read-1024", read(1024)),
        ("data-0", Frame::Data { n_bytes: 0 }),
        (
            "data-4gib",
            Frame::Data {
                n_bytes: (4 << 30) + 1,
            },
        ),
        ("refused", refused(FailureCode::Gone, "no lease, ä")),
        ("refused-empty", refused(FailureCode::Internal, "")),
    ]
}

#[test]
fn frames_read_back() {
    for (name, frame) in samples() {
        assert_eq!(parse_frame(&frame.encode()), Ok(frame), "{name}");
    }
}

#[test]
fn every_failure_code_has_its_own_number() {
    for (code, _) in FAILURES {
        let frame = Frame::Refused(Failure::new(code, "x"));
        assert_eq!(parse_frame(&frame.encode()), Ok(frame));
    }
    let numbers: std::collections::BTreeSet<u8> = FAILURES.iter().map(|(_, n)| *n).collect();
    assert_eq!(numbers.len(), FAILURES.len());
}

#[test]
fn a_truncated_or_extended_frame_is_refused() {
    for (name, frame) in samples() {
        let bytes = frame.encode();
        for end in 0..bytes.len() {
            assert!(parse_frame(&bytes[..end]).is_err(), "{name} cut at {end}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(parse_frame(&longer).is_err(), "{name} and one byte");
    }
}

#[test]
fn heads_bound_the_body_before_anything_is_allocated() {
    let head = |kind: u8, body_bytes: u32| {
        let mut bytes = [b'K', b'V', version(), kind, 0, 0, 0, 0];
        bytes[4..].copy_from_slice(&body_bytes.to_le_bytes());
        parse_head(bytes)
    };
    for kind in 0..=255 {
        assert!(head(kind, u32::MAX).is_err(), "{kind}");
    }
    assert!(head(3, u32::try_from(BODY_BYTES_MAX).expect("small")).is_ok());
    let error = head(3, u32::try_from(BODY_BYTES_MAX + 1).expect("small")).expect_err("one more");
    assert!(
        error.to_string().contains(&BODY_BYTES_MAX.to_string()),
        "{error}"
    );
    assert_eq!(
        parse_head(*b"GET / HT"),
        Err(FrameError::Magic([b'G', b'E']))
    );
    let other = [b'K', b'V', version() + 1, 4, 8, 0, 0, 0];
    assert_eq!(
        parse_head(other),
        Err(FrameError::Version {
            version: version() + 1
        })
    );
    assert_eq!(head(6, 0), Err(FrameError::Kind(6)));
}

#[test]
fn a_hello_is_checked_field_by_field() {
    let good = hello().encode();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        parse_frame(&bytes).expect_err("refused").to_string()
    };
    let body = HEAD_BYTES;
    // n_layers becomes 0: out of its bound.
    let text = with(body + 32, 0);
    assert!(text.contains("n_layers"), "{text}");
    let text = with(body + 56, 9);
    assert!(text.contains("dtype"), "{text}");
    // The last byte belongs to the fingerprint.
    let text = with(good.len() - 1, good[good.len() - 1] ^ 1);
    assert!(text.contains("layout_fingerprint"), "{text}");
}

#[test]
fn a_read_counts_its_slices() {
    let mut bytes = read(2).encode();
    let at = HEAD_BYTES + READ_FIXED_BYTES - 4;
    for n_slices in [0_u32, 1, 3, u32::MAX] {
        bytes[at..at + 4].copy_from_slice(&n_slices.to_le_bytes());
        let text = parse_frame(&bytes).expect_err("counts").to_string();
        assert!(text.contains("n_slices"), "{text}");
    }
}

#[test]
fn long_words_are_cut_between_characters() {
    let long = "ä".repeat(MESSAGE_BYTES_MAX);
    let frame = Frame::Refused(Failure::new(FailureCode::Internal, long));
    let Ok(Frame::Refused(failure)) = parse_frame(&frame.encode()) else {
        panic!("reads back")
    };
    assert_eq!(failure.message.len(), MESSAGE_BYTES_MAX);
}

/// Every file of the fuzz corpus is decoded; what is accepted encodes to the very same bytes. Its whole frames, and the
/// same without their last byte, are those of `samples`: after a change of the protocol, write them anew with
/// `TIDEMILL_WRITE_CORPUS=1 cargo test -p tidemill-kv-transfer the_corpus_replays`.
#[test]
fn the_corpus_replays() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/kv_frame");
    for (name, frame) in samples() {
        let bytes = frame.encode();
        let cut = &bytes[..bytes.len() - 1];
        for (name, wanted) in [(name.to_owned(), &bytes[..]), (format!("cut-{name}"), cut)] {
            let path = corpus.join(&name);
            if std::env::var_os("TIDEMILL_WRITE_CORPUS").is_some() {
                std::fs::write(&path, wanted).expect("writable");
            }
            assert_eq!(std::fs::read(&path).expect("kept"), wanted, "{name}");
        }
    }
    for file in std::fs::read_dir(&corpus).expect("the corpus lies beside the fuzz target") {
        let bytes = std::fs::read(file.expect("readable").path()).expect("readable");
        if let Ok(frame) = parse_frame(&bytes) {
            assert_eq!(frame.encode(), bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_decoded_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(frame) = parse_frame(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }

    /// Near-misses reach deeper than noise.
    #[test]
    fn any_change_to_a_frame_is_refused_or_read_back(
        which in 0_usize..8,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = samples()[which].1.encode();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(frame) = parse_frame(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }
}
