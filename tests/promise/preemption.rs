//! Too little memory: sequences lose their blocks in the middle of an answer and are computed again, and nobody can tell
//! from the tokens.

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
/// Three blocks before the first token.
const N_PROMPT: usize = 40;
/// Six blocks at the end.
const N_OUTPUT: u32 = 50;
/// For the decode node: three at once begin, and two can end.
const N_BLOCKS: u32 = 13;

/// True when some of its tokens were fed twice.
fn was_preempted(answer: &Answer) -> bool {
    let n_fed = answer.n_cached_tokens + answer.n_computed_tokens;
    n_fed > u32::try_from(N_PROMPT).expect("few") + N_OUTPUT
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preemption_changes_no_token() {
    let model = Tiny::new("preemption", WeightType::Q4_1).load(Isa::detect());
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 1);
    let mut findings = Findings::default();
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
            let mut n_preempted = 0;
            for round in 0..if is_soak() { 20 } else { 2 } {
                let deployment = Deployment::start(&model, &setup).await;
                let mut running = Vec::new();
                for salt in 0..N_REQUESTS {
                    let sampling = match salt % 2 {
                        0 => SamplingParams::greedy(),
                        _ => seeded(salt),
                    };
                    let prompt = prompt(N_PROMPT, round * 100 + salt, vocab_size);
                    let ask = Ask::new(prompt, N_OUTPUT, sampling);
                    let (at, asked) = (deployment.connections(), ask.clone());
                    let answer = tokio::spawn(async move { client::ask(&at, &asked).await });
                    running.push((ask, answer));
                }
                for (ask, answer) in running {
                    let answer = answer.await.unwrap_or_else(|error| Err(error.to_string()));
                    let wanted = bare.draw(&ask);
                    findings.compare(&format!("{setup} {ask:?}"), &wanted, &answer);
                    n_preempted += u32::from(answer.is_ok_and(|answer| was_preempted(&answer)));
                }
                deployment.end().await;
            }
            findings.expect(&setup, n_preempted > 0, "nothing was preempted");
        }
    }
    findings.assert_none();
}
