//! The GGUF container (versions 2 and 3, little-endian), read without trusting it.
//!
//! Every count and length in the file is compared with the bytes that are left before anything is allocated or
//! indexed, every product is checked, and no check lives in a debug assertion: a model file is input from a
//! stranger. [`parse`] is a plain function of bytes so that a fuzzer can drive it.
//! Source: the GGUF specification, <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod access;
mod cursor;
pub(crate) mod model;
mod rope;

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::error::{Refusal, quoted};
use crate::tensors::WeightType;
use cursor::Cursor;

const KEY_BYTES_MAX: usize = 65_535;
const TENSOR_NAME_BYTES_MAX: usize = 256;
const N_DIMS_MAX: u32 = 4;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// A parsed header: metadata and the place of each tensor. Borrows the file's bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    metadata: HashMap<&'a str, Value<'a>>,
    tensors: Vec<TensorEntry<'a>>,
}

/// One tensor as the header describes it; its bytes lie within the file and overlap no other tensor's.
#[derive(Debug)]
pub struct TensorEntry<'a> {
    /// Name as written in the file.
    pub name: &'a str,
    /// Element or block type.
    pub dtype: WeightType,
    /// One to four dimensions, each at least 1, fastest-varying first (the reverse of row-major notation).
    pub dims: Vec<u64>,
    /// Byte range within the file.
    pub range: Range<usize>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer type.
    Unsigned(u64),
    /// Any signed integer type.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// UTF-8 text.
    String(&'a str),
    /// An array of strings.
    Strings(Vec<&'a str>),
    /// An array of a scalar type.
    Scalars(ScalarArray<'a>),
}

/// An array of scalars, left in the file and decoded on demand.
#[derive(Debug, Clone, PartialEq)]
pub struct ScalarArray<'a> {
    element: ScalarType,
    bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScalarType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

impl ScalarType {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    fn n_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// `None` when a boolean is neither 0 nor 1. `bytes` holds exactly `n_bytes()` bytes.
    fn decode(self, bytes: &[u8]) -> Option<Value<'static>> {
        let mut wide = [0_u8; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        let unused_bits = 64 - 8 * bytes.len() as u32;
        let signed = (unsigned << unused_bits).cast_signed() >> unused_bits;
        Some(match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Value::Unsigned(unsigned),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => Value::Signed(signed),
            Self::F32 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
            Self::F64 => Value::Float(f64::from_bits(unsigned)),
            Self::Bool if unsigned <= 1 => Value::Bool(unsigned == 1),
            Self::Bool => return None,
        })
    }
}

impl ScalarArray<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.element.n_bytes()
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements as integers; `None` for an element that is not an integer.
    pub fn integers(&self) -> impl Iterator<Item = Option<i64>> + '_ {
        self.bytes
            .chunks_exact(self.element.n_bytes())
            .map(|bytes| match self.element.decode(bytes)? {
                Value::Unsigned(value) => i64::try_from(value).ok(),
                Value::Signed(value) => Some(value),
                _ => None,
            })
    }
}

impl<'a> Gguf<'a> {
    /// The value of a metadata key.
    pub fn value(&self, key: &str) -> Option<&Value<'a>> {
        self.metadata.get(key)
    }

    /// All metadata keys, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.metadata.keys().copied()
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorEntry<'a>] {
        &self.tensors
    }
}

/// Reads the header of a GGUF file. `file` is the whole file: tensor ranges are checked against its length.
///
/// # Errors
/// A [`Refusal`] that names the first field that is malformed, out of bounds or of an unknown kind.
pub fn parse(file: &[u8]) -> Result<Gguf<'_>, Refusal> {
    let mut cursor = Cursor::new(file);
    let (n_tensors, n_keys) = read_counts(&mut cursor)?;
    let metadata = read_metadata(&mut cursor, n_keys)?;
    let alignment = read_alignment(&metadata)?;
    let descriptions = read_descriptions(&mut cursor, n_tensors)?;
    let tensors = place_tensors(descriptions, alignment, cursor.position(), file.len())?;
    Ok(Gguf { metadata, tensors })
}

fn read_counts(cursor: &mut Cursor<'_>) -> Result<(usize, usize), Refusal> {
    if cursor.take(4, "magic")? != b"GGUF" {
        return Err(Refusal::new("magic", "the file does not start with GGUF"));
    }
    let version = cursor.u32("version")?;
    if version.swap_bytes() <= 0xffff && version > 0xffff {
        return Err(Refusal::new(
            "version",
            "big-endian GGUF is not supported; convert the file to little-endian",
        ));
    }
    if !(2..=3).contains(&version) {
        return Err(Refusal::new(
            "version",
            format!("{version}, but versions 2 and 3 are supported"),
        ));
    }
    // A tensor takes at least name length, one byte, n_dims, one dim, type and offset; a key likewise.
    let n_tensors = cursor.count("tensor_count", 8 + 1 + 4 + 8 + 4 + 8)?;
    let n_keys = cursor.count("metadata_kv_count", 8 + 1 + 4 + 1)?;
    Ok((n_tensors, n_keys))
}

fn read_metadata<'a>(
    cursor: &mut Cursor<'a>,
    n_keys: usize,
) -> Result<HashMap<&'a str, Value<'a>>, Refusal> {
    let mut metadata = HashMap::new();
    for key_idx in 0..n_keys {
        let field = format!("key {key_idx} of the metadata");
        let key = cursor.string(&field)?;
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(Refusal::new(
                field,
                format!(
                    "its name has {} bytes, expected 1 to {KEY_BYTES_MAX}",
                    key.len()
                ),
            ));
        }
        let value = read_value(cursor, key)?;
        if metadata.insert(key, value).is_some() {
            return Err(Refusal::new(field, format!("{} twice", quoted(key))));
        }
    }
    Ok(metadata)
}

fn read_value<'a>(cursor: &mut Cursor<'a>, key: &str) -> Result<Value<'a>, Refusal> {
    match cursor.u32(key)? {
        TYPE_STRING => Ok(Value::String(cursor.string(key)?)),
        TYPE_ARRAY => read_array(cursor, key),
        id => {
            let element = ScalarType::from_id(id)
                .ok_or_else(|| Refusal::new(key, format!("unknown value type {id}")))?;
            let bytes = cursor.take(element.n_bytes(), key)?;
            element
                .decode(bytes)
                .ok_or_else(|| Refusal::new(key, format!("boolean {}, not 0 or 1", bytes[0])))
        }
    }
}

fn read_array<'a>(cursor: &mut Cursor<'a>, key: &str) -> Result<Value<'a>, Refusal> {
    match cursor.u32(key)? {
        TYPE_ARRAY => Err(Refusal::new(key, "an array within an array")),
        TYPE_STRING => {
            let n = cursor.count(key, 8)?;
            let mut strings = Vec::with_capacity(n);
            for _ in 0..n {
                strings.push(cursor.string(key)?);
            }
            Ok(Value::Strings(strings))
        }
        id => {
            let element = ScalarType::from_id(id)
                .ok_or_else(|| Refusal::new(key, format!("unknown element type {id}")))?;
            let n = cursor.count(key, element.n_bytes())?;
            // `count` has compared n * n_bytes with the bytes left, so the product cannot wrap.
            let bytes = cursor.take(n * element.n_bytes(), key)?;
            Ok(Value::Scalars(ScalarArray { element, bytes }))
        }
    }
}

fn read_alignment(metadata: &HashMap<&str, Value<'_>>) -> Result<u64, Refusal> {
    let key = "general.alignment";
    match metadata.get(key) {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(value))
            if value.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(value) =>
        {
            Ok(*value)
        }
        Some(value) => Err(Refusal::new(
            key,
            format!("{value:?}, expected a power of two from 8 to {ALIGNMENT_MAX}"),
        )),
    }
}

/// A tensor whose offset is not yet checked against the file.
struct Description<'a> {
    name: &'a str,
    dtype: WeightType,
    dims: Vec<u64>,
    n_bytes: u64,
    offset: u64,
}

fn read_descriptions<'a>(
    cursor: &mut Cursor<'a>,
    n_tensors: usize,
) -> Result<Vec<Description<'a>>, Refusal> {
    let mut names = HashSet::new();
    let mut descriptions = Vec::with_capacity(n_tensors);
    for tensor_idx in 0..n_tensors {
        let description = read_description(cursor, tensor_idx)?;
        if !names.insert(description.name) {
            return Err(Refusal::new(
                description.name,
                "this tensor name is used twice",
            ));
        }
        descriptions.push(description);
    }
    Ok(descriptions)
}

fn read_description<'a>(
    cursor: &mut Cursor<'a>,
    tensor_idx: usize,
) -> Result<Description<'a>, Refusal> {
    let field = format!("name of tensor {tensor_idx}");
    let name = cursor.string(&field)?;
    if name.is_empty() || name.len() > TENSOR_NAME_BYTES_MAX {
        return Err(Refusal::new(
            field,
            format!(
                "{} bytes, expected 1 to {TENSOR_NAME_BYTES_MAX}",
                name.len()
            ),
        ));
    }
    let n_dims = cursor.u32(name)?;
    if !(1..=N_DIMS_MAX).contains(&n_dims) {
        return Err(Refusal::new(
            name,
            format!("{n_dims} dimensions, expected 1 to {N_DIMS_MAX}"),
        ));
    }
    let mut dims = Vec::with_capacity(n_dims as usize);
    for _ in 0..n_dims {
        dims.push(cursor.u64(name)?);
    }
    let dtype_id = cursor.u32(name)?;
    let dtype = WeightType::from_ggml_id(dtype_id).ok_or_else(|| {
        Refusal::new(
            name,
            format!(
                "unsupported tensor type {}; supported: {}",
                ggml_type_name(dtype_id),
                WeightType::SUPPORTED
            ),
        )
    })?;
    let n_bytes = dtype
        .n_bytes(&dims)
        .map_err(|problem| Refusal::new(name, problem))?;
    let offset = cursor.u64(name)?;
    Ok(Description {
        name,
        dtype,
        dims,
        n_bytes,
        offset,
    })
}

fn place_tensors(
    descriptions: Vec<Description<'_>>,
    alignment: u64,
    header_bytes: usize,
    file_bytes: usize,
) -> Result<Vec<TensorEntry<'_>>, Refusal> {
    if descriptions.is_empty() {
        return Ok(Vec::new());
    }
    let data_start = (header_bytes as u64).next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(descriptions.len());
    for description in descriptions {
        let name = description.name;
        if !description.offset.is_multiple_of(alignment) {
            return Err(Refusal::new(
                name,
                format!(
                    "offset {} is no multiple of {alignment}",
                    description.offset
                ),
            ));
        }
        let start = data_start.checked_add(description.offset);
        let end = start.and_then(|start| start.checked_add(description.n_bytes));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file_bytes as u64)) else {
            return Err(Refusal::new(
                name,
                format!(
                    "offset {} and {} bytes lie beyond the file's {file_bytes} bytes; \
                     the file is truncated, get it again",
                    description.offset, description.n_bytes
                ),
            ));
        };
        tensors.push(TensorEntry {
            name,
            dtype: description.dtype,
            dims: description.dims,
            range: start as usize..end as usize,
        });
    }
    refuse_overlap(&tensors)?;
    Ok(tensors)
}

fn refuse_overlap(tensors: &[TensorEntry<'_>]) -> Result<(), Refusal> {
    let mut by_place: Vec<&TensorEntry<'_>> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| tensor.range.start);
    for pair in by_place.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            return Err(Refusal::new(
                pair[1].name,
                format!("its bytes overlap those of {}", quoted(pair[0].name)),
            ));
        }
    }
    Ok(())
}

/// The name of a ggml type that we may not support, for messages.
fn ggml_type_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16..=23 | 29 => "an IQ type",
        24..=27 => "an integer type",
        28 => "F64",
        34 | 35 => "a ternary type",
        39 => "MXFP4",
        _ => return format!("{id} (unknown)"),
    };
    format!("{name} ({id})")
}

#[cfg(test)]
mod tests;
