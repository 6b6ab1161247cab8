//! Random storms: submits, cancels, imports, foreign owners and failing steps, in pools so small that sequences
//! push each other out. Whatever happens, a token is the reference's token, and in the end nothing is left.

use super::*;
use proptest::prelude::*;

/// Steps after which a storm that has not ended counts as a livelock.
const N_STEPS_MAX: usize = 20_000;

#[derive(Clone, Debug)]
enum Move {
    /// Prompts of one family share their prefix.
    Submit {
        family: u32,
        n_prompt: u32,
        n_emitted: u32,
        max_tokens: u32,
        greedy: bool,
        prompt_logprobs: bool,
        prefill: bool,
    },
    /// Before, or while, the next step is in flight.
    Cancel {
        nth: usize,
        in_flight: bool,
    },
    /// Another owner takes blocks, or gives them back.
    Lend {
        n_blocks: u32,
    },
    TakeBack,
    Steps(usize),
    FailStep,
}

fn any_move() -> impl Strategy<Value = Move> {
    let submit = (
        0..3_u32,
        1..70_u32,
        0..20_u32,
        0..40_u32,
        any::<bool>(),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.2),
    );
    prop_oneof![
        6 => submit.prop_map(
            |(family, n_prompt, n_emitted, max_tokens, greedy, prompt_logprobs, prefill)| {
                Move::Submit {
                    family,
                    n_prompt,
                    n_emitted,
                    max_tokens,
                    greedy,
                    prompt_logprobs,
                    prefill,
                }
            }
        ),
        2 => (0..20_usize, any::<bool>())
            .prop_map(|(nth, in_flight)| Move::Cancel { nth, in_flight }),
        1 => (1..3_u32).prop_map(|n_blocks| Move::Lend { n_blocks }),
        1 => Just(Move::TakeBack),
        6 => (1..12_usize).prop_map(Move::Steps),
        1 => Just(Move::FailStep),
    ]
}

/// The bench and what it should have said.
struct Storm {
    bench: Bench,
    specs: BTreeMap<u64, SequenceSpec>,
    cancelled: BTreeSet<u64>,
    n_steps: usize,
}

const LENT: Owner = Owner::Lease(RequestId(u128::MAX));

impl Storm {
    fn new(n_blocks: u32, max_batch_tokens: u32, max_sequences: u32) -> Self {
        let config = SchedulerConfig {
            max_batch_tokens,
            max_sequences,
            max_waiting: 1000,
            ..config()
        };
        Self {
            bench: Bench::new(config, n_blocks),
            specs: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            n_steps: 0,
        }
    }

    fn play(&mut self, step: &Move) {
        match step {
            Move::Submit { .. } => self.submit(step),
            Move::Cancel { nth, in_flight } => self.cancel(*nth, *in_flight),
            Move::Lend { n_blocks } => {
                for _ in 0..*n_blocks {
                    let _ = self.bench.pool.allocate(LENT);
                }
            }
            Move::TakeBack => self.bench.pool.release_all(LENT),
            Move::Steps(n) => {
                for _ in 0..*n {
                    self.step();
                }
            }
            Move::FailStep => {
                if self.bench.plan().is_some() {
                    let failure = Failure::new(FailureCode::Unavailable, "device lost");
                    self.bench.complete(Err(failure));
                }
            }
        }
    }

    fn submit(&mut self, step: &Move) {
        let &Move::Submit {
            family,
            n_prompt,
            n_emitted,
            max_tokens,
            greedy,
            prompt_logprobs,
            prefill,
        } = step
        else {
            return;
        };
        let id = self.specs.len() as u64;
        let mut asked = spec(prompt(family, n_prompt), max_tokens);
        if greedy {
            asked.sampling = SamplingParams::greedy();
        }
        asked.logprobs.prompt_top = prompt_logprobs.then_some(2);
        let n_emitted = n_emitted.min(max_tokens.saturating_sub(1));
        asked.emitted = self.bench.reference(&asked, n_emitted);
        let mut made = sequence(id, asked.clone());
        if prefill {
            made = prefill_of(id, &asked);
            self.bench.prefills.insert(id, asked.clone());
        }
        self.bench.scheduler.submit(made).expect("room");
        self.specs.insert(id, asked);
    }

    fn cancel(&mut self, nth: usize, in_flight: bool) {
        let Some(&id) = self.specs.keys().nth(nth) else {
            return;
        };
        let plan = if in_flight { self.bench.plan() } else { None };
        for id in [id, id + HEIR] {
            let has_ended = self.bench.finished.contains_key(&id);
            self.bench
                .scheduler
                .cancel(&mut self.bench.pool, SequenceId(id));
            if !has_ended {
                self.cancelled.insert(id);
            }
        }
        if let Some(plan) = plan {
            let output = self.bench.executor.step(&plan, &mut NoProgress);
            self.bench.complete(output);
        }
    }

    fn step(&mut self) -> bool {
        self.n_steps += 1;
        assert!(self.n_steps < N_STEPS_MAX, "livelock");
        self.bench.step()
    }

    /// Lets everything end, then holds it against the reference.
    fn settle(mut self) {
        self.bench.pool.release_all(LENT);
        while self.step() {}
        self.bench.assert_idle();
        for (&id, spec) in &self.specs {
            let expected = self.bench.reference(spec, spec.stop.max_tokens);
            let whole = &expected[spec.emitted.len()..];
            self.check_prompt_logprobs(id, spec);
            if !self.bench.prefills.contains_key(&id) {
                self.check_end(id, whole, expected.len());
                continue;
            }
            let first = &whole[..whole.len().min(1)];
            let has_ended = self.check_end(id, first, spec.emitted.len() + first.len());
            if has_ended && whole.len() > 1 {
                self.check_end(id + HEIR, &whole[1..], expected.len());
            }
        }
    }

    /// Each once, however often the prompt was computed.
    fn check_prompt_logprobs(&self, id: u64, spec: &SequenceSpec) {
        let told = &self.bench.n_prompt_logprobs;
        let n_told = told.get(&id).copied().unwrap_or(0);
        let asked = spec.logprobs.prompt_top.is_some();
        let n_wanted = if asked { spec.prompt.len() - 1 } else { 0 };
        let is_whole = n_told == n_wanted || !self.bench.finished.contains_key(&id);
        assert!(is_whole && n_told <= n_wanted, "sequence {id}");
        assert!(!told.contains_key(&(id + HEIR)), "told by the prefill");
    }

    /// Right tokens, and one end. True for a good end.
    fn check_end(&self, id: u64, expected: &[TokenId], n_output: usize) -> bool {
        let bench = &self.bench;
        let told = bench.tokens.get(&id).cloned().unwrap_or_default();
        assert_eq!(told, expected[..told.len()], "sequence {id}");
        let failed = bench.failed.contains_key(&id);
        let Some(finished) = bench.finished.get(&id) else {
            let ended = failed || self.cancelled.contains(&id);
            assert!(ended, "sequence {id} is lost");
            return false;
        };
        assert!(!failed && told.len() == expected.len(), "sequence {id}");
        assert_eq!(finished.n_output_tokens as usize, n_output);
        true
    }
}

/// The same request up to its first token.
fn prefill_of(id: u64, asked: &SequenceSpec) -> Sequence {
    let context = [&asked.prompt[..], &asked.emitted[..]].concat();
    let hashes = block_hashes(&FINGERPRINT, "", &context);
    Sequence::new(
        SequenceId(id),
        asked.clone(),
        hashes,
        FinishAfter::FirstToken,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn tokens_are_right_and_nothing_is_left(
        n_blocks in 3..16_u32,
        max_batch_tokens in 1..60_u32,
        max_sequences in 1..6_u32,
        moves in prop::collection::vec(any_move(), 1..60),
    ) {
        let mut storm = Storm::new(n_blocks, max_batch_tokens, max_sequences);
        for step in &moves {
            storm.play(step);
        }
        storm.settle();
    }

    #[test]
    fn equal_calls_give_equal_plans(moves in prop::collection::vec(any_move(), 1..30)) {
        let run = || {
            let mut storm = Storm::new(6, 24, 3);
            let mut plans = Vec::new();
            for step in &moves {
                storm.play(step);
                if let Some(plan) = storm.bench.plan() {
                    let output = storm.bench.executor.step(&plan, &mut NoProgress);
                    storm.bench.complete(output);
                    plans.push(plan);
                }
            }
            plans
        };
        prop_assert_eq!(run(), run());
    }
}
