use super::*;
use crate::testing::safetensors_bytes;
use proptest::prelude::*;

fn with_header(header: &str, n_data_bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + n_data_bytes, 7);
    file
}

fn assert_refused(file: &[u8], parts: &[&str]) {
    let text = parse(file).expect_err("the file is refused").to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

fn valid_file() -> Vec<u8> {
    safetensors_bytes(&[
        ("a".to_owned(), WeightType::F32, vec![2, 2], vec![1; 16]),
        ("b".to_owned(), WeightType::BF16, vec![3], vec![2; 6]),
    ])
}

#[test]
fn a_written_file_reads_back() {
    let file = valid_file();
    let tensors = parse(&file).expect("well-formed");
    let [a, b] = &tensors[..] else {
        panic!("two tensors");
    };
    assert_eq!(
        (a.name.as_str(), a.dtype, &a.shape[..]),
        ("a", WeightType::F32, &[2, 2][..])
    );
    assert_eq!(file[a.range.clone()], [1; 16]);
    assert_eq!(file[b.range.clone()], [2; 6]);
}

#[test]
fn metadata_and_padding_are_no_tensors() {
    let header = r#"{"__metadata__":{"format":"pt"},"t":{"dtype":"F16","shape":[],"data_offsets":[0,2]}}   "#;
    let file = with_header(header, 2);
    assert_eq!(parse(&file).expect("well-formed").len(), 1);
}

/// B055: the header length sizes nothing before it was compared with the file and the cap.
#[test]
fn header_lengths() {
    assert_refused(
        &u64::MAX.to_le_bytes(),
        &["header length: 18446744073709551615"],
    );
    assert_refused(&0_u64.to_le_bytes(), &["header length: 0 bytes"]);
    assert_refused(b"1234567", &["the file has 7 bytes, expected at least 8"]);
    assert_refused(b"", &["the file has 0 bytes"]);
    let mut file = valid_file();
    let over = file.len() as u64 - 7;
    file[..8].copy_from_slice(&over.to_le_bytes());
    assert_refused(&file, &["header length", &over.to_string(), "truncated"]);
    let mut file = 4_u64.to_le_bytes().to_vec();
    file.extend([0xff, 0xfe, b'{', b'}']);
    assert_refused(&file, &["header: not UTF-8"]);
}

/// B055: a header over the cap is refused though the file holds it.
#[test]
fn header_length_over_the_cap() {
    let mut file = (HEADER_BYTES_MAX + 1).to_le_bytes().to_vec();
    file.resize(8 + HEADER_BYTES_MAX as usize + 1, b' ');
    assert_refused(
        &file,
        &["header length: 100000001 bytes, expected 2 to 100000000"],
    );
}

#[test]
fn headers_that_are_no_description() {
    for header in [
        "[]",
        "{",
        "{}x",
        "null",
        r#"{"t":7}"#,
        r#"{"t":{"dtype":"F32"}}"#,
    ] {
        assert!(parse(&with_header(header, 0)).is_err(), "{header}");
    }
    let tensor = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let twice = format!(r#"{{"t":{tensor},"t":{tensor}}}"#);
    assert_refused(&with_header(&twice, 4), &["header", "t is there twice"]);
    let nested = "[".repeat(100_000);
    assert_refused(&with_header(&format!(r#"{{"t":{nested}"#), 0), &["header"]);
}

#[test]
fn types_shapes_and_offsets() {
    let file = |dtype: &str, shape: &str, offsets: &str| {
        let header =
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        with_header(&header, 16)
    };
    assert!(parse(&file("F32", "[2,2]", "[0,16]")).is_ok());
    assert_refused(
        &file("I64", "[2]", "[0,16]"),
        &["\"t\": unsupported dtype \"I64\""],
    );
    assert_refused(&file("F32", "[2,0]", "[0,0]"), &["none may be zero"]);
    let wraps = "[18446744073709551615,2]";
    assert_refused(&file("F32", wraps, "[0,16]"), &["exceeds 64 bits"]);
    let beyond = "[9223372036854775808,9223372036854775808]";
    assert_refused(&file("F32", beyond, "[0,16]"), &["exceeds 64 bits"]);
    assert_refused(
        &file("F32", "[1,1,1,1,1,1,1,1,4]", "[0,16]"),
        &["9 dimensions"],
    );
    assert_refused(&file("F32", "[2,2]", "[16,0]"), &["data_offsets 16..0"]);
    assert_refused(
        &file("F32", "[2,2]", "[4,20]"),
        &["data_offsets 4..20", "16 bytes of data"],
    );
    assert_refused(
        &file("F32", "[3]", "[0,16]"),
        &["hold 16 bytes", "takes 12"],
    );
    assert_refused(
        &file("F32", "[2]", "[0,8]"),
        &["8 bytes of data belong to no tensor"],
    );
    assert_refused(
        &file("F32", "[2]", "[8,16]"),
        &["starts at data offset 8", "ends at 0"],
    );
    assert_refused(&file("F32", "[-1]", "[0,16]"), &["t"]);
}

#[test]
fn overlaps() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    assert_refused(
        &with_header(header, 12),
        &["\"b\": starts at data offset 4", "ends at 8"],
    );
}

#[test]
fn every_truncation_is_refused() {
    let file = valid_file();
    for n_bytes in 0..file.len() {
        assert!(parse(&file[..n_bytes]).is_err(), "{n_bytes} bytes");
    }
}

#[test]
fn the_fuzz_corpus_never_panics() {
    crate::testing::replay_corpus("safetensors", |file| {
        let _ = parse(file);
    });
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..256),
        text in "[\\[\\]{}\":,0-9a-z_]{0,64}",
    ) {
        let _ = parse(&bytes);
        let _ = parse(&with_header(&text, 8));
    }

    #[test]
    fn mutated_files_never_panic(
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..6),
    ) {
        let mut file = valid_file();
        for (place, byte) in changes {
            let place = place % file.len();
            file[place] = byte;
        }
        if let Ok(tensors) = parse(&file) {
            for tensor in tensors {
                prop_assert!(tensor.range.end <= file.len());
            }
        }
    }
}
