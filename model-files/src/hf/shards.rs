//! Weights in several files, with an index that says which tensor is where.
//!
//! A broken download is the usual case: a shard is missing, or is left from another version, and a reader that takes what
//! it finds serves a model with holes. So the index and the shards must describe each other exactly: every tensor lies
//! in the shard that the index names, no shard holds another one, and the stated total is the sum of all.
//! A shard is a plain name in the same directory; files that the index does not name are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use super::{Entry, WEIGHTS_FILE, read_bounded};
use crate::error::{LoadError, Refusal, quoted};
use crate::json::Fields;
use crate::mapping::Mapping;
use crate::safetensors;
use crate::tensors::WeightFiles;

pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
const INDEX_BYTES_MAX: u64 = 64 << 20;
const N_SHARDS_MAX: usize = 1024;

/// What the index says.
struct Index {
    total_bytes: Option<u64>,
    /// The tensors of each shard.
    shards: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Deserialize)]
struct Metadata {
    total_size: Option<u64>,
}

/// Maps every shard and returns its tensors.
pub(super) fn open(directory: &Path, index: &Path) -> Result<(WeightFiles, Vec<Entry>), LoadError> {
    if directory.join(WEIGHTS_FILE).exists() {
        let problem =
            format!("{WEIGHTS_FILE} lies beside it; remove the one that is not the model");
        return Err(Refusal::new("weight_map", problem).in_file(index));
    }
    let text = read_bounded(index, INDEX_BYTES_MAX)?;
    let stated = parse(&text).map_err(|refusal| refusal.in_file(index))?;
    let mut mappings = Vec::with_capacity(stated.shards.len());
    let mut entries: Vec<Entry> = Vec::new();
    for (file_idx, (shard, names)) in stated.shards.iter().enumerate() {
        let file = directory.join(shard);
        let mapping = Mapping::open(&file)?;
        let found = safetensors::parse(mapping.bytes()).and_then(|found| {
            let in_file: BTreeSet<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
            compare(names, &in_file)?;
            Ok(found)
        });
        let found = found.map_err(|refusal| refusal.in_file(&file))?;
        entries.extend(found.into_iter().map(|entry| (file_idx, entry)));
        mappings.push(mapping);
    }
    let total: u64 = entries
        .iter()
        .map(|(_, entry)| entry.range.len() as u64)
        .sum();
    if let Some(stated) = stated.total_bytes.filter(|stated| *stated != total) {
        let problem =
            format!("{stated}, but the shards hold {total} bytes of tensors; get them again");
        return Err(Refusal::new("metadata.total_size", problem).in_file(index));
    }
    let files = WeightFiles {
        label: index.to_path_buf(),
        mappings,
    };
    Ok((files, entries))
}

fn parse(text: &[u8]) -> Result<Index, Refusal> {
    let fields = Fields::parse(text, "index")?;
    if let Some(other) = fields
        .keys()
        .find(|key| !["metadata", "weight_map"].contains(key))
    {
        let problem = "this key is not known, supported: metadata, weight_map";
        return Err(Refusal::new(quoted(other), problem));
    }
    let metadata: Option<Metadata> = fields.get("metadata")?;
    let map: Fields<'_> = fields.required("weight_map")?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in map.keys() {
        let shard: String = map.required(name)?;
        check_name(&shard)?;
        shards.entry(shard).or_default().insert(name.to_owned());
    }
    if shards.is_empty() || shards.len() > N_SHARDS_MAX {
        let problem = format!("{} files, expected 1 to {N_SHARDS_MAX}", shards.len());
        return Err(Refusal::new("weight_map", problem));
    }
    Ok(Index {
        total_bytes: metadata.and_then(|metadata| metadata.total_size),
        shards,
    })
}

/// Letters, digits and `._-` make no path.
fn check_name(shard: &str) -> Result<(), Refusal> {
    let is_plain = shard
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if is_plain && !shard.starts_with('.') && shard.ends_with(".safetensors") {
        return Ok(());
    }
    let problem = format!(
        "{}, expected the name of a .safetensors file in this directory",
        quoted(shard)
    );
    Err(Refusal::new("weight_map", problem))
}

fn compare(stated: &BTreeSet<String>, found: &BTreeSet<&str>) -> Result<(), Refusal> {
    if let Some(missing) = stated.iter().find(|name| !found.contains(name.as_str())) {
        let problem = format!(
            "{INDEX_FILE} says that this tensor is here, and it is not; get the file again"
        );
        return Err(Refusal::new(quoted(missing), problem));
    }
    match found.iter().find(|name| !stated.contains(**name)) {
        None => Ok(()),
        Some(surplus) => Err(Refusal::new(
            quoted(surplus),
            format!("{INDEX_FILE} does not say that this tensor is here; get both again"),
        )),
    }
}
