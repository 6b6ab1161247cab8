//! The safetensors container, read without trusting it.
//!
//! Eight bytes of header length, a JSON header, then the data. The length is compared with the file and with a
//! cap before anything else happens; each tensor's size follows from type and shape and must equal its range;
//! the ranges must cover the data exactly, without gap or overlap, as the format demands.
//! Source: <https://github.com/huggingface/safetensors#format>.

use std::ops::Range;

use serde::Deserialize;

use crate::error::{Refusal, quoted};
use crate::json::Fields;
use crate::tensors::WeightType;

/// Largest header, the bound of the reference implementation.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

const N_DIMS_MAX: usize = 8;
const METADATA: &str = "__metadata__";

/// One tensor as the header describes it; its bytes lie within the file and overlap no other tensor's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name as written in the file.
    pub name: String,
    /// Element type: F32, F16 or BF16.
    pub dtype: WeightType,
    /// Row-major dimensions, each at least 1.
    pub shape: Vec<u64>,
    /// Byte range within the file.
    pub range: Range<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Reads the header of a safetensors file. `file` is the whole file: ranges are checked against its length.
/// The tensors come in the order of their bytes.
///
/// # Errors
/// A [`Refusal`] that names the first field that is malformed, out of bounds or of an unknown kind.
pub fn parse(file: &[u8]) -> Result<Vec<TensorEntry>, Refusal> {
    let header_bytes = read_header_bytes(file)?;
    let data_start = 8 + header_bytes;
    let header = Fields::parse(&file[8..data_start], "header")?;
    let mut tensors = Vec::with_capacity(header.len());
    for name in header.keys() {
        if name != METADATA {
            tensors.push(read_tensor(&header, name, data_start..file.len())?);
        }
    }
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    check_cover(&tensors, data_start..file.len())?;
    Ok(tensors)
}

fn read_header_bytes(file: &[u8]) -> Result<usize, Refusal> {
    let field = "header length";
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(Refusal::new(
            field,
            format!("the file has {} bytes, expected at least 8", file.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    let most = HEADER_BYTES_MAX.min(rest.len() as u64);
    if !(2..=most).contains(&length) {
        return Err(Refusal::new(
            field,
            format!(
                "{length} bytes, expected 2 to {most} ({} bytes follow; the file is damaged or truncated)",
                rest.len()
            ),
        ));
    }
    Ok(length as usize)
}

/// `data` is the range of the file that the offsets count within.
fn read_tensor(
    header: &Fields<'_>,
    name: &str,
    data: Range<usize>,
) -> Result<TensorEntry, Refusal> {
    let description: Description = header.required(name)?;
    let dtype = match description.dtype.as_str() {
        "F32" => WeightType::F32,
        "F16" => WeightType::F16,
        "BF16" => WeightType::BF16,
        other => {
            return Err(Refusal::new(
                quoted(name),
                format!(
                    "unsupported dtype {}; supported: F32, F16, BF16",
                    quoted(other)
                ),
            ));
        }
    };
    if description.shape.len() > N_DIMS_MAX {
        return Err(Refusal::new(
            quoted(name),
            format!(
                "{} dimensions, expected at most {N_DIMS_MAX}",
                description.shape.len()
            ),
        ));
    }
    let n_bytes = dtype
        .n_bytes(&description.shape)
        .map_err(|problem| Refusal::new(quoted(name), problem))?;
    let [begin, end] = description.data_offsets;
    if begin > end || end > data.len() as u64 {
        return Err(Refusal::new(
            quoted(name),
            format!(
                "data_offsets {begin}..{end}, but the file holds {} bytes of data; \
                 the file is damaged or truncated, get it again",
                data.len()
            ),
        ));
    }
    if end - begin != n_bytes {
        return Err(Refusal::new(
            quoted(name),
            format!(
                "data_offsets {begin}..{end} hold {} bytes, but {dtype:?} {:?} takes {n_bytes}",
                end - begin,
                description.shape
            ),
        ));
    }
    Ok(TensorEntry {
        name: name.to_owned(),
        dtype,
        shape: description.shape,
        range: data.start + begin as usize..data.start + end as usize,
    })
}

/// `tensors` are in the order of their bytes.
fn check_cover(tensors: &[TensorEntry], data: Range<usize>) -> Result<(), Refusal> {
    let mut covered = data.start;
    for tensor in tensors {
        if tensor.range.start != covered {
            return Err(Refusal::new(
                quoted(&tensor.name),
                format!(
                    "starts at data offset {}, but the tensor before it ends at {}",
                    tensor.range.start - data.start,
                    covered - data.start
                ),
            ));
        }
        covered = tensor.range.end;
    }
    if covered != data.end {
        return Err(Refusal::new(
            "header",
            format!("{} bytes of data belong to no tensor", data.end - covered),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
