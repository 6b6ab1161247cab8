//! The full product of all axes, on tiny random models of every weight type.
//!
//! One deployment serves twelve cells one after the other: two ways of sampling, three states of the prefix cache,
//! alone or in a crowd. A cell's namespace is its own, so that what is cold is cold. The members of the crowd are
//! requests like any other: each is held against its own right answer.

use crate::ask::{Ask, forked_prompt, is_soak, prompt, seeded};
use crate::axes::{CHUNKS, Cache, Cell, KV_DTYPES, Mates, N_THREADS, Setup, WAYS, Way};
use crate::bare::Bare;
use crate::client::{self, Answer, Drawn};
use crate::deployment::{Connections, Deployment};
use crate::findings::Findings;
use crate::models::Tiny;
use std::collections::{BTreeSet, HashMap};
use tidemill_core::{KvDtype, SamplingParams};
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::WeightType;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Four full blocks and a tail.
const N_PROMPT: usize = 75;
/// Beyond the next end of a block.
const N_OUTPUT: u32 = 10;
/// What `Cache::Prefix` shares: two full blocks and half of one.
const N_SHARED: usize = 40;
/// Of each node: room for everything that is served at the same time, and for the prefix cache.
const N_BLOCKS: u32 = 256;
/// Two ways of sampling, three states of the cache, alone or in a crowd.
const N_CELLS: usize = 12;

/// What the twelve cells of every deployment of one model and KV type ask, each with its right answer.
struct Wanted {
    bare: Bare,
    vocab_size: u32,
    known: HashMap<String, Vec<Drawn>>,
}

impl Wanted {
    fn answer(&mut self, ask: &Ask) -> Vec<Drawn> {
        // The namespace decides nothing.
        let key = format!("{:?}", ask.clone().within(""));
        let known = self.known.entry(key);
        known.or_insert_with(|| self.bare.draw(ask)).clone()
    }
}

/// One deployment at work, and what is known about it.
struct Bench<'a> {
    at: Connections,
    setup: Setup,
    label: String,
    wanted: &'a mut Wanted,
    findings: &'a mut Findings,
    overlaps: &'a mut Overlaps,
}

/// How often a crowd was one: its tokens were drawn in turns with the probe's.
#[derive(Default)]
struct Overlaps {
    n_crowds: usize,
    n_overlapping: usize,
}

impl Overlaps {
    fn assert_some(&self) {
        let Self {
            n_crowds,
            n_overlapping,
        } = self;
        assert!(
            n_overlapping * 3 > *n_crowds,
            "a crowd has to be one: {n_overlapping} of {n_crowds} overlapped"
        );
    }
}

type Mate = (Ask, JoinHandle<Result<Answer, String>>);

impl Bench<'_> {
    async fn all_cells(&mut self, variant: u64) {
        // Variant 0 has the whole pipeline of sampling, among a crowd that has not.
        for sampling in [SamplingParams::greedy(), seeded(12 + variant)] {
            for mates in [Mates::Alone, Mates::Crowd] {
                let kind = if sampling.is_greedy() {
                    "greedy"
                } else {
                    "seeded"
                };
                let namespace = format!("{kind}-{mates:?}-{variant}");
                for cache in [Cache::Cold, Cache::Warm, Cache::Prefix] {
                    let cell = Cell {
                        name: format!("{} sampling={kind} variant={variant}", self.label),
                        setup: self.setup,
                        cache,
                        mates,
                    };
                    // Warm follows cold, which has served the same.
                    let namespace = match cache {
                        Cache::Cold | Cache::Warm => namespace.clone(),
                        Cache::Prefix => format!("{namespace}-prefix"),
                    };
                    let prompt = prompt(N_PROMPT, variant, self.wanted.vocab_size);
                    let probe = Ask::new(prompt, N_OUTPUT, sampling.clone()).within(&namespace);
                    self.cell(&cell, &probe, variant).await;
                }
            }
        }
    }

    async fn cell(&mut self, cell: &Cell, probe: &Ask, variant: u64) {
        if cell.cache == Cache::Prefix {
            let vocab_size = self.wanted.vocab_size;
            let before = forked_prompt((N_SHARED, variant), (20, 900), vocab_size);
            let before = Ask::new(before, 3, probe.sampling.clone()).within(&probe.namespace);
            let answer = client::ask(&self.at, &before).await;
            let wanted = self.wanted.answer(&before);
            self.findings.compare(cell, &wanted, &answer);
        }
        let mates = match cell.mates {
            Mates::Alone => Vec::new(),
            Mates::Crowd => self.crowd(cell, probe, variant).await,
        };
        let answer = client::ask(&self.at, probe).await;
        let wanted = self.wanted.answer(probe);
        self.findings.compare(cell, &wanted, &answer);
        if let Ok(answer) = &answer {
            self.check_cache(cell, answer);
        }
        let mut is_overlapping = false;
        let has_mates = !mates.is_empty();
        for (ask, running) in mates {
            let mate = running.await.unwrap_or_else(|error| Err(error.to_string()));
            let wanted = self.wanted.answer(&ask);
            self.findings.compare(cell, &wanted, &mate);
            if let (Ok(answer), Ok(mate)) = (&answer, &mate) {
                is_overlapping |= answer.overlaps(mate);
            }
        }
        self.overlaps.n_crowds += usize::from(has_mates);
        self.overlaps.n_overlapping += usize::from(is_overlapping);
    }

    fn check_cache(&mut self, cell: &Cell, answer: &Answer) {
        let n_cached = match cell.cache {
            Cache::Cold => 0,
            Cache::Prefix => 32,
            Cache::Warm => 64,
        };
        let found = answer.n_cached_tokens;
        let told = format!("{found} tokens were cached, {n_cached} have to be");
        self.findings.expect(cell, found == n_cached, told);
        if cell.setup.way != Way::Colocated {
            let found = answer.n_local_tokens;
            let told = format!("{found} tokens were at the decode node, {n_cached} have to be");
            self.findings.expect(cell, found == n_cached, told);
        }
    }

    /// Starts the others: two are decoding when this returns, two have just been asked, one of them to be given up.
    async fn crowd(&mut self, cell: &Cell, probe: &Ask, variant: u64) -> Vec<Mate> {
        let vocab_size = self.wanted.vocab_size;
        // A cold cell stays cold: nobody else fills its namespace.
        let shared = match cell.cache {
            Cache::Cold => "of the crowd",
            Cache::Prefix | Cache::Warm => &probe.namespace,
        };
        let (greedy, seeded) = (SamplingParams::greedy(), seeded(5 + variant));
        let long = [
            Ask::new(prompt(64, 100 + variant, vocab_size), 20, seeded.clone()),
            Ask::new(prompt(1, 200 + variant, vocab_size), 18, greedy.clone()),
        ];
        let mut mates = Vec::new();
        for ask in long {
            let ask = ask.within("of the crowd");
            let (begun, has_begun) = oneshot::channel();
            mates.push(self.spawn(ask, Some(begun)));
            // An error here is a failed mate, which is found when it is joined.
            let _ = has_begun.await;
        }
        let forked = forked_prompt((N_SHARED, variant), (9, 300 + variant), vocab_size);
        let joining = Ask::new(forked, 12, seeded).within(shared);
        mates.push(self.spawn(joining, None));
        let leaving = Ask::new(prompt(50, 400 + variant, vocab_size), 300, greedy);
        let (at, leaving) = (self.at.clone(), leaving.within("of the crowd"));
        tokio::spawn(async move { client::ask_and_leave(&at, &leaving).await });
        mates
    }

    fn spawn(&self, ask: Ask, begun: Option<oneshot::Sender<()>>) -> Mate {
        let (at, asked) = (self.at.clone(), ask.clone());
        let running = async move { client::ask_and_tell(&at, &asked, begun).await };
        (ask, tokio::spawn(running))
    }
}

/// Which part of the product a model and KV type get.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Breadth {
    /// Everything.
    Whole,
    /// Every way with every chunk size; instruction set and threads take turns, shifted by the number.
    Turns(usize),
}

fn setups(kv_dtype: KvDtype, breadth: Breadth) -> Vec<Setup> {
    let isas = Isa::available();
    let mut setups = Vec::new();
    for (way_idx, way) in WAYS.into_iter().enumerate() {
        for (chunk_idx, chunk) in CHUNKS.into_iter().enumerate() {
            let sorts = isas
                .iter()
                .flat_map(|&isa| N_THREADS.map(|n_threads| (isa, n_threads)));
            let mut sorts: Vec<_> = sorts.collect();
            if let Breadth::Turns(shift) = breadth {
                let turn = (way_idx + chunk_idx + shift) % sorts.len();
                sorts = vec![sorts[turn]];
            }
            setups.extend(sorts.into_iter().map(|(isa, n_threads)| Setup {
                way,
                chunk,
                isa,
                n_threads,
                kv_dtype,
                n_blocks: N_BLOCKS,
            }));
        }
    }
    setups
}

/// Runs the cells of one weight type; of `whole` KV with every setup, of other KV types with some.
async fn product(weight_type: WeightType, whole: Option<KvDtype>) {
    if Isa::available().len() == 1 {
        eprintln!("this CPU has no AVX2: the scalar path alone is compared with itself");
    }
    let tiny = Tiny::new(&format!("tiny-{weight_type:?}"), weight_type);
    let models: Vec<_> = Isa::available()
        .into_iter()
        .map(|isa| tiny.load(isa))
        .collect();
    let mut findings = Findings::default();
    let mut overlaps = Overlaps::default();
    let mut n_cells = 0;
    for (kv_idx, kv_dtype) in KV_DTYPES.into_iter().enumerate() {
        let mut wanted = Wanted {
            bare: Bare::new(&models[0], kv_dtype, 1),
            vocab_size: models[0].facts(kv_dtype).vocab_size,
            known: HashMap::new(),
        };
        let breadth = if is_soak() || whole == Some(kv_dtype) {
            Breadth::Whole
        } else {
            Breadth::Turns(kv_idx + weight_type as usize)
        };
        for setup in setups(kv_dtype, breadth) {
            let model = models.iter().find(|model| model.isa() == setup.isa);
            let deployment = Deployment::start(model.expect("loaded"), &setup).await;
            let mut bench = Bench {
                at: deployment.connections(),
                setup,
                label: format!("weights={weight_type:?}"),
                wanted: &mut wanted,
                findings: &mut findings,
                overlaps: &mut overlaps,
            };
            for variant in 0..if is_soak() { 8 } else { 1 } {
                bench.all_cells(variant).await;
                n_cells += N_CELLS;
            }
            deployment.end().await;
        }
    }
    findings.assert_none();
    assert!(findings.n_compared() > n_cells, "every cell was compared");
    overlaps.assert_some();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_q4_1_weights_gives_the_same() {
    product(WeightType::Q4_1, Some(KvDtype::F16)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_q8_0_weights_gives_the_same() {
    product(WeightType::Q8_0, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_q4_k_weights_gives_the_same() {
    product(WeightType::Q4K, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_q6_k_weights_gives_the_same() {
    product(WeightType::Q6K, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_f16_weights_gives_the_same() {
    product(WeightType::F16, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deployment_of_f32_weights_gives_the_same() {
    product(WeightType::F32, None).await;
}

#[test]
fn the_product_has_every_combination() {
    let n_isas = Isa::available().len();
    let whole = setups(KvDtype::F16, Breadth::Whole);
    assert_eq!(whole.len(), 3 * 5 * n_isas * 2);
    let told: BTreeSet<String> = whole.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), whole.len(), "no two are the same");
    let turns = setups(KvDtype::F16, Breadth::Turns(1));
    assert_eq!(turns.len(), 3 * 5);
    for isa in Isa::available() {
        for n_threads in N_THREADS {
            let is_it = |setup: &Setup| setup.isa == isa && setup.n_threads == n_threads;
            assert!(turns.iter().any(is_it), "{isa:?} {n_threads}");
        }
    }
}
