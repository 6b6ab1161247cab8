use std::collections::HashSet;

use super::*;
use crate::tensors::{LayerTensor, TensorName};
use crate::testing::tokenizer::tokens;

fn row(model: &crate::ModelFiles, name: TensorName, row: usize) -> Vec<f32> {
    let view = model.tensors.get(name).expect("the model has it");
    let mut out = vec![0.0; view.shape[1]];
    view.row_to_f32(row, &mut out);
    out
}

fn both(spec: &TinySpec, label: &str) -> (crate::ModelFiles, crate::ModelFiles) {
    let dir = scratch(label);
    write_gguf(dir.join("tiny.gguf"), spec).expect("the scratch directory takes files");
    write_hf_dir(dir.join("tiny"), spec).expect("the scratch directory takes files");
    let gguf = crate::open(dir.join("tiny.gguf")).expect("our own GGUF loads");
    let hf = crate::open(dir.join("tiny")).expect("our own directory loads");
    std::fs::remove_dir_all(dir).expect("the mapped files can be unlinked");
    (gguf, hf)
}

#[test]
fn both_containers_hold_the_same_numbers() {
    for tied_head in [true, false] {
        let spec = TinySpec {
            tied_head,
            ..TinySpec::default()
        };
        let (gguf, hf) = both(&spec, &format!("same-{tied_head}"));
        assert_eq!(gguf.config.tied_head, tied_head);
        assert_eq!(gguf.config.rope.style, crate::RopeStyle::Interleaved);
        assert_eq!(hf.config.rope.style, crate::RopeStyle::HalfSplit);
        let mut config = gguf.config.clone();
        config.rope.style = hf.config.rope.style;
        assert_eq!(config, hf.config);
        assert_eq!(gguf.tensors.iter().count(), hf.tensors.iter().count());
        for (ours, theirs) in gguf.tensors.iter().zip(hf.tensors.iter()) {
            let permuted = matches!(
                ours.name,
                TensorName::Layer(_, LayerTensor::Q | LayerTensor::K)
            );
            assert_eq!(ours.bytes == theirs.bytes, !permuted, "{ours:?}");
        }
    }
}

#[test]
fn q_rows_are_permuted_within_their_head() {
    let spec = TinySpec::default();
    let (gguf, hf) = both(&spec, "permuted");
    let name = TensorName::Layer(1, LayerTensor::Q);
    // Head 2 starts at row 32; interleaved row 5 is element 2 of the second half: row 8 + 2.
    assert_eq!(row(&gguf, name, 32 + 5), row(&hf, name, 32 + 8 + 2));
    assert_eq!(row(&gguf, name, 32 + 4), row(&hf, name, 32 + 2));
}

#[test]
fn quantised_weights_are_near_the_float_ones() {
    for dtype in WeightType::ALL {
        let spec = TinySpec::new(3, dtype);
        let (model, _) = both(&spec, &format!("near-{dtype:?}"));
        let float = TinySpec {
            weight_type: WeightType::F32,
            ..spec
        };
        let (float, _) = both(&float, &format!("float-{dtype:?}"));
        let name = TensorName::Layer(0, LayerTensor::Down);
        assert_eq!(model.tensors.get(name).expect("there").dtype, dtype);
        // Amplitude sqrt(3 / 96); half a step of 4 bits over twice that, and a little for the rounded scale.
        let tolerance = 0.18 * 2.0 / 15.0;
        for idx in 0..64 {
            for (ours, theirs) in row(&model, name, idx).iter().zip(row(&float, name, idx)) {
                assert!(
                    (ours - theirs).abs() < tolerance,
                    "{dtype:?}: {ours} for {theirs}"
                );
            }
        }
    }
}

#[test]
fn the_seed_decides_the_fingerprint_and_the_path_does_not() {
    let spec = TinySpec::new(7, WeightType::Q4_1);
    let (first, first_hf) = both(&spec, "fingerprint-a");
    let (again, _) = both(&spec, "fingerprint-b");
    let (other, _) = both(&TinySpec::new(8, WeightType::Q4_1), "fingerprint-c");
    assert_eq!(first.fingerprint, again.fingerprint);
    assert_ne!(first.fingerprint, other.fingerprint);
    assert_ne!(first.fingerprint, first_hf.fingerprint);
}

#[test]
fn the_tokens_are_distinct_and_every_merge_is_made_of_tokens() {
    let tokens = tokens();
    let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    assert_eq!((tokens.len(), known.len()), (N_TOKENS, N_TOKENS));
    for (left, right) in tokenizer::MERGES {
        assert!(
            known.contains(left) && known.contains(right),
            "{left} {right}"
        );
    }
}

#[test]
fn the_directory_has_a_tokenizer_that_the_library_accepts() {
    let dir = scratch("tokenizer");
    write_hf_dir(&dir, &TinySpec::default()).expect("the scratch directory takes files");
    let tokenizer =
        tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).expect("it is well-formed");
    let text = "<|im_start|>user\nthe tide and the mill 42 \u{6771}<|im_end|>";
    let encoding = tokenizer.encode(text, false).expect("any text encodes");
    assert_eq!(encoding.get_ids().first(), Some(&1));
    assert_eq!(encoding.get_ids().last(), Some(&2));
    assert!(encoding.get_tokens().contains(&"\u{120}the".to_owned()));
    let back = tokenizer
        .decode(encoding.get_ids(), false)
        .expect("ids of the vocabulary");
    assert_eq!(back, text);
    std::fs::remove_dir_all(dir).expect("the directory is ours");
}
