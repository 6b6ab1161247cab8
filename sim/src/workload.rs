//! The deployment, the load and the faults of a history, drawn from its seed. Pools are small on purpose: waiting for
//! blocks and preemption have to happen.

use crate::answers::Tracked;
use crate::coverage::FaultKind;
use crate::fault::{Fault, Window};
use crate::host::Host;
use crate::network::Network;
use crate::occurrence::Occurrence;
use crate::reference::run_alone;
use crate::rng::Rng;
use crate::router_host::RouterHost;
use crate::schedule::Schedule;
use crate::world::{BEGINNING, Outcome, SimConfig, World};
use crate::{decode_host, prefill_host};
use std::collections::BTreeMap;
use tidemill_core::{
    FinishReason, KvDtype, KvLayout, LogprobSpec, SamplingParams, StopConditions, TokenId,
};
use tidemill_engine::executor::simulated::SimulatedModel;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_router::placement::SplitPolicy;
use tidemill_router::requests::Job;

/// Longest prompt.
const PROMPT_TOKENS_MAX: u64 = 90;
/// Prefixes are shared within each of them.
const NAMESPACES: [&str; 3] = ["", "", "tenant"];
/// Longest output.
const OUTPUT_TOKENS_MAX: u64 = 24;
/// Longest time between two requests of a burst, and between two bursts.
const BURST_GAP_US: u64 = 2_000;
const PAUSE_US: u64 = 5_000_000;
/// How often a request begins a new burst, per mille.
const BURST_PER_MILLE: u64 = 120;

fn layout() -> KvLayout {
    let mut layout = KvLayout::new([1; 32], 3, 1, 4, KvDtype::F16).expect("a valid shape");
    // Small groups, so that a request has many slices.
    layout.group_layers = 1;
    layout
}

impl World {
    pub(crate) fn new(seed: u64, config: SimConfig) -> Self {
        let mut rng = Rng::new(seed);
        let layout = layout();
        let split = if rng.chance(150) {
            SplitPolicy::Require
        } else {
            SplitPolicy::Prefer
        };
        let mut world = Self {
            config,
            now: BEGINNING,
            schedule: Schedule::default(),
            network: Network::default(),
            prefills: Vec::new(),
            decodes: Vec::new(),
            router: RouterHost::new(split),
            requests: Vec::new(),
            attempts: BTreeMap::new(),
            transfers: BTreeMap::new(),
            claims: BTreeMap::new(),
            renewals: BTreeMap::new(),
            is_settling: false,
            drops: Window::default(),
            doubles: Window::default(),
            corrupts: Window::default(),
            legs: BTreeMap::new(),
            generating: BTreeMap::new(),
            rebinding: BTreeMap::new(),
            epochs: BTreeMap::new(),
            outcome: Outcome::default(),
            violation: None,
            layout: layout.clone(),
            rng: Rng::new(rng.next_u64()),
        };
        let facts = prefill_host::facts(&layout);
        for prefill_idx in 0..usize::try_from(rng.between(1, 3)).expect("few") {
            let n_blocks = u32::try_from(rng.between(16, 48)).expect("few");
            let scheduler = world.scheduler_config();
            let (incarnation, core) =
                prefill_host::new_core(prefill_idx, &facts, n_blocks, scheduler, &mut world.rng);
            world
                .prefills
                .push(Host::new(&layout, n_blocks, incarnation, core));
        }
        for decode_idx in 0..usize::try_from(rng.between(1, 3)).expect("few") {
            let n_blocks = u32::try_from(rng.between(10, 48)).expect("few");
            let scheduler = world.scheduler_config();
            let (incarnation, core) =
                decode_host::new_core(decode_idx, &facts, n_blocks, scheduler, &mut world.rng);
            world
                .decodes
                .push(Host::new(&layout, n_blocks, incarnation, core));
        }
        world
    }

    pub(crate) fn scheduler_config(&mut self) -> SchedulerConfig {
        let mut config = SchedulerConfig::for_model(&prefill_host::facts(&self.layout));
        config.max_batch_tokens = u32::try_from(self.rng.between(8, 64)).expect("few");
        config.max_sequences = u32::try_from(self.rng.between(2, 12)).expect("few");
        config.max_waiting = 64;
        config
    }

    pub(crate) fn plan_load_and_faults(&mut self) {
        self.begin_membership();
        let model = SimulatedModel::new(
            self.layout.clone(),
            prefill_host::facts(&self.layout).vocab_size,
        );
        let prefixes: Vec<Vec<TokenId>> = (0..4).map(|_| self.draw_tokens(64)).collect();
        let mut at_us = 50_000;
        let mut arrivals = Vec::with_capacity(self.config.n_requests);
        for request_idx in 0..self.config.n_requests {
            let gap_us = if self.rng.chance(BURST_PER_MILLE) {
                PAUSE_US
            } else {
                BURST_GAP_US
            };
            at_us += self.rng.below(gap_us);
            arrivals.push(at_us);
            let at = BEGINNING.plus_us(at_us);
            let mut request = self.draw_request(&model, &prefixes);
            if self.rng.chance(120) {
                // Early or late in its life: it takes some ten milliseconds.
                let longest = self.rng.pick(&[300, 3_000, 30_000, 300_000]);
                request.leaves_after_us = Some(self.rng.below(longest));
            }
            self.requests.push(request);
            self.schedule.push(at, Occurrence::Arrive(request_idx));
        }
        for _ in 0..self.config.n_faults {
            // Faults strike where there is work: some milliseconds after a request has come.
            let fault_at = BEGINNING.plus_us(self.rng.pick(&arrivals) + self.rng.below(20_000));
            let kind = self.draw_fault();
            let fault = Fault { kind, n_misses: 0 };
            self.schedule.push(fault_at, Occurrence::Fault(fault));
        }
    }

    /// A router's death takes all of its requests along: it comes half as often as the others.
    fn draw_fault(&mut self) -> FaultKind {
        match self.rng.pick(&FaultKind::ALL) {
            FaultKind::CrashRouter if self.rng.chance(500) => FaultKind::CorruptSlice,
            kind => kind,
        }
    }

    fn draw_tokens(&mut self, n_tokens: u64) -> Vec<TokenId> {
        let vocab_size = u64::from(prefill_host::facts(&self.layout).vocab_size);
        (0..n_tokens)
            .map(|_| u32::try_from(self.rng.below(vocab_size)).expect("a token"))
            .collect()
    }

    fn draw_request(&mut self, model: &SimulatedModel, prefixes: &[Vec<TokenId>]) -> Tracked {
        let n_tokens = self.rng.between(1, PROMPT_TOKENS_MAX);
        let mut prompt = self.draw_tokens(n_tokens);
        if self.rng.chance(500) {
            let prefix_idx = usize::try_from(self.rng.below(prefixes.len() as u64)).expect("few");
            let n_shared = prompt.len().min(64);
            prompt[..n_shared].copy_from_slice(&prefixes[prefix_idx][..n_shared]);
        }
        let max_tokens = u32::try_from(self.rng.below(OUTPUT_TOKENS_MAX + 1)).expect("few");
        let sampling = if self.rng.chance(500) {
            SamplingParams::greedy()
        } else {
            SamplingParams {
                temperature: 1.0,
                seed: self.rng.next_u64(),
                ..SamplingParams::greedy()
            }
        };
        let mut reference = model.reference(&prompt, &sampling, max_tokens);
        let mut reason = FinishReason::Length;
        let mut stop_token_ids = Vec::new();
        if max_tokens > 0 && self.rng.chance(200) {
            let stop_idx = usize::try_from(self.rng.below(u64::from(max_tokens))).expect("few");
            stop_token_ids.push(reference[stop_idx]);
            let first = reference
                .iter()
                .position(|token| *token == stop_token_ids[0])
                .expect("it is there");
            reference.truncate(first + 1);
            reason = FinishReason::Stop;
        }
        let patience_us = if self.rng.chance(50) {
            self.rng.between(1_000, 100_000)
        } else {
            120_000_000
        };
        let job = Job {
            prompt,
            namespace: self.rng.pick(&NAMESPACES).to_owned(),
            sampling,
            stop: StopConditions {
                max_tokens,
                min_tokens: 0,
                stop_token_ids,
            },
            logprobs: self.draw_logprobs(),
            deadline: BEGINNING.plus_us(patience_us),
            traceparent: String::new(),
        };
        let exact = (job.logprobs != LogprobSpec::default()).then(|| run_alone(&job, &self.layout));
        if let Some(exact) = &exact {
            let tokens = exact.output.iter().map(|token| token.token);
            assert!(
                tokens.eq(reference.iter().copied()),
                "a lone node and the model without memory agree"
            );
        }
        Tracked {
            exact,
            patience_us,
            ..Tracked::new(job, reference, reason)
        }
    }

    fn draw_logprobs(&mut self) -> LogprobSpec {
        let mut draw_top = |per_mille| {
            let n_top = u32::try_from(self.rng.below(4)).expect("few");
            self.rng.chance(per_mille).then_some(n_top)
        };
        let (output_top, prompt_top) = (draw_top(200), draw_top(150));
        LogprobSpec {
            output_top,
            prompt_top,
            logits_digest: self.rng.chance(100),
        }
    }
}
