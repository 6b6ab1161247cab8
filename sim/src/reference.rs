//! What an undisturbed node gives for a request, down to the last bit: the measure of everything that a client hears.
//!
//! The tokens come from the simulated model without any memory. Log-probabilities and digests come from one shipped
//! decode node that has a pool for itself and nobody to talk to.

use crate::decode_host;
use crate::host::VOCAB_SIZE;
use crate::prefill_host;
use crate::rng::Rng;
use std::sync::Arc;
use tidemill_core::{
    CallId, GenerateRequest, KvLayout, RequestId, SampledToken, SequenceSpec, Timestamp,
    block_hashes,
};
use tidemill_decode_node::node::{Effect, Event, GenerateEvent};
use tidemill_engine::executor::simulated::SimulatedExecutor;
use tidemill_engine::executor::{Executor, NoProgress, PromptLogprob};
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_kernels::memory::KvArena;
use tidemill_router::requests::Job;

/// Everything that a client may hear of a request.
#[derive(Clone, Default, PartialEq, Debug)]
pub(crate) struct Exact {
    /// Its tokens.
    pub(crate) output: Vec<SampledToken>,
    /// Its prompt's log-probabilities.
    pub(crate) prompt: Vec<PromptLogprob>,
}

/// Runs a job on a node of its own.
pub(crate) fn run_alone(job: &Job, layout: &KvLayout) -> Exact {
    let facts = prefill_host::facts(layout);
    let n_blocks = layout.n_blocks_for(facts.context_length);
    let arena = KvArena::new(layout, n_blocks).expect("a few kilobytes");
    let mut executor = SimulatedExecutor::new(Arc::clone(&arena), VOCAB_SIZE);
    let scheduler = SchedulerConfig::for_model(&facts);
    let (incarnation, mut node) =
        decode_host::new_core(0, &facts, n_blocks, scheduler, &mut Rng::new(0));
    let now = Timestamp(job.deadline.0 - 1);
    let mut effects = node.apply(
        Event::Generate {
            call: CallId(1),
            request: GenerateRequest {
                spec: spec(job, layout),
                handle: None,
            },
            to: incarnation,
        },
        now,
    );
    let mut exact = Exact::default();
    loop {
        effects.extend(node.maintain(now));
        assert!(!effects.is_empty(), "a lone node has nothing to wait for");
        let mut next = Vec::new();
        for effect in effects {
            match effect {
                Effect::RunStep(plan) => {
                    let result = executor.step(&plan, &mut NoProgress);
                    let step_id = plan.step_id;
                    next.extend(node.apply(Event::StepDone { step_id, result }, now));
                }
                Effect::Generate { event, .. } => match event {
                    GenerateEvent::Token(token) => exact.output.push(token),
                    GenerateEvent::PromptLogprobs(entries) => exact.prompt.extend(entries),
                    GenerateEvent::Finished(_) => return exact,
                    GenerateEvent::Accepted => {}
                    other => panic!("a lone node says {other:?}"),
                },
                other => panic!("a lone node wants {other:?}"),
            }
        }
        effects = next;
    }
}

fn spec(job: &Job, layout: &KvLayout) -> SequenceSpec {
    SequenceSpec {
        request_id: RequestId(1),
        prompt: job.prompt.clone(),
        emitted: Vec::new(),
        namespace: job.namespace.clone(),
        block_hashes: block_hashes(&layout.model_fingerprint, &job.namespace, &job.prompt),
        sampling: job.sampling.clone(),
        stop: job.stop.clone(),
        logprobs: job.logprobs,
        deadline: job.deadline,
        traceparent: String::new(),
    }
}
