//! Edge values of sampling, and that a draw depends on nothing but its row.

use super::*;
use crate::executor::GivenTokens;
use std::sync::Arc;
use tidemill_core::{LogprobSpec, SamplingParams, TokenBias};

fn spec(temperature: f32, top_k: u32, top_p: f32) -> SampleSpec {
    SampleSpec {
        params: SamplingParams {
            temperature,
            top_k,
            top_p,
            seed: 7,
            ..SamplingParams::greedy()
        },
        output_idx: 0,
        given: GivenTokens::default(),
        barred: Vec::new(),
        logprobs: LogprobSpec::default(),
    }
}

fn draws(logits: &[f32], spec: &SampleSpec, n: u32) -> Vec<TokenId> {
    let draw = |output_idx| {
        let spec = SampleSpec {
            output_idx,
            ..spec.clone()
        };
        sample(logits, &spec).expect("a good row").token
    };
    (0..n).map(draw).collect()
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let logits = [0.5, 2.0, -1.0, 2.0];
    assert_eq!(sample(&logits, &spec(0.0, 0, 1.0)).expect("good").token, 1);
    let zeros = [-0.0, 0.0, -0.0];
    assert_eq!(sample(&zeros, &spec(-0.0, 0, 1.0)).expect("good").token, 0);
}

#[test]
fn a_tiny_temperature_is_greedy() {
    let logits = [1.0, 88.0, 87.999];
    for temperature in [9.9e-5, 1e-12, 1e-45] {
        assert_eq!(draws(&logits, &spec(temperature, 0, 1.0), 50), [1; 50]);
    }
    // Just above the threshold the division makes no infinity either.
    assert_eq!(draws(&[-3e38, 3e38], &spec(1e-4, 0, 1.0), 50), [1; 50]);
}

#[test]
fn unusable_rows_are_errors_and_barred_tokens_are_not() {
    let inf = f32::INFINITY;
    for row in [&[0.0, f32::NAN][..], &[0.0, inf], &[-inf, -inf], &[]] {
        for temperature in [0.0, 1.0] {
            let error = sample(row, &spec(temperature, 0, 1.0)).expect_err("unusable");
            assert_eq!(error.code, FailureCode::NumericFault);
        }
        assert!(prompt_logprob(row, 0, 0).is_err());
    }
    let barred = [-inf, 0.0, -inf, 0.0];
    for top_k in [0, 1, 3, 9] {
        for token in draws(&barred, &spec(2.0, top_k, 1.0), 200) {
            assert!(token == 1 || token == 3, "token {token} is barred");
        }
    }
}

#[test]
fn filters_keep_what_they_say() {
    // Probabilities 1/2, 1/4, 1/8, 1/8.
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    let largest = |spec: &SampleSpec| draws(&logits, spec, 500).into_iter().max();
    assert_eq!(largest(&spec(1.0, 0, 1.0)), Some(3));
    assert_eq!(largest(&spec(1.0, 1, 1.0)), Some(0));
    assert_eq!(largest(&spec(1.0, 3, 1.0)), Some(2));
    assert_eq!(largest(&spec(1.0, 99, 1.0)), Some(3));
    assert_eq!(largest(&spec(1.0, 0, 1e-4)), Some(0));
    assert_eq!(largest(&spec(1.0, 0, 0.49)), Some(0));
    assert_eq!(largest(&spec(1.0, 0, 0.7)), Some(1));
    assert_eq!(largest(&spec(1.0, 0, 0.8)), Some(2));
    // Of the two that top-k leaves, the first holds two thirds.
    assert_eq!(largest(&spec(1.0, 2, 0.6)), Some(0));
    assert_eq!(largest(&spec(1.0, 2, 0.7)), Some(1));
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    let tokens = draws(&logits, &spec(1.0, 0, 1.0), 8000);
    for (token, share) in [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)] {
        let n = tokens.iter().filter(|&&drawn| drawn == token).count();
        let off = (n as f64 / 8000.0 - share).abs();
        assert!(off < 0.02, "token {token}: {n} of 8000");
    }
}

#[test]
fn a_nucleus_beyond_the_first_look_is_found() {
    let logits: Vec<f32> = (0..2000_u16).map(|idx| -f32::from(idx) * 1e-3).collect();
    let wide = draws(&logits, &spec(1.0, 0, 0.9), 3000);
    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let mut sum = 0.0;
    let expected = logits.iter().position(|&l| {
        sum += f64::from(l).exp();
        sum >= f64::from(0.9_f32) * total
    });
    let expected = expected.expect("reached") as u32;
    let largest = wide.into_iter().max().expect("some");
    assert!(
        largest <= expected && largest + 20 > expected,
        "{largest} {expected}"
    );
}

#[test]
fn a_draw_depends_on_seed_and_place_alone() {
    let logits: Vec<f32> = (0..100_u8).map(|idx| f32::from(idx % 7)).collect();
    let all = draws(&logits, &spec(1.0, 0, 0.95), 64);
    // Resumed at 40: the same tokens.
    for output_idx in 40..64 {
        let resumed = SampleSpec {
            output_idx,
            ..spec(1.0, 0, 0.95)
        };
        let token = sample(&logits, &resumed).expect("good").token;
        assert_eq!(token, all[output_idx as usize]);
    }
    let mut other = spec(1.0, 0, 0.95);
    other.params.seed = 8;
    assert_ne!(draws(&logits, &other, 64), all);
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    let logits = [0.25_f32, 0.5, 0.125, 0.125].map(f32::ln);
    let mut asked = spec(2.0, 1, 0.1);
    asked.logprobs = LogprobSpec {
        output_top: Some(3),
        prompt_top: None,
        logits_digest: true,
    };
    let sampled = sample(&logits, &asked).expect("good");
    let close = |a: f32, p: f32| (a - p.ln()).abs() < 1e-6;
    assert!(close(sampled.logprob.expect("asked"), 0.5));
    let ids: Vec<_> = sampled.top.iter().map(|top| top.token).collect();
    assert_eq!(ids, [1, 0, 2]);
    assert!(close(sampled.top[2].logprob, 0.125));
    let mut bytes = Vec::new();
    logits.iter().for_each(|l| bytes.extend(l.to_le_bytes()));
    assert_eq!(
        sampled.logits_digest,
        Some(xxhash_rust::xxh3::xxh3_64(&bytes))
    );
}

#[test]
fn prompt_logprobs_of_barred_and_unknown_tokens() {
    let logits = [0.0, f32::NEG_INFINITY];
    let barred = prompt_logprob(&logits, 1, 20).expect("good row");
    assert_eq!(barred.logprob, f32::NEG_INFINITY);
    assert_eq!(barred.top.len(), 2);
    assert_eq!(prompt_logprob(&logits, 0, 0).expect("good").logprob, 0.0);
    let error = prompt_logprob(&logits, 2, 0).expect_err("unknown");
    assert!(error.message.contains('2'));
}

fn given(prompt: &[TokenId], output: &[TokenId]) -> GivenTokens {
    GivenTokens {
        prompt: prompt.to_vec(),
        output: output.to_vec(),
    }
}

fn biased(entries: &[(TokenId, f32)]) -> Arc<[TokenBias]> {
    let entries = entries.iter();
    entries
        .map(|&(token, bias)| TokenBias { token, bias })
        .collect()
}

fn greedy_token(logits: &[f32], spec: &SampleSpec) -> TokenId {
    sample(logits, spec).expect("a good row").token
}

#[test]
fn repetition_counts_prompt_and_output_the_others_output_alone() {
    let logits = [2.0, 1.9, -1.0, -1.05];
    let mut asked = spec(0.0, 0, 1.0);
    asked.given = given(&[0, 0, 0], &[]);
    asked.params.presence_penalty = 2.0;
    asked.params.frequency_penalty = 2.0;
    assert_eq!(greedy_token(&logits, &asked), 0, "the prompt is no output");
    asked.given = given(&[], &[0]);
    assert_eq!(greedy_token(&logits, &asked), 1);
    asked.params.presence_penalty = 0.0;
    asked.params.frequency_penalty = 0.06;
    assert_eq!(greedy_token(&logits, &asked), 0, "0.06 off once");
    asked.given = given(&[], &[0, 0]);
    assert_eq!(greedy_token(&logits, &asked), 1, "0.06 off twice");
    asked.params.frequency_penalty = 0.0;
    asked.params.repetition_penalty = 1.1;
    asked.given = given(&[0, 0], &[]);
    assert_eq!(greedy_token(&logits, &asked), 1);
    // A negative logit goes down, too; and once, however often it was given.
    let logits = [f32::NEG_INFINITY, f32::NEG_INFINITY, -1.0, -1.05];
    asked.params.repetition_penalty = 1.06;
    asked.given = given(&[2, 2, 2], &[2, 2]);
    assert_eq!(greedy_token(&logits, &asked), 3);
    asked.params.repetition_penalty = 1.04;
    assert_eq!(greedy_token(&logits, &asked), 2);
}

#[test]
fn a_bias_decides_and_cannot_lift_what_is_barred() {
    let logits = [5.0, 0.0, f32::NEG_INFINITY];
    let mut asked = spec(1.0, 0, 1.0);
    asked.params.logit_bias = biased(&[(1, 100.0)]);
    assert_eq!(draws(&logits, &asked, 50), [1; 50]);
    asked.params.logit_bias = biased(&[(1, 100.0), (2, 100.0)]);
    asked.barred = vec![1];
    assert_eq!(draws(&logits, &asked, 50), [0; 50]);
}

#[test]
fn a_bias_on_everything_changes_nothing_and_every_token_barred_is_the_clients_error() {
    let logits: Vec<f32> = (0..40_u8).map(|idx| f32::from(idx % 7)).collect();
    for temperature in [0.0, 1.0] {
        let mut asked = spec(temperature, 0, 0.9);
        let plain = draws(&logits, &asked, 50);
        let all: Vec<_> = (0..40).map(|token| (token, -100.0)).collect();
        asked.params.logit_bias = biased(&all);
        assert_eq!(draws(&logits, &asked, 50), plain);
        asked.barred = (0..40).collect();
        let error = sample(&logits, &asked).expect_err("nothing is left");
        assert_eq!(error.code, FailureCode::InvalidRequest);
        assert!(error.message.starts_with("min_tokens"), "{error}");
    }
}

#[test]
fn extreme_logits_stay_numbers() {
    let mut asked = spec(1e-4, 0, 1.0);
    asked.params.repetition_penalty = 0.01;
    asked.params.frequency_penalty = -2.0;
    asked.params.typical_p = 0.5;
    asked.params.min_p = 1.0;
    asked.given = given(&[0], &[1, 1]);
    for logits in [[f32::MAX, f32::MIN, 0.0], [f32::MIN, f32::MIN, f32::MIN]] {
        draws(&logits, &asked, 20);
        asked.params.repetition_penalty = 10.0;
        draws(&logits, &asked, 20);
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let error = sample(&[0.0, bad, 0.0], &asked).expect_err("unusable");
        assert_eq!(error.code, FailureCode::NumericFault);
    }
}

#[test]
fn b021_b022_ids_beyond_the_row_are_errors_and_touch_nothing() {
    let logits = [0.0, 1.0];
    let change: [fn(&mut SampleSpec); 4] = [
        |spec| spec.params.logit_bias = biased(&[(2, 1.0)]),
        |spec| spec.barred = vec![u32::MAX],
        |spec| spec.given.prompt = vec![2],
        |spec| spec.given.output = vec![2],
    ];
    for (change, field) in
        change
            .into_iter()
            .zip(["logit_bias", "stop_token_ids", "prompt", "emitted"])
    {
        let mut asked = spec(0.0, 0, 1.0);
        asked.params.presence_penalty = 1.0;
        change(&mut asked);
        let error = sample(&logits, &asked).expect_err("beyond");
        assert_eq!(error.code, FailureCode::InvalidRequest);
        assert!(error.message.starts_with(field), "{error}");
    }
}

#[test]
fn typical_and_min_p_keep_what_they_say() {
    // Probabilities 1/2, 1/4, 1/8, 1/8; the entropy is 1.75 bits, nearest to it is 2.
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    let kept = |asked: &SampleSpec| {
        let mut tokens = draws(&logits, asked, 500);
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    };
    let mut typical = spec(1.0, 0, 1.0);
    for (typical_p, expected) in [
        (0.2, &[1][..]),
        (0.3, &[0, 1]),
        (0.76, &[0, 1, 2]),
        (0.99, &[0, 1, 2, 3]),
    ] {
        typical.params.typical_p = typical_p;
        assert_eq!(kept(&typical), expected, "typical_p {typical_p}");
    }
    let mut near = spec(1.0, 0, 1.0);
    for (min_p, expected) in [
        (1.0, &[0][..]),
        (0.51, &[0]),
        (0.49, &[0, 1]),
        (0.26, &[0, 1]),
        (0.2, &[0, 1, 2, 3]),
        (1e-45, &[0, 1, 2, 3]),
    ] {
        near.params.min_p = min_p;
        assert_eq!(kept(&near), expected, "min_p {min_p}");
    }
    // The best of what is left counts: typical has taken the most likely one.
    typical.params.typical_p = 0.2;
    typical.params.min_p = 1.0;
    assert_eq!(kept(&typical), [1]);
}

#[test]
fn parameters_do_not_touch_logprobs() {
    let logits = [0.5_f32, 0.25, 0.25].map(f32::ln);
    let mut asked = spec(0.0, 0, 1.0);
    asked.params.repetition_penalty = 2.0;
    asked.params.logit_bias = biased(&[(2, 50.0)]);
    asked.barred = vec![0];
    asked.logprobs.output_top = Some(1);
    let sampled = sample(&logits, &asked).expect("good");
    assert_eq!(sampled.token, 2);
    assert!((sampled.logprob.expect("asked") - 0.25_f32.ln()).abs() < 1e-6);
    assert_eq!(sampled.top[0].token, 0);
}

/// What was drawn before penalties, bias, typical and min-p were there: at their neutral values a seed keeps its tokens.
#[test]
fn neutral_values_draw_what_was_drawn_without_them() {
    let logit = |idx: u32| (idx.wrapping_mul(2_654_435_761) >> 16) as f32 / 4096.0;
    let logits: Vec<f32> = (0..3000).map(logit).collect();
    for (temperature, top_k, top_p, expected) in [
        (0.0, 0, 1.0, 0x1770_6ef9_58a1_d527),
        (1.0, 0, 1.0, 0xa4f0_11a4_c4bd_5b58),
        (0.7, 40, 1.0, 0x5201_7d6e_703a_ef84),
        (0.9, 0, 0.95, 0x9cd9_b6c7_b0e5_4f19),
        (1.3, 100, 0.8, 0x81a6_aaeb_d396_4c45),
        (2.0, 0, 0.5, 0x6326_7766_e3c6_f3b2),
    ] {
        let mut asked = spec(temperature, top_k, top_p);
        asked.params.seed = 99;
        // Without penalties nothing looks at what was given.
        asked.given = given(&[1, 2, 3], &[4]);
        let tokens = draws(&logits, &asked, 256);
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let found = xxhash_rust::xxh3::xxh3_64(&bytes);
        assert_eq!(found, expected, "{temperature} {top_k} {top_p}");
    }
}
