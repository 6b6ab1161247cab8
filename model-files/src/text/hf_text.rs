//! The tokenizer of a Hugging Face directory: `tokenizer.json` and the small files beside it.
//!
//! `tokenizer.json` describes a pipeline of steps, of which many exist. Only pipelines that are known to be a
//! byte-level BPE with one of our rules of splitting, or SentencePiece's with byte fallback, are accepted; any other step
//! is refused with its text, since to leave a step out gives other tokens without an error.

mod pipeline;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tidemill_core::TokenId;

use super::TextParts;
use super::generation_defaults::GenerationDefaults;
use super::spaces;
use super::vocabulary::{Spelling, TokenKind, TokenParts, VocabularyParts};
use crate::error::{LoadError, Refusal, quoted};
use crate::hf::{context_length, read_bounded};
use crate::json::Fields;
use pipeline::Pipeline;

const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
const SMALL_FILE_BYTES_MAX: u64 = 4 << 20;
/// Ids size a table before the vocabulary is checked as a whole.
const TOKEN_ID_MAX: TokenId = (1 << 22) - 1;

pub(super) fn read(directory: &Path) -> Result<TextParts, LoadError> {
    let tokenizer = SmallFile::required(directory, "tokenizer.json", TOKENIZER_BYTES_MAX)?;
    let config = SmallFile::required(directory, "config.json", SMALL_FILE_BYTES_MAX)?;
    let tokenizer_config = SmallFile::optional(directory, "tokenizer_config.json")?;
    let generation_config = SmallFile::optional(directory, "generation_config.json")?;

    let mut vocabulary = tokenizer.parse(vocabulary_parts)?;
    let config = config.parse(model_facts)?;
    let labels = tokenizer_config.parse(read_labels)?;
    let (defaults, eos_ids) = generation_config.parse(|fields| {
        Ok((
            GenerationDefaults::from_json(fields)?,
            read_eos_ids(fields)?,
        ))
    })?;

    if vocabulary.bos_id.is_none() {
        vocabulary.bos_id = find(&vocabulary.tokens, &labels.bos_text);
    }
    let labelled_eos = find(&vocabulary.tokens, &labels.eos_text);
    vocabulary.eos_ids = [eos_ids, config.eos_ids, labelled_eos.into_iter().collect()]
        .into_iter()
        .find(|ids| !ids.is_empty())
        .unwrap_or_default();
    let template_file = directory.join("chat_template.jinja");
    let chat_template = if template_file.exists() {
        Some(read_template(&template_file)?)
    } else {
        labels.chat_template
    };
    Ok(TextParts {
        vocabulary,
        chat_template,
        bos_text: labels.bos_text,
        eos_text: labels.eos_text,
        defaults,
        context_length: config.context_length,
        vocab_size: Some(config.vocab_size),
    })
}

/// A JSON file with its name, so that refusals can be placed.
struct SmallFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl SmallFile {
    fn required(directory: &Path, name: &str, bytes_max: u64) -> Result<Self, LoadError> {
        let path = directory.join(name);
        let bytes = read_bounded(&path, bytes_max)?;
        Ok(Self { path, bytes })
    }

    /// A file that is absent reads as an empty object.
    fn optional(directory: &Path, name: &str) -> Result<Self, LoadError> {
        let path = directory.join(name);
        if path.exists() {
            return Self::required(directory, name, SMALL_FILE_BYTES_MAX);
        }
        Ok(Self {
            path,
            bytes: b"{}".to_vec(),
        })
    }

    fn parse<'a, T>(
        &'a self,
        read: impl FnOnce(&Fields<'a>) -> Result<T, Refusal>,
    ) -> Result<T, LoadError> {
        Fields::parse(&self.bytes, "file")
            .and_then(|fields| read(&fields))
            .map_err(|refusal| refusal.in_file(&self.path))
    }
}

fn read_template(file: &Path) -> Result<String, LoadError> {
    let bytes = read_bounded(file, SMALL_FILE_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|_| Refusal::new("file", "not UTF-8").in_file(file))
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Spaced(String),
}

fn vocabulary_parts(fields: &Fields<'_>) -> Result<VocabularyParts, Refusal> {
    let model: &serde_json::value::RawValue = fields.required("model")?;
    let model = Fields::parse(model.get().as_bytes(), "model")?;
    check_model(&model)?;
    let byte_fallback = model.get("byte_fallback")?.unwrap_or(false);
    let pipeline = Pipeline::read(fields, byte_fallback)?;
    let vocab: HashMap<String, TokenId> = model.required("vocab")?;
    let added: Vec<AddedToken> = fields.get("added_tokens")?.unwrap_or_default();
    let merges: Vec<Merge> = model.required("merges")?;
    Ok(VocabularyParts {
        tokens: number_tokens(vocab, added, &pipeline)?,
        merges: merges
            .into_iter()
            .map(split_merge)
            .collect::<Result<_, _>>()?,
        spelling: pipeline.spelling,
        whole_words_first: model.get("ignore_merges")?.unwrap_or(false),
        compose: pipeline.compose,
        bos_id: pipeline.bos_id,
        add_bos: pipeline.bos_id.is_some(),
        eos_ids: Vec::new(),
    })
}

fn check_model(model: &Fields<'_>) -> Result<(), Refusal> {
    let kind: Option<String> = model.get("type")?;
    if kind.as_deref().is_some_and(|kind| kind != "BPE") {
        let problem = format!(
            "{}, supported: BPE",
            quoted(kind.as_deref().unwrap_or_default())
        );
        return Err(Refusal::new("model.type", problem));
    }
    for field in ["continuing_subword_prefix", "end_of_word_suffix"] {
        let affix: Option<String> = model.get(field)?;
        if let Some(affix) = affix.filter(|affix| !affix.is_empty()) {
            return Err(Refusal::new(
                field,
                format!("{}, supported: none", quoted(&affix)),
            ));
        }
    }
    if model
        .get::<f32>("dropout")?
        .is_some_and(|dropout| dropout != 0.0)
    {
        return Err(Refusal::new(
            "dropout",
            format!("{}, supported: 0", model.raw("dropout")),
        ));
    }
    Ok(())
}

fn number_tokens(
    vocab: HashMap<String, TokenId>,
    added: Vec<AddedToken>,
    pipeline: &Pipeline,
) -> Result<Vec<TokenParts>, Refusal> {
    let mut tokens = Vec::new();
    for (text, id) in vocab {
        let has_bytes = matches!(pipeline.spelling, Spelling::Spaces(_));
        let kind = match spaces::byte_of(&text).filter(|_| has_bytes) {
            Some(_) => TokenKind::Byte,
            None => TokenKind::Normal,
        };
        place(&mut tokens, id, text, kind)?;
    }
    for token in added {
        let strips = token.single_word || token.lstrip || token.rstrip;
        let is_changed = token.normalized && pipeline.changes(&token.content);
        if strips || is_changed || token.content.is_empty() {
            return Err(Refusal::new(
                "added_tokens",
                format!(
                    "token {} {}: empty, single_word, lstrip, rstrip, or normalized with a normalizer, supported: none \
                     of these",
                    token.id,
                    quoted(&token.content)
                ),
            ));
        }
        let kind = if token.special {
            TokenKind::Control
        } else {
            TokenKind::UserDefined
        };
        place(&mut tokens, token.id, token.content, kind)?;
    }
    Ok(tokens)
}

fn place(
    tokens: &mut Vec<TokenParts>,
    id: TokenId,
    text: String,
    kind: TokenKind,
) -> Result<(), Refusal> {
    if id > TOKEN_ID_MAX {
        let problem = format!(
            "id {id} of {}, expected at most {TOKEN_ID_MAX}",
            quoted(&text)
        );
        return Err(Refusal::new("vocab", problem));
    }
    let idx = id as usize;
    if tokens.len() <= idx {
        let hole = TokenParts {
            text: String::new(),
            kind: TokenKind::Unused,
        };
        tokens.resize(idx + 1, hole);
    }
    let is_of_vocab = |kind| matches!(kind, TokenKind::Normal | TokenKind::Byte);
    let twice = is_of_vocab(kind) && is_of_vocab(tokens[idx].kind);
    if twice {
        let both = format!(
            "id {id} for both {} and {}",
            quoted(&tokens[idx].text),
            quoted(&text)
        );
        return Err(Refusal::new("vocab", both));
    }
    tokens[idx] = TokenParts { text, kind };
    Ok(())
}

fn split_merge(merge: Merge) -> Result<(String, String), Refusal> {
    match merge {
        Merge::Pair(left, right) => Ok((left, right)),
        Merge::Spaced(text) => match text.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(Refusal::new(
                "merges",
                format!("{}, expected a pair", quoted(&text)),
            )),
        },
    }
}

struct ModelFacts {
    context_length: u32,
    vocab_size: u32,
    eos_ids: Vec<TokenId>,
}

fn model_facts(fields: &Fields<'_>) -> Result<ModelFacts, Refusal> {
    Ok(ModelFacts {
        context_length: context_length(fields)?,
        vocab_size: fields.required("vocab_size")?,
        eos_ids: read_eos_ids(fields)?,
    })
}

fn read_eos_ids(fields: &Fields<'_>) -> Result<Vec<TokenId>, Refusal> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Ids {
        One(TokenId),
        Many(Vec<TokenId>),
    }
    let mut ids = match fields.get("eos_token_id")? {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![id],
        Some(Ids::Many(ids)) => ids,
    };
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// What `tokenizer_config.json` says.
struct Labels {
    bos_text: String,
    eos_text: String,
    chat_template: Option<String>,
}

fn read_labels(fields: &Fields<'_>) -> Result<Labels, Refusal> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Label {
        Text(String),
        Token { content: String },
    }
    #[derive(Deserialize)]
    struct Named {
        name: String,
        template: String,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Template {
        Only(String),
        Choice(Vec<Named>),
    }
    let label = |field: &str| {
        Ok::<_, Refusal>(match fields.get(field)? {
            None => String::new(),
            Some(Label::Text(content) | Label::Token { content }) => content,
        })
    };
    let chat_template = match fields.get("chat_template")? {
        None => None,
        Some(Template::Only(source)) => Some(source),
        Some(Template::Choice(choice)) => {
            let default = choice.into_iter().find(|named| named.name == "default");
            Some(default.map(|named| named.template).ok_or_else(|| {
                Refusal::new("chat_template", "a list without an entry named \"default\"")
            })?)
        }
    };
    Ok(Labels {
        bos_text: label("bos_token")?,
        eos_text: label("eos_token")?,
        chat_template,
    })
}

fn find(tokens: &[TokenParts], text: &str) -> Option<TokenId> {
    let mut numbered = (0..).zip(tokens);
    let found = numbered.find(|(_, token)| !text.is_empty() && token.text == text);
    found.map(|(id, _)| id)
}

#[cfg(test)]
mod tests;
