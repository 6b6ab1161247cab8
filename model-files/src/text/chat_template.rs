//! Messages to a prompt, by the model's own template.
//!
//! A template is a program of a stranger. It runs without reach to anything but its arguments, and within a budget
//! of steps and bytes that grows with the request and nothing else. A template that fails is an error with its
//! line; another format is never tried, since the model would follow it, badly. What the client wrote stays marked
//! as such (see `content_marks`).

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};

use super::content_marks::MarkRules;
use super::template_functions::{self, Raised};
use super::template_program::{self, Budget};
use super::vocabulary::Segment;
use crate::error::{Refusal, quoted};

const NAME: &str = "chat_template";
const TEMPLATE_BYTES_MAX: usize = 256 << 10;
const ROLE_BYTES_MAX: usize = 64;

/// Steps that a rendering may take, however short the messages.
const FUEL_BASE: u64 = 100_000;
const FUEL_PER_MESSAGE: u64 = 1_000;
const FUEL_PER_CONTENT_BYTE: u64 = 2;
/// Bytes of one value within the template.
const VALUE_BYTES_BASE: usize = 256 << 10;
const VALUE_BYTES_PER_MESSAGE: usize = 256;
/// Macros and includes within each other.
const RECURSION_MAX: usize = 64;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// Letters, digits, `_` and `-`.
    pub role: String,
    /// Any text; it never becomes control tokens.
    pub content: String,
}

/// Messages that gave no prompt. Its text is meant for the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template refuses these messages, in its own words.
    #[error("the chat template refuses the messages: {0}")]
    Raised(String),
    /// The template failed.
    #[error("the chat template failed in line {line}: {problem}")]
    Failed {
        /// Line of the template, 0 when unknown.
        line: usize,
        /// What the engine says.
        problem: String,
    },
    /// The rendering would take more steps or memory than the messages justify.
    #[error("the chat template exceeded its budget of {fuel} steps")]
    TooExpensive {
        /// The budget for these messages.
        fuel: u64,
    },
    /// A role that could spell a control token together with the template's text.
    #[error("messages[{message_idx}].role: {role}, expected 1 to 64 letters, digits, '_' or '-'")]
    Role {
        /// Place of the message.
        message_idx: usize,
        /// The role, quoted and cut.
        role: String,
    },
    /// The messages use every private-use character, so that none is left to mark content with.
    #[error(
        "messages: the content uses all private-use characters of Unicode, expected at least one unused"
    )]
    NoFreeCharacter,
}

/// A chat template of a model, checked at loading.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    rules: MarkRules,
    bos_text: String,
    eos_text: String,
}

impl ChatTemplate {
    pub(super) fn new(source: String, control_texts: Vec<String>) -> Result<Self, Refusal> {
        if source.len() > TEMPLATE_BYTES_MAX {
            let problem = format!(
                "{} bytes, expected at most {TEMPLATE_BYTES_MAX}",
                source.len()
            );
            return Err(Refusal::new(NAME, problem));
        }
        let rules = MarkRules::new(&control_texts, &source);
        Ok(Self {
            source,
            rules,
            bos_text: String::new(),
            eos_text: String::new(),
        })
    }

    /// Sets what the template prints as `bos_token` and `eos_token`.
    pub(super) fn with_edge_tokens(self, bos_text: String, eos_text: String) -> Self {
        Self {
            bos_text,
            eos_text,
            ..self
        }
    }

    /// Renders a simple conversation, so that a template that never works is found at loading. That it refuses
    /// this conversation in words of its own is no reason against it.
    pub(super) fn try_out(&self) -> Result<(), Refusal> {
        let hello = ChatMessage {
            role: "user".to_owned(),
            content: "Hello".to_owned(),
        };
        match self.render(&[hello], true) {
            Ok(_) | Err(TemplateError::Raised(_)) => Ok(()),
            Err(error) => Err(Refusal::new(NAME, error.to_string())),
        }
    }

    /// The prompt for `messages`. With `add_generation_prompt` it ends where the assistant's answer begins. No
    /// beginning-of-text token is added: the template prints it where the model wants one.
    ///
    /// # Errors
    /// A [`TemplateError`], whose text is meant for the client.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<Segment>, TemplateError> {
        check_roles(messages)?;
        let contents = messages.iter().map(|message| message.content.as_str());
        let edge_texts = [self.bos_text.as_str(), &self.eos_text];
        let marks = self
            .rules
            .choose(contents.clone().chain(edge_texts))
            .ok_or(TemplateError::NoFreeCharacter)?;
        let marked: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => message.role.as_str(), content => marks.mark(&message.content) })
            .collect();
        let arguments = context! {
            messages => marked,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos_text.as_str(),
            eos_token => self.eos_text.as_str(),
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let budget = budget(messages.len(), contents.map(str::len).sum());
        let rendered = template_program::render(environment(), &self.source, arguments, budget)
            .map_err(|error| template_error(&error, budget.fuel))?;
        Ok(marks.segments(&rendered))
    }
}

fn check_roles(messages: &[ChatMessage]) -> Result<(), TemplateError> {
    let is_plain = |role: &str| {
        (1..=ROLE_BYTES_MAX).contains(&role.len())
            && role
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
    };
    match messages.iter().position(|message| !is_plain(&message.role)) {
        None => Ok(()),
        Some(message_idx) => Err(TemplateError::Role {
            message_idx,
            role: quoted(&messages[message_idx].role),
        }),
    }
}

fn budget(n_messages: usize, n_content_bytes: usize) -> Budget {
    Budget {
        fuel: FUEL_BASE
            + FUEL_PER_MESSAGE * n_messages as u64
            + FUEL_PER_CONTENT_BYTE * n_content_bytes as u64,
        value_bytes: VALUE_BYTES_BASE + VALUE_BYTES_PER_MESSAGE * n_messages + 4 * n_content_bytes,
    }
}

/// The engine as the Python library sets it up for chat templates.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_recursion_limit(RECURSION_MAX);
    // Its report on an error prints the values in reach.
    environment.set_debug(false);
    template_functions::add_to(&mut environment);
    environment
}

fn template_error(error: &Error, fuel: u64) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(source) = cause {
        if let Some(Raised(message)) = source.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        let kind = source.downcast_ref::<Error>().map(Error::kind);
        if kind == Some(ErrorKind::OutOfFuel) {
            return TemplateError::TooExpensive { fuel };
        }
        cause = source.source();
    }
    TemplateError::Failed {
        line: error.line().unwrap_or(0),
        problem: quoted(error.detail().unwrap_or(&error.kind().to_string())),
    }
}

#[cfg(test)]
mod tests;
