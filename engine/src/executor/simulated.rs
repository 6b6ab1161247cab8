//! A model that is cheap and unforgiving, for tests and the simulator.
//!
//! It writes real bytes into real blocks: those of a position depend on its token, its place, the layer and all KV
//! before it, as read through the block table. The next token is drawn from a hash of everything read. So a wrong
//! block, a lost write or a byte flipped on the way shows as wrong tokens, and `SimulatedModel::reference` says,
//! without any memory, what an undisturbed node would have said.

use crate::executor::{
    Executor, GivenTokens, LayerProgress, ProgressSink, PromptLogprob, StepItem, StepItemOutput,
    StepOutput, StepPlan,
};
use crate::sampler;
use std::sync::Arc;
use tidemill_core::{
    BlockIdx, Failure, FailureCode, KvLayout, LayerGroupIdx, LogprobSpec, SamplingParams, TokenId,
};
use tidemill_kernels::memory::{KvArena, MemoryError, SliceAt};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::SampleSpec;

/// Spread of logits: likely tokens stand out, unlikely ones still occur.
const LOGIT_SPREAD: f32 = 8.0;

/// What the simulated model computes, apart from where it is stored.
#[derive(Clone, Debug)]
pub struct SimulatedModel {
    layout: KvLayout,
    vocab_size: u32,
}

impl SimulatedModel {
    /// A model with KV of this shape and tokens below `vocab_size`.
    ///
    /// # Panics
    /// When `vocab_size` is 0.
    pub fn new(layout: KvLayout, vocab_size: u32) -> Self {
        assert!(vocab_size > 0, "a vocabulary has at least one token");
        Self { layout, vocab_size }
    }

    /// The first `n_output` tokens that a single undisturbed node would emit, stop tokens not regarded.
    ///
    /// # Panics
    /// When `prompt` is empty.
    pub fn reference(
        &self,
        prompt: &[TokenId],
        params: &SamplingParams,
        n_output: u32,
    ) -> Vec<TokenId> {
        assert!(!prompt.is_empty(), "a prompt has at least one token");
        let mut row = vec![0; self.position_bytes()];
        let mut context = Context::default();
        for &token in prompt {
            self.fill(context, token, &mut row);
            context = context.after(&row);
        }
        let mut output = Vec::with_capacity(n_output as usize);
        for output_idx in 0..n_output {
            let spec = SampleSpec {
                params: params.clone(),
                output_idx,
                given: GivenTokens {
                    prompt: prompt.to_vec(),
                    output: output.clone(),
                },
                barred: Vec::new(),
                logprobs: LogprobSpec::default(),
            };
            let sampled = sampler::sample(&self.logits(context), &spec);
            let token = sampled.expect("simulated logits are finite").token;
            output.push(token);
            self.fill(context, token, &mut row);
            context = context.after(&row);
        }
        output
    }

    /// Bytes of one position in all layers.
    fn position_bytes(&self) -> usize {
        self.layout.block_bytes() / self.layout.block_tokens as usize
    }

    /// Bytes of one position in one head of K or V: what lies together.
    fn head_row_bytes(&self) -> usize {
        self.layout.head_dim as usize * self.layout.dtype.bytes()
    }

    /// KV of `token` after `context`, `[layer][k|v][kv_head][head_dim]`.
    fn fill(&self, context: Context, token: TokenId, row: &mut [u8]) {
        let layer_row_bytes = row.len() / self.layout.n_layers as usize;
        for (layer, bytes) in row.chunks_exact_mut(layer_row_bytes).enumerate() {
            let place = (u64::from(context.n_tokens) << 32) | u64::from(token);
            let mut noise =
                Noise(context.digest ^ mix(place) ^ mix(layer as u64 + 1).rotate_left(17));
            for word in bytes.chunks_mut(8) {
                word.copy_from_slice(&noise.draw().to_le_bytes()[..word.len()]);
            }
        }
    }

    /// Logits of the token that follows `context`.
    #[expect(clippy::cast_precision_loss, reason = "24 bits are exact in f32")]
    fn logits(&self, context: Context) -> Vec<f32> {
        let mut noise = Noise(context.digest);
        let mut draw = || (noise.draw() >> 40) as f32 / (1_u32 << 24) as f32 * LOGIT_SPREAD;
        (0..self.vocab_size).map(|_| draw()).collect()
    }
}

/// All KV up to a position, in one number.
#[derive(Clone, Copy, Default)]
struct Context {
    n_tokens: u32,
    digest: u64,
}

impl Context {
    fn after(self, row: &[u8]) -> Self {
        Self {
            n_tokens: self.n_tokens + 1,
            digest: xxh3_64_with_seed(row, self.digest),
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
struct Noise(u64);

impl Noise {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Runs a `SimulatedModel` on the blocks of one node.
pub struct SimulatedExecutor {
    model: SimulatedModel,
    arena: Arc<KvArena>,
}

/// One block as it will be after the step.
struct WrittenBlock {
    block: BlockIdx,
    bytes: Vec<u8>,
}

impl SimulatedExecutor {
    /// An executor on this memory, with tokens below `vocab_size`.
    ///
    /// # Panics
    /// When `vocab_size` is 0.
    pub fn new(arena: Arc<KvArena>, vocab_size: u32) -> Self {
        Self {
            model: SimulatedModel::new(arena.layout().clone(), vocab_size),
            arena,
        }
    }

    /// See `SimulatedModel::reference`.
    pub fn reference(
        &self,
        prompt: &[TokenId],
        params: &SamplingParams,
        n_output: u32,
    ) -> Vec<TokenId> {
        self.model.reference(prompt, params, n_output)
    }

    fn check(&self, item: &StepItem) -> Result<(), Failure> {
        let n_positions = item.start_position as usize + item.tokens.len();
        let n_blocks = n_positions.div_ceil(self.model.layout.block_tokens as usize);
        if item.tokens.is_empty() || item.block_table.len() < n_blocks {
            return Err(internal(format!(
                "a step item feeds {} tokens up to position {n_positions} with {} blocks; at least 1 token and \
                 {n_blocks} blocks are needed",
                item.tokens.len(),
                item.block_table.len()
            )));
        }
        for &block in &item.block_table {
            self.arena.check(block).map_err(memory_failure)?;
        }
        Ok(())
    }

    fn compute(
        &self,
        item: &StepItem,
        progress: &mut dyn ProgressSink,
    ) -> Result<StepItemOutput, Failure> {
        let mut output = StepItemOutput {
            sequence_id: item.sequence_id,
            sampled: None,
            prompt_logprobs: Vec::new(),
            failure: None,
        };
        let vocab_size = self.model.vocab_size;
        if let Some(token) = item.tokens.iter().find(|&&token| token >= vocab_size) {
            output.failure = Some(internal(format!(
                "token id {token} is fed; the vocabulary has ids below {vocab_size}"
            )));
            return Ok(output);
        }
        let (context, written) = self.read_and_extend(item, &mut output)?;
        for group in (0..self.model.layout.n_groups()).map(LayerGroupIdx) {
            self.store(group, &written)?;
            if item.report_progress {
                progress.layers_done(LayerProgress {
                    sequence_id: item.sequence_id,
                    group,
                    n_tokens: context.n_tokens,
                });
            }
        }
        if let Some(spec) = &item.sample {
            match sampler::sample(&self.model.logits(context), spec) {
                Ok(sampled) => output.sampled = Some(sampled),
                Err(failure) => output.failure = Some(failure),
            }
        }
        Ok(output)
    }

    /// Reads all earlier positions, then computes the fed ones; returns the blocks to be stored.
    fn read_and_extend(
        &self,
        item: &StepItem,
        output: &mut StepItemOutput,
    ) -> Result<(Context, Vec<WrittenBlock>), Failure> {
        let block_tokens = self.model.layout.block_tokens;
        let start = item.start_position;
        let end = start + u32::try_from(item.tokens.len()).expect("a batch is counted in u32");
        let mut context = Context::default();
        let mut row = vec![0; self.model.position_bytes()];
        let mut written = Vec::new();
        for &block in &item.block_table {
            if context.n_tokens >= end {
                break;
            }
            // A block whose first position is fed now is new to its sequence: the tail stays zero.
            let mut bytes = vec![0; self.arena.block_bytes()];
            if context.n_tokens < start {
                self.load(block, &mut bytes)?;
            }
            let block_end = (context.n_tokens + block_tokens).min(end);
            while context.n_tokens < block_end {
                let position = context.n_tokens;
                if position < start {
                    self.each_head_row(position, |n, range| {
                        row[n..n + range.len()].copy_from_slice(&bytes[range]);
                    });
                    context = context.after(&row);
                    continue;
                }
                let idx = (position - start) as usize;
                self.model.fill(context, item.tokens[idx], &mut row);
                self.each_head_row(position, |n, range| {
                    let n_bytes = range.len();
                    bytes[range].copy_from_slice(&row[n..n + n_bytes]);
                });
                context = context.after(&row);
                if let Some(logprob) = self.prompt_logprob(item, idx, context)? {
                    output.prompt_logprobs.push(logprob);
                }
            }
            if block_end > start {
                written.push(WrittenBlock { block, bytes });
            }
        }
        Ok((context, written))
    }

    /// Pairs each run of a position's row with its range in the block.
    fn each_head_row(&self, position: u32, mut visit: impl FnMut(usize, std::ops::Range<usize>)) {
        let layout = &self.model.layout;
        let n_bytes = self.model.head_row_bytes();
        let in_block = (position % layout.block_tokens) as usize * n_bytes;
        let head_bytes = layout.block_tokens as usize * n_bytes;
        for idx in 0..self.model.position_bytes() / n_bytes {
            let from = idx * head_bytes + in_block;
            visit(idx * n_bytes, from..from + n_bytes);
        }
    }

    fn prompt_logprob(
        &self,
        item: &StepItem,
        idx: usize,
        context: Context,
    ) -> Result<Option<PromptLogprob>, Failure> {
        let Some(spec) = &item.prompt_logprobs else {
            return Ok(None);
        };
        let Some(&target) = spec.targets.get(idx) else {
            return Ok(None);
        };
        let logits = self.model.logits(context);
        sampler::prompt_logprob(&logits, target, spec.n_top).map(Some)
    }

    fn load(&self, block: BlockIdx, bytes: &mut [u8]) -> Result<(), Failure> {
        for group in (0..self.model.layout.n_groups()).map(LayerGroupIdx) {
            let range = self.model.layout.group_byte_range(group);
            let at = SliceAt { block, group };
            let copied = self.arena.copy_out(at, &mut bytes[range]);
            copied.map_err(memory_failure)?;
        }
        Ok(())
    }

    fn store(&self, group: LayerGroupIdx, written: &[WrittenBlock]) -> Result<(), Failure> {
        let range = self.model.layout.group_byte_range(group);
        for WrittenBlock { block, bytes } in written {
            let at = SliceAt {
                block: *block,
                group,
            };
            let copied = self.arena.copy_in(at, &bytes[range.clone()]);
            copied.map_err(memory_failure)?;
        }
        Ok(())
    }
}

impl Executor for SimulatedExecutor {
    fn step(
        &mut self,
        plan: &StepPlan,
        progress: &mut dyn ProgressSink,
    ) -> Result<StepOutput, Failure> {
        // All or nothing: nothing is written before everything is checked.
        plan.items.iter().try_for_each(|item| self.check(item))?;
        let items = plan.items.iter().map(|item| self.compute(item, progress));
        Ok(StepOutput {
            step_id: plan.step_id,
            items: items.collect::<Result<_, _>>()?,
        })
    }
}

fn internal(message: String) -> Failure {
    Failure::new(FailureCode::Internal, message)
}

fn memory_failure(error: MemoryError) -> Failure {
    internal(error.to_string())
}

#[cfg(test)]
mod tests;
