//! A router's front door with a script in the place of dispatch, and a small client.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::HeaderMap;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidemill_core::{FinishReason, SampledToken, TokenId, TokenLogprob};
use tidemill_model_files::testing::{TinySpec, write_gguf};
use tidemill_model_files::text::{ModelText, open_text};
use tidemill_router::admission::Admission;
use tidemill_router::http::{HttpConfig, serve};
use tidemill_router::requests::{Answer, Finished, Job, PromptLogprob, Requests, Submission};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub(crate) const MODEL: &str = "tiny";
/// `<|im_end|>`.
pub(crate) const EOS: TokenId = 2;
pub(crate) const CONTEXT: u32 = 64;

/// What the script does with one job.
pub(crate) type Script = Arc<dyn Fn(&Job) -> Vec<Answer> + Send + Sync>;

pub(crate) struct Door {
    pub(crate) address: SocketAddr,
    pub(crate) jobs: Arc<Mutex<Vec<Job>>>,
    pub(crate) model: Arc<ModelText>,
    pub(crate) admission: Arc<Admission>,
    /// Jobs whose client left before their end.
    pub(crate) n_cancelled: Arc<AtomicUsize>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) served: tokio::task::JoinHandle<std::io::Result<()>>,
    client: Client<HttpConnector, Full<Bytes>>,
}

pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("JSON: {}", self.body))
    }

    /// The status, the code and the field of an error.
    pub(crate) fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        assert!(
            !text("message").is_empty() && !text("type").is_empty(),
            "{}",
            self.body
        );
        (self.status, text("code"), text("param"))
    }

    /// The data of each event; an event with a name is given as `name: data`.
    pub(crate) fn events(&self) -> Vec<String> {
        let blocks = self.body.split("\n\n").filter(|block| !block.is_empty());
        let event = |block: &str| {
            let field = |name: &str| {
                let lines = block.lines();
                lines
                    .filter_map(|line| line.strip_prefix(name))
                    .collect::<String>()
            };
            match field("event: ") {
                name if name.is_empty() => field("data: "),
                name => format!("{name}: {}", field("data: ")),
            }
        };
        blocks.map(event).filter(|data| !data.is_empty()).collect()
    }

    /// The chunks before `[DONE]`, which must be there.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.body);
        let chunks = events.iter();
        chunks
            .map(|data| serde_json::from_str(data).expect("a chunk"))
            .collect()
    }
}

impl Door {
    /// Opens a door. Jobs that the script leaves without an end stay open until their client leaves; an empty script
    /// breaks off at once.
    pub(crate) async fn open(script: impl Fn(&Job) -> Vec<Answer> + Send + Sync + 'static) -> Self {
        Self::open_with(Arc::new(Admission::new(16, 16)), |_| {}, script).await
    }

    pub(crate) async fn open_with(
        admission: Arc<Admission>,
        change: impl FnOnce(&mut HttpConfig),
        script: impl Fn(&Job) -> Vec<Answer> + Send + Sync + 'static,
    ) -> Self {
        let model = Arc::new(tiny_model());
        let (requests, mut queue) = Requests::new(Arc::clone(&admission));
        let jobs = Arc::new(Mutex::new(Vec::new()));
        let n_cancelled = Arc::new(AtomicUsize::new(0));
        let script: Script = Arc::new(script);
        let (seen, cancelled) = (Arc::clone(&jobs), Arc::clone(&n_cancelled));
        tokio::spawn(async move {
            while let Some(submission) = queue.recv().await {
                seen.lock().expect("no panic").push(submission.job.clone());
                tokio::spawn(play(
                    submission,
                    Arc::clone(&script),
                    Arc::clone(&cancelled),
                ));
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let shutdown = CancellationToken::new();
        let mut config = HttpConfig::new(MODEL);
        change(&mut config);
        let served = serve(
            listener,
            config,
            Arc::clone(&model),
            requests,
            shutdown.clone(),
        );
        Self {
            address,
            jobs,
            model,
            admission,
            n_cancelled,
            shutdown,
            served: tokio::spawn(served),
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().into_bytes(), &[])
            .await
    }

    pub(crate) async fn post_bytes(
        &self,
        path: &str,
        body: impl Into<Bytes>,
        headers: &[(&str, &str)],
    ) -> Reply {
        let mut request = hyper::Request::post(format!("http://{}{path}", self.address));
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(Full::new(body.into())).expect("a request"))
            .await
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        let request = hyper::Request::get(format!("http://{}{path}", self.address));
        self.send(request.body(Full::default()).expect("a request"))
            .await
    }

    pub(crate) async fn send(&self, request: hyper::Request<Full<Bytes>>) -> Reply {
        let response = self.client.request(request).await.expect("an answer");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        Reply {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: String::from_utf8(body.to_vec()).expect("UTF-8"),
        }
    }

    pub(crate) async fn chat(&self, content: &str, more: Value) -> Reply {
        let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": content}]});
        merge(&mut body, more);
        self.post("/v1/chat/completions", &body).await
    }

    pub(crate) async fn complete(&self, prompt: impl Into<Value>, more: Value) -> Reply {
        let mut body = json!({"model": MODEL, "prompt": prompt.into()});
        merge(&mut body, more);
        self.post("/v1/completions", &body).await
    }

    /// Waits until every permit is back, which is when every job has ended or been cancelled.
    pub(crate) async fn all_ended(&self) {
        for _ in 0..500 {
            if self.admission.n_taken() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} jobs are still open", self.admission.n_taken());
    }

    pub(crate) fn n_jobs(&self) -> usize {
        self.jobs.lock().expect("no panic").len()
    }

    pub(crate) fn last_job(&self) -> Job {
        self.jobs
            .lock()
            .expect("no panic")
            .last()
            .expect("a job")
            .clone()
    }

    pub(crate) fn n_cancelled(&self) -> usize {
        self.n_cancelled.load(Ordering::SeqCst)
    }
}

fn merge(body: &mut Value, more: Value) {
    let Value::Object(more) = more else { return };
    body.as_object_mut().expect("an object").extend(more);
}

async fn play(submission: Submission, script: Script, n_cancelled: Arc<AtomicUsize>) {
    let Submission {
        job,
        answers,
        permit,
        span: _,
    } = submission;
    let script = script(&job);
    let is_empty = script.is_empty();
    let has_end = script
        .iter()
        .any(|answer| matches!(answer, Answer::Finished(_) | Answer::Failed(_)));
    for answer in script {
        if answers.send(answer).await.is_err() {
            n_cancelled.fetch_add(1, Ordering::SeqCst);
            return;
        }
    }
    if !has_end && !is_empty {
        answers.closed().await;
        n_cancelled.fetch_add(1, Ordering::SeqCst);
    }
    drop(permit);
}

fn tiny_model() -> ModelText {
    static N_FILES: AtomicUsize = AtomicUsize::new(0);
    let n = N_FILES.fetch_add(1, Ordering::SeqCst);
    let name = format!("tidemill-http-{}-{n}.gguf", std::process::id());
    let path = std::env::temp_dir().join(name);
    let spec = TinySpec {
        context_length: CONTEXT,
        ..TinySpec::default()
    };
    write_gguf(&path, &spec).expect("the temporary folder takes files");
    let model = open_text(&path).expect("a tiny model opens");
    std::fs::remove_file(&path).expect("it was just written");
    model
}

/// The token of one byte in the tiny vocabulary.
pub(crate) fn byte_token(byte: u8) -> TokenId {
    3 + TokenId::from(byte)
}

/// One answer for each byte, with log-probabilities as far as the job asks for them.
pub(crate) fn byte_answers(job: &Job, bytes: &[u8]) -> Vec<Answer> {
    let tokens: Vec<TokenId> = bytes.iter().copied().map(byte_token).collect();
    token_answers(job, &tokens)
}

pub(crate) fn token_answers(job: &Job, tokens: &[TokenId]) -> Vec<Answer> {
    let mut answers = Vec::new();
    if let Some(top) = job.logprobs.prompt_top {
        let scored = job.prompt[1..].iter().map(|&token| PromptLogprob {
            logprob: -2.0,
            top: rivals(token, top),
        });
        answers.push(Answer::PromptLogprobs(scored.collect()));
    }
    for (i, &token) in tokens.iter().enumerate() {
        answers.push(Answer::Token(SampledToken {
            token,
            output_idx: i as u32,
            logprob: job.logprobs.output_top.map(|_| -0.5),
            top: job
                .logprobs
                .output_top
                .map_or(Vec::new(), |top| rivals(token, top)),
            logits_digest: None,
        }));
    }
    answers
}

fn rivals(token: TokenId, top: u32) -> Vec<TokenLogprob> {
    let rivals = (0..top).map(|i| TokenLogprob {
        token: if i == 0 { token } else { byte_token(b'0') + i },
        logprob: -0.5 - i as f32,
    });
    rivals.collect()
}

pub(crate) fn finished(reason: FinishReason, n_output_tokens: u32) -> Answer {
    Answer::Finished(Finished {
        reason,
        n_output_tokens,
        n_cached_tokens: 7,
    })
}

/// A whole scripted answer: `text` byte by byte, ended by the end-of-turn token.
pub(crate) fn say(job: &Job, text: &str) -> Vec<Answer> {
    let mut tokens: Vec<TokenId> = text.bytes().map(byte_token).collect();
    tokens.push(EOS);
    let mut answers = token_answers(job, &tokens);
    answers.push(finished(FinishReason::Stop, tokens.len() as u32));
    answers
}
