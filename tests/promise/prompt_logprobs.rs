//! Log-probabilities of a prompt (`max_tokens` 0): the same bits whatever the chunk size, and whatever lies in the
//! prefix cache, which such a request passes by.

use crate::ask::{Ask, prompt, seeded};
use crate::axes::{CHUNKS, KV_DTYPES, Setup, WAYS};
use crate::bare::Bare;
use crate::client::{self, Answer};
use crate::deployment::Deployment;
use crate::findings::Findings;
use crate::models::Tiny;
use std::fmt::Display;
use tidemill_core::SamplingParams;
use tidemill_engine::executor::PromptLogprob;
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::WeightType;

const N_PROMPT: usize = 75;

/// Bits of a prompt token's log-probability, and of the most likely ones at its place.
type Bits = (u32, Vec<(u32, u32)>);

fn wanted_bits(logprobs: &[PromptLogprob]) -> Vec<Bits> {
    let bits = |entry: &PromptLogprob| {
        let top = entry.top.iter();
        let top = top.map(|top| (top.token, top.logprob.to_bits()));
        (entry.logprob.to_bits(), top.collect())
    };
    logprobs.iter().map(bits).collect()
}

fn found_bits(answer: &Answer) -> Vec<Bits> {
    let entries = answer.prompt_logprobs.iter();
    let bits = entries.map(|entry| {
        let top = entry.top.iter();
        let top = top.map(|top| (top.token, top.logprob.to_bits()));
        (entry.logprob.to_bits(), top.collect())
    });
    bits.collect()
}

fn compare(
    findings: &mut Findings,
    cell: &dyn Display,
    wanted: &[Bits],
    answer: Result<Answer, String>,
) {
    findings.compare(cell, &[], &answer);
    let Ok(answer) = answer else { return };
    let found = found_bits(&answer);
    let parted = wanted.iter().zip(&found).position(|(a, b)| a != b);
    let n_found = found.len();
    findings.expect(
        cell,
        found == wanted,
        format!("{n_found} entries, the first other one is {parted:?}"),
    );
    let n_cached = answer.n_cached_tokens;
    findings.expect(cell, n_cached == 0, format!("{n_cached} tokens from cache"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_log_probabilities_are_the_same_everywhere() {
    let tiny = Tiny::new("prompt-logprobs", WeightType::Q8_0);
    let reference = tiny.load(Isa::Scalar);
    let mut findings = Findings::default();
    for isa in Isa::available() {
        let model = tiny.load(isa);
        for kv_dtype in KV_DTYPES {
            let vocab_size = model.facts(kv_dtype).vocab_size;
            let prompt = prompt(N_PROMPT, 3, vocab_size);
            let mut ask = Ask::new(prompt.clone(), 0, SamplingParams::greedy());
            ask.prompt_top = Some(4);
            let wanted = Bare::new(&reference, kv_dtype, 1).prompt_logprobs(&ask);
            assert_eq!(wanted.len(), N_PROMPT - 1);
            let wanted = wanted_bits(&wanted);
            for way in WAYS {
                for chunk in CHUNKS {
                    let setup = Setup {
                        way,
                        chunk,
                        isa,
                        n_threads: 2,
                        kv_dtype,
                        n_blocks: 128,
                    };
                    let deployment = Deployment::start(&model, &setup).await;
                    let at = deployment.connections();
                    let cold = client::ask(&at, &ask).await;
                    compare(&mut findings, &format!("{setup} cold"), &wanted, cold);
                    let served = Ask::new(prompt.clone(), 5, seeded(1));
                    let served = client::ask(&at, &served).await;
                    findings.expect(&setup, served.is_ok(), "a request between failed");
                    let warm = client::ask(&at, &ask).await;
                    compare(&mut findings, &format!("{setup} warm"), &wanted, warm);
                    deployment.end().await;
                }
            }
        }
    }
    findings.assert_none();
}

/// With tokens to follow, the tokens too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asking_for_prompt_log_probabilities_changes_no_token() {
    let model = Tiny::new("prompt-logprobs-more", WeightType::Q4_1).load(Isa::detect());
    let mut findings = Findings::default();
    let kv_dtype = KV_DTYPES[0];
    let prompt = prompt(N_PROMPT, 3, model.facts(kv_dtype).vocab_size);
    let mut ask = Ask::new(prompt, 9, seeded(8));
    let mut bare = Bare::new(&model, kv_dtype, 1);
    let wanted = bare.draw(&ask);
    ask.prompt_top = Some(0);
    let logprobs = wanted_bits(&bare.prompt_logprobs(&ask));
    for way in WAYS {
        for chunk in CHUNKS {
            let setup = Setup {
                way,
                chunk,
                isa: Isa::detect(),
                n_threads: 1,
                kv_dtype,
                n_blocks: 64,
            };
            let deployment = Deployment::start(&model, &setup).await;
            for _ in ["cold", "warm"] {
                let answer = client::ask(&deployment.connections(), &ask).await;
                findings.compare(&setup, &wanted, &answer);
                let is_same = answer.is_ok_and(|answer| found_bits(&answer) == logprobs);
                findings.expect(&setup, is_same, "other log-probabilities of the prompt");
            }
            deployment.end().await;
        }
    }
    findings.assert_none();
}
