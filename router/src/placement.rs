//! Which nodes serve an attempt. A pure function of the candidates, so the same load always gives the same
//! answer: least loaded first, ties by node id.
//!
//! Prefill is compute-bound, so its load is the prompt tokens that still wait; decode is bound by its batch and its
//! blocks, so its load is the sequences it holds, and a node that lacks the blocks comes last. Only nodes with equal
//! model and layout fingerprints form a pair. Nodes that failed in this request are left out, whatever their load, and
//! so are nodes whose whole pool cannot hold the context: waiting would not help there.

use tidemill_core::bounds::BLOCK_TOKENS;
use tidemill_core::{Incarnation, NodeId, Role};

/// One life of one node, and where it answers.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Target {
    /// Its name.
    pub node_id: NodeId,
    /// Its life: an old one is never called again.
    pub incarnation: Incarnation,
    /// `host:port` or `local:NAME`.
    pub address: String,
}

/// When prompts are prefilled on a node of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SplitPolicy {
    /// Always; a request that cannot be split fails.
    Require,
    /// Whenever a pair is there; each exception is counted.
    #[default]
    Prefer,
    /// Never: the decode node prefills too.
    Never,
}

impl SplitPolicy {
    /// The name used in flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Require => "require",
            Self::Prefer => "prefer",
            Self::Never => "never",
        }
    }
}

impl std::str::FromStr for SplitPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "require" => Ok(Self::Require),
            "prefer" => Ok(Self::Prefer),
            "never" => Ok(Self::Never),
            other => Err(format!(
                "split policy {other:?} is none of require, prefer, never"
            )),
        }
    }
}

/// A node that may take work now, with its load: the last report and what was booked since.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Who.
    pub target: Target,
    /// What it does.
    pub role: Role,
    /// Weights, config and text.
    pub model_fingerprint: [u8; 32],
    /// Only equal ones exchange KV.
    pub layout_fingerprint: [u8; 16],
    /// Prompt tokens that wait there.
    pub queued_tokens: u64,
    /// Sequences running and waiting there.
    pub n_sequences: u64,
    /// Blocks of its pool; `None` until its first report.
    pub n_blocks: Option<u64>,
    /// Blocks free; `None` until its first report.
    pub n_blocks_free: Option<u64>,
    /// Requests of this router that are open there; breaks ties before the node id does.
    pub n_open: u64,
}

/// What an attempt needs.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// Tokens whose KV must be computed or held: prompt and output so far.
    pub n_context_tokens: u64,
    /// False when the first token is also the last: no second node is needed.
    pub needs_decode: bool,
    /// The deployment's policy.
    pub split: SplitPolicy,
    /// Nodes that failed in this request.
    pub failed: &'a [Target],
}

/// Where an attempt runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Placement {
    /// Prefill on one node, decode on another.
    Split {
        /// Computes the prompt.
        prefill: Target,
        /// Pulls its KV and goes on.
        decode: Target,
    },
    /// The prefill node answers alone.
    PrefillOnly {
        /// Computes the prompt and the only token.
        prefill: Target,
    },
    /// One decode node does everything.
    Whole {
        /// Prefills and decodes.
        decode: Target,
        /// True when the policy would have split.
        is_exception: bool,
    },
}

/// Why nothing could be placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unplaced {
    /// No prefill node takes work.
    #[error("no usable prefill node")]
    NoPrefill,
    /// No decode node takes work.
    #[error("no usable decode node")]
    NoDecode,
    /// Both roles are there, but no two of them share model and KV layout.
    #[error("no prefill and decode node with equal model and KV layout")]
    NoPair,
    /// Nodes of a role are there, but no pool of theirs can ever hold the context.
    #[error(
        "the context needs {n_blocks} KV blocks of {BLOCK_TOKENS} tokens; the largest pool of a {role} node has \
         {n_blocks_max}; shorten the prompt, or give the nodes a larger --kv-bytes", role = .role.name()
    )]
    TooLong {
        /// Whose pools are too small.
        role: Role,
        /// What the context and its next token need.
        n_blocks: u64,
        /// What the largest of them has.
        n_blocks_max: u64,
    },
}

/// Blocks that hold `n_context_tokens` and one more.
pub fn blocks_for(n_context_tokens: u64) -> u64 {
    (n_context_tokens + 1).div_ceil(u64::from(BLOCK_TOKENS))
}

/// Places one attempt.
///
/// # Errors
/// Says which role is missing.
pub fn place(candidates: &[Candidate], want: &Want<'_>) -> Result<Placement, Unplaced> {
    let whole = |is_exception| {
        best_decode(candidates, want, None)
            .map(|decode| Placement::Whole {
                decode: decode.target.clone(),
                is_exception,
            })
            .ok_or_else(|| none_of(candidates, want, Role::Decode))
    };
    if want.split == SplitPolicy::Never {
        return whole(false);
    }
    let split = place_split(candidates, want);
    match (split, want.split) {
        (Err(reason), SplitPolicy::Prefer) => whole(true).map_err(|_| reason),
        (split, _) => split,
    }
}

fn place_split(candidates: &[Candidate], want: &Want<'_>) -> Result<Placement, Unplaced> {
    let mut prefills: Vec<&Candidate> = usable(candidates, want, Role::Prefill).collect();
    prefills.sort_by_key(|node| (node.queued_tokens, node.n_open, &node.target));
    let Some(first) = prefills.first() else {
        return Err(none_of(candidates, want, Role::Prefill));
    };
    if !want.needs_decode {
        return Ok(Placement::PrefillOnly {
            prefill: first.target.clone(),
        });
    }
    if usable(candidates, want, Role::Decode).next().is_none() {
        return Err(none_of(candidates, want, Role::Decode));
    }
    prefills
        .into_iter()
        .find_map(|prefill| {
            let decode = best_decode(candidates, want, Some(prefill))?;
            Some(Placement::Split {
                prefill: prefill.target.clone(),
                decode: decode.target.clone(),
            })
        })
        .ok_or(Unplaced::NoPair)
}

/// The least loaded decode node that can pull from `exporter` (from anybody when `None`).
pub fn best_decode<'a>(
    candidates: &'a [Candidate],
    want: &Want<'_>,
    exporter: Option<&Candidate>,
) -> Option<&'a Candidate> {
    let n_blocks = blocks_for(want.n_context_tokens);
    usable(candidates, want, Role::Decode)
        .filter(|node| exporter.is_none_or(|exporter| is_pair(exporter, node)))
        .min_by_key(|node| {
            let lacks_blocks = node.n_blocks_free.is_some_and(|free| free < n_blocks);
            (lacks_blocks, node.n_sequences, node.n_open, &node.target)
        })
}

fn is_pair(exporter: &Candidate, importer: &Candidate) -> bool {
    exporter.layout_fingerprint == importer.layout_fingerprint
        && exporter.model_fingerprint == importer.model_fingerprint
}

fn usable<'a>(
    candidates: &'a [Candidate],
    want: &Want<'_>,
    role: Role,
) -> impl Iterator<Item = &'a Candidate> {
    let failed = want.failed;
    let n_blocks = blocks_for(want.n_context_tokens);
    candidates.iter().filter(move |node| {
        let is_too_small = node.n_blocks.is_some_and(|pool| pool < n_blocks);
        node.role == role && !is_too_small && !failed.contains(&node.target)
    })
}

/// Why no node of a role can be used.
fn none_of(candidates: &[Candidate], want: &Want<'_>, role: Role) -> Unplaced {
    let n_blocks = blocks_for(want.n_context_tokens);
    let pools = candidates
        .iter()
        .filter(|node| node.role == role && !want.failed.contains(&node.target))
        .filter_map(|node| node.n_blocks);
    match (pools.max(), role) {
        (Some(n_blocks_max), _) if n_blocks_max < n_blocks => Unplaced::TooLong {
            role,
            n_blocks,
            n_blocks_max,
        },
        (_, Role::Prefill) => Unplaced::NoPrefill,
        (_, Role::Decode) => Unplaced::NoDecode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, role: Role, load: u64) -> Candidate {
        Candidate {
            target: Target {
                node_id: NodeId::new(name).expect("valid"),
                incarnation: Incarnation(1),
                address: format!("local:{name}"),
            },
            role,
            model_fingerprint: [0; 32],
            layout_fingerprint: [0; 16],
            queued_tokens: load,
            n_sequences: load,
            n_blocks: Some(100),
            n_blocks_free: Some(100),
            n_open: 0,
        }
    }

    fn want(failed: &[Target]) -> Want<'_> {
        Want {
            n_context_tokens: 30,
            needs_decode: true,
            split: SplitPolicy::Prefer,
            failed,
        }
    }

    fn names(placement: &Placement) -> Vec<&str> {
        match placement {
            Placement::Split { prefill, decode } => {
                vec![prefill.node_id.as_str(), decode.node_id.as_str()]
            }
            Placement::PrefillOnly { prefill } => vec![prefill.node_id.as_str()],
            Placement::Whole { decode, .. } => vec![decode.node_id.as_str()],
        }
    }

    fn pools() -> Vec<Candidate> {
        vec![
            node("p1", Role::Prefill, 50),
            node("p0", Role::Prefill, 50),
            node("d0", Role::Decode, 3),
            node("d1", Role::Decode, 2),
        ]
    }

    #[test]
    fn the_least_loaded_pair_wins_and_ties_go_by_name() {
        let placed = place(&pools(), &want(&[])).expect("a pair");
        assert_eq!(names(&placed), ["p0", "d1"]);
        let mut nodes = pools();
        nodes[1].n_open = 1;
        let placed = place(&nodes, &want(&[])).expect("a pair");
        assert_eq!(names(&placed), ["p1", "d1"]);
    }

    #[test]
    fn a_decode_node_without_blocks_comes_last_but_is_not_left_out() {
        let mut nodes = pools();
        nodes[3].n_blocks_free = Some(1);
        assert_eq!(names(&place(&nodes, &want(&[])).expect("pair"))[1], "d0");
        nodes[2].n_blocks_free = Some(1);
        assert_eq!(names(&place(&nodes, &want(&[])).expect("pair"))[1], "d1");
    }

    #[test]
    fn a_pool_that_can_never_hold_the_context_is_left_out() {
        let mut nodes = pools();
        nodes[3].n_blocks = Some(1);
        assert_eq!(names(&place(&nodes, &want(&[])).expect("pair"))[1], "d0");
        nodes[2].n_blocks = Some(1);
        let too_long = |role, n_blocks_max| {
            Err(Unplaced::TooLong {
                role,
                n_blocks: 2,
                n_blocks_max,
            })
        };
        assert_eq!(place(&nodes, &want(&[])), too_long(Role::Decode, 1));
        nodes[2].n_blocks = Some(2);
        (nodes[0].n_blocks, nodes[1].n_blocks) = (Some(1), Some(0));
        let require = Want {
            split: SplitPolicy::Require,
            ..want(&[])
        };
        assert_eq!(place(&nodes, &require), too_long(Role::Prefill, 1));
        // A decode node that is large enough prefills by itself when the policy allows it.
        assert_eq!(names(&place(&nodes, &want(&[])).expect("whole")), ["d0"]);
        // Before its first report a node is given the benefit of the doubt.
        nodes[1].n_blocks = None;
        assert_eq!(names(&place(&nodes, &require).expect("pair")), ["p0", "d0"]);
    }

    #[test]
    fn failed_nodes_are_left_out_in_that_life_only() {
        let nodes = pools();
        let failed = [nodes[1].target.clone()];
        assert_eq!(
            names(&place(&nodes, &want(&failed)).expect("pair"))[0],
            "p1"
        );
        let mut reborn = nodes.clone();
        reborn[1].target.incarnation = Incarnation(2);
        assert_eq!(
            names(&place(&reborn, &want(&failed)).expect("pair"))[0],
            "p0"
        );
    }

    #[test]
    fn only_equal_layouts_and_models_form_a_pair() {
        let mut nodes = pools();
        nodes[3].layout_fingerprint = [9; 16];
        assert_eq!(
            names(&place(&nodes, &want(&[])).expect("pair")),
            ["p0", "d0"]
        );
        nodes[2].model_fingerprint = [9; 32];
        let require = Want {
            split: SplitPolicy::Require,
            ..want(&[])
        };
        assert_eq!(place(&nodes, &require), Err(Unplaced::NoPair));
        let placed = place(&nodes, &want(&[])).expect("whole");
        assert!(matches!(
            placed,
            Placement::Whole {
                is_exception: true,
                ..
            }
        ));
    }

    #[test]
    fn policies_say_what_happens_without_a_role() {
        let decode_only = &pools()[2..];
        let prefill_only = &pools()[..2];
        let with = |split, needs_decode| Want {
            split,
            needs_decode,
            ..want(&[])
        };
        use SplitPolicy::{Never, Prefer, Require};
        let missing = |nodes, split, needs_decode| place(nodes, &with(split, needs_decode)).err();
        assert_eq!(
            missing(decode_only, Require, true),
            Some(Unplaced::NoPrefill)
        );
        assert_eq!(missing(decode_only, Prefer, true), None);
        assert_eq!(missing(decode_only, Never, true), None);
        assert_eq!(
            missing(prefill_only, Require, true),
            Some(Unplaced::NoDecode)
        );
        assert_eq!(
            missing(prefill_only, Prefer, true),
            Some(Unplaced::NoDecode)
        );
        assert_eq!(missing(prefill_only, Never, true), Some(Unplaced::NoDecode));
        assert_eq!(missing(prefill_only, Prefer, false), None);
        assert_eq!(missing(&[], Prefer, true), Some(Unplaced::NoPrefill));
        let never = place(&pools(), &with(Never, true)).expect("whole");
        assert_eq!(names(&never), ["d1"]);
        assert!(matches!(
            never,
            Placement::Whole {
                is_exception: false,
                ..
            }
        ));
    }

    #[test]
    fn blocks_count_the_token_to_come() {
        assert_eq!(blocks_for(15), 1);
        assert_eq!(blocks_for(16), 2);
    }
}
