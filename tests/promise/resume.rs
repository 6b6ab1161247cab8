//! A resume: prompt and tokens already given come apart, and what follows is what would have followed.

use crate::ask::{Ask, is_soak, prompt, seeded};
use crate::axes::{CHUNKS, Setup, WAYS};
use crate::bare::Bare;
use crate::client;
use crate::deployment::Deployment;
use crate::findings::Findings;
use crate::models::Tiny;
use tidemill_core::{KvDtype, SamplingParams};
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::WeightType;

const N_OUTPUT: u32 = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resume_goes_on_where_the_first_attempt_stopped() {
    let model = Tiny::new("resume", WeightType::Q4_1).load(Isa::detect());
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 1);
    let mut findings = Findings::default();
    for way in WAYS {
        for chunk in CHUNKS {
            let setup = Setup {
                way,
                chunk,
                isa: Isa::detect(),
                n_threads: 1,
                kv_dtype: KvDtype::F16,
                n_blocks: 128,
            };
            let deployment = Deployment::start(&model, &setup).await;
            let at = deployment.connections();
            for salt in 0..if is_soak() { 10 } else { 2 } {
                // One ends within a block, the next at the end of one.
                let prompt = prompt(if salt % 2 == 0 { 41 } else { 48 }, salt, vocab_size);
                for sampling in [SamplingParams::greedy(), seeded(salt)] {
                    let whole = Ask::new(prompt.clone(), N_OUTPUT, sampling);
                    let wanted = bare.draw(&whole);
                    // One token, up to just before and after a full block, all but two and all but one.
                    for n_emitted in [1, 6, 7, 8, 17, N_OUTPUT - 2, N_OUTPUT - 1] {
                        // Found in the cache of the attempt before, or not.
                        for namespace in ["", &format!("{salt} {n_emitted}")] {
                            let (given, rest) = wanted.split_at(n_emitted as usize);
                            let mut rest_of = whole.clone().within(namespace);
                            rest_of.emitted = given.iter().map(|drawn| drawn.token).collect();
                            let cell = format!(
                                "{setup} emitted={n_emitted} namespace={namespace:?} \
                                 temperature={}",
                                whole.sampling.temperature
                            );
                            let answer = client::ask(&at, &rest_of).await;
                            findings.compare(&cell, rest, &answer);
                        }
                    }
                }
            }
            deployment.end().await;
        }
    }
    findings.assert_none();
}
