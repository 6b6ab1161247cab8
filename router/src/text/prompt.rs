//! What a client wants continued, turned into tokens, and back into text for an echo.
//!
//! Who wrote a text decides what it may become: the template and a raw prompt may spell control tokens, the content of
//! a message may not. A template that fails is an error of this request, never a reason to try another form.

use std::sync::Arc;
use tidemill_core::TokenId;
use tidemill_model_files::text::{ChatMessage, Detokeniser, ModelText, Vocabulary};

/// Most bytes of text in one request, all prompts or messages together.
pub const TEXT_BYTES_MAX: usize = 4 << 20;
/// How many times more bytes a text may have than the longest tokens could spell in the whole context: composing characters
/// (NFC) makes some texts shorter before they are cut into tokens, none by so much.
const SHRINK_MAX: usize = 4;

/// What is to be continued.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prompt {
    /// Raw text; control tokens are recognised.
    Text(String),
    /// Tokens, not yet checked against the vocabulary.
    Tokens(Vec<TokenId>),
    /// A conversation, put into text by the model's template.
    Chat(Vec<Message>),
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; the parts of a list one after another.
    pub content: String,
}

/// Who speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Instructions (`system` and `developer`).
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The name that chat templates know.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// Why a prompt has no tokens.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PromptError {
    /// Nothing to continue.
    #[error("is empty; this model needs at least one token")]
    Empty,
    /// More text than `TEXT_BYTES_MAX`.
    #[error("has {n_bytes} bytes of text; at most {TEXT_BYTES_MAX} are allowed")]
    TooLong {
        /// Its length.
        n_bytes: usize,
    },
    /// More text than the context can hold, however few tokens it has.
    #[error(
        "has {n_bytes} bytes of text, at least {n_tokens_min} tokens; the context holds {limit}"
    )]
    ExceedsContext {
        /// Its length.
        n_bytes: usize,
        /// Tokens that it has at least.
        n_tokens_min: usize,
        /// Tokens of the context.
        limit: usize,
    },
    /// The model brings no chat template.
    #[error("cannot be used: this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template refused these messages or failed.
    #[error("were refused by the model's chat template: {0}")]
    Template(String),
}

impl Prompt {
    /// Bytes of text.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
            Self::Chat(messages) => messages.iter().map(|message| message.content.len()).sum(),
        }
    }

    /// The tokens, at least one.
    ///
    /// # Errors
    /// Says what is wrong, to be read after the field's name.
    pub fn encode(&self, model: &ModelText) -> Result<Vec<TokenId>, PromptError> {
        let n_bytes = self.text_bytes();
        if n_bytes > TEXT_BYTES_MAX {
            return Err(PromptError::TooLong { n_bytes });
        }
        let tokens = match self {
            Self::Text(text) => {
                check_length(text.len(), model)?;
                model.vocabulary.encode_prompt(text)
            }
            Self::Tokens(tokens) => tokens.clone(),
            Self::Chat(messages) => encode_chat(messages, model)?,
        };
        if tokens.is_empty() {
            return Err(PromptError::Empty);
        }
        Ok(tokens)
    }
}

/// Refuses what cannot fit the context before time is spent on making its tokens.
fn check_length(n_bytes: usize, model: &ModelText) -> Result<(), PromptError> {
    let longest = model.vocabulary.longest_token_bytes().max(1);
    let n_tokens_min = n_bytes / longest / SHRINK_MAX;
    let limit = model.context_length as usize;
    if n_tokens_min > limit {
        return Err(PromptError::ExceedsContext {
            n_bytes,
            n_tokens_min,
            limit,
        });
    }
    Ok(())
}

fn encode_chat(messages: &[Message], model: &ModelText) -> Result<Vec<TokenId>, PromptError> {
    let template = model
        .chat_template
        .as_ref()
        .ok_or(PromptError::NoTemplate)?;
    let messages: Vec<ChatMessage> = messages
        .iter()
        .map(|message| ChatMessage {
            role: message.role.name().to_owned(),
            content: message.content.clone(),
        })
        .collect();
    let segments = template
        .render(&messages, true)
        .map_err(|error| PromptError::Template(error.to_string()))?;
    check_length(segments.iter().map(|it| it.text.len()).sum(), model)?;
    Ok(model.vocabulary.encode_segments(&segments))
}

/// The text that `tokens` spell, control tokens too, and for each token the number of characters before it. The
/// first token has no text when `first_is_added` says that the tokenizer put it there.
pub fn spell(
    vocabulary: &Arc<Vocabulary>,
    tokens: &[TokenId],
    first_is_added: bool,
) -> (String, Vec<usize>) {
    let mut detokeniser = Detokeniser::new(Arc::clone(vocabulary));
    let mut text = String::new();
    let mut n_chars = 0;
    let mut offsets = Vec::with_capacity(tokens.len());
    for (i, &token) in tokens.iter().enumerate() {
        offsets.push(n_chars);
        let more = match (i == 0 && first_is_added, vocabulary.is_special(token)) {
            (true, _) => String::new(),
            (false, false) => detokeniser.push(token),
            (false, true) => detokeniser.finish() + &vocabulary.token_text(token),
        };
        n_chars += more.chars().count();
        text.push_str(&more);
    }
    text.push_str(&detokeniser.finish());
    (text, offsets)
}
