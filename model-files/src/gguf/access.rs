//! Typed look-up in the metadata: absent is an answer, a value of another type is a refusal.
//!
//! A key of the wrong type is never treated as absent, for that is how a default silently replaces what a file
//! says.

use super::{Gguf, ScalarArray, Value};
use crate::error::{Refusal, quoted};

impl<'a> Gguf<'a> {
    /// Text, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value has another type; likewise for the other look-ups.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(key, other, "a string")),
        }
    }

    /// An integer from 0 to `u32::MAX`, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Refusal> {
        let expected = "an integer from 0 to 4294967295";
        let number = match self.value(key) {
            None => return Ok(None),
            Some(Value::Unsigned(number)) => u32::try_from(*number).ok(),
            Some(Value::Signed(number)) => u32::try_from(*number).ok(),
            Some(other) => return Err(wrong_type(key, other, expected)),
        };
        match (number, self.value(key)) {
            (None, Some(value)) => Err(wrong_type(key, value, expected)),
            _ => Ok(number),
        }
    }

    /// A finite float, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none, or is no finite f32.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Float(number)) if (*number as f32).is_finite() => Ok(Some(*number as f32)),
            Some(other) => Err(wrong_type(key, other, "a finite float")),
        }
    }

    /// A boolean, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, other, "a boolean")),
        }
    }

    /// An array of strings, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none.
    pub fn strings(&self, key: &str) -> Result<Option<&[&'a str]>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Strings(strings)) => Ok(Some(strings)),
            Some(other) => Err(wrong_type(key, other, "an array of strings")),
        }
    }

    /// An array of integers, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none, or an element is no integer of 64 signed bits.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Scalars(array)) => {
                let integers: Option<Vec<i64>> = array.integers().collect();
                integers
                    .map(Some)
                    .ok_or_else(|| Refusal::new(key, "an array with elements that are no integers"))
            }
            Some(other) => Err(wrong_type(key, other, "an array of integers")),
        }
    }

    /// An array of finite floats, if the key is there.
    ///
    /// # Errors
    /// A [`Refusal`] when the value is none, or an element is no finite f32.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Refusal> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Scalars(array)) => {
                let floats: Option<Vec<f32>> = array.floats().collect();
                floats.map(Some).ok_or_else(|| {
                    Refusal::new(key, "an array with elements that are no finite floats")
                })
            }
            Some(other) => Err(wrong_type(key, other, "an array of floats")),
        }
    }
}

impl ScalarArray<'_> {
    /// The elements as floats; `None` for an element that is no finite f32.
    pub fn floats(&self) -> impl Iterator<Item = Option<f32>> + '_ {
        self.bytes
            .chunks_exact(self.element.n_bytes())
            .map(|bytes| match self.element.decode(bytes)? {
                Value::Float(value) => Some(value as f32).filter(|value| value.is_finite()),
                _ => None,
            })
    }
}

pub(super) fn wrong_type(key: &str, value: &Value<'_>, expected: &str) -> Refusal {
    Refusal::new(key, format!("{}, expected {expected}", describe(value)))
}

/// A value in a few words, however long it is.
pub(super) fn describe(value: &Value<'_>) -> String {
    match value {
        Value::Unsigned(number) => number.to_string(),
        Value::Signed(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => quoted(text),
        Value::Strings(strings) => format!("an array of {} strings", strings.len()),
        Value::Scalars(array) => format!("an array of {} scalars", array.len()),
    }
}
