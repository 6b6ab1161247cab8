//! Edge values of sampling, and that a draw depends on nothing but its row.

use super::*;
use tidemill_core::LogprobSpec;

fn spec(temperature: f32, top_k: u32, top_p: f32) -> SampleSpec {
    SampleSpec {
        params: SamplingParams {
            temperature,
            top_k,
            top_p,
            seed: 7,
        },
        output_idx: 0,
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
