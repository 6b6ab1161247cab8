//! JSON objects of strangers: each field decoded by name, so that an error can say which one is wrong.
//!
//! A derived struct reports a line and a column, keeps quiet about unknown keys or lists forty known ones, and
//! some maps let the last of two equal keys win. Here a key that is there twice refuses the file.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{Refusal, quoted};

/// The fields of one object, undecoded.
pub(crate) struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Distinct;
        impl<'de> Visitor<'de> for Distinct {
            type Value = BTreeMap<String, &'de RawValue>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                    if fields.contains_key(&key) {
                        let problem = format!("the key {} is there twice", quoted_key(&key));
                        return Err(A::Error::custom(problem));
                    }
                    fields.insert(key, value);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Distinct).map(Fields)
    }
}

impl<'a> Fields<'a> {
    /// The object that `bytes` are; `field` names them in a refusal.
    pub(crate) fn parse(bytes: &'a [u8], field: &str) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(bytes).map_err(|_| Refusal::new(field, "not UTF-8"))?;
        serde_json::from_str(text).map_err(|error| refusal(field, &error))
    }

    /// The field's value, `None` when it is absent or null. Refuses a value of another type.
    pub(crate) fn get<T: Deserialize<'a>>(&self, field: &str) -> Result<Option<T>, Refusal> {
        match self.0.get(field) {
            None => Ok(None),
            Some(raw) => serde_json::from_str::<Option<T>>(raw.get()).map_err(|error| {
                let problem = format!("{}: {}", quoted(raw.get()), quoted(&error.to_string()));
                Refusal::new(quoted_key(field), problem)
            }),
        }
    }

    /// The field's value; refuses when it is absent or null.
    pub(crate) fn required<T: Deserialize<'a>>(&self, field: &str) -> Result<T, Refusal> {
        self.get(field)?
            .ok_or_else(|| Refusal::new(quoted_key(field), "the key is missing"))
    }

    /// The field's text as it stands in the file, for messages.
    pub(crate) fn raw(&self, field: &str) -> &'a str {
        self.0.get(field).map_or("", |raw| raw.get())
    }

    /// All keys, in order of their bytes.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// A plain key as it is; one with odd characters, or a very long one, made harmless.
fn quoted_key(key: &str) -> String {
    let plain = key.len() <= 64
        && key
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if plain { key.to_owned() } else { quoted(key) }
}

/// Bounded, because serde repeats a value of the wrong type however long it is.
fn refusal(field: &str, error: &serde_json::Error) -> Refusal {
    let told = quoted(&error.to_string());
    let (line, column) = (error.line(), error.column());
    Refusal::new(
        field,
        format!("line {line} column {column}: not the JSON object expected: {told}"),
    )
}
