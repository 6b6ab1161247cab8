//! What the tokens have to be: an executor driven by hand, one sequence in blocks `0..`, the whole context in one step
//! and then a token a step. No node, no scheduler, no block pool, no prefix cache, no transfer, no thread but its own.

use crate::ask::Ask;
use crate::client::Drawn;
use std::sync::Arc;
use tidemill_core::{BlockIdx, KvDtype, LogprobSpec};
use tidemill_engine::executor::cpu::CpuExecutor;
use tidemill_engine::executor::{
    Executor, GivenTokens, NoProgress, PromptLogprob, PromptLogprobSpec, SampleSpec, SequenceId,
    StepItem, StepItemOutput, StepPlan,
};
use tidemill_engine::model::Model;
use tidemill_kernels::memory::KvArena;

/// Blocks of its memory: 512 positions.
const N_BLOCKS: u32 = 32;

/// Computes what is right for one model and one KV type.
pub(crate) struct Bare(CpuExecutor);

impl Bare {
    pub(crate) fn new(model: &Arc<Model>, kv_dtype: KvDtype, n_threads: usize) -> Self {
        let layout = model.facts(kv_dtype).layout;
        let arena = KvArena::new(&layout, N_BLOCKS).expect("memory for 512 positions");
        let executor = CpuExecutor::new(Arc::clone(model), arena, n_threads);
        Self(executor.expect("threads start"))
    }

    /// The tokens that `ask` has to get.
    pub(crate) fn draw(&mut self, ask: &Ask) -> Vec<Drawn> {
        let mut tokens = [&ask.prompt[..], &ask.emitted].concat();
        let mut drawn = Vec::new();
        let mut n_fed = 0;
        for output_idx in ask.emitted.len() as u32..ask.max_tokens {
            let mut item = item(&tokens, n_fed);
            item.sample = Some(SampleSpec {
                params: ask.sampling.clone(),
                output_idx,
                given: GivenTokens {
                    prompt: ask.prompt.to_vec(),
                    output: tokens[ask.prompt.len()..].to_vec(),
                },
                barred: Vec::new(),
                logprobs: LogprobSpec {
                    logits_digest: true,
                    ..LogprobSpec::default()
                },
            });
            n_fed = tokens.len();
            let sampled = self.step(item).sampled.expect("one was asked for");
            tokens.push(sampled.token);
            drawn.push(Drawn::from(sampled));
        }
        drawn
    }

    /// Log-probabilities of the prompt's tokens from the second on.
    pub(crate) fn prompt_logprobs(&mut self, ask: &Ask) -> Vec<PromptLogprob> {
        let mut item = item(&ask.prompt, 0);
        item.prompt_logprobs = Some(PromptLogprobSpec {
            targets: ask.prompt[1..].to_vec(),
            n_top: ask.prompt_top.expect("somebody asks for them"),
        });
        self.step(item).prompt_logprobs
    }

    fn step(&mut self, item: StepItem) -> StepItemOutput {
        let plan = StepPlan {
            step_id: 1,
            items: vec![item],
        };
        let mut output = self.0.step(&plan, &mut NoProgress).expect("a valid step");
        let output = output.items.remove(0);
        assert_eq!(output.failure, None);
        output
    }
}

fn item(tokens: &[u32], n_fed: usize) -> StepItem {
    let n_blocks = u32::try_from(tokens.len().div_ceil(16)).expect("few");
    StepItem {
        sequence_id: SequenceId(1),
        tokens: tokens[n_fed..].to_vec(),
        start_position: u32::try_from(n_fed).expect("few"),
        block_table: (0..n_blocks).map(BlockIdx).collect(),
        sample: None,
        prompt_logprobs: None,
        report_progress: false,
    }
}
