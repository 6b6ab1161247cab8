//! Penalties, bias and barred tokens: what changes logits before anything is drawn.
//!
//! There is no state: what a penalty knows is counted anew from prompt and output, so that a sequence that was resumed,
//! preempted or handed over draws what it would have drawn. A row that nothing changes is not copied. Results are computed
//! in f64 and kept within the finite numbers of f32: a client's parameter cannot make an infinity, nor lift a token that
//! the model itself has barred.

use crate::executor::{GivenTokens, SampleSpec};
use tidemill_core::{Failure, FailureCode, SamplingParams, TokenBias, TokenId};

/// The row after step 1; `None` when nothing changes it.
///
/// # Errors
/// `InvalidRequest` when a token id lies beyond the row.
pub(super) fn adjusted(logits: &[f32], spec: &SampleSpec) -> Result<Option<Vec<f32>>, Failure> {
    let params = &spec.params;
    if !params.has_penalties() && params.logit_bias.is_empty() && spec.barred.is_empty() {
        return Ok(None);
    }
    let mut row = logits.to_vec();
    if params.has_penalties() {
        penalise(&mut row, params, &spec.given)?;
    }
    for &TokenBias { token, bias } in params.logit_bias.iter() {
        let logit = place(&mut row, "logit_bias", token)?;
        *logit = finite(*logit, f64::from(*logit) + f64::from(bias));
    }
    for &token in &spec.barred {
        *place(&mut row, "stop_token_ids", token)? = f32::NEG_INFINITY;
    }
    Ok(Some(row))
}

/// Each token once, however often it was given.
fn penalise(row: &mut [f32], params: &SamplingParams, given: &GivenTokens) -> Result<(), Failure> {
    let mut n_output = vec![0_u32; row.len()];
    for &token in &given.output {
        *place(&mut n_output, "emitted", token)? += 1;
    }
    let mut is_done = vec![false; row.len()];
    for &token in given.prompt.iter().chain(&given.output) {
        let is_done = place(&mut is_done, "prompt", token)?;
        if !std::mem::replace(is_done, true) {
            let logit = &mut row[token as usize];
            let penalised = penalised(f64::from(*logit), params, n_output[token as usize]);
            *logit = finite(*logit, penalised);
        }
    }
    Ok(())
}

fn penalised(logit: f64, params: &SamplingParams, n_output: u32) -> f64 {
    let repetition = f64::from(params.repetition_penalty);
    let logit = if logit > 0.0 {
        logit / repetition
    } else {
        logit * repetition
    };
    if n_output == 0 {
        return logit;
    }
    let presence = f64::from(params.presence_penalty);
    logit - (presence + f64::from(params.frequency_penalty) * f64::from(n_output))
}

/// `after` as an f32 that is finite, unless the token was barred before.
#[expect(
    clippy::cast_possible_truncation,
    reason = "logits are f32; the value was clamped"
)]
fn finite(before: f32, after: f64) -> f32 {
    if before == f32::NEG_INFINITY {
        return before;
    }
    after.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
}

fn place<'a, T>(row: &'a mut [T], field: &str, token: TokenId) -> Result<&'a mut T, Failure> {
    let n_tokens = row.len();
    row.get_mut(token as usize).ok_or_else(|| {
        Failure::new(
            FailureCode::InvalidRequest,
            format!("{field} holds token id {token}; the vocabulary has ids below {n_tokens}"),
        )
    })
}
