//! The simulated model against its own reference: whole, in chunks, and with a byte flipped.

use super::*;
use crate::executor::{GivenTokens, NoProgress, PromptLogprobSpec, SequenceId};
use tidemill_core::KvDtype;

const VOCAB_SIZE: u32 = 64;

/// Two layer groups in a block of 16 positions.
fn layout() -> KvLayout {
    let mut layout = KvLayout::new([3; 32], 3, 2, 4, KvDtype::F16).expect("valid");
    layout.group_layers = 2;
    layout
}

fn executor() -> SimulatedExecutor {
    let arena = KvArena::new(&layout(), 8).expect("small");
    SimulatedExecutor::new(arena, VOCAB_SIZE)
}

fn item(tokens: &[TokenId], start_position: u32, sample: bool) -> StepItem {
    StepItem {
        sequence_id: SequenceId(1),
        tokens: tokens.to_vec(),
        start_position,
        block_table: vec![BlockIdx(5), BlockIdx(2), BlockIdx(7)],
        sample: sample.then(|| SampleSpec {
            params: SamplingParams::greedy(),
            output_idx: 0,
            given: GivenTokens::default(),
            barred: Vec::new(),
            logprobs: LogprobSpec::default(),
        }),
        prompt_logprobs: None,
        report_progress: false,
    }
}

fn run(executor: &mut SimulatedExecutor, item: StepItem) -> StepItemOutput {
    let plan = StepPlan {
        step_id: 1,
        items: vec![item],
    };
    let output = executor.step(&plan, &mut NoProgress).expect("valid plan");
    output.items.into_iter().next().expect("one item")
}

fn prompt() -> Vec<TokenId> {
    (0..37).map(|idx| idx * 7 % VOCAB_SIZE).collect()
}

fn all_bytes(executor: &SimulatedExecutor) -> Vec<u8> {
    let mut all = Vec::new();
    for block in 0..8 {
        let mut bytes = vec![0; executor.arena.block_bytes()];
        executor.load(BlockIdx(block), &mut bytes).expect("exists");
        all.extend(bytes);
    }
    all
}

#[test]
fn chunks_give_the_bytes_and_the_token_of_the_whole() {
    let mut whole = executor();
    let expected = run(&mut whole, item(&prompt(), 0, true)).sampled;
    let reference = whole.reference(&prompt(), &SamplingParams::greedy(), 1);
    assert_eq!(expected.as_ref().map(|s| s.token), Some(reference[0]));
    for cut in [1, 15, 16, 17, 32, 36] {
        let mut chunked = executor();
        run(&mut chunked, item(&prompt()[..cut], 0, false));
        let rest = item(&prompt()[cut..], cut as u32, true);
        assert_eq!(run(&mut chunked, rest).sampled, expected, "cut at {cut}");
        assert!(all_bytes(&chunked) == all_bytes(&whole), "cut at {cut}");
    }
}

#[test]
fn one_flipped_bit_anywhere_changes_the_kv_that_follows() {
    let mut clean = executor();
    run(&mut clean, item(&prompt()[..36], 0, false));
    run(&mut clean, item(&prompt()[36..], 36, true));
    for (block, group, byte) in [(5, 0, 0), (5, 1, 9), (2, 0, 100), (7, 1, 3 * 8)] {
        let mut hurt = executor();
        run(&mut hurt, item(&prompt()[..36], 0, false));
        let at = SliceAt {
            block: BlockIdx(block),
            group: LayerGroupIdx(group),
        };
        let n_bytes = hurt.arena.slice_bytes(at.group).expect("exists");
        let mut bytes = vec![0; n_bytes];
        hurt.arena.copy_out(at, &mut bytes).expect("exists");
        bytes[byte] ^= 1;
        hurt.arena.copy_in(at, &bytes).expect("exists");
        run(&mut hurt, item(&prompt()[36..], 36, true));
        let last_row = |executor: &SimulatedExecutor| {
            let mut bytes = vec![0; executor.arena.block_bytes()];
            executor.load(BlockIdx(7), &mut bytes).expect("exists");
            let mut row = Vec::new();
            executor.each_head_row(36, |_, range| row.extend_from_slice(&bytes[range]));
            row
        };
        assert_ne!(
            last_row(&hurt),
            last_row(&clean),
            "block {block} byte {byte}"
        );
    }
}

#[test]
fn a_new_block_forgets_its_former_content() {
    let mut executor = executor();
    run(&mut executor, item(&[9; 48], 0, false));
    run(&mut executor, item(&[1, 2, 3], 0, false));
    let mut bytes = vec![0; executor.arena.block_bytes()];
    executor.load(BlockIdx(5), &mut bytes).expect("exists");
    executor.each_head_row(3, |_, range| assert!(bytes[range].iter().all(|&b| b == 0)));
    executor.each_head_row(2, |_, range| assert!(bytes[range].iter().any(|&b| b != 0)));
}

#[test]
fn progress_and_prompt_logprobs_are_reported_when_asked_for() {
    struct Seen(Vec<(u32, u32)>);
    impl ProgressSink for Seen {
        fn layers_done(&mut self, progress: LayerProgress) {
            self.0.push((progress.group.0, progress.n_tokens));
        }
    }
    let mut asked = item(&prompt(), 0, true);
    asked.report_progress = true;
    asked.prompt_logprobs = Some(PromptLogprobSpec {
        targets: prompt()[1..].to_vec(),
        n_top: 2,
    });
    let plan = StepPlan {
        step_id: 9,
        items: vec![asked],
    };
    let mut seen = Seen(vec![]);
    let output = executor().step(&plan, &mut seen).expect("valid plan");
    assert_eq!(seen.0, [(0, 37), (1, 37)]);
    let logprobs = &output.items[0].prompt_logprobs;
    assert_eq!(logprobs.len(), 36);
    assert!(logprobs.iter().all(|l| l.logprob < 0.0 && l.top.len() == 2));
}

#[test]
fn bad_plans_fail_before_anything_is_written() {
    let mut executor = executor();
    let mut short = item(&prompt(), 0, true);
    short.block_table.pop();
    let mut outside = item(&[1], 0, true);
    outside.block_table[0] = BlockIdx(8);
    for bad in [short, outside, item(&[], 0, true)] {
        let plan = StepPlan {
            step_id: 1,
            items: vec![item(&[1], 0, false), bad],
        };
        assert!(executor.step(&plan, &mut NoProgress).is_err());
        assert!(all_bytes(&executor).iter().all(|&byte| byte == 0));
    }
    let unknown = run(&mut executor, item(&[VOCAB_SIZE], 0, true));
    assert!(unknown.failure.is_some() && unknown.sampled.is_none());
}
