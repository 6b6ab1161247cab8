//! May two pools exchange blocks, and how.
//!
//! Only equal layouts do: then a slice is the same bytes on both sides, and the split keeps every token bit for
//! bit. Everything else is refused when two nodes meet, in words that name each field that differs with both its
//! values, so that it is never found out under load.

use std::fmt;
use tidemill_core::KvLayout;

/// How slices of one layout become slices of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// Byte for byte.
    Copy,
}

/// One field on which two layouts do not agree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The field of `KvLayout`.
    pub field: &'static str,
    /// The exporter's value.
    pub exporter: String,
    /// The importer's value.
    pub importer: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {} at the exporter and {} at the importer",
            self.field, self.exporter, self.importer
        )
    }
}

/// Why two layouts cannot exchange blocks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the KV layouts differ: {}; both nodes need the same model files, KV type and release", list(.0))]
pub struct PlanError(pub Vec<Difference>);

/// Decides how an importer reads from an exporter.
///
/// # Errors
/// Names every field that differs, with both values.
pub fn plan(exporter: &KvLayout, importer: &KvLayout) -> Result<Plan, PlanError> {
    let mut differences = Vec::new();
    let mut compare = |field, exporter: String, importer: String| {
        if exporter != importer {
            differences.push(Difference {
                field,
                exporter,
                importer,
            });
        }
    };
    let (e, i) = (exporter, importer);
    compare(
        "model_fingerprint",
        hex(&e.model_fingerprint),
        hex(&i.model_fingerprint),
    );
    compare("n_layers", e.n_layers.to_string(), i.n_layers.to_string());
    compare(
        "n_kv_heads",
        e.n_kv_heads.to_string(),
        i.n_kv_heads.to_string(),
    );
    compare("head_dim", e.head_dim.to_string(), i.head_dim.to_string());
    compare(
        "block_tokens",
        e.block_tokens.to_string(),
        i.block_tokens.to_string(),
    );
    compare("dtype", e.dtype.name().into(), i.dtype.name().into());
    compare(
        "group_layers",
        e.group_layers.to_string(),
        i.group_layers.to_string(),
    );
    compare(
        "tp_degree",
        e.tp_degree.to_string(),
        i.tp_degree.to_string(),
    );
    if differences.is_empty() {
        return Ok(Plan::Copy);
    }
    Err(PlanError(differences))
}

fn list(differences: &[Difference]) -> String {
    let texts: Vec<String> = differences.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// The first bytes tell weights apart well enough for a person.
fn hex(fingerprint: &[u8; 32]) -> String {
    fingerprint
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::KvDtype;

    fn layout() -> KvLayout {
        KvLayout::new([1; 32], 30, 3, 64, KvDtype::F16).expect("valid")
    }

    #[test]
    fn equal_layouts_copy() {
        assert_eq!(plan(&layout(), &layout()), Ok(Plan::Copy));
    }

    #[test]
    fn each_field_that_differs_is_named_with_both_values() {
        let mut other = layout();
        other.dtype = KvDtype::F32;
        other.tp_degree = 2;
        let error = plan(&layout(), &other).expect_err("two differences");
        assert_eq!(error.0.len(), 2);
        let text = error.to_string();
        assert!(text.contains("dtype is f16 at the exporter and f32 at the importer"));
        assert!(text.contains("tp_degree is 1 at the exporter and 2 at the importer"));
    }

    #[test]
    fn every_field_counts() {
        let changes: [fn(&mut KvLayout); 8] = [
            |l| l.model_fingerprint[31] = 9,
            |l| l.n_layers += 1,
            |l| l.n_kv_heads += 1,
            |l| l.head_dim += 1,
            |l| l.block_tokens += 1,
            |l| l.dtype = KvDtype::Bf16,
            |l| l.group_layers += 1,
            |l| l.tp_degree += 1,
        ];
        for change in changes {
            let mut other = layout();
            change(&mut other);
            let error = plan(&layout(), &other).expect_err("differs");
            assert_eq!(error.0.len(), 1, "{error}");
        }
    }
}
