//! Reading members of a JSON object, each with its type and its bound.
//!
//! `null` and absent are the same, as in OpenAI's interface. Every refusal names the field, the value and what is
//! allowed, so that a client can correct itself without reading our source.

use super::error::{ApiError, shown};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// One object of a request, and where it lies (`""` for the outermost).
#[derive(Clone)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self {
            map,
            path: String::new(),
        }
    }

    /// The object `value`, which lies at `path`.
    pub(super) fn of(value: &'a Value, path: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong_type(&path, "an object", other)),
        }
    }

    /// The full name of a member.
    pub(super) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// A member; `None` when absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name)
            .map(|value| Fields::of(value, self.path(name)))
            .transpose()
    }

    pub(super) fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(&self.path(name), "true or false", other)),
        }
    }

    /// A whole number, written without fraction or exponent.
    pub(super) fn integer(
        &self,
        name: &str,
        allowed: RangeInclusive<i128>,
    ) -> Result<Option<i128>, ApiError> {
        self.get(name)
            .map(|value| integer(value, &self.path(name), allowed))
            .transpose()
    }

    /// `integer` within 0 to `max`.
    pub(super) fn count(&self, name: &str, max: u32) -> Result<Option<u32>, ApiError> {
        let value = self.integer(name, 0..=i128::from(max))?;
        Ok(value.map(|value| u32::try_from(value).expect("within the range, which u32 holds")))
    }

    /// A number for which `is_allowed` holds; `allowed` says so in words.
    pub(super) fn number(
        &self,
        name: &str,
        allowed: &str,
        is_allowed: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let path = self.path(name);
        let number = value
            .as_f64()
            .ok_or_else(|| wrong_type(&path, "a number", value))?;
        if is_allowed(number) {
            return Ok(Some(number));
        }
        let message = format!("{path} is {value}; {allowed} is allowed");
        Err(ApiError::invalid(path, message))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", other)),
        }
    }

    /// An array of at most `n_max` elements.
    pub(super) fn array(&self, name: &str, n_max: usize) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(values)) => {
                check_length(values.len(), n_max, &self.path(name))?;
                Ok(Some(values))
            }
            Some(other) => Err(wrong_type(&self.path(name), "an array", other)),
        }
    }
}

/// A whole number out of `value`, which lies at `path`.
pub(super) fn integer(
    value: &Value,
    path: &str,
    allowed: RangeInclusive<i128>,
) -> Result<i128, ApiError> {
    let number = value
        .as_u64()
        .map(i128::from)
        .or_else(|| value.as_i64().map(i128::from))
        .filter(|number| allowed.contains(number));
    number.ok_or_else(|| {
        let message = format!(
            "{path} is {}; a whole number from {} to {} is allowed",
            brief(value),
            allowed.start(),
            allowed.end()
        );
        ApiError::invalid(path, message)
    })
}

/// Refuses an array that is too long.
pub(super) fn check_length(n: usize, n_max: usize, path: &str) -> Result<(), ApiError> {
    if n <= n_max {
        return Ok(());
    }
    let message = format!("{path} has {n} elements; at most {n_max} are allowed");
    Err(ApiError::invalid(path, message))
}

/// 400: the value at `path` has another type than `expected`.
pub(super) fn wrong_type(path: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(
        path,
        format!("{path} must be {expected}, not {}", brief(value)),
    )
}

/// A value in an error message: never long, never a client's nested data.
pub(super) fn brief(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the string {}", shown(text)),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        scalar => scalar.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: &Value) -> Fields<'_> {
        Fields::of(value, String::new()).expect("an object")
    }

    #[test]
    fn b018_counts_are_whole_and_within_their_bound() {
        for bad in [
            json!(-1),
            json!(1_u64 << 31),
            json!(1_u64 << 63),
            json!(1.5),
            json!(1e300),
            json!("10"),
            json!([1]),
            json!({}),
            json!(true),
        ] {
            let value = json!({"max_tokens": bad});
            let error = object(&value).count("max_tokens", 1000).expect_err("bad");
            assert_eq!(error.param.as_deref(), Some("max_tokens"));
            assert!(error.message.contains("0 to 1000"), "{error}");
        }
        let value = json!({"a": 0, "b": 1000, "c": null});
        assert_eq!(object(&value).count("a", 1000), Ok(Some(0)));
        assert_eq!(object(&value).count("b", 1000), Ok(Some(1000)));
        assert_eq!(object(&value).count("c", 1000), Ok(None));
        assert_eq!(object(&value).count("d", 1000), Ok(None));
    }

    #[test]
    fn paths_name_nested_fields() {
        let value = json!({"stream_options": {"include_usage": 1}});
        let options = object(&value).object("stream_options").expect("an object");
        let error = options
            .expect("there")
            .bool("include_usage")
            .expect_err("1");
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
    }

    #[test]
    fn errors_do_not_repeat_long_values() {
        let value = json!({"n": "x".repeat(10_000), "m": [[[1]]]});
        for name in ["n", "m"] {
            let error = object(&value).bool(name).expect_err("neither is a bool");
            assert!(error.message.len() < 200);
        }
    }
}
