//! One request, asked at the nodes themselves as a router would, since clients of a router cannot see logits.
//!
//! With a prefill node: Prefill, its handle to Generate at once, so that decode pulls while prefill computes.
//! Without: Generate alone.

use crate::ask::Ask;
use crate::deployment::Connections;
use std::time::Instant;
use tidemill_core::{SampledToken, SequenceSpec, TokenId};
use tidemill_proto::convert::id_bytes;
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::generate_event::Event as Generated;
use tidemill_proto::pd::v1::prefill_event::Event as Prefilled;
use tokio::sync::oneshot;

/// A token and the digest of the logits that it was drawn from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Drawn {
    pub(crate) token: TokenId,
    pub(crate) logits_digest: u64,
}

impl From<SampledToken> for Drawn {
    fn from(sampled: SampledToken) -> Self {
        Self {
            token: sampled.token,
            logits_digest: sampled.logits_digest.expect("always asked for"),
        }
    }
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// From output `emitted.len()` on.
    pub(crate) drawn: Vec<Drawn>,
    pub(crate) prompt_logprobs: Vec<v1::PromptLogprob>,
    /// Prompt tokens that the node that prefills had already.
    pub(crate) n_cached_tokens: u32,
    /// Tokens that were fed as a prompt, after a preemption too.
    pub(crate) n_computed_tokens: u32,
    /// Prompt tokens that the decode node had already; 0 without a hand-off.
    pub(crate) n_local_tokens: u32,
    pub(crate) first_at: Instant,
    pub(crate) last_at: Instant,
}

impl Answer {
    /// True when tokens of both were drawn in turns.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.first_at < other.last_at && other.first_at < self.last_at
    }
}

/// What went wrong, in a peer's words.
type Trouble = String;

/// An answer as far as it has come, in the order of `output_idx`.
struct Growing {
    answer: Answer,
    next_idx: u32,
    /// Told when the first token is here.
    begun: Option<oneshot::Sender<()>>,
}

impl Growing {
    fn new(ask: &Ask, begun: Option<oneshot::Sender<()>>) -> Self {
        let now = Instant::now();
        Self {
            answer: Answer {
                drawn: Vec::new(),
                prompt_logprobs: Vec::new(),
                n_cached_tokens: 0,
                n_computed_tokens: 0,
                n_local_tokens: 0,
                first_at: now,
                last_at: now,
            },
            next_idx: u32::try_from(ask.emitted.len()).expect("few"),
            begun,
        }
    }

    fn push(&mut self, token: v1::SampledToken) -> Result<(), Trouble> {
        if token.output_idx != self.next_idx {
            let (got, wanted) = (token.output_idx, self.next_idx);
            return Err(format!("output_idx is {got}, has to be {wanted}"));
        }
        self.next_idx += 1;
        self.answer.last_at = Instant::now();
        if self.answer.drawn.is_empty() {
            self.answer.first_at = self.answer.last_at;
        }
        self.answer.drawn.push(SampledToken::from(token).into());
        if let Some(begun) = self.begun.take() {
            // Whoever waited may be gone.
            let _ = begun.send(());
        }
        Ok(())
    }
}

/// Asks, and waits for the end.
pub(crate) async fn ask(at: &Connections, ask: &Ask) -> Result<Answer, Trouble> {
    ask_and_tell(at, ask, None).await
}

/// The same; tells when the first token is here.
pub(crate) async fn ask_and_tell(
    at: &Connections,
    ask: &Ask,
    begun: Option<oneshot::Sender<()>>,
) -> Result<Answer, Trouble> {
    let spec = ask.spec(&at.facts);
    let mut growing = Growing::new(ask, begun);
    if at.prefill.is_some() {
        hand_off(at, &spec, &mut growing).await?;
    } else {
        generate(at, &spec, None, &mut growing).await?;
    }
    Ok(growing.answer)
}

/// Asks, and gives up when the first word comes: everybody is told, as a router whose client has left would do.
pub(crate) async fn ask_and_leave(at: &Connections, ask: &Ask) -> Result<(), Trouble> {
    let spec = ask.spec(&at.facts);
    if let Some((mut client, life)) = at.prefill.clone() {
        let request = v1::PrefillRequest {
            spec: Some((&spec).into()),
            expected_incarnation: life,
        };
        let answer = client.prefill(request).await;
        let mut events = answer.map_err(|status| status.to_string())?.into_inner();
        let event = events
            .message()
            .await
            .map_err(|status| status.to_string())?;
        if let Some(Prefilled::Handle(handle)) = event.and_then(|event| event.event) {
            open(at, &spec, Some(handle)).await?;
        }
    } else {
        let mut events = open(at, &spec, None).await?;
        events
            .message()
            .await
            .map_err(|status| status.to_string())?;
    }
    for (mut node, life) in at.nodes.clone() {
        let request = v1::CancelRequest {
            request_id: id_bytes(spec.request_id.0),
            expected_incarnation: life,
        };
        let cancelled = node.cancel(request).await;
        cancelled.map_err(|status| status.to_string())?;
    }
    Ok(())
}

async fn hand_off(
    at: &Connections,
    spec: &SequenceSpec,
    growing: &mut Growing,
) -> Result<(), Trouble> {
    let (mut client, life) = at.prefill.clone().ok_or("no prefill node")?;
    let request = v1::PrefillRequest {
        spec: Some(spec.into()),
        expected_incarnation: life,
    };
    let answer = client.prefill(request).await;
    let mut events = answer.map_err(|status| status.to_string())?.into_inner();
    let mut told = None;
    let mut decoding = None;
    loop {
        let event = events
            .message()
            .await
            .map_err(|status| status.to_string())?;
        match event.and_then(|event| event.event) {
            Some(Prefilled::Handle(handle)) => {
                let (at, spec) = (at.clone(), spec.clone());
                let open = async move { open(&at, &spec, Some(handle)).await };
                decoding = Some(tokio::spawn(open));
            }
            Some(Prefilled::PromptLogprobs(more)) => {
                growing.answer.prompt_logprobs.extend(more.tokens);
            }
            Some(Prefilled::FirstToken(first)) => {
                growing.answer.n_cached_tokens = first.n_cached_tokens;
                growing.answer.n_computed_tokens = first.n_computed_tokens;
                if let Some(token) = first.token {
                    told = Some(token.clone());
                    growing.push(token)?;
                }
                break;
            }
            Some(Prefilled::Failed(failure)) => return Err(failure.message),
            None => return Err("the prefill was lost".into()),
        }
    }
    let Some(decoding) = decoding else {
        return Ok(());
    };
    let events = decoding.await.map_err(|error| error.to_string())??;
    read(events, told, growing).await
}

async fn generate(
    at: &Connections,
    spec: &SequenceSpec,
    handle: Option<v1::KvHandle>,
    growing: &mut Growing,
) -> Result<(), Trouble> {
    read(open(at, spec, handle).await?, None, growing).await
}

async fn open(
    at: &Connections,
    spec: &SequenceSpec,
    handle: Option<v1::KvHandle>,
) -> Result<tonic::Streaming<v1::GenerateEvent>, Trouble> {
    let (mut client, life) = at.decode.clone();
    let request = v1::GenerateRequest {
        spec: Some(spec.into()),
        handle,
        expected_incarnation: life,
    };
    let answer = client.generate(request).await;
    Ok(answer.map_err(|status| status.to_string())?.into_inner())
}

/// Reads a generation to its end. `told` is the first token as the prefill node told it.
async fn read(
    mut events: tonic::Streaming<v1::GenerateEvent>,
    told: Option<v1::SampledToken>,
    growing: &mut Growing,
) -> Result<(), Trouble> {
    let is_handed_over = told.is_some();
    loop {
        let event = events
            .message()
            .await
            .map_err(|status| status.to_string())?;
        match event.and_then(|event| event.event) {
            Some(Generated::Accepted(_)) => {}
            Some(Generated::KvReady(ready)) => {
                growing.answer.n_local_tokens = ready.n_local_tokens;
                if ready.first_token != told {
                    let first = ready.first_token;
                    return Err(format!("told {told:?} first, handed over {first:?}"));
                }
            }
            Some(Generated::PromptLogprobs(more)) => {
                growing.answer.prompt_logprobs.extend(more.tokens);
            }
            Some(Generated::Token(token)) => growing.push(token)?,
            Some(Generated::Finished(finished)) => {
                growing.answer.n_computed_tokens += finished.n_computed_tokens;
                if !is_handed_over {
                    growing.answer.n_cached_tokens = finished.n_cached_tokens;
                }
                return Ok(());
            }
            Some(Generated::Failed(failure)) => return Err(failure.message),
            None => return Err("the generation was lost".into()),
        }
    }
}
