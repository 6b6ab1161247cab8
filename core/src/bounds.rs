//! Every limit that more than one crate must agree on. A limit that one crate alone knows stays there.

/// Positions in a block unless a layout says otherwise.
pub const BLOCK_TOKENS: u32 = 16;
/// Positions that one link of the block-hash chain covers, whatever the storage block.
pub const HASH_BLOCK_TOKENS: usize = 16;
/// Most top alternatives that a log-probability request may ask for.
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// Most stop token ids in a request.
pub const STOP_TOKENS_MAX: usize = 64;
/// Most stop tokens of a sequence: the client's, and the model's own beside them.
pub const SEQUENCE_STOP_TOKENS_MAX: usize = 2 * STOP_TOKENS_MAX;
/// Most tokens (prompt and output) in a sequence, whatever the model says.
pub const SEQUENCE_TOKENS_MAX: u32 = 1 << 20;
/// Largest temperature.
pub const TEMPERATURE_MAX: f32 = 2.0;
/// Below this temperature sampling is greedy: dividing logits by less only loses precision.
pub const TEMPERATURE_GREEDY_BELOW: f32 = 1e-4;
/// Presence and frequency penalties lie between minus this and this, as with OpenAI.
pub const PENALTY_MAX: f32 = 2.0;
/// Smallest repetition penalty; below 1 it rewards repetition.
pub const REPETITION_PENALTY_MIN: f32 = 0.01;
/// Largest repetition penalty.
pub const REPETITION_PENALTY_MAX: f32 = 10.0;
/// Most tokens with a bias.
pub const LOGIT_BIASES_MAX: usize = 1024;
/// A bias lies between minus this and this, as with OpenAI.
pub const LOGIT_BIAS_MAX: f32 = 100.0;
/// How long an exporter keeps a lease that nobody renews.
pub const LEASE_TTL_US: u64 = 30_000_000;
