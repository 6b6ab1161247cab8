//! The default model: each axis by itself, everything else as in the base, greedy and seeded.
//!
//! What the tokens have to be is computed by the bare executor with the fastest instruction set; that the scalar one
//! agrees is an axis like the others, on a shorter prompt, since it is slow.

use crate::ask::{Ask, forked_prompt, is_soak, prompt, seeded};
use crate::axes::{CHUNKS, Cache, Cell, KV_DTYPES, Mates, Setup, WAYS, Way};
use crate::bare::Bare;
use crate::client::{self, Drawn};
use crate::deployment::{Connections, Deployment};
use crate::findings::Findings;
use crate::models::{load, open_default};
use std::sync::{Arc, OnceLock};
use tidemill_core::{KvDtype, SamplingParams, TokenId};
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;

/// Longer than the second longest chunk.
const N_PROMPT: usize = 70;
const N_OUTPUT: u32 = 6;
/// For the scalar path: more than two blocks, and some tokens beyond the first.
const N_SHORT_PROMPT: usize = 35;
const N_SHORT_OUTPUT: u32 = 4;

/// One copy of the weights for all tests of this file.
fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let model = MODEL.get_or_init(|| load(&open_default(), Isa::detect()));
    Arc::clone(model)
}

fn base() -> Setup {
    Setup {
        way: Way::Local,
        chunk: 64,
        isa: Isa::detect(),
        n_threads: 2,
        kv_dtype: KvDtype::F16,
        n_blocks: 64,
    }
}

/// A prompt, greedy and seeded, with what has to come.
struct Wanted {
    asks: Vec<(Ask, Vec<Drawn>)>,
}

impl Wanted {
    fn new(bare: &mut Bare, prompts: &[Arc<[TokenId]>], n_output: u32) -> Self {
        let mut asks = Vec::new();
        for prompt in prompts {
            for sampling in [SamplingParams::greedy(), seeded(21)] {
                let ask = Ask::new(Arc::clone(prompt), n_output, sampling);
                let drawn = bare.draw(&ask);
                asks.push((ask, drawn));
            }
        }
        Self { asks }
    }

    /// What most axes ask; in the long form with more prompts.
    fn usual(model: &Arc<Model>, kv_dtype: KvDtype) -> Self {
        let vocab_size = model.facts(kv_dtype).vocab_size;
        let n_prompts = if is_soak() { 8 } else { 1 };
        let prompts: Vec<_> = (0..n_prompts)
            .map(|salt| prompt(N_PROMPT, salt, vocab_size))
            .collect();
        Self::new(&mut Bare::new(model, kv_dtype, 2), &prompts, N_OUTPUT)
    }

    /// Asks everything, each in a cold namespace.
    async fn check(&self, at: &Connections, setup: &Setup, findings: &mut Findings) {
        for (idx, (ask, wanted)) in self.asks.iter().enumerate() {
            let cell = cell(setup, ask, Cache::Cold, Mates::Alone);
            let answer = client::ask(at, &ask.clone().within(&idx.to_string())).await;
            findings.compare(&cell, wanted, &answer);
        }
    }
}

fn cell(setup: &Setup, ask: &Ask, cache: Cache, mates: Mates) -> Cell {
    let kind = match ask.sampling.is_greedy() {
        true => "greedy",
        false => "seeded",
    };
    Cell {
        name: format!("default model sampling={kind}"),
        setup: *setup,
        cache,
        mates,
    }
}

/// Runs the usual asks on each of these setups of one model.
async fn check_all(model: &Arc<Model>, wanted: &Wanted, setups: Vec<Setup>) {
    let mut findings = Findings::default();
    for setup in setups {
        let deployment = Deployment::start(model, &setup).await;
        let at = deployment.connections();
        wanted.check(&at, &setup, &mut findings).await;
        deployment.end().await;
    }
    findings.assert_none();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_gives_the_same_in_every_way_chunk_and_team() {
    let model = model();
    let wanted = Wanted::usual(&model, KvDtype::F16);
    let ways = WAYS.map(|way| Setup { way, ..base() });
    let chunks = CHUNKS.map(|chunk| Setup { chunk, ..base() });
    let one_thread = Setup {
        n_threads: 1,
        ..base()
    };
    let setups = ways.into_iter().chain(chunks).chain([one_thread]);
    check_all(&model, &wanted, setups.collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_gives_the_same_with_each_kv_type() {
    let model = model();
    for kv_dtype in KV_DTYPES {
        let wanted = Wanted::usual(&model, kv_dtype);
        let setup = Setup {
            kv_dtype,
            chunk: 16,
            ..base()
        };
        let colocated = Setup {
            way: Way::Colocated,
            ..setup
        };
        check_all(&model, &wanted, vec![setup, colocated]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_gives_the_same_with_each_instruction_set() {
    let fastest = model();
    let vocab_size = fastest.facts(KvDtype::F16).vocab_size;
    let prompts = [prompt(N_SHORT_PROMPT, 0, vocab_size)];
    let mut bare = Bare::new(&fastest, KvDtype::F16, 2);
    let wanted = Wanted::new(&mut bare, &prompts, N_SHORT_OUTPUT);
    let files = open_default();
    for isa in Isa::available() {
        let model = match isa == fastest.isa() {
            true => Arc::clone(&fastest),
            false => load(&files, isa),
        };
        let setup = Setup { isa, ..base() };
        check_all(&model, &wanted, vec![setup]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_gives_the_same_from_the_prefix_cache() {
    let model = model();
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let wanted = Wanted::usual(&model, KvDtype::F16);
    let mut findings = Findings::default();
    for way in [Way::Colocated, Way::Local] {
        let setup = Setup { way, ..base() };
        let deployment = Deployment::start(&model, &setup).await;
        let at = deployment.connections();
        for (idx, (ask, drawn)) in wanted.asks.iter().enumerate() {
            let salt = idx as u64 / 2;
            let ask = ask.clone().within(&idx.to_string());
            let before = forked_prompt((40, salt), (4, 900), vocab_size);
            let before = Ask::new(before, 2, SamplingParams::greedy()).within(&ask.namespace);
            client::ask(&at, &before).await.expect("it is served");
            for (cache, n_cached) in [(Cache::Prefix, 32), (Cache::Warm, 64)] {
                let cell = cell(&setup, &ask, cache, Mates::Alone);
                let answer = client::ask(&at, &ask).await;
                findings.compare(&cell, drawn, &answer);
                let found = answer.map_or(0, |answer| answer.n_cached_tokens);
                let told = format!("{found} tokens were cached, {n_cached} have to be");
                findings.expect(&cell, found == n_cached, told);
            }
        }
        deployment.end().await;
    }
    findings.assert_none();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_gives_the_same_in_a_crowd() {
    let model = model();
    let vocab_size = model.facts(KvDtype::F16).vocab_size;
    let mut bare = Bare::new(&model, KvDtype::F16, 2);
    let wanted = Wanted::usual(&model, KvDtype::F16);
    let others = [(64, 30), (1, 31), (33, 32)];
    let others = others.map(|(n, salt)| prompt(n, salt, vocab_size));
    let others = Wanted::new(&mut bare, &others, 12);
    let mut findings = Findings::default();
    for way in [Way::Colocated, Way::Local] {
        let setup = Setup { way, ..base() };
        let deployment = Deployment::start(&model, &setup).await;
        // All of them at the same time, the others first.
        let all = others.asks.iter().chain(&wanted.asks);
        let running: Vec<_> = all
            .map(|(ask, drawn)| {
                let (at, asked) = (deployment.connections(), ask.clone());
                let running = tokio::spawn(async move { client::ask(&at, &asked).await });
                (ask, drawn, running)
            })
            .collect();
        let mut answers = Vec::new();
        for (ask, drawn, running) in running {
            let answer = running.await.unwrap_or_else(|error| Err(error.to_string()));
            let cell = cell(&setup, ask, Cache::Cold, Mates::Crowd);
            findings.compare(&cell, drawn, &answer);
            answers.extend(answer);
        }
        let last = answers.last();
        let is_crowd = last.is_some_and(|last| {
            answers[..answers.len() - 1]
                .iter()
                .any(|other| last.overlaps(other))
        });
        findings.expect(&setup, is_crowd, "everybody was alone");
        deployment.end().await;
    }
    findings.assert_none();
}
