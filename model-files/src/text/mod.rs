//! The text half of a model: vocabulary, chat template, defaults of generation.
//!
//! A router needs exactly this and no weights, so [`open_text`] reads nothing else. Where a tokenizer or a template
//! uses something that is not known here, opening refuses it by name: other tokens than the model was trained with
//! would still give fluent answers, only worse ones, and nobody would notice.
#![forbid(unsafe_code)]

mod byte_letters;
mod chat_template;
mod content_marks;
mod detokenise;
mod generation_defaults;
mod gguf_text;
mod hf_text;
mod spaces;
mod split;
mod template_functions;
mod template_program;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

pub use chat_template::{ChatMessage, ChatTemplate, TemplateError};
pub use detokenise::Detokeniser;
pub use generation_defaults::GenerationDefaults;
pub use vocabulary::{Segment, SpecialTokens, Vocabulary};

use crate::error::{LoadError, Refusal};
use crate::open;
use vocabulary::VocabularyParts;

/// Everything about a model that concerns text.
#[derive(Debug)]
pub struct ModelText {
    /// Text to tokens and back.
    pub vocabulary: Arc<Vocabulary>,
    /// How messages become a prompt; a model without one answers raw prompts only.
    pub chat_template: Option<ChatTemplate>,
    /// Sampling that the model's authors recommend.
    pub defaults: GenerationDefaults,
    /// Most tokens of prompt and answer together.
    pub context_length: u32,
    /// Rows of the model's head; ids at or above [`Vocabulary::vocab_size`] are padding.
    pub vocab_size: u32,
    /// The name under which clients ask for the model: what stands before `.gguf`, or the directory's name.
    pub name: String,
    /// Identity of the vocabulary: two processes may exchange tokens when theirs are equal, whichever files they
    /// read. The chat template is no part of it.
    pub text_fingerprint: [u8; 32],
}

/// What the two containers say, before it is checked as a whole.
struct TextParts {
    vocabulary: VocabularyParts,
    chat_template: Option<String>,
    /// The text of the beginning and end tokens, as templates may print them.
    bos_text: String,
    eos_text: String,
    defaults: GenerationDefaults,
    context_length: u32,
    /// Absent: as many as there are tokens.
    vocab_size: Option<u32>,
}

/// Opens the text half of a model: a GGUF file, or a Hugging Face directory with `tokenizer.json` and `config.json`.
///
/// # Errors
/// [`LoadError`] when a file cannot be read, is malformed, or describes something that is not supported; also when
/// the chat template cannot render a simple conversation.
pub fn open_text(path: impl AsRef<Path>) -> Result<ModelText, LoadError> {
    let path = path.as_ref();
    let facts = std::fs::metadata(path).map_err(|source| LoadError::io(path, source))?;
    let parts = if facts.is_dir() {
        hf_text::read(path)?
    } else {
        open::refuse_other_files(path)?;
        gguf_text::read(path)?
    };
    ModelText::new(parts, served_name(path)).map_err(|refusal| refusal.in_file(path))
}

/// `path` may end in `..` or `.`: the name is that of the thing itself.
fn served_name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = whole.file_name().unwrap_or_default().to_string_lossy();
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

impl ModelText {
    fn new(parts: TextParts, name: String) -> Result<Self, Refusal> {
        let vocabulary = Vocabulary::new(parts.vocabulary)?;
        let n_tokens = u32::try_from(vocabulary.vocab_size()).expect("the vocabulary is bounded");
        let vocab_size = parts.vocab_size.unwrap_or(n_tokens);
        if vocab_size < n_tokens {
            let problem = format!(
                "{vocab_size}, but the tokenizer has ids up to {}",
                n_tokens - 1
            );
            return Err(Refusal::new("vocab_size", problem));
        }
        if parts.context_length == 0 {
            return Err(Refusal::new("context length", "0, expected at least 1"));
        }
        let chat_template = match parts.chat_template {
            None => None,
            Some(source) => {
                let control_texts = vocabulary.control_texts().map(str::to_owned).collect();
                let template = ChatTemplate::new(source, control_texts)?;
                let template = template.with_edge_tokens(parts.bos_text, parts.eos_text);
                template.try_out()?;
                Some(template)
            }
        };
        Ok(Self {
            text_fingerprint: vocabulary.fingerprint(),
            vocabulary: Arc::new(vocabulary),
            chat_template,
            defaults: parts.defaults,
            context_length: parts.context_length,
            vocab_size,
            name,
        })
    }
}

#[cfg(test)]
mod tests;
