//! Too little memory: sequences lose their blocks in the middle of an answer and are computed again, and nobody can
//! tell from the tokens.

use crate::ask::{Ask, is_soak, prompt, seeded};
use crate::axes::{Setup, WAYS};
use crate::bare::Bare;
use crate::client::{self, Answer};
use crate::deployment::Deployment;
use crate::findings::Findings;
use crate::models::Tiny;
use tidemill_core::{KvDtype, SamplingParams};
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::WeightType;

const N_REQUESTS: u64 = 6;
/// Long enough that all of them are at work together, however late the last one comes.
const N_OUTPUT: u32 = 150;
/// The requests have three or four blocks before the first token and 12 or 13 at the end: all of them can begin
/// together, and two can end so.
const N_BLOCKS: u32 = 30;

/// Of different lengths, so that they do not come to the end of a block at the same time.
fn n_prompt(salt: u64) -> usize {
    33 + 5 * usize::try_from(salt).expect("few")
}

/// True when tokens were fed as a prompt that are no prompt: what had been decoded was computed again.
fn was_preempted(ask: &Ask, answer: &Answer) -> bool {
    (answer.n_cached_tokens + answer.n_computed_tokens) as usize > ask.prompt.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preemption_changes_no_token() {
    let model = Tiny::new("preemption", WeightType::Q4_1).load(Isa::detect());
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 1);
    let mut findings = Findings::default();
    for round in 0..if is_soak() { 20 } else { 2 } {
        let asks: Vec<Ask> = (0..N_REQUESTS)
            .map(|salt| {
                let sampling = match salt % 2 {
                    0 => SamplingParams::greedy(),
                    _ => seeded(salt),
                };
                let prompt = prompt(n_prompt(salt), round * 100 + salt, vocab_size);
                Ask::new(prompt, N_OUTPUT, sampling)
            })
            .collect();
        let wanted: Vec<_> = asks.iter().map(|ask| bare.draw(ask)).collect();
        for way in WAYS {
            for chunk in [16, 4096] {
                let setup = Setup {
                    way,
                    chunk,
                    isa: Isa::detect(),
                    n_threads: 1,
                    kv_dtype: KvDtype::F16,
                    n_blocks: N_BLOCKS,
                };
                let deployment = Deployment::start(&model, &setup).await;
                let spawned = asks.iter().map(|ask| {
                    let (at, ask) = (deployment.connections(), ask.clone());
                    tokio::spawn(async move { client::ask(&at, &ask).await })
                });
                let running: Vec<_> = spawned.collect();
                let mut n_preempted = 0;
                for (running, (ask, wanted)) in running.into_iter().zip(asks.iter().zip(&wanted)) {
                    let answer = running.await.unwrap_or_else(|error| Err(error.to_string()));
                    findings.compare(&format!("{setup} {ask:?}"), wanted, &answer);
                    n_preempted +=
                        u32::from(answer.is_ok_and(|answer| was_preempted(ask, &answer)));
                }
                findings.expect(&setup, n_preempted > 0, "nothing was preempted");
                deployment.end().await;
            }
        }
    }
    findings.assert_none();
}
