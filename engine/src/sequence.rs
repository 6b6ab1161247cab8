//! The tokens of one request in one engine, and how far their KV has been computed.
//!
//! Prompt and output lie in one list, since to the model they are the same; what differs is kept as a count.
//! `n_computed` is the only truth about KV: positions below it are in the blocks, positions from it on are to be
//! fed. So a fresh prompt, a resumed request, an imported prefix and a preempted sequence are one thing.

use crate::executor::{GivenTokens, PromptLogprobSpec, SampleSpec, SequenceId};
use tidemill_core::{
    BlockHash, BlockIdx, FinishReason, LogprobSpec, SamplingParams, SequenceSpec, StopConditions,
    Timestamp, TokenId, block_hashes,
};

/// What ends a sequence well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishAfter {
    /// One sampled token (or none, when `max_tokens` is 0): prefill for another node.
    FirstToken,
    /// Stop tokens, `max_tokens` and the context length.
    Conditions,
}

/// One sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    id: SequenceId,
    /// Prompt, then output.
    tokens: Vec<TokenId>,
    n_prompt: usize,
    /// Tokens before this position are context: given, or to be fed again. The others were sampled here.
    n_context: usize,
    finish_after: FinishAfter,
    sampling: SamplingParams,
    stop: StopConditions,
    logprobs: LogprobSpec,
    namespace: String,
    deadline: Timestamp,
    /// Hashes of full blocks, 16 tokens each; may end before the last full block.
    hashes: Vec<BlockHash>,
    pub(crate) blocks: Vec<BlockIdx>,
    n_computed: usize,
    /// Full blocks whose content has been offered to the prefix cache.
    pub(crate) n_offered_blocks: usize,
    /// Prompt log-probabilities already reported.
    pub(crate) n_prompt_logprobs: usize,
    /// Set at the first admission: context tokens that came from the cache or from another node.
    pub(crate) n_cached_tokens: Option<u32>,
    /// Context tokens fed here, those fed again after a preemption included.
    pub(crate) n_computed_tokens: u32,
    /// Given up while its step is in flight: ends when the step does.
    pub(crate) is_cancelled: bool,
}

impl Sequence {
    /// A sequence with nothing computed. `hashes` are those of all full blocks of prompt and emitted tokens, as
    /// returned by `intake::check`.
    pub fn new(
        id: SequenceId,
        spec: SequenceSpec,
        hashes: Vec<BlockHash>,
        finish_after: FinishAfter,
    ) -> Self {
        let mut tokens = spec.prompt;
        let n_prompt = tokens.len();
        tokens.extend(spec.emitted);
        Self {
            id,
            n_context: tokens.len(),
            tokens,
            n_prompt,
            finish_after,
            sampling: spec.sampling,
            stop: spec.stop,
            logprobs: spec.logprobs,
            namespace: spec.namespace,
            deadline: spec.deadline,
            hashes,
            blocks: Vec::new(),
            n_computed: 0,
            n_offered_blocks: 0,
            n_prompt_logprobs: 0,
            n_cached_tokens: None,
            n_computed_tokens: 0,
            is_cancelled: false,
        }
    }

    /// A sequence whose context was computed elsewhere: `blocks` hold all positions of prompt and emitted tokens,
    /// in order (and may have room for more), and belong to this sequence; `first_token` came after them.
    #[must_use]
    pub fn with_kv(mut self, blocks: Vec<BlockIdx>, first_token: TokenId) -> Self {
        self.n_computed = self.n_context;
        self.n_cached_tokens = Some(count(self.n_context));
        // Its prompt was asked about where it was computed.
        self.n_prompt_logprobs = self.n_prompt - 1;
        self.blocks = blocks;
        self.tokens.push(first_token);
        self
    }

    /// Its name.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// When it is too late.
    pub fn deadline(&self) -> Timestamp {
        self.deadline
    }

    /// Prompt and output tokens.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Output tokens, those emitted before included.
    pub fn n_output(&self) -> u32 {
        count(self.tokens.len() - self.n_prompt)
    }

    /// Positions whose KV is in the blocks.
    pub fn n_computed(&self) -> usize {
        self.n_computed
    }

    /// Tokens to be fed before the next one can be sampled.
    pub fn n_pending(&self) -> usize {
        self.tokens.len() - self.n_computed
    }

    /// True when its context has been fed: each step takes one sampled token and gives the next.
    pub(crate) fn is_decoding(&self) -> bool {
        self.n_computed >= self.n_context
    }

    /// True once it has been in a step here, or came with its KV.
    pub(crate) fn was_started(&self) -> bool {
        self.n_cached_tokens.is_some()
    }

    pub(crate) fn finishes_after_first_token(&self) -> bool {
        self.finish_after == FinishAfter::FirstToken
    }

    /// The tokens of the next step.
    pub(crate) fn chunk(&self, n_tokens: usize) -> Vec<TokenId> {
        self.tokens[self.n_computed..self.n_computed + n_tokens].to_vec()
    }

    /// How to draw the next token; `None` when none is wanted.
    pub(crate) fn sample_spec(&self) -> Option<SampleSpec> {
        (self.stop.max_tokens > 0).then(|| SampleSpec {
            params: self.sampling.clone(),
            output_idx: self.n_output(),
            given: self.given_tokens(),
            barred: if self.n_output() < self.stop.min_tokens {
                self.stop.stop_token_ids.clone()
            } else {
                Vec::new()
            },
            logprobs: self.logprobs,
        })
    }

    fn given_tokens(&self) -> GivenTokens {
        if !self.sampling.has_penalties() {
            return GivenTokens::default();
        }
        let (prompt, output) = self.tokens.split_at(self.n_prompt);
        GivenTokens {
            prompt: prompt.to_vec(),
            output: output.to_vec(),
        }
    }

    /// True while prompt log-probabilities are still to be reported: every row is needed then, so the cache is
    /// of no use.
    pub(crate) fn wants_prompt_logprobs(&self) -> bool {
        self.logprobs.prompt_top.is_some() && self.n_prompt_logprobs + 1 < self.n_prompt
    }

    /// The prompt tokens that follow the rows of the next chunk.
    pub(crate) fn prompt_logprob_spec(&self, n_tokens: usize) -> Option<PromptLogprobSpec> {
        let n_top = self.logprobs.prompt_top?;
        let end = (self.n_computed + n_tokens + 1).min(self.n_prompt);
        let targets = self.tokens.get(self.n_computed + 1..end)?;
        // After a preemption the first rows have been reported already.
        let is_news = !targets.is_empty() && self.n_prompt_logprobs + 1 < end;
        is_news.then(|| PromptLogprobSpec {
            targets: targets.to_vec(),
            n_top,
        })
    }

    /// Hashes of the full blocks that may be taken from the cache: all but the one with the last token, which is
    /// fed again for its logits. One for each block of `block_tokens` positions; none when the hash chain does
    /// not fall on block borders.
    pub(crate) fn reusable_hashes(&self, block_tokens: usize) -> Vec<BlockHash> {
        if self.wants_prompt_logprobs() {
            return Vec::new();
        }
        let n_blocks = (self.tokens.len() - 1) / block_tokens;
        (0..n_blocks)
            .map_while(|block| self.block_hash(block, block_tokens))
            .collect()
    }

    /// Hash of one full block of `block_tokens` positions, when it is known.
    pub(crate) fn block_hash(&self, block: usize, block_tokens: usize) -> Option<BlockHash> {
        let links = links_per_block(block_tokens)?;
        self.hashes.get((block + 1) * links - 1).copied()
    }

    /// Hashes what has been decoded since, so that it can be found again.
    pub(crate) fn extend_hashes(&mut self, model_fingerprint: &[u8; 32]) {
        let computed = &self.tokens[..self.n_computed];
        if computed.len() / tidemill_core::bounds::HASH_BLOCK_TOKENS > self.hashes.len() {
            self.hashes = block_hashes(model_fingerprint, &self.namespace, computed);
        }
    }

    /// The KV of the next `n_tokens` tokens is in the blocks.
    pub(crate) fn advance(&mut self, n_tokens: usize) {
        if !self.is_decoding() {
            self.n_computed_tokens += count(n_tokens);
        }
        self.n_computed += n_tokens;
    }

    /// Starts with what the cache has.
    pub(crate) fn start_at(&mut self, n_computed: usize, n_offered_blocks: usize) {
        self.n_computed = n_computed;
        self.n_offered_blocks = n_offered_blocks;
        self.n_cached_tokens.get_or_insert(count(n_computed));
    }

    /// Forgets its KV: everything is to be fed again.
    pub(crate) fn forget_kv(&mut self) {
        self.blocks.clear();
        self.n_computed = 0;
        self.n_context = self.tokens.len();
        self.n_offered_blocks = 0;
    }

    /// Appends a sampled token.
    pub(crate) fn append(&mut self, token: TokenId) {
        self.tokens.push(token);
    }

    /// Why it ends with its present output, if it does.
    pub(crate) fn finish_reason(&self, context_length: u32) -> Option<FinishReason> {
        let last = self.tokens[self.n_prompt..].last();
        if last.is_some_and(|token| self.stop.stop_token_ids.contains(token)) {
            Some(FinishReason::Stop)
        } else if self.n_output() >= self.stop.max_tokens
            || self.tokens.len() >= context_length as usize
        {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// Links of the hash chain in a block; `None` when a block holds no whole number of them.
fn links_per_block(block_tokens: usize) -> Option<usize> {
    let link = tidemill_core::bounds::HASH_BLOCK_TOKENS;
    (block_tokens >= link && block_tokens.is_multiple_of(link)).then_some(block_tokens / link)
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("a sequence has at most 2^20 tokens")
}
