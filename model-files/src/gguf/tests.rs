use super::*;
use crate::testing::{GgufWriter, TinySpec, gguf_bytes};
use proptest::prelude::*;

const TYPE_U32: u32 = 4;
const TYPE_U64: u32 = 10;

/// A header with these counts and nothing after it.
fn header(n_tensors: u64, n_keys: u64) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend(n_tensors.to_le_bytes());
    file.extend(n_keys.to_le_bytes());
    file
}

/// A file with one tensor description, written field by field.
fn one_tensor(name: &str, dims: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    let mut file = header(1, 0);
    push_name(&mut file, name);
    file.extend((dims.len() as u32).to_le_bytes());
    for dim in dims {
        file.extend(dim.to_le_bytes());
    }
    file.extend(type_id.to_le_bytes());
    file.extend(offset.to_le_bytes());
    file.resize(file.len().next_multiple_of(32) + 256, 0);
    file
}

fn push_name(file: &mut Vec<u8>, name: &str) {
    file.extend((name.len() as u64).to_le_bytes());
    file.extend(name.as_bytes());
}

/// The refusal, as text; panics when the file is accepted.
fn refusal(file: &[u8]) -> String {
    parse(file).expect_err("the file is refused").to_string()
}

fn assert_refused(file: &[u8], parts: &[&str]) {
    let text = refusal(file);
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn a_written_file_reads_back() {
    let mut writer = GgufWriter::new();
    writer.string("general.name", "mill");
    writer.u32("a.count", 7);
    writer.f32("a.ratio", 0.5);
    writer.boolean("a.flag", true);
    writer.strings("a.words", ["ebb", "flow"].into_iter());
    writer.i32s("a.levels", &[-1, 2]);
    writer.tensor("first", WeightType::F32, &[4, 2], &[1; 32]);
    writer.tensor("second", WeightType::Q8_0, &[32], &[2; 34]);
    let bytes = writer.finish();
    let gguf = parse(&bytes).expect("well-formed");
    assert_eq!(gguf.string("general.name"), Ok(Some("mill")));
    assert_eq!(gguf.u32("a.count"), Ok(Some(7)));
    assert_eq!(gguf.f32("a.ratio"), Ok(Some(0.5)));
    assert_eq!(gguf.boolean("a.flag"), Ok(Some(true)));
    assert_eq!(gguf.strings("a.words"), Ok(Some(&["ebb", "flow"][..])));
    assert_eq!(gguf.integers("a.levels"), Ok(Some(vec![-1, 2])));
    assert_eq!(gguf.u32("a.absent"), Ok(None));
    let [first, second] = gguf.tensors() else {
        panic!("two tensors");
    };
    assert_eq!((first.name, &first.dims[..]), ("first", &[4, 2][..]));
    assert_eq!(bytes[first.range.clone()], [1; 32]);
    assert_eq!((second.dtype, second.range.len()), (WeightType::Q8_0, 34));
    assert_eq!(bytes[second.range.clone()], [2; 34]);
}

#[test]
fn a_key_of_another_type_is_not_an_absent_key() {
    let mut writer = GgufWriter::new();
    writer.string("a", "text");
    writer.raw("big", TYPE_U64, &u64::MAX.to_le_bytes());
    writer.f32("nan", f32::NAN);
    let bytes = writer.finish();
    let gguf = parse(&bytes).expect("well-formed");
    for text in [
        gguf.u32("a").expect_err("text").to_string(),
        gguf.f32("a").expect_err("text").to_string(),
        gguf.boolean("a").expect_err("text").to_string(),
        gguf.strings("a").expect_err("text").to_string(),
        gguf.integers("a").expect_err("text").to_string(),
    ] {
        assert!(text.starts_with("a: \"text\", expected "), "{text}");
    }
    let text = gguf.u32("big").expect_err("too large").to_string();
    assert!(
        text.starts_with("big: 18446744073709551615, expected"),
        "{text}"
    );
    assert!(gguf.f32("nan").is_err());
}

#[test]
fn magic_and_version() {
    assert_refused(b"", &["magic"]);
    assert_refused(b"GGML\x03\0\0\0", &["magic"]);
    let mut file = header(0, 0);
    assert!(parse(&file).is_ok(), "an empty model is well-formed");
    file[4] = 1;
    assert_refused(&file, &["version: 1", "2 and 3"]);
    file[4..8].copy_from_slice(&3_u32.to_be_bytes());
    assert_refused(&file, &["version", "big-endian"]);
}

/// B058: counts are bounded by the bytes that are left, before anything is allocated.
#[test]
fn counts_beyond_the_file() {
    assert_refused(
        &header(1 << 63, 0),
        &["tensor_count: a count of 9223372036854775808"],
    );
    assert_refused(
        &header(0, 1 << 63),
        &["metadata_kv_count: a count of 9223372036854775808"],
    );
    assert_refused(&header(0, u64::MAX), &["metadata_kv_count"]);
    let mut file = header(0, 1);
    file.extend(u64::MAX.to_le_bytes());
    file.extend([0; 16]);
    assert_refused(
        &file,
        &["key 0 of the metadata: a count of 18446744073709551615"],
    );
}

/// B058: arrays.
#[test]
fn arrays_beyond_the_file_and_nested_arrays() {
    for (element, expected) in [
        (TYPE_ARRAY, "an array within an array"),
        (TYPE_U64, "a count of 2305843009213693952"),
        (TYPE_STRING, "a count of 2305843009213693952"),
        (13, "unknown element type 13"),
    ] {
        let mut value = element.to_le_bytes().to_vec();
        value.extend((1_u64 << 61).to_le_bytes());
        value.extend([0; 64]);
        let mut writer = GgufWriter::new();
        writer.raw("list", TYPE_ARRAY, &value);
        assert_refused(&writer.finish(), &["list: ", expected]);
    }
}

/// B057: an empty key and a zero dimension; no check lives in a debug assertion.
#[test]
fn empty_keys_and_zero_dimensions() {
    let mut writer = GgufWriter::new();
    writer.u32("", 1);
    assert_refused(&writer.finish(), &["key 0 of the metadata", "0 bytes"]);
    assert_refused(
        &one_tensor("", &[1], 0, 0),
        &["name of tensor 0", "0 bytes"],
    );
    for dims in [&[0_u64][..], &[0, 4], &[4, 0], &[32, 1, 0, 1]] {
        assert_refused(
            &one_tensor("t", dims, 0, 0),
            &["t: dimensions", "none may be zero"],
        );
        assert_refused(
            &one_tensor("t", dims, 8, 0),
            &["t: dimensions", "none may be zero"],
        );
    }
}

/// B058: shapes.
#[test]
fn shapes_that_wrap_or_have_too_many_dimensions() {
    for dims in [[u64::MAX, 2], [1 << 62, 1 << 2], [1 << 63, 1 << 63]] {
        assert_refused(
            &one_tensor("t", &dims, 0, 0),
            &["t: dimensions", "exceeds 64 bits"],
        );
    }
    assert_refused(
        &one_tensor("t", &[1; 5], 0, 0),
        &["t: 5 dimensions, expected 1 to 4"],
    );
    assert_refused(&one_tensor("t", &[], 0, 0), &["t: 0 dimensions"]);
    let mut file = one_tensor("t", &[1], 0, 0);
    file[24 + 8 + 1..][..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_refused(&file, &["t: 4294967295 dimensions"]);
}

#[test]
fn types_and_rows() {
    assert_refused(
        &one_tensor("t", &[32], 11, 0),
        &["t: unsupported tensor type Q3_K (11)"],
    );
    assert_refused(
        &one_tensor("t", &[32], 99, 0),
        &["99 (unknown)", "supported: F32"],
    );
    assert_refused(
        &one_tensor("t", &[33], 8, 0),
        &["rows of 33 elements", "32 of a Q8_0"],
    );
}

/// B058: offsets and alignment.
#[test]
fn offsets_and_alignment() {
    for offset in [u64::MAX - 31, 1 << 63, 512] {
        assert_refused(
            &one_tensor("t", &[1], 0, offset),
            &["t: offset", "truncated"],
        );
    }
    assert_refused(
        &one_tensor("t", &[1], 0, 8),
        &["offset 8 is no multiple of 32"],
    );
    for alignment in [0, 3, 4, 1 << 21, u32::MAX] {
        let mut writer = GgufWriter::new();
        writer.u32("general.alignment", alignment);
        assert_refused(
            &writer.finish(),
            &[
                "general.alignment",
                &alignment.to_string(),
                "power of two from 8",
            ],
        );
    }
    let mut writer = GgufWriter::new();
    writer.raw("general.alignment", TYPE_U64, &u64::MAX.to_le_bytes());
    assert_refused(&writer.finish(), &["general.alignment"]);
}

#[test]
fn what_is_there_twice() {
    let mut writer = GgufWriter::new();
    writer.u32("a", 1);
    writer.u32("a", 1);
    assert_refused(&writer.finish(), &["\"a\" twice"]);
    let mut writer = GgufWriter::new();
    writer.tensor("t", WeightType::F32, &[1], &[0; 4]);
    writer.tensor("t", WeightType::F32, &[1], &[0; 4]);
    assert_refused(&writer.finish(), &["t: this tensor name is used twice"]);
    let mut writer = GgufWriter::new();
    writer.tensor("long", WeightType::F32, &[16], &[0; 4]);
    writer.tensor("over", WeightType::F32, &[1], &[0; 64]);
    assert_refused(
        &writer.finish(),
        &["over: its bytes overlap those of \"long\""],
    );
}

#[test]
fn booleans_text_and_value_types() {
    let mut writer = GgufWriter::new();
    writer.raw("flag", 7, &[2]);
    assert_refused(&writer.finish(), &["flag: boolean 2"]);
    let mut writer = GgufWriter::new();
    writer.raw("odd", 77, &[0; 8]);
    assert_refused(&writer.finish(), &["odd: unknown value type 77"]);
    let mut writer = GgufWriter::new();
    writer.raw("text", TYPE_STRING, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]);
    assert_refused(&writer.finish(), &["text: text at offset", "not UTF-8"]);
    let mut writer = GgufWriter::new();
    writer.raw("short", TYPE_U32, &[1, 0]);
    let mut file = writer.finish();
    file.truncate(24 + 8 + 5 + 4 + 2);
    assert_refused(&file, &["short: 4 bytes expected", "2 are left"]);
}

/// A small valid file for mutation.
fn valid_file() -> Vec<u8> {
    gguf_bytes(&TinySpec {
        n_layers: 1,
        hidden_size: 32,
        intermediate_size: 32,
        n_heads: 2,
        n_kv_heads: 1,
        ..TinySpec::new(5, WeightType::Q4_0)
    })
}

/// Everything that is derived from a parsed file, so that none of it panics either.
fn drive(file: &[u8]) {
    if let Ok(gguf) = parse(file) {
        let _ = model::config(&gguf);
        let _ = model::config(&gguf).map(|config| model::tensors(&gguf, &config));
    }
}

#[test]
fn every_truncation_is_refused() {
    let file = valid_file();
    let header_bytes = parse(&file).expect("valid").tensors()[0].range.start;
    for n_bytes in (0..header_bytes).chain([file.len() - 1]) {
        assert!(
            parse(&file[..n_bytes]).is_err(),
            "{n_bytes} bytes of {}",
            file.len()
        );
    }
}

#[test]
fn the_fuzz_corpus_never_panics() {
    crate::testing::replay_corpus("gguf", drive);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        drive(&bytes);
        let mut file = header(1, 1);
        file.extend(bytes);
        drive(&file);
    }

    #[test]
    fn mutated_files_never_panic(
        changes in proptest::collection::vec((0_usize..12_000, any::<u8>()), 1..8),
        cut in 0_usize..40_000,
    ) {
        let mut file = valid_file();
        for (place, byte) in changes {
            let place = place % file.len();
            file[place] = byte;
        }
        file.truncate(cut.max(64));
        drive(&file);
    }
}
