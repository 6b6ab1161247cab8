//! `tidemill chat`: a terminal chat that streams. Ctrl-D or `/quit` ends it, `/new` forgets the conversation.

use crate::openai::{Client, Message, Piece};
use anyhow::Result;
use futures::StreamExt;
use serde::Serialize;
use std::io::{BufRead, Write};

/// Flags of `tidemill chat`.
#[derive(clap::Args, Debug)]
pub(crate) struct ChatArgs {
    /// The server.
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "TIDEMILL_URL")]
    url: String,
    /// The model; the server's first one when not given.
    #[arg(long)]
    model: Option<String>,
    /// A system message.
    #[arg(long)]
    system: Option<String>,
    /// 0 to 2; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Most tokens in an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: u32,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: &'a [Message],
    temperature: f32,
    max_tokens: u32,
    stream: bool,
}

/// Runs the chat until its input ends.
///
/// # Errors
/// When the server cannot be reached at all; a failed turn is shown and the chat goes on.
pub(crate) async fn run(args: ChatArgs) -> Result<()> {
    let client = Client::new(&args.url)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{model} at {} - /new starts over, /quit or Ctrl-D ends",
        args.url
    )?;
    let mut messages = opening(&args);
    let mut lines = std::io::stdin().lock().lines();
    loop {
        write!(out, "\n> ")?;
        out.flush()?;
        let Some(line) = lines.next().transpose()? else {
            writeln!(out)?;
            return Ok(());
        };
        match line.trim() {
            "" => {}
            "/quit" | "/exit" => return Ok(()),
            "/new" => messages = opening(&args),
            text => {
                messages.push(message("user", text));
                match answer(&client, &args, &model, &messages).await {
                    Ok(text) => messages.push(message("assistant", &text)),
                    Err(error) => {
                        messages.pop();
                        writeln!(out, "\n[{error:#}]")?;
                    }
                }
            }
        }
    }
}

fn message(role: &str, content: &str) -> Message {
    Message {
        role: role.to_owned(),
        content: content.to_owned(),
    }
}

fn opening(args: &ChatArgs) -> Vec<Message> {
    args.system
        .iter()
        .map(|text| message("system", text))
        .collect()
}

async fn answer(
    client: &Client,
    args: &ChatArgs,
    model: &str,
    messages: &[Message],
) -> Result<String> {
    let body = Body {
        model,
        messages,
        temperature: args.temperature,
        max_tokens: args.max_tokens,
        stream: true,
    };
    let mut pieces = Box::pin(client.stream("chat/completions", &body).await?);
    let mut text = String::new();
    let mut out = std::io::stdout();
    let mut is_done = false;
    while let Some(piece) = pieces.next().await {
        match piece? {
            Piece::Text(part) => {
                write!(out, "{part}")?;
                out.flush()?;
                text.push_str(&part);
            }
            Piece::Usage(_) => {}
            Piece::Done => is_done = true,
        }
    }
    writeln!(out)?;
    anyhow::ensure!(
        is_done,
        "the answer was cut off: the stream ended without [DONE]"
    );
    Ok(text)
}
