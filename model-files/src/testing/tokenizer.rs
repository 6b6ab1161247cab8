//! The tokenizer of tiny models: byte-level BPE like the real one's, small enough to read.
//!
//! Ids 0 to 2 are the special tokens, 3 to 258 the 256 bytes in the order of their values, then one token per merge.
//! Any text can be encoded, and common English is merged into longer tokens.

use super::GgufWriter;

/// Control tokens, ids 0, 1 and 2, in the order of the default model's.
pub const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Tokens of every tiny model.
pub const N_TOKENS: usize = SPECIAL_TOKENS.len() + 256 + MERGES.len();

/// ChatML, without a default system message.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Id of `<|im_start|>`, which llama-like GGUF files of ChatML models name as the first token.
pub(super) const BOS_ID: u32 = 1;
/// Id of `<|im_end|>`.
pub(super) const EOS_ID: u32 = 2;
/// Id of `<|endoftext|>`.
pub(super) const UNKNOWN_ID: u32 = 0;

/// In order of rank; each part is a byte or an earlier merge. `Ġ` is the letter of the space.
pub(super) const MERGES: [(&str, &str); 61] = [
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("i", "n"),
    ("h", "e"),
    ("Ġ", "Ġ"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("Ġ", "w"),
    ("Ġ", "o"),
    ("e", "n"),
    ("Ġ", "c"),
    ("i", "t"),
    ("i", "s"),
    ("a", "n"),
    ("o", "r"),
    ("e", "s"),
    ("Ġ", "b"),
    ("e", "d"),
    ("Ġ", "f"),
    ("in", "g"),
    ("Ġ", "p"),
    ("o", "u"),
    ("Ġa", "n"),
    ("a", "l"),
    ("a", "r"),
    ("Ġt", "o"),
    ("Ġ", "m"),
    ("Ġo", "f"),
    ("Ġ", "in"),
    ("Ġ", "d"),
    ("Ġ", "h"),
    ("Ġan", "d"),
    ("i", "c"),
    ("a", "s"),
    ("l", "e"),
    ("Ġt", "h"),
    ("i", "on"),
    ("o", "m"),
    ("l", "l"),
    ("en", "t"),
    ("Ġ", "n"),
    ("Ġ", "l"),
    ("s", "t"),
    ("Ġ", "re"),
    ("v", "e"),
    ("Ġ", "e"),
    ("r", "o"),
    ("l", "y"),
    ("Ġb", "e"),
    ("Ġ", "g"),
    ("Ġth", "at"),
    ("Ġ", "is"),
    ("o", "w"),
    ("c", "t"),
    ("Ġ", "T"),
    ("u", "t"),
    ("a", "y"),
];

/// The spelling of every token, by id.
pub(super) fn tokens() -> Vec<String> {
    let specials = SPECIAL_TOKENS.iter().map(|token| (*token).to_owned());
    let bytes = byte_letters().into_iter().map(String::from);
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    specials.chain(bytes).chain(merged).collect()
}

/// Each merge as its two parts with a space between.
pub(super) fn merges() -> Vec<String> {
    MERGES
        .iter()
        .map(|(left, right)| format!("{left} {right}"))
        .collect()
}

/// The letter of each byte in GPT-2's table: itself when printable, else the next from U+0100 on.
fn byte_letters() -> Vec<char> {
    let mut unprintable = '\u{100}'..;
    (0..=u8::MAX)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => unprintable
                .next()
                .expect("there are 68 such bytes and more such letters"),
        })
        .collect()
}

/// Writes vocabulary and chat template as GGUF metadata.
pub(super) fn write_gguf(writer: &mut GgufWriter) {
    const TYPE_NORMAL: i32 = 1;
    const TYPE_CONTROL: i32 = 3;
    let tokens = tokens();
    let types: Vec<i32> = (0..tokens.len())
        .map(|id| {
            if id < SPECIAL_TOKENS.len() {
                TYPE_CONTROL
            } else {
                TYPE_NORMAL
            }
        })
        .collect();
    let merges = merges();
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.string("tokenizer.ggml.pre", "smollm");
    writer.strings("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
    writer.i32s("tokenizer.ggml.token_type", &types);
    writer.strings("tokenizer.ggml.merges", merges.iter().map(String::as_str));
    writer.u32("tokenizer.ggml.bos_token_id", BOS_ID);
    writer.u32("tokenizer.ggml.eos_token_id", EOS_ID);
    writer.u32("tokenizer.ggml.unknown_token_id", UNKNOWN_ID);
    writer.u32("tokenizer.ggml.padding_token_id", EOS_ID);
    writer.boolean("tokenizer.ggml.add_bos_token", false);
    writer.boolean("tokenizer.ggml.add_space_prefix", false);
    writer.string("tokenizer.chat_template", CHAT_TEMPLATE);
}
