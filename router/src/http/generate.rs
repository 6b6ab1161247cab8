//! The life of a generating request within `http`: read, plan, submit, tell.
//!
//! Nothing here outlives its request. The answers of all choices live in `Running`, which lives in the handler or in
//! the response body: when the client leaves, hyper drops either, and the drop is the cancel, streaming or not.

use super::App;
use super::body::{self, WholeBody};
use super::choice::{self, ChoiceEvent, Ended};
use super::error::ApiError;
use super::headers::{self, Identity};
use super::plan::{Envelope, Plan, plan};
use super::shape::{Endpoint, Shape, Usage, WholeChoice};
use super::sse;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use futures::StreamExt;
use futures::stream::{BoxStream, select_all};
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{Failure, FailureCode, RequestId};
use tokio::time::{Instant, timeout, timeout_at};

/// Requests whose text may be turned into tokens or wait for it; each worker takes one after another.
pub(super) const TEXT_JOBS_MAX: usize = 256;
/// How long after its deadline a request waits for dispatch to say so.
const DEADLINE_GRACE: Duration = Duration::from_secs(5);

/// A submitted request. Dropping it cancels every choice.
pub(super) struct Running {
    pub(super) shape: Shape,
    events: BoxStream<'static, (usize, ChoiceEvent)>,
    give_up: Instant,
    ended: Vec<Option<Ended>>,
    n_prompt_tokens: u64,
    /// Choices of each prompt that are answered.
    n: usize,
    /// Choices of each prompt that are generated.
    best_of: usize,
}

/// Answers a request of either endpoint.
pub(super) async fn serve(
    app: Arc<App>,
    endpoint: Endpoint,
    identity: Identity,
    request: Request<Body>,
) -> Response<Body> {
    match answer(&app, endpoint, identity, request).await {
        Ok(response) => response,
        Err(error) => {
            let status = error.status.as_u16();
            tracing::debug!(status, code = error.code, "refused or failed");
            error.response()
        }
    }
}

async fn answer(
    app: &Arc<App>,
    endpoint: Endpoint,
    identity: Identity,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (parts, mut body) = request.into_parts();
    let read = read(app, endpoint, (identity, &parts.headers), &mut body).await;
    let (envelope, give_up, body) = match read {
        Ok(read) => read,
        Err(error) => {
            body::discard(body).await;
            return Err(error);
        }
    };
    let id = envelope.id;
    let planned = plan_elsewhere(app, body, envelope).await?;
    let is_stream = planned.stream;
    let mut running = Running::start(app, endpoint, id, (planned, give_up))?;
    if is_stream {
        // A failure before the first event still gets its own status.
        return match timeout(sse::SILENCE_MAX, running.next()).await {
            Ok(Some((_, ChoiceEvent::Failed(failure)))) => Err(failure.into()),
            Ok(first) => Ok(sse::respond(running, first)),
            Err(_) => Ok(sse::respond(running, None)),
        };
    }
    collect(running).await
}

/// Headers and body, each within its bounds; and when to give up waiting for dispatch.
async fn read(
    app: &App,
    endpoint: Endpoint,
    (identity, headers): (Identity, &HeaderMap),
    body: &mut Body,
) -> Result<(Envelope, Instant, WholeBody), ApiError> {
    body::check_headers(headers)?;
    let time_max = headers::timeout(headers)?.unwrap_or(app.config.request_time_max);
    let time_max_us = u64::try_from(time_max.as_micros()).unwrap_or(u64::MAX);
    let give_up = Instant::now() + time_max + DEADLINE_GRACE;
    let envelope = Envelope {
        endpoint,
        id: identity.id,
        deadline: app.config.clock.now().plus_us(time_max_us),
        traceparent: identity.traceparent,
    };
    let whole = body::read(body, &app.body_budget).await?;
    Ok((envelope, give_up, whole))
}

/// Parsing and tokenising may take long for a large body, so they leave the async threads.
async fn plan_elsewhere(
    app: &Arc<App>,
    body: WholeBody,
    envelope: Envelope,
) -> Result<Plan, ApiError> {
    let permit = Arc::clone(&app.text_jobs)
        .try_acquire_owned()
        .map_err(|_| {
            ApiError::from(Failure::new(
                FailureCode::Overloaded,
                format!("{TEXT_JOBS_MAX} requests are being read; try again later"),
            ))
        })?;
    let app = Arc::clone(app);
    let span = tracing::debug_span!("tokenise", n_bytes = body.bytes.len());
    let planned = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let _span = span.entered();
        plan(&body.bytes, &envelope, &app.config.model_name, &app.model)
    });
    planned.await.unwrap_or_else(|error| {
        tracing::error!(%error, "reading a request panicked");
        Err(ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "this request could not be read because of a fault of the server",
        ))
    })
}

/// The answer in one piece, out of the same events that a stream tells.
async fn collect(mut running: Running) -> Result<Response<Body>, ApiError> {
    let mut pieces: Vec<(String, Vec<_>)> = vec![Default::default(); running.n_choices()];
    while let Some((index, event)) = running.next().await {
        match event {
            ChoiceEvent::Piece(mut piece) => {
                pieces[index].0.push_str(&piece.text);
                pieces[index].1.append(&mut piece.tokens);
            }
            ChoiceEvent::Ended(_) => {}
            ChoiceEvent::Failed(failure) => return Err(failure.into()),
        }
    }
    let whole = pieces.into_iter().zip(&running.ended);
    let whole = whole.map(|((text, tokens), ended)| WholeChoice {
        text,
        tokens,
        ended: ended.expect("the events end when every choice has ended"),
    });
    let whole = best(whole.collect(), running.best_of, running.n);
    let body = running.shape.whole(whole, running.usage());
    let mut response = Response::new(Body::from(body.to_string()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    Ok(response)
}

/// Of each prompt's `best_of` candidates the `n` with the highest mean log-probability, best first; of equals the earlier.
/// Without a choice to make, all of them in their order.
fn best(mut candidates: Vec<WholeChoice>, best_of: usize, n: usize) -> Vec<WholeChoice> {
    if best_of == n {
        return candidates;
    }
    for of_prompt in candidates.chunks_mut(best_of) {
        of_prompt.sort_by(|a, b| b.ended.mean_logprob.total_cmp(&a.ended.mean_logprob));
    }
    let ranked = candidates.into_iter().enumerate();
    ranked
        .filter(|(idx, _)| idx % best_of < n)
        .map(|(_, candidate)| candidate)
        .collect()
}

impl Running {
    /// Submits every choice, or none.
    fn start(
        app: &App,
        endpoint: Endpoint,
        id: RequestId,
        (plan, give_up): (Plan, Instant),
    ) -> Result<Self, ApiError> {
        let n_places = app.requests.n_places();
        if plan.choices.len() > n_places {
            return Err(ApiError::invalid(
                if plan.best_of > plan.n {
                    "best_of"
                } else {
                    "n"
                },
                format!(
                    "{} choices are asked for (n or best_of times the number of prompts); this router has {n_places} places in all",
                    plan.choices.len()
                ),
            ));
        }
        let mut events = Vec::with_capacity(plan.choices.len());
        for (index, (job, choice)) in plan.choices.into_iter().enumerate() {
            // On a refusal the choices before this one are dropped, and so cancelled.
            let refused =
                |failure| ApiError::from(failure).with_patience(app.requests.retry_after_s());
            let answers = app.requests.submit(job).map_err(refused)?;
            let told = choice::events(choice, answers);
            events.push(told.map(move |event| (index, event)).boxed());
        }
        Ok(Self {
            shape: Shape {
                endpoint,
                id,
                created_s: app.config.clock.now().0 / 1_000_000,
                model: app.config.model_name.clone(),
                vocabulary: Arc::clone(&app.model.vocabulary),
                include_usage: plan.include_usage,
                has_logprobs: plan.has_logprobs,
            },
            ended: vec![None; events.len()],
            events: select_all(events).boxed(),
            give_up,
            n_prompt_tokens: plan.n_prompt_tokens,
            n: plan.n,
            best_of: plan.best_of,
        })
    }

    pub(super) fn n_choices(&self) -> usize {
        self.ended.len()
    }

    /// The next event of any choice; `None` when all have ended well.
    pub(super) async fn next(&mut self) -> Option<(usize, ChoiceEvent)> {
        let Ok(next) = timeout_at(self.give_up, self.events.next()).await else {
            let failure = Failure::new(
                FailureCode::DeadlineExceeded,
                "the request's time is over; ask for less or for more time",
            );
            return Some((0, ChoiceEvent::Failed(failure)));
        };
        if let Some((index, ChoiceEvent::Ended(ended))) = &next {
            self.ended[*index] = Some(*ended);
        }
        next
    }

    /// Cancels what still runs.
    pub(super) fn cancel(&mut self) {
        self.events = futures::stream::empty().boxed();
    }

    /// Tokens of the choices that have ended. A prompt counts once, however many choices it has.
    pub(super) fn usage(&self) -> Usage {
        let ended = || self.ended.iter().flatten();
        let firsts = self.ended.iter().step_by(self.best_of).flatten();
        Usage {
            n_prompt_tokens: self.n_prompt_tokens,
            n_output_tokens: ended().map(|e| u64::from(e.n_output_tokens)).sum(),
            n_cached_tokens: firsts
                .map(|e| u64::from(e.n_cached_tokens.unwrap_or(0)))
                .sum(),
        }
    }
}
