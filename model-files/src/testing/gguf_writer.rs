//! Writes GGUF version 3, well-formed or, for the tests of the reader, otherwise: nothing is checked here.

use crate::tensors::WeightType;

const ALIGNMENT: usize = 32;
const TYPE_U32: u32 = 4;
const TYPE_I32: u32 = 5;
const TYPE_F32: u32 = 6;
const TYPE_BOOL: u32 = 7;
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// A file under construction: metadata in any order, then tensors, then [`GgufWriter::finish`].
#[derive(Debug, Default)]
pub struct GgufWriter {
    n_keys: u64,
    metadata: Vec<u8>,
    n_tensors: u64,
    descriptions: Vec<u8>,
    data: Vec<u8>,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// A key with a value of any type, its bytes given as they will stand in the file.
    pub fn raw(&mut self, key: &str, type_id: u32, value: &[u8]) {
        self.n_keys += 1;
        push_string(&mut self.metadata, key);
        self.metadata.extend(type_id.to_le_bytes());
        self.metadata.extend(value);
    }

    /// An unsigned integer.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, TYPE_U32, &value.to_le_bytes());
    }

    /// A float.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.raw(key, TYPE_F32, &value.to_le_bytes());
    }

    /// A boolean.
    pub fn boolean(&mut self, key: &str, value: bool) {
        self.raw(key, TYPE_BOOL, &[u8::from(value)]);
    }

    /// Text.
    pub fn string(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        push_string(&mut bytes, value);
        self.raw(key, TYPE_STRING, &bytes);
    }

    /// An array of text.
    pub fn strings<'a>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'a str>) {
        let mut bytes = Vec::new();
        bytes.extend(TYPE_STRING.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in values {
            push_string(&mut bytes, value);
        }
        self.raw(key, TYPE_ARRAY, &bytes);
    }

    /// An array of signed integers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let mut bytes = Vec::new();
        bytes.extend(TYPE_I32.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in values {
            bytes.extend(value.to_le_bytes());
        }
        self.raw(key, TYPE_ARRAY, &bytes);
    }

    /// An array of floats.
    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        let mut bytes = Vec::new();
        bytes.extend(TYPE_F32.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in values {
            bytes.extend(value.to_le_bytes());
        }
        self.raw(key, TYPE_ARRAY, &bytes);
    }

    /// A tensor with its dimensions, fastest first, and its bytes.
    pub fn tensor(&mut self, name: &str, dtype: WeightType, dims: &[u64], bytes: &[u8]) {
        self.n_tensors += 1;
        self.data
            .resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        push_string(&mut self.descriptions, name);
        self.descriptions.extend((dims.len() as u32).to_le_bytes());
        for dim in dims {
            self.descriptions.extend(dim.to_le_bytes());
        }
        self.descriptions.extend(dtype.ggml_id().to_le_bytes());
        self.descriptions
            .extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
    }

    /// The file's bytes.
    pub fn finish(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(self.n_tensors.to_le_bytes());
        file.extend(self.n_keys.to_le_bytes());
        file.extend(self.metadata);
        file.extend(self.descriptions);
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(self.data);
        file
    }
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
