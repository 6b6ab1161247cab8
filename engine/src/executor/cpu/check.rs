//! What a plan must hold before the CPU touches memory for it.
//!
//! The scheduler never makes a plan that fails here. It is checked all the same, because a wrong block index is a write
//! into another request's KV, which no later check would notice.

use crate::executor::{StepItem, StepPlan};
use std::collections::{HashMap, HashSet};
use tidemill_core::{BlockIdx, Failure, FailureCode};
use tidemill_kernels::memory::KvArena;

/// What tokens and positions are held against.
pub(super) struct Bounds {
    pub(super) vocab_size: u32,
    pub(super) context_length: u32,
}

/// Checks a whole plan.
pub(super) fn check(plan: &StepPlan, arena: &KvArena, bounds: &Bounds) -> Result<(), Failure> {
    let mut sequences = HashSet::new();
    let mut writers = HashMap::new();
    let block_tokens = arena.layout().block_tokens as usize;
    for item in &plan.items {
        if !sequences.insert(item.sequence_id) {
            return Err(refused(item, "it is in the step twice"));
        }
        check_item(item, arena, bounds)?;
        for &block in &written(item, block_tokens) {
            if writers.insert(block, item.sequence_id).is_some() {
                return Err(refused(
                    item,
                    format!("block {} would be written twice in one step", block.0),
                ));
            }
        }
    }
    for item in &plan.items {
        let shared = |block: &&BlockIdx| {
            let writer = writers.get(*block);
            writer.is_some_and(|writer| *writer != item.sequence_id)
        };
        if let Some(block) = item.block_table.iter().find(shared) {
            return Err(refused(
                item,
                format!("it reads block {}, which another sequence writes", block.0),
            ));
        }
    }
    Ok(())
}

/// The blocks that an item's own positions lie in.
fn written(item: &StepItem, block_tokens: usize) -> Vec<BlockIdx> {
    let start = item.start_position as usize;
    let end = start + item.tokens.len();
    item.block_table[start / block_tokens..end.div_ceil(block_tokens)].to_vec()
}

fn check_item(item: &StepItem, arena: &KvArena, bounds: &Bounds) -> Result<(), Failure> {
    if item.tokens.is_empty() {
        return Err(refused(item, "it feeds no token"));
    }
    let end = item.start_position as usize + item.tokens.len();
    if end > bounds.context_length as usize {
        let limit = bounds.context_length;
        let problem = format!("it reaches position {end}; the context ends at {limit}");
        return Err(refused(item, problem));
    }
    let block_tokens = arena.layout().block_tokens as usize;
    if end > item.block_table.len() * block_tokens {
        let n_blocks = item.block_table.len();
        let problem = format!("{end} positions need more than its {n_blocks} blocks");
        return Err(refused(item, problem));
    }
    let mut seen = HashSet::with_capacity(item.block_table.len());
    for &block in &item.block_table {
        arena
            .check(block)
            .map_err(|error| refused(item, error.to_string()))?;
        if !seen.insert(block) {
            return Err(refused(item, format!("block {} holds two places", block.0)));
        }
    }
    let targets = item.prompt_logprobs.as_ref().map(|spec| &spec.targets[..]);
    let targets = targets.unwrap_or_default();
    if targets.len() > item.tokens.len() {
        let (n_targets, n_tokens) = (targets.len(), item.tokens.len());
        let problem = format!("{n_targets} log-probability targets for {n_tokens} tokens");
        return Err(refused(item, problem));
    }
    match item
        .tokens
        .iter()
        .chain(targets)
        .find(|t| **t >= bounds.vocab_size)
    {
        Some(token) => Err(refused(
            item,
            format!(
                "token id {token}; the vocabulary has ids below {}",
                bounds.vocab_size
            ),
        )),
        None => Ok(()),
    }
}

fn refused(item: &StepItem, problem: impl std::fmt::Display) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("step refused, sequence {}: {problem}", item.sequence_id.0),
    )
}
