//! From a body to jobs: everything that happens to a request before it costs anything on a node.
//!
//! Pure and synchronous, so it runs off the async threads. All choices of a request are checked before the first is
//! submitted: a request is refused as a whole or not at all.

use super::chat_request::parse_chat;
use super::choice::{Choice, Echo};
use super::completion_request::{MAX_TOKENS_DEFAULT, parse_completion};
use super::error::{ApiError, shown};
use super::request::Common;
use super::shape::Endpoint;
use crate::requests::Job;
use crate::text::output::{OutputText, ScoredToken};
use crate::text::prompt::{Prompt, PromptError, TEXT_BYTES_MAX, spell};
use axum::http::StatusCode;
use std::sync::Arc;
use tidemill_core::{
    Failure, FailureCode, LogprobSpec, RequestId, SequenceSpec, StopConditions, Timestamp, TokenId,
    bounds,
};
use tidemill_model_files::text::ModelText;

/// What is known of a request beside its body.
pub(super) struct Envelope {
    pub(super) endpoint: Endpoint,
    pub(super) id: RequestId,
    pub(super) deadline: Timestamp,
    pub(super) traceparent: String,
}

/// A request, ready to be submitted.
pub(super) struct Plan {
    /// In the order of the choices' indices.
    pub(super) choices: Vec<(Job, Choice)>,
    pub(super) n_prompt_tokens: u64,
    /// Choices of each prompt that are answered.
    pub(super) n: usize,
    /// Choices of each prompt that are generated; the best `n` by mean log-probability are answered.
    pub(super) best_of: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) has_logprobs: bool,
}

/// A request of either endpoint.
struct Wanted {
    common: Common,
    prompts: Vec<Prompt>,
    best_of: u32,
    echo: bool,
    logprobs: Option<u32>,
}

impl Wanted {
    fn read(endpoint: Endpoint, body: &[u8]) -> Result<Self, ApiError> {
        Ok(match endpoint {
            Endpoint::Chat => {
                let request = parse_chat(body)?;
                Self {
                    best_of: request.common.n,
                    common: request.common,
                    prompts: vec![Prompt::Chat(request.messages)],
                    echo: false,
                    logprobs: request.logprobs,
                }
            }
            Endpoint::Completions => {
                let request = parse_completion(body)?;
                Self {
                    common: request.common,
                    prompts: request.prompts,
                    best_of: request.best_of,
                    echo: request.echo,
                    logprobs: request.logprobs,
                }
            }
        })
    }
}

/// Makes the plan.
///
/// # Errors
/// 400 with the field that does not hold, 404 for another model.
pub(super) fn plan(
    body: &[u8],
    envelope: &Envelope,
    model_name: &str,
    model: &ModelText,
) -> Result<Plan, ApiError> {
    let wanted = Wanted::read(envelope.endpoint, body)?;
    check_model(wanted.common.model.as_deref(), model_name)?;
    let n_bytes = wanted.prompts.iter().map(Prompt::text_bytes).sum::<usize>();
    if n_bytes > TEXT_BYTES_MAX {
        let field = field_name(envelope.endpoint);
        return Err(ApiError::invalid(
            field,
            format!(
                "{field} has {n_bytes} bytes of text in all; at most {TEXT_BYTES_MAX} are allowed"
            ),
        ));
    }
    let mut plan = Plan {
        choices: Vec::new(),
        n_prompt_tokens: 0,
        n: wanted.common.n as usize,
        best_of: wanted.best_of as usize,
        stream: wanted.common.stream,
        include_usage: wanted.common.include_usage,
        has_logprobs: wanted.logprobs.is_some(),
    };
    for (i, prompt) in wanted.prompts.iter().enumerate() {
        let field = match (envelope.endpoint, wanted.prompts.len()) {
            (Endpoint::Completions, 2..) => format!("prompt[{i}]"),
            (endpoint, _) => field_name(endpoint).to_owned(),
        };
        let tokens = prompt.encode(model).map_err(|error| {
            let message = format!("{field} {error}");
            match error {
                PromptError::ExceedsContext { .. } => with_field(
                    Failure::new(FailureCode::ContextLengthExceeded, message),
                    &field,
                ),
                _ => ApiError::invalid(field.as_str(), message),
            }
        })?;
        plan.n_prompt_tokens += tokens.len() as u64;
        let spec = sequence_spec(&wanted, tokens, envelope, model);
        let spec = spec.map_err(|failure| with_field(failure, &field))?;
        for i in 0..wanted.best_of {
            plan.choices.push(choice(&wanted, prompt, &spec, i, model));
        }
    }
    Ok(plan)
}

fn field_name(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "messages",
        Endpoint::Completions => "prompt",
    }
}

fn check_model(asked: Option<&str>, served: &str) -> Result<(), ApiError> {
    match asked {
        Some(asked) if asked != served => Err(unknown_model(asked, served)),
        _ => Ok(()),
    }
}

/// 404 for a model that is not served.
pub(super) fn unknown_model(asked: &str, served: &str) -> ApiError {
    let message = format!("model {} is not served here; {served:?} is", shown(asked));
    ApiError {
        param: Some("model".to_owned()),
        ..ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    }
}

/// The prompt as the nodes will see it, checked by the very check that they run.
fn sequence_spec(
    wanted: &Wanted,
    prompt: Vec<TokenId>,
    envelope: &Envelope,
    model: &ModelText,
) -> Result<SequenceSpec, Failure> {
    let common = &wanted.common;
    let max_tokens = max_tokens(common, envelope.endpoint, prompt.len(), model)?;
    let eos = model.vocabulary.eos_ids().iter();
    let eos = eos.copied().filter(|_| !common.ignore_eos);
    let mut stop_token_ids: Vec<TokenId> =
        common.stop_token_ids.iter().copied().chain(eos).collect();
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    // Candidates are compared by their log-probabilities, whether or not the client wants to see them.
    let is_ranked = wanted.best_of > common.n;
    let spec = SequenceSpec {
        request_id: envelope.id,
        prompt,
        emitted: Vec::new(),
        namespace: String::new(),
        block_hashes: Vec::new(),
        sampling: common.sampling.params(&model.defaults),
        stop: StopConditions {
            max_tokens,
            min_tokens: common.min_tokens,
            stop_token_ids,
        },
        logprobs: LogprobSpec {
            output_top: wanted.logprobs.or(is_ranked.then_some(0)),
            prompt_top: wanted.logprobs.filter(|_| wanted.echo),
            logits_digest: false,
        },
        deadline: envelope.deadline,
        traceparent: envelope.traceparent.clone(),
    };
    spec.check(model.vocab_size, context_length(model))?;
    Ok(spec)
}

fn context_length(model: &ModelText) -> u32 {
    model.context_length.min(bounds::SEQUENCE_TOKENS_MAX)
}

/// The client's limit, or the endpoint's default as far as the context has room; at least one.
fn max_tokens(
    common: &Common,
    endpoint: Endpoint,
    n_prompt_tokens: usize,
    model: &ModelText,
) -> Result<u32, Failure> {
    if let Some(max_tokens) = common.max_tokens {
        return Ok(max_tokens);
    }
    let limit = context_length(model);
    let n_prompt = u32::try_from(n_prompt_tokens).unwrap_or(u32::MAX);
    let room = limit.saturating_sub(n_prompt);
    if room == 0 {
        return Err(Failure::new(
            FailureCode::ContextLengthExceeded,
            format!(
                "prompt has {n_prompt_tokens} tokens, which leaves no room for output; prompt and output are at most {limit} together"
            ),
        ));
    }
    Ok(match endpoint {
        Endpoint::Chat => room,
        Endpoint::Completions => room.min(MAX_TOKENS_DEFAULT),
    })
}

/// A failure of the shared check, with the client's name of the field in it.
fn with_field(failure: Failure, prompt_field: &str) -> ApiError {
    let first = failure.message.split(' ').next().unwrap_or_default();
    let param = match first {
        "prompt" => prompt_field.to_owned(),
        other => other.to_owned(),
    };
    ApiError {
        param: Some(param),
        ..ApiError::from(failure)
    }
}

fn choice(
    wanted: &Wanted,
    prompt: &Prompt,
    spec: &SequenceSpec,
    i: u32,
    model: &ModelText,
) -> (Job, Choice) {
    let mut sampling = spec.sampling.clone();
    sampling.seed = match wanted.common.sampling.seed {
        Some(seed) => seed.wrapping_add(u64::from(i)),
        // Every choice its own, so that equal prompts do not give equal answers.
        None => RequestId::random().0 as u64,
    };
    let echo = wanted
        .echo
        .then(|| echo(prompt, &spec.prompt, wanted.logprobs.is_some(), model));
    let n_chars_before = echo.as_ref().map_or(0, |echo| echo.text.chars().count());
    let output = OutputText::new(
        Arc::clone(&model.vocabulary),
        &wanted.common.stop,
        wanted.logprobs.is_some(),
        n_chars_before,
    );
    let job = Job {
        prompt: spec.prompt.clone(),
        namespace: spec.namespace.clone(),
        sampling,
        stop: spec.stop.clone(),
        logprobs: spec.logprobs,
        deadline: spec.deadline,
        traceparent: spec.traceparent.clone(),
    };
    let choice = Choice::new(output, spec.stop.stop_token_ids.clone(), echo);
    (job, choice)
}

fn echo(prompt: &Prompt, tokens: &[TokenId], keeps_tokens: bool, model: &ModelText) -> Echo {
    let vocabulary = &model.vocabulary;
    let first_is_added = match (prompt, vocabulary.bos_id()) {
        (Prompt::Text(text), Some(bos)) => {
            tokens.first() == Some(&bos) && !text.starts_with(&*vocabulary.token_text(bos))
        }
        _ => false,
    };
    let (spelled, offsets) = spell(vocabulary, tokens, first_is_added);
    let text = match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(_) | Prompt::Chat(_) => spelled,
    };
    let scored = tokens.iter().zip(offsets).filter(|_| keeps_tokens);
    let scored = scored.map(|(&token, offset_chars)| ScoredToken {
        token,
        logprob: None,
        top: Vec::new(),
        offset_chars,
    });
    Echo {
        text,
        tokens: scored.collect(),
    }
}
