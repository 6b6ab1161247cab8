//! Would it be seen? Each of these runs is wrong on purpose, and the comparison has to say so.

use crate::ask::{Ask, prompt, seeded};
use crate::axes::{Setup, Way};
use crate::bare::Bare;
use crate::client;
use crate::deployment::Deployment;
use crate::findings::Findings;
use crate::models::Tiny;
use tidemill_core::{KvDtype, SamplingParams};
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::WeightType;

const N_OUTPUT: u32 = 12;

fn setup(kv_dtype: KvDtype) -> Setup {
    Setup {
        way: Way::Local,
        chunk: 64,
        isa: Isa::detect(),
        n_threads: 1,
        kv_dtype,
        n_blocks: 64,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_run_is_found() {
    let model = Tiny::new("control", WeightType::Q4_1).load(Isa::detect());
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 1);
    let right = Ask::new(prompt(40, 1, vocab_size), N_OUTPUT, seeded(3));
    let wanted = bare.draw(&right);

    let mut other_seed = right.clone();
    other_seed.sampling.seed = 4;
    let mut other_token = right.clone();
    let mut tokens = right.prompt.to_vec();
    tokens[0] = (tokens[0] + 1) % vocab_size;
    other_token.prompt = tokens.into();
    let mut too_short = right.clone();
    too_short.max_tokens -= 1;
    let mut greedy = right.clone();
    greedy.sampling = SamplingParams::greedy();
    let impossible = Ask::new(vec![vocab_size].into(), N_OUTPUT, seeded(3));

    let deployment = Deployment::start(&model, &setup(KvDtype::F16)).await;
    let at = deployment.connections();
    let mut findings = Findings::default();
    let answer = client::ask(&at, &right).await;
    findings.compare(&"right", &wanted, &answer);
    findings.assert_none();
    let wrong = [&other_seed, &other_token, &too_short, &greedy, &impossible];
    for (n_before, ask) in wrong.into_iter().enumerate() {
        let answer = client::ask(&at, ask).await;
        findings.compare(&format!("{ask:?}"), &wanted, &answer);
        assert_eq!(findings.wrong().len(), n_before + 1, "not found: {ask:?}");
    }
    deployment.end().await;
    // Another KV type: the tokens may well be the same, the logits are not.
    let deployment = Deployment::start(&model, &setup(KvDtype::F32)).await;
    let n_before = findings.wrong().len();
    let answer = client::ask(&deployment.connections(), &right).await;
    findings.compare(&"KV of another type", &wanted, &answer);
    assert_eq!(findings.wrong().len(), n_before + 1);
    deployment.end().await;
}

/// A digest that told nothing, or tokens that never vary, would make every comparison hold.
#[test]
fn outputs_vary() {
    let model = Tiny::new("vary", WeightType::Q4_1).load(Isa::detect());
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 1);
    let drawn = bare.draw(&Ask::new(prompt(75, 0, vocab_size), N_OUTPUT, seeded(11)));
    let mut tokens: Vec<_> = drawn.iter().map(|drawn| drawn.token).collect();
    let mut digests: Vec<_> = drawn.iter().map(|drawn| drawn.logits_digest).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert!(tokens.len() > N_OUTPUT as usize / 2, "{drawn:?}");
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), N_OUTPUT as usize, "{drawn:?}");
}
