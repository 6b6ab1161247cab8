//! The one parser of request bodies, with its bounds.
//!
//! Depth (skipped fields included), the number of values and duplicate keys are checked while reading, before
//! anything is believed: a deep body must not end the process, a wide one must not multiply in memory, and two
//! values for one key would let a proxy and us read different requests. What JSON itself forbids (NaN, numbers
//! beyond f64, lone surrogates, bad UTF-8, a byte order mark) is refused by serde_json.

use super::error::{ApiError, shown};
use axum::http::StatusCode;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::fmt;

/// Deepest nesting.
pub(super) const JSON_DEPTH_MAX: usize = 100;
/// Most values (array elements and object members, nested ones too): room for the longest prompt in token ids.
pub(super) const JSON_VALUES_MAX: usize = (1 << 20) + (1 << 16);

/// Reads a body that must be one JSON object.
///
/// # Errors
/// 400, with the place.
pub(super) fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if body.starts_with(b"\xef\xbb\xbf") {
        return Err(not_json(
            "the body begins with a byte order mark; send it without",
        ));
    }
    let n_values = Cell::new(0);
    let seed = Bounded {
        n_values: &n_values,
        depth: 0,
    };
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = seed
        .deserialize(&mut reader)
        .and_then(|value| reader.end().map(|()| value))
        .map_err(|error| not_json(&error.to_string()))?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(not_json("the body must be a JSON object")),
    }
}

fn not_json(reason: &str) -> ApiError {
    ApiError::new(
        StatusCode::BAD_REQUEST,
        "invalid_json",
        format!("the body is not a request in JSON: {reason}"),
    )
}

#[derive(Clone, Copy)]
struct Bounded<'a> {
    n_values: &'a Cell<usize>,
    depth: usize,
}

impl Bounded<'_> {
    fn inner<E: de::Error>(self) -> Result<Self, E> {
        if self.depth >= JSON_DEPTH_MAX {
            return Err(E::custom(format_args!(
                "nested deeper than {JSON_DEPTH_MAX} levels"
            )));
        }
        Ok(Self {
            depth: self.depth + 1,
            ..self
        })
    }

    fn count<E: de::Error>(self) -> Result<(), E> {
        self.n_values.set(self.n_values.get() + 1);
        if self.n_values.get() > JSON_VALUES_MAX {
            return Err(E::custom(format_args!(
                "more than {JSON_VALUES_MAX} values"
            )));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let inner = self.inner()?;
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(inner)? {
            self.count()?;
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let inner = self.inner()?;
        let mut map = Map::new();
        while let Some(key) = members.next_key::<String>()? {
            self.count()?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!(
                    "key {} appears twice in one object",
                    shown(&key)
                )));
            }
            let value = members.next_value_seed(inner)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &[u8], reason: &str) {
        let error = parse_object(body).expect_err(reason);
        assert_eq!(error.code, "invalid_json");
        assert!(error.message.contains(reason), "{reason}: {error}");
    }

    #[test]
    fn b032_depth_is_bounded_also_in_unknown_fields() {
        for depth in [JSON_DEPTH_MAX, 127, 128, 10_000, 1_000_000] {
            let body = format!("{{\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
            refused(body.as_bytes(), "");
            let body = format!("{}{}", "{\"x\":".repeat(depth + 1), "1");
            refused(body.as_bytes(), "");
        }
        let depth = JSON_DEPTH_MAX - 1;
        let body = format!("{{\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse_object(body.as_bytes()).is_ok());
    }

    #[test]
    fn b109_odd_bodies_are_refused() {
        refused(br#"{"a":1,"a":1}"#, "appears twice");
        refused(br#"{"a":NaN}"#, "expected");
        refused(br#"{"a":1e999}"#, "out of range");
        refused(br#"{"a":"\ud800"}"#, "hex escape");
        refused(br#"{"a":"\ude00"}"#, "hex escape");
        refused(b"\xef\xbb\xbf{}", "byte order mark");
        refused(b"{\"a\":\"\xff\"}", "");
        refused(b"", "EOF");
        refused(b"[]", "must be a JSON object");
        refused(b"{} {}", "trailing");
        refused(b"{\"a\":\"\x00\"}", "control character");
    }

    #[test]
    fn nul_and_pairs_of_surrogates_are_characters() {
        let map = parse_object(br#"{"a":"\u0000","b":"\ud83d\ude00"}"#).expect("both are legal");
        assert_eq!(map["a"], "\0");
        assert_eq!(map["b"], "\u{1f600}");
    }

    #[test]
    fn b108_the_number_of_values_is_bounded() {
        let body = format!("{{\"a\":[{}0]}}", "0,".repeat(JSON_VALUES_MAX));
        refused(body.as_bytes(), "more than");
    }
}
